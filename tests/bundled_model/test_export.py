"""The exported folder is a DeepSeek-V3 checkpoint that the engine reads and computes as the training code does."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxinfer.configs.huggingface import from_hf
from jaxinfer.configs.model import num_parameters
from jaxinfer.llm import LLM
from jaxinfer.tokenizer import Tokenizer
from launch.bundled_model import export, model
from launch.bundled_model.prepare_corpus import train_tokenizer

SMALL = {**export.HF_CONFIG, "hidden_size": 128, "num_hidden_layers": 3, "vocab_size": 300, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("exported")
    train_tokenizer(["some text to learn from, 123 times"] * 50).save(str(folder / "t.json"))
    config = from_hf(SMALL)
    params = model.initial_parameters(config, jax.random.key(3))
    keys = iter(jax.random.split(jax.random.key(4), 100))
    # Nothing may be zero or one, or a mistake in its place would not show.
    params = jax.tree.map(lambda leaf: leaf + 0.05 * jax.random.normal(next(keys), leaf.shape), params)
    export.export(folder / "model", config, SMALL, jax.device_get(params), folder / "t.json")
    return folder / "model", params


@pytest.mark.slow
def test_weights_come_back(exported):
    folder, params = exported
    config = from_hf(SMALL)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    for group in (rounded["moe"], rounded["mtp"]["block"]):
        original = params["moe"] if group is rounded["moe"] else params["mtp"]["block"]
        group["moe"]["router_bias"] = original["moe"]["router_bias"]
    back = export.parameters(config, folder)
    assert jax.tree.structure(back) == jax.tree.structure(rounded)
    jax.tree.map(np.testing.assert_array_equal, back, rounded)


@pytest.mark.slow
def test_engine_computes_the_same(exported):
    folder, _ = exported
    config = from_hf(SMALL)
    params = jax.tree.map(jnp.asarray, export.parameters(config, folder))
    ids = np.random.default_rng(0).integers(7, 300, 50)
    with jax.default_matmul_precision("highest"):
        hidden, _ = model.hidden_states(config, params, jnp.asarray(ids)[None], jnp.arange(50)[None], "blocked")
        ours = model.logits(params, hidden)[0]
    with LLM(model=str(folder), precision="fp32", max_context=256, chunk_size=64, page_size=16) as llm:
        theirs = llm.logits(ids.tolist())
    np.testing.assert_allclose(ours, theirs, atol=5e-5)


@pytest.mark.slow
def test_files(exported):
    folder, _ = exported
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            names |= dict.fromkeys(file.keys(), path.name)
    assert names == index["weight_map"]
    assert "model.layers.3.eh_proj.weight" in names and "lm_head.weight" not in names
    assert len(list(folder.iterdir())) == len(set(names.values())) + 5
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None and tokenizer.eos_ids == (1, 5)
    chat = tokenizer.encode(
        tokenizer.apply_chat_template([{"role": "user", "content": "text 123"}]), add_special_tokens=False
    )
    assert chat[:2] == [0, 2] and chat[-2:] == [5, 3]
    assert tokenizer.encode("text")[0] == 0


def test_the_bundled_model_is_of_the_size_planned():
    config = export.bundled_config()
    shapes = model.parameter_shapes(config)
    sizes = jax.tree.map(np.prod, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    total = sum(jax.tree.leaves(sizes))
    assert total - sum(jax.tree.leaves(sizes["mtp"])) == num_parameters(config).total == 10_567_976
    assert total == 12_193_840
    assert 2 * total < 24 << 20
    assert config.max_positions == 131072 and config.rope.factor == 32
