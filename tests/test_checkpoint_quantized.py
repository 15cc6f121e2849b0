"""Parameters in fp8 and int8: a checkpoint's own blocks bit for bit, everything else quantised as the kernels say."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, build
from jaxinfer.checkpoint import CheckpointError, open_checkpoint, random_parameters
from jaxinfer.checkpoint.constructed import probe_parameters
from jaxinfer.checkpoint.tree import flatten
from jaxinfer.configs.engine import EngineOptions
from jaxinfer.configs.presets import preset
from jaxinfer.configs.probe import split_dials
from jaxinfer.convert import convert
from jaxinfer.kernels.quantize import quantize_weight
from jaxinfer.kernels.quantized import Quantized
from jaxinfer.source import ModelSource
from tests.checkpoints import assert_trees_equal, read_tensors, specs_on
from tests.model.fake_quantized import multiplied_out
from tests.oracles import oracle


def load(name: str, mesh: str, precision: str | None) -> dict[str, Any]:
    checkpoint = open_checkpoint(oracle(name))
    return checkpoint.load(specs_on(mesh, checkpoint.config, precision=precision), progress=False)


def corner(array: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The part of an array that is not filled up; the rest must be zeros."""
    array = np.asarray(array, np.float32)
    part = array[tuple(map(slice, shape))]
    assert np.count_nonzero(array) == np.count_nonzero(part)
    return part


@pytest.mark.parametrize(
    ("name", "on_gpu", "expected"),
    [
        ("deepseek_v3_fp8", True, jnp.float8_e4m3fn),
        ("deepseek_v3_fp8", False, None),
        ("deepseek_v3", True, None),
    ],
)
def test_auto_on_a_gpu_takes_blocks_as_they_are(name: str, on_gpu: bool, expected: Any):
    options = EngineOptions(model=str(oracle(name)))
    assert build._precision(options, ModelSource(options), on_gpu).quantized == expected


@pytest.mark.parametrize("mesh", ["cp=1", "cp=8", "tp=2,cp=4"])
def test_blocks_of_the_checkpoint_are_kept_bit_for_bit(mesh: str):
    params = load("deepseek_v3_fp8", mesh, "fp8")
    tensors = read_tensors(oracle("deepseek_v3_fp8") / "model.safetensors")
    moe = params["moe"]
    for layer in range(3):
        at = f"model.layers.{layer + 1}."
        found = [
            (moe["attention"]["q_a"], (layer,), "self_attn.q_a_proj"),
            (moe["attention"]["kv_a"], (layer,), "self_attn.kv_a_proj_with_mqa"),
            (moe["moe"]["shared"]["gate_up"], (layer, 1), "mlp.shared_experts.up_proj"),
            (moe["moe"]["gate_up"], (layer, 6, 0), "mlp.experts.6.gate_proj"),
            (moe["moe"]["down"], (layer, 3), "mlp.experts.3.down_proj"),
        ]
        for parameter, place, name in found:
            kind, values = tensors[f"{at}{name}.weight"]
            assert kind == "F8_E4M3" and parameter.dtype == jnp.float8_e4m3fn
            np.testing.assert_array_equal(corner(parameter.values[place], values.shape), values.astype(np.float32))
            scale = tensors[f"{at}{name}.weight_scale_inv"][1]
            np.testing.assert_array_equal(corner(parameter.scale[place], scale.shape), scale)
    # 48 and 80 inputs: not quantised, nor are the expansions of the latent and what is never quantised.
    for leaf in (
        *(moe["attention"][name] for name in ("q_b", "o", "k_b", "v_b")),
        params["embed"],
        moe["moe"]["router"],
    ):
        assert leaf.dtype == jnp.float32


