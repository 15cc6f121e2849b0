"""The captured softmax mass: shares add up, and follow from what is read."""

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.configs.attention import Hybrid, parse_policy
from jaxinfer.configs.profile import HeadProfile
from jaxinfer.engine.request import SamplingParams
from jaxinfer.evaluation.attention_mass import attention_mass, draw_mass
from jaxinfer.kernels.selection.sources import SOURCES
from jaxinfer.llm import LLM

GRID = "window=64,anchor_gap=64,sinks=32,block=32,hot_epoch=64,dense_below=64,head_groups=2,voters=4"
FEW = parse_policy(f"hybrid:{GRID},candidates=6,retrieve_blocks=2,hot_blocks=2,3=dense")
assert isinstance(FEW, Hybrid)
LAYERS = {"num_layers": 4}
ROWS = (40, 200, 333, 599)


@pytest.fixture(scope="module")
def llm():
    with LLM(model="tiny-random", overrides=LAYERS, max_context=1024, chunk_size=64, max_num_seqs=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(0).integers(0, 256, 600).tolist()


def test_shares_add_up_and_follow_the_policy(llm: LLM, ids: list[int]):
    mass = attention_mass(llm, ids, ROWS, policy=FEW)
    assert mass.shares.shape == (4, len(ROWS), 4, len(SOURCES)) and mass.best.shape == (4, len(ROWS), 4)
    np.testing.assert_allclose(mass.shares.sum(axis=-1), 1, atol=1e-5)
    share = {name: mass.shares[..., i] for i, name in enumerate(SOURCES)}
    # The first row reads all, as the dense layer does.
    for whole in (share["window"][:, 0], share["window"][3]):
        np.testing.assert_allclose(whole, 1, atol=1e-5)
    for name in ("sinks", "anchors", "hot", "retrieved", "missed"):
        assert (share[name][:3, 2:] > 0).all() or name == "hot", name
    assert share["hot"].max() > 0
    far = share["missed"] + share["hot"] + share["retrieved"]
    assert (mass.best <= far + 1e-5).all()
    # As many blocks, chosen for the query alone by the mass of the group of heads, hold no less for the group.
    by_group = [
        array.reshape(4, len(ROWS), 2, 2).sum(axis=-1) for array in (mass.best, share["hot"] + share["retrieved"])
    ]
    assert (by_group[0] >= by_group[1] - 1e-5).all()


@pytest.mark.slow
def test_groups_that_do_not_look_far_read_nothing_far(llm: LLM, ids: list[int]):
    """Of heads 0 and 1, 2 and 3: by the head profile, layer by layer."""
    scores = ((0.0, 0.0, 0.0, 0.3), (0.0, 0.9, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0))
    profile = HeadProfile(scores=scores, task="", length=1, samples=1)
    mass = attention_mass(llm, ids, ROWS, policy=replace(FEW, local_below=0.1), profile=profile)
    far = mass.shares[:3, 2:, :, SOURCES.index("hot")] + mass.shares[:3, 2:, :, SOURCES.index("retrieved")]
    assert not far[0, :, :2].any() and (far[0, :, 2:] > 0).all()
    assert not far[1, :, 2:].any() and (far[1, :, :2] > 0).all()
    assert not far[2].any()


@pytest.mark.slow
def test_budgets_for_everything_miss_nothing(llm: LLM, ids: list[int]):
    policy = parse_policy(f"hybrid:{GRID},candidates=24,retrieve_blocks=20,hot_blocks=2")
    mass = attention_mass(llm, ids, ROWS, layers=[2], policy=policy)
    np.testing.assert_allclose(mass.shares[..., SOURCES.index("missed")], 0, atol=1e-6)
    row = mass.by_source()[0]
    assert row["layer"] == 2 and row["read of far"] == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_the_engine_samples_what_is_measured_here(llm: LLM, ids: list[int]):
    """`/metrics`: the last query of every step's part of a prompt, in the layers that select."""
    mass = attention_mass(llm, ids, [255, 511, 599], policy=FEW)
    captured = 1 - mass.shares[:3, ..., SOURCES.index("missed")].mean(axis=2)
    sizes = {"max_context": 1024, "chunk_size": 256, "max_num_seqs": 1}
    with LLM(model="tiny-random", overrides=LAYERS, attention=FEW, **sizes) as hybrid:
        hybrid.generate([ids], SamplingParams(max_tokens=1))
        reads = hybrid.engine.stats().reads
    assert reads["sampled"] == captured.size == 9
    assert reads["captured"] == pytest.approx(captured.sum(), abs=1e-4) and captured[:, 1:].max() < 0.9


def test_table_and_picture(llm: LLM, ids: list[int], tmp_path):
    mass = attention_mass(llm, ids, ROWS, layers=[0, 2], policy=FEW)
    lines = mass.markdown().splitlines()
    assert len(lines) == 4 and lines[0].startswith("| layer | missed | sinks |") and lines[3].startswith("| 2 | ")
    draw_mass(mass, tmp_path / "mass.png")
    assert (tmp_path / "mass.png").read_bytes()[:4] == b"\x89PNG"


def test_refused(llm: LLM, ids: list[int]):
    for arguments, words in (
        ({"rows": [600], "policy": FEW}, "expected rows from 0 to 599"),
        ({"rows": [], "policy": FEW}, "expected rows from 0 to 599"),
        ({"rows": [3], "policy": FEW, "layers": [4]}, "expected layers from 0 to 3"),
        ({"rows": [3]}, "expected a hybrid policy"),
    ):
        with pytest.raises(ValueError, match=words):
            attention_mass(llm, ids, **arguments)
