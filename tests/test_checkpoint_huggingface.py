"""Hugging Face folders: every tensor where it belongs, on every mesh, and every fault named."""

import gc
import logging
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer.checkpoint import CheckpointError, huggingface, open_checkpoint
from jaxinfer.checkpoint.mapping import shapes_of, sources
from jaxinfer.checkpoint.tensors import Tensor
from jaxinfer.checkpoint.tree import flatten
from jaxinfer.configs.presets import PRESET_NAMES, preset
from tests.checkpoints import Tensors, assert_trees_equal, read_tensors, specs_on, write_checkpoint
from tests.oracles import oracle, oracle_long

LAYER = "model.layers.2."


def load(folder: Path, mesh: str = "cp=1", dtype: Any = np.float32, shard_dense: bool = True) -> dict[str, Any]:
    checkpoint = open_checkpoint(folder)
    return checkpoint.load(specs_on(mesh, checkpoint.config, dtype, shard_dense), progress=False)


@pytest.fixture(scope="module")
def whole_v3() -> dict[str, Any]:
    return load(oracle("deepseek_v3"))


@pytest.fixture(scope="module")
def fp8_tensors() -> Tensors:
    return read_tensors(oracle("deepseek_v3_fp8") / "model.safetensors")


def test_every_parameter_holds_its_tensors(whole_v3: dict[str, Any]):
    file = load_file(oracle("deepseek_v3") / "model.safetensors")
    params = jax.tree.map(np.asarray, whole_v3)
    heads, nope, value, rope, d = 4, 24, 20, 16, 128
    np.testing.assert_array_equal(params["embed"], file["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"], file["lm_head.weight"])
    np.testing.assert_array_equal(params["final_norm"], file["model.norm.weight"])
    for layer in range(4):
        group, at, name = ("dense", 0, "mlp") if layer == 0 else ("moe", layer - 1, "moe")
        layer_params = jax.tree.map(lambda stacked, at=at: stacked[at], params[group])
        tensor = {key.removeprefix(f"model.layers.{layer}."): data for key, data in file.items()}
        expand = tensor["self_attn.kv_b_proj.weight"].reshape(heads, nope + value, 32)
        expected = {
            "q_a": tensor["self_attn.q_a_proj.weight"],
            "q_a_norm": tensor["self_attn.q_a_layernorm.weight"],
            "q_b": tensor["self_attn.q_b_proj.weight"].reshape(heads, nope + rope, 48),
            "kv_a": tensor["self_attn.kv_a_proj_with_mqa.weight"],
            "kv_a_norm": tensor["self_attn.kv_a_layernorm.weight"],
            "k_b": expand[:, :nope],
            "v_b": expand[:, nope:],
            "o": tensor["self_attn.o_proj.weight"].reshape(d, heads, value),
        }
        assert set(layer_params["attention"]) == set(expected)
        for key, value_expected in expected.items():
            np.testing.assert_array_equal(layer_params["attention"][key], value_expected, err_msg=f"{layer} {key}")
        np.testing.assert_array_equal(layer_params["attn_norm"], tensor["input_layernorm.weight"])
        np.testing.assert_array_equal(layer_params["mlp_norm"], tensor["post_attention_layernorm.weight"])
        ffn = layer_params[name]
        if group == "dense":
            assert_gated(ffn, "mlp.", tensor)
        else:
            np.testing.assert_array_equal(ffn["router"], tensor["mlp.gate.weight"])
            np.testing.assert_array_equal(ffn["router_bias"], tensor["mlp.gate.e_score_correction_bias"])
            assert_gated(ffn["shared"], "mlp.shared_experts.", tensor)
            for expert in range(8):
                one = {"gate_up": ffn["gate_up"][expert], "down": ffn["down"][expert]}
                assert_gated(one, f"mlp.experts.{expert}.", tensor)


def assert_gated(params: dict[str, np.ndarray], prefix: str, tensor: dict[str, np.ndarray]):
    np.testing.assert_array_equal(params["gate_up"][0], tensor[prefix + "gate_proj.weight"])
    np.testing.assert_array_equal(params["gate_up"][1], tensor[prefix + "up_proj.weight"])
    np.testing.assert_array_equal(params["down"], tensor[prefix + "down_proj.weight"])


