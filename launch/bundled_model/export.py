"""The released form of the bundled model: a Hugging Face DeepSeek-V3 folder in bfloat16."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint.mapping import sources
from jaxinfer.configs.huggingface import from_hf
from jaxinfer.configs.model import ModelConfig
from launch.bundled_model.vocabulary import BOS, END, EOS

SHARD_BYTES = (12 << 20) - (64 << 10)
"""Bytes of weights in a file; the file has a header besides."""

HF_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "kv_lora_rank": 256,
    "max_position_embeddings": 131072,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": True,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 8192,
}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('expected the role system, user or assistant, got ' ~ message.role) }}{% endif %}"
    "{{ '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def bundled_config() -> ModelConfig:
    """The configuration of the bundled model."""
    return from_hf(HF_CONFIG)


def _with_mtp(config: ModelConfig) -> ModelConfig:
    """The model as if its multi-token-prediction layer were one more layer, as checkpoints number it."""
    return dataclasses.replace(config, num_layers=config.num_layers + 1)


def _join_mtp(params: dict[str, Any]) -> dict[tuple[str, ...], np.ndarray]:
    flat: dict[tuple[str, ...], np.ndarray] = {}

    def visit(tree: dict[str, Any], path: tuple[str, ...]):
        for name, value in tree.items():
            if isinstance(value, dict):
                visit(value, (*path, name))
            else:
                flat[(*path, name)] = np.asarray(value)

    visit(params, ())
    for path in [path for path in flat if path[:2] == ("mtp", "block")]:
        group = ("moe", *path[2:])
        flat[group] = np.concatenate((flat[group], flat.pop(path)))
    return flat


def tensors(config: ModelConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by name: bfloat16, the routers' biases float32.

    Embedding and head of the multi-token-prediction layer are those of the model and are not repeated.
    """
    flat = _join_mtp(params)
    made: dict[str, np.ndarray] = {}
    for path, made_of in sources(_with_mtp(config)).items():
        if path == ("head",):
            continue
        dtype = np.float32 if path[-1] == "router_bias" else ml_dtypes.bfloat16
        for source in made_of:
            tensor = made.setdefault(source.name, np.zeros(source.tensor_shape, dtype))
            view = tensor.reshape(source.rows + source.columns)
            at = (slice(None),) * (len(source.rows) - 1)
            view[(*at, source.part or slice(None))] = flat[path][source.index].astype(dtype)
    prefix = f"model.layers.{config.num_layers}."
    for ours, theirs in _MTP_NAMES.items():
        made[prefix + theirs] = flat["mtp", ours].astype(ml_dtypes.bfloat16)
    return made


_MTP_NAMES = {
    "enorm": "enorm.weight",
    "hnorm": "hnorm.weight",
    "proj": "eh_proj.weight",
    "norm": "shared_head.norm.weight",
}


def parameters(config: ModelConfig, folder: Path) -> dict[str, Any]:
    """The parameter tree (float32 numpy) of a checkpoint folder of this model: the inverse of `export`."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    tree: dict[str, Any] = {}
    wanted = sources(_with_mtp(config))
    for path, made_of in wanted.items():
        if path == ("head",):
            continue
        lead = tuple(max(places) + 1 for places in zip(*(source.index for source in made_of), strict=True))
        array = np.zeros(lead + made_of[0].shape, np.float32)
        for source in made_of:
            view = found[source.name].reshape(source.rows + source.columns)
            at = (slice(None),) * (len(source.rows) - 1)
            array[source.index] = view[(*at, source.part or slice(None))].astype(np.float32)
        _put(tree, path, array)
        if path[0] == "moe":
            _put(tree, path, array[: config.num_moe_layers])
            _put(tree, ("mtp", "block", *path[1:]), array[config.num_moe_layers :])
    for ours, theirs in _MTP_NAMES.items():
        _put(tree, ("mtp", ours), found[f"model.layers.{config.num_layers}.{theirs}"].astype(np.float32))
    return tree


def _put(tree: dict[str, Any], path: tuple[str, ...], array: np.ndarray):
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = array


def export(folder: Path, config: ModelConfig, hf_config: dict[str, Any], params: dict[str, Any], tokenizer: Path):
    """Writes the folder: configuration, tokenizer with chat template, generation defaults and weights in shards."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tensors(config, params)
    total = sum(array.nbytes for array in made.values())
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, array in made.items():
        if sum(held.nbytes for held in shards[-1].values()) + array.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = array
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS, END]}
    for name, value in (
        ("model.safetensors.index.json", index),
        ("config.json", hf_config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config(hf_config["max_position_embeddings"])),
    ):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n")
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    if total > 24 << 20 or math.ceil(total / SHARD_BYTES) > 2:
        raise ValueError(f"expected at most 24 MiB of weights in two files, got {total / 2**20:.2f} MiB")


def tokenizer_config(longest: int) -> dict[str, Any]:
    """Contents of `tokenizer_config.json`."""
    return {
        "add_bos_token": True,
        "bos_token": "<|bos|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|eos|>",
        "model_max_length": longest,
        "pad_token": "<|pad|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
