"""What a model is: sizes and semantics, independent of where its weights come from."""

from dataclasses import dataclass
from typing import Literal

Router = Literal["softmax_greedy", "softmax_group_limited", "sigmoid_noaux_tc"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: plain when `factor` is None, else YaRN (arXiv 2309.00071) with DeepSeek's mscale rules."""

    theta: float = 10000.0
    factor: float | None = None
    original_max_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the DeepSeek V2/V3 family: MLA attention, dense layers first, then mixture-of-experts layers."""

    architecture: Literal["deepseek_v2", "deepseek_v3"]
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
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the weights in the checkpoint (of those left unquantised)."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

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