@pytest.mark.parametrize(("mesh", "shard_dense"), [("cp=8", True), ("cp=8", False), ("tp=2,cp=4", True)])
def test_the_same_weights_on_every_mesh(mesh: str, shard_dense: bool, whole_v3: dict[str, Any]):
    specs = specs_on(mesh, open_checkpoint(oracle("deepseek_v3")).config, shard_dense=shard_dense)
    params = load(oracle("deepseek_v3"), mesh, shard_dense=shard_dense)
    assert jax.tree.map(lambda spec: spec.sharding, specs) == jax.tree.map(lambda array: array.sharding, params)
    assert_trees_equal(params, whole_v3)
    gate_up = params["moe"]["moe"]["gate_up"]
    assert gate_up.addressable_shards[0].data.nbytes * 8 == gate_up.nbytes


def test_v2_lite_has_no_query_compression_and_no_router_bias():
    params = load(oracle("deepseek_v2_lite"), "cp=2")
    assert set(params["moe"]["attention"]) == {"q", "kv_a", "kv_a_norm", "k_b", "v_b", "o"}
    assert set(params["moe"]["moe"]) == {"router", "gate_up", "down", "shared"}
    assert params["moe"]["moe"]["shared"]["down"].shape == (3, 128, 2 * 96)
    file = load_file(oracle("deepseek_v2_lite") / "model.safetensors")
    expected = file[LAYER + "self_attn.q_proj.weight"].reshape(4, 40, 128)
    np.testing.assert_array_equal(np.asarray(params["moe"]["attention"]["q"][1]), expected)


def dequantised(tensors: Tensors) -> Tensors:
    """Weights times their scales, in float32, block by block."""
    plain: Tensors = {}
    for name, (kind, data) in tensors.items():
        if kind == "F8_E4M3":
            scale = tensors[name + "_scale_inv"][1]
            values = data.astype(np.float32)
            for row in range(scale.shape[0]):
                for column in range(scale.shape[1]):
                    block = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
                    values[block] *= scale[row, column]
            plain[name] = ("F32", values)
        elif not name.endswith("_scale_inv"):
            plain[name] = (kind, data)
    return plain


@pytest.mark.parametrize("mesh", ["cp=1", "cp=8", "tp=2,cp=4"])
def test_fp8_is_multiplied_by_its_scales(mesh: str, tmp_path: Path, fp8_tensors: Tensors):
    # Scales that differ from block to block, so that a scale in the wrong place shows.
    generator = np.random.default_rng(0)
    tensors = {
        name: (kind, generator.uniform(0.5, 2, data.shape).astype(np.float32) if name.endswith("_inv") else data)
        for name, (kind, data) in fp8_tensors.items()
    }
    quantised = write_checkpoint(tmp_path / "quantised", oracle("deepseek_v3_fp8"), tensors)
    plain = write_checkpoint(
        tmp_path / "plain", oracle("deepseek_v3_fp8"), dequantised(tensors), quantization_config=None
    )
    assert_trees_equal(load(quantised, mesh), load(plain))


