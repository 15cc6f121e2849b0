"""What a model is: sizes and semantics, independent of where its weights come from."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

Architecture = Literal["deepseek_v2", "deepseek_v3"]
Router = Literal["softmax_greedy", "softmax_group_limited", "sigmoid_noaux_tc"]
WeightDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: plain when `factor` is None, else YaRN (arXiv 2309.00071) with DeepSeek's mscale rules.

    Raises ValueError if a number is not positive.
    """

    theta: float = 10000.0
    factor: float | None = None
    original_max_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    def __post_init__(self):
        if self.theta <= 0 or self.original_max_positions < 1:
            raise ValueError(f"expected positive rotary theta and original_max_positions, got {self}")
        if self.factor is not None and self.factor < 1:
            raise ValueError(f"expected a YaRN factor of at least 1, got {self.factor}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the DeepSeek V2/V3 family: MLA attention, dense layers first, then mixture-of-experts layers.

    Raises ValueError if sizes contradict each other.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    """Width of the feed-forward of the first `num_dense_layers` layers."""
    num_dense_layers: int
    moe_intermediate_size: int
    num_experts: int
    num_shared_experts: int
    experts_per_token: int
    router: Router
    num_groups: int = 1
    groups_per_token: int = 1
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float = 1e-6
    latent_norm_eps: float = 1e-6
    """Epsilon of the norms of the query and key-value latents: 1e-6 in every release, whatever `rms_norm_eps` says."""
    rope: RopeConfig
    max_positions: int
    tie_word_embeddings: bool = False
    num_mtp_layers: int = 0
    """Multi-token-prediction layers in the checkpoint, stored after the last layer."""
    weight_block_size: tuple[int, int] | None = None
    """Block of one scale in an FP8 checkpoint, (output rows, input columns); None: the checkpoint is not quantised."""
    dtype: WeightDtype = "bfloat16"
    """Type of the weights in the checkpoint (of those left unquantised)."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for field, allowed in (("architecture", Architecture), ("router", Router), ("dtype", WeightDtype)):
            _expect_one_of(field, getattr(self, field), get_args(allowed))
        if not isinstance(self.rope, RopeConfig):
            raise ValueError(f"expected rope to be a RopeConfig, got {self.rope!r}")
        positive = ("vocab_size", "hidden_size", "num_layers", "num_heads", "kv_lora_rank", "qk_nope_head_dim")
        positive += ("qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size", "num_experts")
        positive += ("experts_per_token", "num_groups", "groups_per_token", "max_positions")
        for field in positive:
            _expect_integer(field, getattr(self, field), 1)
        for field in ("num_dense_layers", "num_shared_experts", "num_mtp_layers"):
            _expect_integer(field, getattr(self, field), 0)
        if self.q_lora_rank is not None:
            _expect_integer("q_lora_rank", self.q_lora_rank, 1)
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"expected an even qk_rope_head_dim, got {self.qk_rope_head_dim}")
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"expected num_dense_layers of at most {self.num_layers} layers, got {self.num_dense_layers}"
            )
        if self.num_experts % self.num_groups:
            raise ValueError(f"expected num_groups that divides {self.num_experts} experts, got {self.num_groups}")
        if self.groups_per_token > self.num_groups:
            raise ValueError(f"expected groups_per_token of at most {self.num_groups}, got {self.groups_per_token}")
        choices = self.num_experts // self.num_groups * self.groups_per_token
        if self.experts_per_token > choices:
            raise ValueError(
                f"expected experts_per_token of at most {choices} (the experts of {self.groups_per_token} of "
                f"{self.num_groups} groups), got {self.experts_per_token}"
            )
        if self.router == "sigmoid_noaux_tc" and self.num_experts // self.num_groups < 2:
            # The score of a group is the sum of its two best experts.
            raise ValueError(f"expected at least 2 experts a group, got {self.num_experts} in {self.num_groups} groups")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Numbers kept per token and layer: the key-value latent and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Inverse of `to_dict`, after a round trip through JSON too. Raises ValueError on unknown or missing names."""
        values = dict(values)
        _expect_fields(cls, values)
        _expect_fields(RopeConfig, values["rope"])
        values["rope"] = RopeConfig(**values["rope"])
        values["eos_token_ids"] = tuple(values["eos_token_ids"])
        block = values["weight_block_size"]
        values["weight_block_size"] = None if block is None else (block[0], block[1])
        return cls(**values)


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of weights: all of them, and those that take part in computing one token."""

    total: int
    active: int


def num_parameters(config: ModelConfig) -> ParameterCount:
    """Counts the weights of the main model, without multi-token-prediction layers.

    The embedding and the output table both count as active (as in the usual "671B, 37B active" figures).
    """
    d, heads = config.hidden_size, config.num_heads
    query = d * heads * config.qk_head_dim
    if config.q_lora_rank is not None:
        query = config.q_lora_rank * (d + 1 + heads * config.qk_head_dim)
    key_value = d * config.latent_dim + config.kv_lora_rank
    key_value += config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    layer = query + key_value + heads * config.v_head_dim * d + 2 * d
    expert = 3 * d * config.moe_intermediate_size
    router = config.num_experts * (d + (config.router == "sigmoid_noaux_tc"))
    moe_rest = router + config.num_shared_experts * expert
    shared = config.num_layers * layer + config.num_dense_layers * 3 * d * config.intermediate_size
    shared += config.num_moe_layers * moe_rest + config.vocab_size * d * (1 if config.tie_word_embeddings else 2) + d
    return ParameterCount(
        total=shared + config.num_moe_layers * config.num_experts * expert,
        active=shared + config.num_moe_layers * config.experts_per_token * expert,
    )


def _expect_one_of(name: str, value: Any, allowed: tuple[str, ...]):
    if value not in allowed:
        raise ValueError(f"expected {name} to be one of {', '.join(allowed)}, got {value!r}")


def _expect_integer(name: str, value: Any, minimum: int):
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"expected {name} to be an integer of at least {minimum}, got {value!r}")


def _expect_fields(cls: type, values: dict[str, Any]):
    names = {field.name for field in dataclasses.fields(cls)}
    if names != set(values):
        missing, unknown = sorted(names - set(values)), sorted(set(values) - names)
        raise ValueError(f"expected the fields of {cls.__name__}: missing {missing}, unknown {unknown}")
