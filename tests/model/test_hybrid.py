"""The whole model with hybrid attention: neither chunks nor meshes nor neighbours show, and it can be dense."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.build import _policy
from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.configs.attention import AUTO_DENSE_BELOW, DENSE, PRESETS, Hybrid, parse_policy
from jaxinfer.configs.engine import EngineOptions
from jaxinfer.configs.presets import preset
from jaxinfer.configs.profile import PROFILE_FILE, HeadProfile
from jaxinfer.engine.request import SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.sharding import mesh as meshes
from jaxinfer.sharding.layout import Layout
from jaxinfer.sharding.rules import Rules
from tests.oracles import oracle

GRID = "window=128,anchor_gap=64,sinks=64,block=64,hot_epoch=256,dense_below=256"
EVERYTHING = f"hybrid:{GRID},candidates=32,retrieve_blocks=28"
FEW = f"hybrid:{GRID},candidates=6,voters=4,retrieve_blocks=2,hot_blocks=2"
MASS = f"hybrid:{GRID},candidates=8,voters=4,retrieve_blocks=3,retrieve_mass=0.6,hot_blocks=2,head_groups=2"
MIXED = f"{FEW},0=dense,2.retrieve_blocks=1,2.window=192"
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LENGTH = 1100


def opened(attention: str | Hybrid, mesh: str = "", chunk_size: int = 128, **options) -> LLM:
    sizes = {"max_context": 2048, "max_num_seqs": 4}
    return LLM(model="tiny-random", mesh=mesh, attention=attention, chunk_size=chunk_size, **sizes, **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def answers(llm: LLM, ids: list[int]) -> tuple[np.ndarray, list[int]]:
    """Logits of all rows, and tokens after them."""
    return llm.logits(ids), llm.generate([ids], GREEDY)[0].token_ids


@pytest.fixture(scope="module")
def dense() -> tuple[np.ndarray, list[int]]:
    with opened("dense") as llm:
        return answers(llm, prompt(LENGTH))


@pytest.mark.parametrize("mesh", ["", pytest.param("cp=4", marks=pytest.mark.slow)])
def test_budgets_for_everything_are_dense_attention(mesh: str, dense):
    with opened(EVERYTHING, mesh, 64 if mesh else 128) as llm:
        logits, tokens = answers(llm, prompt(LENGTH))
    np.testing.assert_allclose(logits, dense[0], atol=2e-5)
    assert tokens == dense[1]


def compare(attention: str, *others: tuple[str, int]) -> np.ndarray:
    """Compares other meshes and chunks with one device; returns its logits.

    Equal but for rounding: no selection flips here, for a flip shows far above it.
    """
    layers = {"overrides": {"num_layers": 4}} if attention == MIXED else {}
    with opened(attention, **layers) as llm:
        wanted, tokens = answers(llm, prompt(LENGTH))
    for mesh, chunk in others:
        with opened(attention, mesh, chunk, shard_dense_weights=mesh == "cp=8", **layers) as llm:
            logits, continued = answers(llm, prompt(LENGTH))
        np.testing.assert_allclose(logits, wanted, atol=2e-5, err_msg=f"{mesh} {chunk}")
        assert continued == tokens, (mesh, chunk)
    return wanted


def test_neither_chunks_nor_meshes_show(dense):
    logits = compare(FEW, ("cp=4", 64))
    assert np.abs(logits - dense[0]).max() > 0.1
    np.testing.assert_allclose(logits[:256], dense[0][:256], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [FEW, MASS, MIXED])
def test_other_policies_chunks_and_meshes(attention: str):
    meshes = [("cp=8", 64), ("dp=2,cp=2", 64), ("cp=2,ep=2", 64), ("tp=4", 64), ("tp=2,cp=2", 64)]
    compare(attention, ("", 256), *(meshes if attention == FEW else [("cp=2", 192)]))


@pytest.mark.slow
def test_neighbours_and_reused_pages_do_not_show():
    """Long and short prompts together answer as each alone, in pages that held others before."""
    prompts = [prompt(length, seed=length) for length in (1500, 40, 700, 300, 1200)]
    with opened(FEW, "cp=2", 128) as llm:
        together = llm.generate(prompts, GREEDY)
        alone = [llm.generate([ids], GREEDY)[0] for ids in prompts]
        again = llm.generate(list(reversed(prompts)), GREEDY)
        assert llm.engine.runner.compilations.count == 0
    for ours, its, later in zip(together, alone, reversed(again), strict=True):
        assert ours.token_ids == its.token_ids == later.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["int8", "fp8_e4m3"])
def test_a_quantised_cache(kv: str):
    """Budgets for everything are dense attention over the same cache.

    On the same mesh, where the first layer's cache is the same to the bit.  In later layers a latent between two
    numbers of the format may be rounded the other way; few rows lean on one, and move by a part of a step (e4m3: 6 of
    900, by 8e-5).
    """
    with opened("dense", "cp=2", 64, kv=kv) as llm:
        wanted = llm.logits(prompt(900))
    with opened(EVERYTHING, "cp=2", 64, kv=kv) as llm:
        apart = np.max(np.abs(llm.logits(prompt(900)) - wanted), axis=-1)
    assert np.mean(apart > 2e-5) < 0.01
    assert np.max(apart) < 2e-4


@pytest.mark.slow
def test_heads_of_a_profile_vote_on_every_mesh(tmp_path: Path):
    """In prefill and decode: others than the evenly spread ones, wherever they lie."""
    source = oracle("deepseek_v3")
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = open_checkpoint(source).config
    scores = np.random.default_rng(0).random((config.num_layers, config.num_heads)).round(3)
    ids, found = prompt(200), {}
    sizes = {"max_context": 256, "max_num_seqs": 1, "precision": "fp32"}
    attention = (
        "hybrid:window=32,anchor_gap=32,sinks=32,block=32,hot_epoch=64,dense_below=64,candidates=3,voters=2,head_groups=2,"
        "retrieve_blocks=1,hot_blocks=1"
    )
    for mesh, chunk in (("", 64), ("tp=2", 64), ("cp=2,tp=2", 32), (None, 64)):
        profile = HeadProfile(scores=tuple(map(tuple, scores.tolist())), task="", length=1, samples=1)
        profile.save(tmp_path / PROFILE_FILE) if mesh is not None else (tmp_path / PROFILE_FILE).unlink()
        with LLM(model=str(tmp_path), mesh=mesh or "", attention=attention, chunk_size=chunk, **sizes) as llm:
            found[mesh] = answers(llm, ids)
    for mesh in ("tp=2", "cp=2,tp=2"):
        np.testing.assert_allclose(found[mesh][0], found[""][0], atol=5e-5)
        assert found[mesh][1] == found[""][1]
    assert np.abs(found[None][0] - found[""][0]).max() > 1e-3


@pytest.mark.slow
def test_a_policy_is_a_value():
    policy = parse_policy(FEW)
    assert isinstance(policy, Hybrid)
    with opened(policy) as llm:
        by_value = llm.generate([prompt(600)], GREEDY)[0].token_ids
    with opened(FEW) as llm:
        assert llm.generate([prompt(600)], GREEDY)[0].token_ids == by_value


@pytest.mark.parametrize(
    ("attention", "mesh", "chunk", "words"),
    [
        ("hybrid", "", 16, "expected query_block of the attention policy to divide 16"),
        (
            "hybrid:head_groups=1,voters=4",
            "tp=2",
            128,
            "expected head_groups of the attention policy to be a multiple of the 2",
        ),
        ("hybrid:2=dense", "", 128, "expected layers of the attention policy below 2, got 2"),
        ("sparse", "", 128, "expected an attention policy"),
    ],
)
def test_refused(attention: str, mesh: str, chunk: int, words: str):
    with pytest.raises(ValueError, match=words):
        opened(attention, mesh, chunk)


@pytest.mark.parametrize(
    ("mesh", "max_context", "on_gpu", "sparse"),
    [
        ("", 65536, True, True),
        ("", AUTO_DENSE_BELOW, True, False),
        ("", 65536, False, False),
        ("cp=8", 65536, True, False),
    ],
)
def test_auto_is_sparse_where_that_was_measured(mesh: str, max_context: int, on_gpu: bool, sparse: bool):
    config, shape = preset("deepseek-v3", {}), meshes.parse(mesh)
    options = EngineOptions(model="deepseek-v3", weights="random", max_context=max_context)
    policy = _policy(options, config, Rules(shape), Layout(shape.cp, 64, 64), on_gpu)
    wanted = PRESETS["balanced"].for_model(config.num_heads, config.latent_dim)
    assert policy == (dataclasses.replace(wanted, dense_below=AUTO_DENSE_BELOW) if sparse else DENSE)
