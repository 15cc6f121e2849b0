"""The bundled models' configurations, and changes to them by name."""

import dataclasses
from typing import Any

from jaxinfer.configs.huggingface import SIZE_NAMES
from jaxinfer.configs.model import ModelConfig, RopeConfig
from jaxinfer.configs.probe import PROBE

_DEEPSEEK_V2_LITE = ModelConfig(
    architecture="deepseek_v2",
    vocab_size=102400,
    hidden_size=2048,
    num_layers=27,
    num_heads=16,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=10944,
    num_dense_layers=1,
    moe_intermediate_size=1408,
    num_experts=64,
    num_shared_experts=2,
    experts_per_token=6,
    router="softmax_greedy",
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    rope=RopeConfig(factor=40.0, mscale=0.707, mscale_all_dim=0.707),
    max_positions=163840,
    bos_token_id=100000,
    eos_token_ids=(100001,),
)

_DEEPSEEK_V2 = dataclasses.replace(
    _DEEPSEEK_V2_LITE,
    hidden_size=5120,
    num_layers=60,
    num_heads=128,
    q_lora_rank=1536,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    num_experts=160,
    router="softmax_group_limited",
    num_groups=8,
    groups_per_token=3,
    routed_scaling_factor=16.0,
)

_DEEPSEEK_V3 = ModelConfig(
    architecture="deepseek_v3",
    vocab_size=129280,
    hidden_size=7168,
    num_layers=61,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=18432,
    num_dense_layers=3,
    moe_intermediate_size=2048,
    num_experts=256,
    num_shared_experts=1,
    experts_per_token=8,
    router="sigmoid_noaux_tc",
    num_groups=8,
    groups_per_token=4,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    rope=RopeConfig(factor=40.0, mscale=1.0, mscale_all_dim=1.0),
    max_positions=163840,
    num_mtp_layers=1,
    weight_block_size=(128, 128),
    bos_token_id=0,
    eos_token_ids=(1,),
)

_KIMI_K2 = dataclasses.replace(
    _DEEPSEEK_V3,
    vocab_size=163840,
    num_heads=64,
    num_dense_layers=1,
    num_experts=384,
    num_groups=1,
    groups_per_token=1,
    routed_scaling_factor=2.827,
    rope=RopeConfig(theta=50000.0, factor=32.0, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0),
    max_positions=131072,
    num_mtp_layers=0,
    bos_token_id=163584,
    eos_token_ids=(163585, 163586),
)

_MOONLIGHT = ModelConfig(
    architecture="deepseek_v3",
    vocab_size=163840,
    hidden_size=2048,
    num_layers=27,
    num_heads=16,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=11264,
    num_dense_layers=1,
    moe_intermediate_size=1408,
    num_experts=64,
    num_shared_experts=2,
    experts_per_token=6,
    router="sigmoid_noaux_tc",
    norm_topk_prob=True,
    routed_scaling_factor=2.446,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=50000.0),
    max_positions=8192,
    bos_token_id=163584,
    eos_token_ids=(163585, 163586),
)

_TINY_RANDOM = ModelConfig(
    architecture="deepseek_v3",
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    intermediate_size=128,
    num_dense_layers=1,
    moe_intermediate_size=64,
    num_experts=8,
    num_shared_experts=1,
    experts_per_token=2,
    router="sigmoid_noaux_tc",
    num_groups=4,
    groups_per_token=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    rope=RopeConfig(factor=128.0, mscale=1.0, mscale_all_dim=1.0),
    max_positions=524288,
    dtype="float32",
    bos_token_id=256,
    eos_token_ids=(257,),
)

# Weights: jaxinfer/checkpoint/constructed.py, which these sizes are made for.
_RETRIEVAL_PROBE = ModelConfig(
    architecture="deepseek_v3",
    vocab_size=8192,
    hidden_size=384,
    num_layers=2,
    num_heads=4,
    q_lora_rank=192,
    kv_lora_rank=256,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=64,
    intermediate_size=128,
    num_dense_layers=1,
    moe_intermediate_size=64,
    num_experts=8,
    num_shared_experts=1,
    experts_per_token=2,
    router="sigmoid_noaux_tc",
    num_groups=4,
    groups_per_token=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    rope=RopeConfig(factor=256.0, mscale=1.0, mscale_all_dim=1.0),
    max_positions=1 << 20,
    dtype="float32",
)

_PRESETS = (
    ("deepseek-v2-lite", _DEEPSEEK_V2_LITE),
    ("deepseek-v2", _DEEPSEEK_V2),
    ("deepseek-v3", _DEEPSEEK_V3),
    ("moonlight-16b-a3b", _MOONLIGHT),
    ("kimi-k2", _KIMI_K2),
    ("tiny-random", _TINY_RANDOM),
    (PROBE, _RETRIEVAL_PROBE),
)

PRESET_NAMES = tuple(name for name, _ in _PRESETS)


def preset(name: str, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """The configuration of a bundled model, with `overrides` by `ModelConfig` or Hugging Face names of sizes.

    Raises ValueError for a name that does not exist (and lists those that do) and for sizes that contradict.
    """
    for known, config in _PRESETS:
        if known == name:
            return override(config, overrides or {})
    raise ValueError(f"expected a model among {', '.join(PRESET_NAMES)}, got {name!r}")


def override(config: ModelConfig, overrides: dict[str, Any]) -> ModelConfig:
    """`config` with other values; raises as `preset`.  A model cut to fewer layers keeps its first ones."""
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    changes: dict[str, Any] = {}
    for given, value in overrides.items():
        name = SIZE_NAMES.get(given, given)
        if name not in fields:
            raise ValueError(
                f"expected overrides among {', '.join(sorted(fields))} or Hugging Face's "
                f"{', '.join(sorted(set(SIZE_NAMES) - fields))}, got {given!r}"
            )
        if name in changes:
            raise ValueError(f"expected one value for {name}, got it under two names: {sorted(overrides)}")
        changes[name] = value
    if isinstance(changes.get("rope"), dict):
        changes["rope"] = _override_rope(config.rope, changes["rope"])
    for name in ("eos_token_ids", "weight_block_size"):
        if isinstance(changes.get(name), list):
            changes[name] = tuple(changes[name])
    num_layers = changes.get("num_layers", config.num_layers)
    changes.setdefault("num_dense_layers", min(config.num_dense_layers, num_layers))
    return dataclasses.replace(config, **changes)


def _override_rope(rope: RopeConfig, overrides: dict[str, Any]) -> RopeConfig:
    fields = [field.name for field in dataclasses.fields(RopeConfig)]
    unknown = sorted(set(overrides) - set(fields))
    if unknown:
        raise ValueError(f"expected overrides of rope among {', '.join(fields)}, got {', '.join(unknown)}")
    return dataclasses.replace(rope, **overrides)
