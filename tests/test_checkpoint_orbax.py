"""Conversion: restored bit for bit on any mesh, refused before anything is overwritten."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint import CheckpointError, open_checkpoint, orbax
from jaxinfer.configs.presets import preset
from jaxinfer.convert import convert
from tests.checkpoints import assert_trees_equal, copy_checkpoint, specs_on
from tests.oracles import oracle

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("converted")
    source = copy_checkpoint(oracle("deepseek_v3_fp8"), parent / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.txt").write_text("not a tokenizer file")
    convert(source, parent / "out", mesh="cp=8")
    return parent / "out"


@pytest.mark.parametrize("mesh", ["cp=8", "cp=1", "dp=2,cp=4", "tp=2,cp=4"])
def test_restored_bit_for_bit_on_any_mesh(mesh: str, converted: Path):
    original = open_checkpoint(oracle("deepseek_v3_fp8"))
    restored = open_checkpoint(converted)
    specs = specs_on(mesh, restored.config)
    params = restored.load(specs, progress=False)
    assert_trees_equal(params, original.load(specs_on("cp=1", original.config), progress=False))
    assert params["moe"]["moe"]["down"].sharding == specs["moe"]["moe"]["down"].sharding


def test_the_folder_describes_itself(converted: Path):
    checkpoint = open_checkpoint(converted)
    assert checkpoint.kind == "converted"
    assert checkpoint.config.weight_block_size is None
    assert checkpoint.config.num_mtp_layers == 0
    original = open_checkpoint(oracle("deepseek_v3_fp8")).config
    assert checkpoint.config.rope == original.rope
    assert sorted(path.name for path in converted.iterdir()) == ["jaxinfer.json", "params", "tokenizer.json"]


def test_restored_in_another_precision(converted: Path):
    checkpoint = open_checkpoint(converted)
    params = checkpoint.load(specs_on("cp=2", checkpoint.config, jnp.bfloat16), progress=False)
    full = checkpoint.load(specs_on("cp=1", checkpoint.config), progress=False)
    assert params["head"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(params["head"]), np.asarray(full["head"].astype(jnp.bfloat16)))
    assert params["moe"]["moe"]["router"].dtype == np.float32


def test_converted_to_bfloat16(tmp_path: Path):
    config = convert(oracle("deepseek_v3"), tmp_path / "out", precision="bf16")
    assert config.dtype == "bfloat16"
    params = open_checkpoint(tmp_path / "out").load(specs_on("cp=1", config, jnp.bfloat16), progress=False)
    original = open_checkpoint(oracle("deepseek_v3"))
    assert_trees_equal(params, original.load(specs_on("cp=1", original.config, jnp.bfloat16), progress=False))


def test_output_with_files_is_refused_unless_asked(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="holds files already"):
        convert(oracle("deepseek_v3"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    convert(oracle("deepseek_v3"), tmp_path, overwrite=True)
    convert(oracle("deepseek_v2_lite"), tmp_path, overwrite=True)
    assert open_checkpoint(tmp_path).config.architecture == "deepseek_v2"
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_bad_requests(tmp_path: Path, converted: Path):
    with pytest.raises(FileNotFoundError, match=r"no such folder"):
        convert(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"config\.json.*jaxinfer\.json.*a folder without either"):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="converted already"):
        convert(converted, tmp_path / "out")
    with pytest.raises(ValueError, match="two different folders"):
        convert(oracle("deepseek_v3"), oracle("deepseek_v3"), overwrite=True)
    with pytest.raises(ValueError, match="'fp4'"):
        convert(oracle("deepseek_v3"), tmp_path / "out", precision="fp4")
    assert not (tmp_path / "out").exists()


def test_a_conversion_that_was_interrupted_is_no_checkpoint(tmp_path: Path):
    convert(oracle("deepseek_v3"), tmp_path / "out")
    # What stands there while the weights are being replaced.
    (tmp_path / "out" / "jaxinfer.json").unlink()
    with pytest.raises(FileNotFoundError, match="expected a checkpoint"):
        open_checkpoint(tmp_path / "out")


def test_versions_and_trees_that_do_not_fit(tmp_path: Path):
    folder = tmp_path / "out"
    convert(oracle("deepseek_v3"), folder)
    with pytest.raises(CheckpointError, match=r"of the wrong shape: embed \(expected \[512, 64\], got \[512, 128\]\)"):
        orbax.restore(folder, specs_on("cp=1", preset("tiny-random")))
    lite = open_checkpoint(oracle("deepseek_v2_lite")).config
    with pytest.raises(CheckpointError, match=r"2 missing: dense\.attention\.q, moe\.attention\.q"):
        orbax.restore(folder, specs_on("cp=1", lite))
    description = json.loads((folder / "jaxinfer.json").read_text()) | {"version": 99}
    (folder / "jaxinfer.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=r"version 1 .*99"):
        open_checkpoint(folder)


def test_chat_models_end_at_the_ids_of_their_generation_configuration(tmp_path: Path):
    folder = copy_checkpoint(oracle("deepseek_v3"), tmp_path / "chat")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert open_checkpoint(folder).config.eos_token_ids == (5, 6)


def test_configuration_that_is_no_json(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="expected JSON"):
        open_checkpoint(tmp_path)


def test_command_line(tmp_path: Path):
    command = [sys.executable, "-m", "jaxinfer.convert", "--hf", str(oracle("deepseek_v2_lite"))]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out"), "--mesh", "cp=2"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "deepseek_v2, 4 layers, float32" in done.stdout
    assert "loading deepseek_v2_lite" in done.stderr
    assert open_checkpoint(tmp_path / "out").kind == "converted"
    again = subprocess.run([*command, "--out", str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode != 0
    assert "holds files already" in again.stderr
    assert "Traceback" not in again.stderr
