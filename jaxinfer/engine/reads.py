"""How many keys the queries of hybrid attention read, by source, and how much of the softmax mass lies in them: what
`/metrics` says of it.  Numpy only."""

from collections import Counter, defaultdict

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

    def of_step(self, step: Step, reads: np.ndarray) -> dict[str, float]:
        """`queries` and the keys of each source; `sampled`, the queries whose `captured` shares of the softmax mass are
        added up.

        `reads [layers, ranks, 2, 4]` are the cache's after the step (see `jaxinfer.cache.Cache`).
        """
        found: dict[str, float] = defaultdict(float)
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
                    hot, retrieved, captured, sampled = reads[layer, :, kind].sum(axis=0)
                    found["hot"] += round(float(hot) * policy.block)
                    found["retrieved"] += round(float(retrieved) * policy.block)
                    if kind == 0:
                        found["captured"] += float(captured)
                        found["sampled"] += round(float(sampled))
        return dict(found)

    def _count(self, found: dict[str, float], sequence: Sequence, positions: np.ndarray) -> None:
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
