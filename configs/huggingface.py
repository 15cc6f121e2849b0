"""Hugging Face `config.json` to `ModelConfig`: the only place where Hugging Face's configuration names occur."""

from typing import Any, cast, get_args

from jaxinfer.configs.model import ModelConfig, RopeConfig, Router, WeightDtype

SIZE_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "intermediate_size": "intermediate_size",
    "first_k_dense_replace": "num_dense_layers",
    "moe_intermediate_size": "moe_intermediate_size",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_experts_per_tok": "experts_per_token",
    "n_group": "num_groups",
    "topk_group": "groups_per_token",
    "norm_topk_prob": "norm_topk_prob",
    "routed_scaling_factor": "routed_scaling_factor",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tie_word_embeddings",
    "num_nextn_predict_layers": "num_mtp_layers",
    "bos_token_id": "bos_token_id",
}
"""Hugging Face's name of a size -> ours, for values that mean the same in both."""

# What transformers' configuration classes assume for keys that a file may leave out; every other size must be there.
_DEFAULTS = {
    "q_lora_rank": None,
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "bos_token_id": None,
}
# Keys whose null in a file means the same as their absence.
_NULL_IS_DEFAULT = ("first_k_dense_replace", "n_shared_experts", "n_group", "topk_group", "num_nextn_predict_layers")

_ARCHITECTURES = {"deepseek_v2": "deepseek_v2", "deepseek_v3": "deepseek_v3", "kimi_k2": "deepseek_v3"}
_ROUTERS: dict[tuple[str, str, str], Router] = {
    ("deepseek_v2", "softmax", "greedy"): "softmax_greedy",
    ("deepseek_v2", "softmax", "group_limited_greedy"): "softmax_group_limited",
    ("deepseek_v3", "sigmoid", "noaux_tc"): "sigmoid_noaux_tc",
}
_YARN_KEYS = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
_YARN_KEYS |= {"attention_factor"}
# In `rope_parameters` besides YaRN's: the type under its two names, theta, and two that only say the usual.
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "truncate", "partial_rotary_factor"}


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """Reads a Hugging Face configuration of the families deepseek_v2 and deepseek_v3 (Kimi-K2 and Moonlight included).

    Takes the form of the releases (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of transformers 5
    (`rope_parameters`, `dtype`).  Raises ValueError, naming what was expected and what came, for anything that the
    model code does not compute.
    """
    model_type = config.get("model_type")
    _expect(config, "model_type", model_type, tuple(_ARCHITECTURES))
    architecture = _ARCHITECTURES[cast(str, model_type)]
    for name, value in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False), ("moe_layer_freq", 1)):
        _expect(config, name, config.get(name, value), (value,))
    _expect(config, "rope_interleave", config.get("rope_interleave", True), (True,))
    values = {ours: _size(config, theirs) for theirs, ours in SIZE_NAMES.items()}
    kv_heads = config.get("num_key_value_heads", values["num_heads"])
    _expect(config, "num_key_value_heads", kv_heads, (values["num_heads"],))
    if architecture == "deepseek_v2":
        # The original code renormalises when this is set, transformers never does, and no release sets it.
        _expect(config, "norm_topk_prob", values["norm_topk_prob"], (False,))
    # A model with fewer layers than `first_k_dense_replace` is all dense.
    values["num_dense_layers"] = min(values["num_dense_layers"], values["num_layers"])
    return ModelConfig(
        architecture=cast(Any, architecture),
        router=_router(config, architecture),
        rope=_rope(config),
        weight_block_size=_weight_block_size(config),
        dtype=_dtype(config),
        eos_token_ids=end_of_sequence_ids(config),
        **values,
    )


def end_of_sequence_ids(config: dict[str, Any]) -> tuple[int, ...]:
    """The ids of `eos_token_id` (an id, a list or null) in a config.json or generation_config.json."""
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _expect(config: dict[str, Any], name: str, value: Any, allowed: tuple[Any, ...]):
    if value not in allowed:
        came = repr(value) if name in config else "nothing"
        raise ValueError(f"expected {name} in config.json to be {' or '.join(map(repr, allowed))}, got {came}")


def _size(config: dict[str, Any], name: str) -> Any:
    value = config.get(name, _DEFAULTS.get(name))
    if name not in config and name not in _DEFAULTS:
        raise ValueError(f"expected {name} in config.json, found none (model_type {config['model_type']!r})")
    if value is None and name in _NULL_IS_DEFAULT:
        value = _DEFAULTS[name]
    if value is None and name not in _DEFAULTS:
        raise ValueError(f"expected a value for {name} in config.json, got null")
    return value


def _router(config: dict[str, Any], architecture: str) -> Router:
    known = [key[1:] for key in _ROUTERS if key[0] == architecture]
    scoring = config.get("scoring_func", known[0][0])
    method = config.get("topk_method", known[0][1])
    router = _ROUTERS.get((architecture, scoring, method))
    if router is None:
        expected = " or ".join(f"({s!r}, {m!r})" for s, m in known)
        raise ValueError(
            f"expected (scoring_func, topk_method) of {architecture} to be {expected}, got ({scoring!r}, {method!r})"
        )
    return router


def _rope(config: dict[str, Any]) -> RopeConfig:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    unknown = set(scaling) - _ROPE_KEYS - _YARN_KEYS
    if unknown:
        raise ValueError(f"expected rope parameters among {sorted(_ROPE_KEYS | _YARN_KEYS)}, got {sorted(unknown)}")
    theta = scaling.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("expected rope_theta in config.json or in its rope_parameters, found neither")
    for name, value in (("truncate", True), ("partial_rotary_factor", 1.0)):
        _expect(scaling, name, scaling.get(name, value), (value,))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=float(theta))
    if kind != "yarn":
        raise ValueError(f"expected rope type 'default' or 'yarn', got {kind!r}")
    for name in ("factor", "original_max_position_embeddings"):
        if scaling.get(name) is None:
            raise ValueError(f"expected {name} among the YaRN rope parameters, got {sorted(scaling)}")
    optional = {name: float(scaling[name]) for name in _YARN_KEYS & set(scaling) if scaling[name] is not None}
    original = int(optional.pop("original_max_position_embeddings"))
    return RopeConfig(theta=float(theta), original_max_positions=original, **optional)


def _weight_block_size(config: dict[str, Any]) -> tuple[int, int] | None:
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return None
    for name, value in (("quant_method", "fp8"), ("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        # transformers leaves out `fmt` and `activation_scheme` when they have these values.
        came = quantisation.get(name, value if name != "quant_method" else None)
        if came != value:
            raise ValueError(f"expected quantization_config.{name} {value!r}, got {came!r}")
    block = quantisation.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise ValueError(f"expected quantization_config.weight_block_size of two positive integers, got {block!r}")
    return block[0], block[1]


def _dtype(config: dict[str, Any]) -> WeightDtype:
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if name not in get_args(WeightDtype):
        raise ValueError(f"expected dtype (torch_dtype) to be one of {', '.join(get_args(WeightDtype))}, got {name!r}")
    return name
