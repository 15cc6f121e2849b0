"""Reading Hugging Face configurations, presets and parameter counts."""

import json
from typing import Any

import pytest

from jaxinfer.configs.huggingface import from_hf
from jaxinfer.configs.model import ModelConfig, RopeConfig, num_parameters
from jaxinfer.configs.presets import PRESET_NAMES, preset
from tests.oracles import oracle

NAMES = ("deepseek_v3", "deepseek_v2_lite", "deepseek_v3_fp8", "deepseek_v3_long", "deepseek_v3_mtp")


def fixture_config(name: str = "deepseek_v3", **changes: Any) -> dict[str, Any]:
    return json.loads((oracle(name) / "config.json").read_text()) | changes


def released_v3(**changes: Any) -> dict[str, Any]:
    """A configuration with the keys of the DeepSeek-V3 release."""
    return {
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 129280,
    } | changes


def test_released_form_of_v3_equals_the_preset():
    assert from_hf(released_v3()) == preset("deepseek-v3")


def test_kimi_model_type_is_the_v3_architecture():
    assert from_hf(released_v3(model_type="kimi_k2")).architecture == "deepseek_v3"


def test_newest_form_of_transformers():
    config = from_hf(fixture_config("deepseek_v3"))
    assert config.rope == RopeConfig(
        theta=10000.0, factor=4.0, original_max_positions=32, mscale=1.0, mscale_all_dim=1.0
    )
    assert (config.router, config.dtype, config.num_mtp_layers) == ("sigmoid_noaux_tc", "float32", 1)
    assert (config.num_groups, config.groups_per_token, config.weight_block_size) == (4, 2, None)


def test_newest_and_released_form_give_the_same_model():
    newest, released = from_hf(fixture_config("deepseek_v3")), from_hf(fixture_config("deepseek_v3_fp8"))
    assert released.weight_block_size == (128, 128)
    assert newest.to_dict() | {"weight_block_size": (128, 128)} == released.to_dict()


def test_v2_lite_router_and_missing_query_compression():
    config = from_hf(fixture_config("deepseek_v2_lite"))
    assert (config.router, config.q_lora_rank, config.norm_topk_prob) == ("softmax_greedy", None, False)
    assert (config.rope.mscale, config.num_shared_experts) == (0.707, 2)


def test_v2_group_limited_router():
    grouped = fixture_config("deepseek_v2_lite", topk_method="group_limited_greedy", n_group=4, topk_group=2)
    assert from_hf(grouped).router == "softmax_group_limited"


def test_latent_norm_epsilon_does_not_follow_rms_norm_eps():
    config = from_hf(fixture_config(rms_norm_eps=1e-5))
    assert (config.rms_norm_eps, config.latent_norm_eps) == (1e-5, 1e-6)


def test_plain_rope_in_both_forms():
    released = released_v3(rope_scaling=None, rope_theta=50000)
    assert from_hf(released).rope == RopeConfig(theta=50000.0)
    newest = fixture_config(rope_parameters={"rope_type": "default", "rope_theta": 50000.0})
    assert from_hf(newest).rope == RopeConfig(theta=50000.0)


def test_absent_mscales_stay_absent():
    rope = released_v3()["rope_scaling"]
    del rope["mscale"], rope["mscale_all_dim"]
    config = from_hf(released_v3(rope_scaling=rope))
    assert (config.rope.mscale, config.rope.mscale_all_dim, config.rope.factor) == (None, None, 40.0)


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (7, (7,)), (0, (0,)), ([3, 4], (3, 4))])
def test_end_of_sequence_ids(value: Any, ids: tuple[int, ...]):
    assert from_hf(fixture_config(eos_token_id=value)).eos_token_ids == ids


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"model_type": "deepseek_v32"}, "deepseek_v32"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"n_routed_experts": None}, "n_routed_experts"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ({"rope_theta": None}, "rope_theta"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}, "weight_block_size"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "e5m2"),
        ({"topk_group": 9}, "groups_per_token"),
        ({"num_experts_per_tok": 200}, "experts_per_token"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"torch_dtype": "int8"}, "int8"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(changes: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=named):
        from_hf(released_v3(**changes))


@pytest.mark.parametrize("name", ["hidden_size", "n_routed_experts", "norm_topk_prob", "vocab_size"])
def test_missing_sizes_are_named(name: str):
    config = released_v3()
    del config[name]
    with pytest.raises(ValueError, match=f"expected {name}"):
        from_hf(config)


def test_v2_with_renormalised_routing_is_refused():
    with pytest.raises(ValueError, match="norm_topk_prob"):
        from_hf(fixture_config("deepseek_v2_lite", norm_topk_prob=True))


@pytest.mark.parametrize("config", [*NAMES, *PRESET_NAMES])
def test_json_round_trip(config: str):
    original = preset(config) if config in PRESET_NAMES else from_hf(fixture_config(config))
    assert ModelConfig.from_dict(json.loads(json.dumps(original.to_dict()))) == original


def test_from_dict_names_unknown_and_missing_fields():
    values = preset("tiny-random").to_dict()
    values["number_of_wheels"] = values.pop("num_heads")
    with pytest.raises(ValueError, match=r"num_heads.*number_of_wheels"):
        ModelConfig.from_dict(values)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("deepseek-v2-lite", 15.71, 2.66),
        ("deepseek-v2", 235.74, 21.4),
        ("deepseek-v3", 671.03, 37.55),
        ("moonlight-16b-a3b", 15.96, 2.9),
        ("kimi-k2", 1026.4, 32.9),
    ],
)
def test_parameter_counts_in_billions(name: str, total: float, active: float):
    count = num_parameters(preset(name))
    digits = len(str(total).split(".")[1]), len(str(active).split(".")[1])
    assert (round(count.total / 1e9, digits[0]), round(count.active / 1e9, digits[1])) == (total, active)


def test_v3_without_the_embedding_table():
    config = preset("deepseek-v3")
    assert round((num_parameters(config).active - config.vocab_size * config.hidden_size) / 1e9, 2) == 36.63


def test_overrides_by_either_name():
    assert preset("deepseek-v3", {"num_hidden_layers": 4}) == preset("deepseek-v3", {"num_layers": 4})
    config = preset("deepseek-v3", {"num_hidden_layers": 2, "n_routed_experts": 16})
    assert (config.num_layers, config.num_dense_layers, config.num_experts) == (2, 2, 16)


def test_overrides_of_rope():
    config = preset("tiny-random", {"rope": {"factor": 8.0}, "eos_token_ids": [1, 2]})
    assert (config.rope.factor, config.rope.mscale, config.eos_token_ids) == (8.0, 1.0, (1, 2))
    with pytest.raises(ValueError, match="beta_quick"):
        preset("tiny-random", {"rope": {"beta_quick": 1}})


def test_unknown_names_list_what_exists():
    with pytest.raises(ValueError, match=r"kimi-k2.*'gpt-2'"):
        preset("gpt-2")
    with pytest.raises(ValueError, match=r"hidden_size.*num_hidden_layers.*'layers'"):
        preset("tiny-random", {"layers": 3})
    with pytest.raises(ValueError, match="two names"):
        preset("tiny-random", {"num_layers": 3, "num_hidden_layers": 3})
    with pytest.raises(ValueError, match="num_heads"):
        preset("tiny-random", {"num_heads": 0})


def test_unknown_fixture():
    with pytest.raises(ValueError, match="deepseek_v3_fp8"):
        oracle("nonesuch")