def test_small_blocks_with_partial_edges(tmp_path: Path, fp8_tensors: Tensors):
    generator = np.random.default_rng(1)
    block = (24, 40)
    small: Tensors = {}
    expanded: Tensors = {}
    for name, (kind, data) in fp8_tensors.items():
        if name.endswith("_scale_inv"):
            continue
        small[name] = expanded[name] = (kind, data)
        if kind == "F8_E4M3":
            shape = [-(-size // per) for size, per in zip(data.shape, block, strict=True)]
            scale = generator.uniform(0.5, 2, shape).astype(np.float32)
            small[name + "_scale_inv"] = ("F32", scale)
            whole = np.kron(scale, np.ones(block, np.float32))[: data.shape[0], : data.shape[1]]
            expanded[name] = ("F32", data.astype(np.float32) * whole)
    like = oracle("deepseek_v3_fp8")
    quantisation = {"quant_method": "fp8", "weight_block_size": list(block)}
    quantised = write_checkpoint(tmp_path / "quantised", like, small, quantization_config=quantisation)
    plain = write_checkpoint(tmp_path / "plain", like, expanded, quantization_config=None)
    assert_trees_equal(load(quantised, "cp=8"), load(plain))


def test_many_files_with_scales_apart_from_weights(tmp_path: Path, fp8_tensors: Tensors):
    parts = write_checkpoint(tmp_path / "parts", oracle("deepseek_v3_fp8"), fp8_tensors, files=3)
    assert_trees_equal(load(parts, "cp=2"), load(oracle("deepseek_v3_fp8")))


def test_weights_are_rounded_once_to_bfloat16_and_the_router_stays_float32(whole_v3: dict[str, Any]):
    params = load(oracle("deepseek_v3"), "cp=8", jnp.bfloat16)
    assert params["moe"]["moe"]["router"].dtype == np.float32
    assert params["moe"]["moe"]["down"].dtype == jnp.bfloat16
    rounded = jax.tree.map(lambda array, like: array.astype(like.dtype), whole_v3, params)
    assert_trees_equal(params, rounded)


@pytest.mark.parametrize(("kind", "dtype"), [("BF16", jnp.bfloat16), ("F16", np.float16)])
def test_checkpoints_of_half_precision(kind: str, dtype: Any, tmp_path: Path, whole_v3: dict[str, Any]):
    tensors = {
        name: (kind, data.astype(dtype))
        for name, (_, data) in read_tensors(oracle("deepseek_v3") / "model.safetensors").items()
    }
    params = load(write_checkpoint(tmp_path / "half", oracle("deepseek_v3"), tensors))
    assert_trees_equal(params, jax.tree.map(lambda array: array.astype(dtype).astype(np.float32), whole_v3))


def test_tied_output_comes_from_the_embedding(tmp_path: Path):
    tensors = read_tensors(oracle("deepseek_v3") / "model.safetensors")
    del tensors["lm_head.weight"]
    params = load(write_checkpoint(tmp_path / "tied", oracle("deepseek_v3"), tensors, tie_word_embeddings=True))
    np.testing.assert_array_equal(np.asarray(params["head"]), np.asarray(params["embed"]))


def test_long_fixture_has_the_weights_of_v3(tmp_path: Path, whole_v3: dict[str, Any]):
    folder = oracle_long(tmp_path)
    assert open_checkpoint(folder).config.max_positions == 4096
    assert_trees_equal(load(folder, "cp=2"), whole_v3)


def test_mtp_layers_are_skipped_and_said_so(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="jaxinfer"):
        params = load(oracle("deepseek_v3_mtp"))
    assert params["moe"]["attn_norm"].shape == (3, 128)
    count = sum(
        name.startswith("model.layers.4.") for name in load_file(oracle("deepseek_v3_mtp") / "model.safetensors")
    )
    assert f"skipping {count} tensors of 1 multi-token-prediction layer" in caplog.text


def test_mtp_layers_that_the_configuration_does_not_name_are_unexpected(tmp_path: Path):
    tensors = read_tensors(oracle("deepseek_v3_mtp") / "model.safetensors")
    folder = write_checkpoint(tmp_path / "c", oracle("deepseek_v3_mtp"), tensors, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.4\."):
        load(folder)


def test_all_faults_are_in_one_error(tmp_path: Path, fp8_tensors: Tensors):
    tensors = dict(fp8_tensors)
    for expert in range(8):
        del tensors[f"{LAYER}mlp.experts.{expert}.up_proj.weight"]
        del tensors[f"{LAYER}mlp.experts.{expert}.up_proj.weight_scale_inv"]
        del tensors[f"model.layers.3.mlp.experts.{expert}.up_proj.weight"]
    tensors["model.layers.9.self_attn.q_a_proj.weight"] = tensors[LAYER + "self_attn.q_a_proj.weight"]
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = ("F32", np.ones(8, np.float32))
    tensors["model.norm.weight"] = ("F32", np.ones(64, np.float32))
    tensors["lm_head.weight"] = ("I32", np.zeros((512, 128), np.int32))
    del tensors["model.layers.0.mlp.down_proj.weight_scale_inv"]
    tensors["model.embed_tokens.weight_scale_inv"] = ("F32", np.ones((4, 1), np.float32))
    wrong_scale = LAYER + "self_attn.o_proj.weight_scale_inv"
    tensors[wrong_scale] = ("F32", np.ones((1, 2), np.float32))
    folder = write_checkpoint(tmp_path / "c", oracle("deepseek_v3_fp8"), tensors)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    lines = str(caught.value).splitlines()
    assert lines[1].startswith(f"  16 missing: {LAYER}mlp.experts.0.up_proj.weight")
    assert lines[1].endswith("and 6 more")
    assert lines[2] == "  1 unexpected: model.layers.9.self_attn.q_a_proj.weight"
    assert lines[3] == (
        "  2 of the wrong shape: model.norm.weight (expected [128], got [64]), "
        f"{wrong_scale} (expected [1, 1], got [1, 2])"
    )
    assert lines[4] == "  1 of a type that cannot be read: lm_head.weight (I32)"
    assert lines[5] == "  1 quantised without a scale: model.layers.0.mlp.down_proj.weight"
    assert lines[6].startswith("  9 scales without a quantised weight: ")
    assert "model.embed_tokens.weight_scale_inv" in lines[6]
    assert len(lines) == 7


def test_fp8_weights_need_a_quantisation_configuration(tmp_path: Path, fp8_tensors: Tensors):
    folder = write_checkpoint(tmp_path / "c", oracle("deepseek_v3_fp8"), fp8_tensors, quantization_config=None)
    with pytest.raises(CheckpointError, match="no quantization_config"):
        load(folder)


def test_files_that_are_cut_short_or_absent(tmp_path: Path, fp8_tensors: Tensors):
    folder = write_checkpoint(tmp_path / "c", oracle("deepseek_v3_fp8"), fp8_tensors)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for cut, message in ((-1, "cut short"), (100, "ends inside its header"), (3, "ends inside its header")):
        file.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=message):
            load(folder)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors\.index\.json"):
        load(folder)
    parts = write_checkpoint(tmp_path / "parts", oracle("deepseek_v3_fp8"), fp8_tensors, files=3)
    (parts / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 files.*model-00002-of-00003"):
        load(parts)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path, fp8_tensors: Tensors):
    parts = write_checkpoint(tmp_path / "parts", oracle("deepseek_v3_fp8"), fp8_tensors, files=2)
    first, second = (parts / f"model-0000{part}-of-00002.safetensors" for part in (1, 2))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="got it in"):
        load(parts)


def test_specs_of_another_model_are_refused():
    specs = specs_on("cp=1", preset("tiny-random"))
    with pytest.raises(ValueError, match=r"embed: expected \(512, 128\), got \(512, 64\)"):
        open_checkpoint(oracle("deepseek_v3")).load(specs, progress=False)


def test_host_memory_stays_at_a_few_tensors(monkeypatch: pytest.MonkeyPatch):
    folder = oracle("deepseek_v3_mtp")
    largest = 512 * 128 * 4
    load(folder, "cp=8")  # compiles, so that only the reading is measured below
    mapped = {"now": 0, "most": 0}

    def release(size: int):
        mapped["now"] -= size

    original = Tensor.map

    def counting_map(tensor: Tensor) -> np.ndarray:
        data = original(tensor)
        owner: Any = data
        while getattr(owner, "base", None) is not None and isinstance(owner.base, np.ndarray):
            owner = owner.base
        mapped["now"] += tensor.size
        mapped["most"] = max(mapped["most"], mapped["now"])
        weakref.finalize(owner, release, tensor.size)
        return data

    monkeypatch.setattr(Tensor, "map", counting_map)
    monkeypatch.setattr(huggingface, "_IN_FLIGHT_BYTES", largest)
    waits: list[object] = []
    original_wait = huggingface._Parameter.wait
    monkeypatch.setattr(huggingface._Parameter, "wait", lambda self: (waits.append(self), original_wait(self)))
    gc.collect()
    tracemalloc.start()
    load(folder, "cp=8")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert mapped["most"] >= largest  # the counter counts
    assert mapped["most"] <= 3 * largest
    assert peak <= 4 * largest  # of 7.6 MB in the file
    # Each parameter was waited for about once in `largest` bytes.
    assert waits.count(waits[0]) > 5_000_000 / (2 * largest)


def test_progress_bar_counts_all_bytes_and_can_be_silent(capfd: pytest.CaptureFixture[str]):
    checkpoint = open_checkpoint(oracle("deepseek_v2_lite"))
    specs = specs_on("cp=1", checkpoint.config)
    checkpoint.load(specs, progress=False)
    assert capfd.readouterr().err == ""
    checkpoint.load(specs, progress=True)
    shown = capfd.readouterr().err
    assert "loading deepseek_v2_lite" in shown
    assert "100%" in shown


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_sources_cover_the_parameters_of_every_preset(name: str):
    """Each parameter's leading places are filled exactly once, and shapes are those of the model."""
    config = preset(name)
    wanted = sources(config)
    shapes = shapes_of(wanted)
    specs = flatten(specs_on("cp=1", config))
    assert shapes == {path: spec.shape for path, spec in specs.items()}
    for path, made_of in wanted.items():
        indices = [source.index for source in made_of]
        places = np.prod(shapes[path][: len(indices[0])], dtype=int)
        assert len(set(indices)) == len(indices) == places, path
        assert {source.shape for source in made_of} == {shapes[path][len(indices[0]) :]}, path
