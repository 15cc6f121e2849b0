"""The matrix products of the models, by name: one list for kernel tests and benchmarks."""

import dataclasses

from jaxinfer.configs.presets import preset

MODELS = ("deepseek-v2-lite", "deepseek-v3", "kimi-k2", "glm-5", "deepseek-v4-flash", "deepseek-v4-pro")
PREFILL_ROWS = 4096
DECODE_ROWS = (1, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """`x [rows, k] @ w[n, k].T`, or with `groups` weights, one of which each row takes."""

    model: str
    name: str
    n: int
    k: int
    groups: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    hidden: int
    experts: int
    expert_width: int
    attention: tuple[tuple[str, int, int], ...]
    """Name, n and k of each projection."""
    dense_width: int | None = None
    shared_width: int | None = None


def _latent_attention(hidden, heads, q_rank, kv_rank, nope, rope, v):
    latent = kv_rank + rope
    queries = heads * (nope + rope)
    if q_rank is None:
        down = (("q", queries, hidden), ("kv_a", latent, hidden))
    else:
        down = (("q_a + kv_a", q_rank + latent, hidden), ("q_b", queries, q_rank))
    return (*down, ("kv_b", heads * (nope + v), kv_rank), ("o", hidden, heads * v))


# Sizes from the models' published configurations; those with a preset take them from there.
_GLM_5 = _Sizes(
    hidden=6144,
    experts=256,
    expert_width=2048,
    dense_width=12288,
    shared_width=2048,
    attention=_latent_attention(6144, 64, 2048, 512, 192, 64, 256),
)


def _deepseek_v4(hidden, heads, q_rank, groups, width, experts):
    """Shared-KV attention of head dimension 512, its output projected in groups of heads to rank 1,024, then back."""
    attention = (
        ("q_a + kv", q_rank + 512, hidden),
        ("q_b", heads * 512, q_rank),
        ("o_a of a group", 1024, heads * 512 // groups),
        ("o_b", hidden, groups * 1024),
    )
    return _Sizes(hidden=hidden, experts=experts, expert_width=width, shared_width=width, attention=attention)


def _sizes(model: str) -> _Sizes:
    if model == "glm-5":
        return _GLM_5
    if model == "deepseek-v4-flash":
        return _deepseek_v4(4096, 64, 1024, 8, 2048, 256)
    if model == "deepseek-v4-pro":
        return _deepseek_v4(7168, 128, 1536, 16, 3072, 384)
    config = preset(model)
    return _Sizes(
        hidden=config.hidden_size,
        experts=config.num_experts,
        expert_width=config.moe_intermediate_size,
        dense_width=config.intermediate_size,
        shared_width=config.num_shared_experts * config.moe_intermediate_size,
        attention=_latent_attention(
            config.hidden_size,
            config.num_heads,
            config.q_lora_rank,
            config.kv_lora_rank,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        ),
    )


def products(model: str) -> tuple[Product, ...]:
    """The products of a model of `MODELS`, undivided; raises ValueError for another name.

    A width that is no multiple of 128 (10,944 of V2-Lite) is rounded up: its weights are padded when they are loaded.
    """
    sizes = _sizes(model)
    found = [Product(model=model, name=name, n=n, k=k) for name, n, k in sizes.attention]
    for name, width, groups in (
        ("dense", sizes.dense_width, None),
        ("shared", sizes.shared_width, None),
        ("experts", sizes.expert_width, sizes.experts),
    ):
        if width:
            width = -(-width // 128) * 128
            found.append(Product(model=model, name=f"{name} gate + up", n=2 * width, k=sizes.hidden, groups=groups))
            found.append(Product(model=model, name=f"{name} down", n=sizes.hidden, k=width, groups=groups))
    return tuple(found)
