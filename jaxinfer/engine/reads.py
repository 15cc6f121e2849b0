"""How many keys the queries of hybrid attention read, by source: what `/metrics` says of it.  Numpy only."""

from collections import Counter

import numpy as np

from jaxinfer.configs.attention import Hybrid
from jaxinfer.engine.request import Sequence
from jaxinfer.engine.step import Step
from jaxinfer.kernels.selection.grid import window_start
from jaxinfer.model.policies import Policies

SOURCES = ("all", "window", "shared", "hot", "retrieved")
"""`all`: of queries that read every earlier position; `shared`: sinks and anchors before the window."""


class ReadCounter:
    """Counts what is read under one model's policies: a query counts once for each layer, its keys on the mean of the
    groups of heads.

    Window, sinks and anchors follow from the positions.  Blocks are counted on the device, and count whole, though
    the anchors in them are read but once.
    """

    def __init__(self, policies: Policies):
        self._policies = policies

    def of_step(self, step: Step, blocks: np.ndarray) -> dict[str, int]:
        """`queries` and the keys of each source.

        `blocks [layers, ranks, 2, 2]` is the cache's `reads` after the step: of prefill and decode, if there was any,
        the hot and the retrieved blocks that each layer's queries of each rank read.
        """
        found = Counter[str]()
        for segments in step.prefill:
            for segment in segments:
                self._count(found, segment.sequence, np.arange(segment.start, segment.end))
        for sequences in step.decode:
            for sequence in sequences:
                self._count(found, sequence, np.array([len(sequence.token_ids) - 1]))
        for kind, ran in enumerate((any(step.prefill), any(step.decode))):
            for layer, number in enumerate(self._policies.of_layer if ran else ()):
                policy = self._policies.distinct[number]
                if isinstance(policy, Hybrid):
                    hot, retrieved = blocks[layer, :, kind].sum(axis=0) * policy.block
                    found["hot"] += round(float(hot))
                    found["retrieved"] += round(float(retrieved))
        return dict(found)

    def _count(self, found: Counter[str], sequence: Sequence, positions: np.ndarray) -> None:
        anchors = np.asarray(sequence.anchors)
        for number, layers in Counter(self._policies.of_layer).items():
            policy = self._policies.distinct[number]
            found["queries"] += layers * len(positions)
            if not isinstance(policy, Hybrid):
                found["all"] += layers * int(np.sum(positions + 1))
                continue
            whole = positions // policy.query_block * policy.query_block < policy.dense_below
            found["all"] += layers * int(np.sum(positions[whole] + 1))
            chosen = positions[~whole]
            first = window_start(
                chosen,
                window=policy.window,
                block=policy.block,
                query_block=policy.query_block,
                dense_below=policy.dense_below,
            )
            behind = np.searchsorted(anchors[anchors >= policy.sinks], first)
            found["window"] += layers * int(np.sum(chosen + 1 - first))
            found["shared"] += layers * int(np.sum(np.minimum(policy.sinks, first) + behind))