@pytest.mark.parametrize("name, precision", [("deepseek_v3", "fp8"), ("deepseek_v3_fp8", "int8")])
@pytest.mark.parametrize("mesh", ["cp=8", "tp=2,cp=4"])
def test_other_checkpoints_are_quantized_by_output_channels(name: str, precision: str, mesh: str):
    plain, held = flatten(load(name, "cp=1", None)), flatten(load(name, mesh, precision))
    quantized = 0
    for path, parameter in held.items():
        expected = plain[path]
        if not isinstance(parameter, Quantized):
            np.testing.assert_array_equal(np.asarray(parameter), np.asarray(expected), err_msg=str(path))
            continue
        quantized += 1
        split = expected.ndim - parameter.columns
        matrix = expected.reshape(-1, np.prod(expected.shape[split:]))
        values, scale = quantize_weight(matrix, dtype=parameter.dtype)
        ours = corner(parameter.values, expected.shape)
        # What a multiplication by scales and a division by others leaves between two numbers may go either way.
        assert np.mean(ours != np.asarray(values, np.float32).reshape(ours.shape)) < 0.01, path
        rows = np.asarray(parameter.scale)[tuple(map(slice, expected.shape[:split]))]
        np.testing.assert_allclose(rows, np.asarray(scale).reshape(rows.shape), rtol=1e-6, err_msg=str(path))
    assert quantized == 10
    assert_trees_equal(load(name, mesh, precision), load(name, "cp=1", precision))


@pytest.mark.parametrize("precision", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_random_weights_are_the_plain_ones_quantized(precision: str):
    config = preset("tiny-random", {"hidden_size": 128, "moe_intermediate_size": 96, "num_layers": 3})
    specs = specs_on("cp=4,ep=2", config, precision=precision)
    held = random_parameters(specs, config, seed=3)
    assert jax.tree.map(lambda spec: spec.sharding, specs) == jax.tree.map(lambda array: array.sharding, held)
    plain = flatten(random_parameters(specs_on("cp=1", config), config, seed=3))
    step = 2.0**-4 if precision == "fp8" else 0.5 / 127
    for path, value in flatten(multiplied_out(held)).items():
        expected = np.asarray(plain[path], np.float64)
        value = corner(value, expected.shape)
        if isinstance(flatten(held)[path], Quantized):
            bound = step * (np.abs(expected) if precision == "fp8" else np.abs(expected).max()) + 1e-4
            assert np.all(np.abs(value - expected) <= bound), path
            assert not np.array_equal(value, expected)
        else:
            np.testing.assert_array_equal(value, expected.astype(np.float32), err_msg=str(path))


def test_constructed_weights():
    dials, overrides = split_dials({})
    config = preset("retrieval-probe", overrides)
    plain, held = (
        probe_parameters(specs_on("cp=2", config, precision=precision), config, dials, seed=0)
        for precision in (None, "int8")
    )
    for path, value in flatten(multiplied_out(held)).items():
        expected = np.asarray(flatten(plain)[path])
        np.testing.assert_allclose(
            corner(value, expected.shape), expected, atol=0.5 / 127 * np.abs(expected).max() + 1e-6
        )


@pytest.mark.parametrize(
    "name, precision", [("deepseek_v3_fp8", "fp8"), pytest.param("deepseek_v3", "int8", marks=pytest.mark.slow)]
)
def test_converted_folders_hold_what_they_were_quantized_to(name: str, precision: str, tmp_path: Path):
    config = convert(oracle(name), tmp_path / "out", precision=precision, mesh="cp=2")
    assert config.weight_block_size == ((128, 128) if precision == "fp8" else None)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.quantized == precision
    params = checkpoint.load(specs_on("cp=4,ep=2", checkpoint.config, precision=precision), progress=False)
    assert_trees_equal(params, load(name, "cp=1", precision))
    other = "int8" if precision == "fp8" else "fp8"
    for wrong in (None, other):
        with pytest.raises(CheckpointError, match=f"are {precision}: expected precision {precision}, got {wrong}"):
            checkpoint.load(specs_on("cp=1", checkpoint.config, precision=wrong), progress=False)
    with LLM(model=str(tmp_path / "out"), max_context=32, chunk_size=8, max_num_seqs=1) as llm:
        assert llm.engine.runner.params["moe"]["moe"]["down"].dtype == jnp.dtype(
            {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}[precision]
        )


def test_a_plain_folder_is_quantized_when_it_is_loaded(tmp_path: Path):
    convert(oracle("deepseek_v3"), tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.quantized is None
    params = checkpoint.load(specs_on("cp=8", checkpoint.config, precision="int8"), progress=False)
    assert_trees_equal(params, load("deepseek_v3", "cp=1", "int8"))
