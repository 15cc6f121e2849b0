"""Which heads vote and which groups read far, with and without a head profile."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.configs.attention import Hybrid
from jaxinfer.configs.presets import preset
from jaxinfer.configs.profile import PROFILE_FILE, HeadProfile
from jaxinfer.model.voters import voters
from jaxinfer.profile import profile as measure

CONFIG = preset("tiny-random", {"num_layers": 2, "num_heads": 8})
POLICY = Hybrid(head_groups=2, voters=4).for_model(8, CONFIG.latent_dim)
SCORES = ((0.1, 0.9, 0.2, 0.2, 0.01, 0.0, 0.02, 0.0), (0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 0.5))
PROFILE = HeadProfile(scores=SCORES, task="niah_single", length=4096, samples=2)


def test_without_a_profile_voters_are_evenly_spread():
    found = voters(POLICY, CONFIG, None)
    assert found.prefill.tolist() == [[[0, 2], [4, 6]]] * 2
    assert found.decode is None
    assert found.far.all() and found.far.shape == (2, 2)


def test_those_that_scored_most_vote_and_the_lower_of_equal_ones():
    found = voters(POLICY, CONFIG, PROFILE)
    assert found.prefill.tolist() == [[[1, 2], [4, 6]], [[0, 1], [5, 7]]]
    assert found.decode.tolist() == [[0, 1, 2, 3], [0, 1, 5, 7]]
    assert found.far.all()
    assert voters(replace(POLICY, local_below=0.05), CONFIG, PROFILE).far.tolist() == [[True, False], [False, True]]


def test_a_profile_on_disk(tmp_path: Path):
    PROFILE.save(tmp_path / PROFILE_FILE)
    assert HeadProfile.load(tmp_path / PROFILE_FILE, 2, 8) == PROFILE
    with pytest.raises(ValueError, match=r"expected scores of \(3, 8\) layers and heads, got \(2, 8\)"):
        HeadProfile.load(tmp_path / PROFILE_FILE, 3, 8)
    for text in ("[]", "{}", "no json", '{"scores": [[2]], "task": "", "length": 1, "samples": 1}'):
        (tmp_path / PROFILE_FILE).write_text(text)
        with pytest.raises(ValueError, match="expected scores"):
            HeadProfile.load(tmp_path / PROFILE_FILE, 1, 1)


@pytest.mark.slow
def test_the_command_finds_the_heads_that_copy(tmp_path: Path):
    """In the bundled model heads of the last layer spend nearly all on the needle, those of the first nothing."""
    path = measure(None, "niah_single", 2048, 2, 0, tmp_path / PROFILE_FILE)
    scores = np.array(HeadProfile.load(path, 6, 4).scores)
    assert scores[5].max() > 0.9 and scores[0].max() < 0.2
