"""Which heads speak in retrieval, and which groups of heads read what it finds."""

from typing import NamedTuple

import numpy as np

from jaxinfer.configs.attention import Hybrid
from jaxinfer.configs.model import ModelConfig
from jaxinfer.configs.profile import HeadProfile
from jaxinfer.kernels.selection.retrieve import voting_heads
from jaxinfer.model.batch import Array


class Voters(NamedTuple):
    """For all layers under one policy."""

    prefill: Array
    """int32 `[layers, G, V]`, for each group of heads those that vote, ascending."""
    decode: Array | None
    """int32 `[layers, V]`, for all heads together; None: evenly spread ones."""
    far: Array
    """bool `[layers, G]`, whether a group reads retrieved and hot blocks."""


def voters(policy: Hybrid, config: ModelConfig, profile: HeadProfile | None) -> Voters:
    """Those that scored most in the profile, in each group; without one, evenly spread heads.  Numpy arrays.

    Of equal scores the lower head goes first.
    """
    layers, heads, groups = config.num_layers, config.num_heads, policy.head_groups

    def spread(groups: int) -> np.ndarray:
        chosen = voting_heads(heads, groups, policy.voters)
        return np.broadcast_to(chosen, (layers, *chosen.shape))

    if profile is None:
        return Voters(spread(groups), None, np.ones((layers, groups), bool))
    scores = np.array(profile.scores)

    def best(groups: int) -> np.ndarray:
        count, size = spread(groups).shape[2], heads // groups
        order = np.argsort(-scores.reshape(layers, groups, size), axis=2, kind="stable")[..., :count]
        return np.sort(order + size * np.arange(groups)[:, None], axis=2).astype(np.int32)

    far = scores.reshape(layers, groups, -1).max(axis=2) >= policy.local_below
    return Voters(best(groups), best(1)[:, 0], far)
