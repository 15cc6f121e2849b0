"""How much of the true softmax mass a hybrid selection reads: by layer, head and query, and by source."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.configs.attention import Hybrid
from jaxinfer.configs.profile import HeadProfile
from jaxinfer.engine.runner import Runner
from jaxinfer.evaluation.attention_rows import AtLayer, by_layer
from jaxinfer.kernels.selection.sources import SOURCES, sources
from jaxinfer.llm import LLM
from jaxinfer.model import sparse
from jaxinfer.model.rope import softmax_scale


@dataclass(frozen=True)
class AttentionMass:
    """Shares of the softmax mass of dense attention."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    """Positions of the queries."""
    shares: np.ndarray
    """float32 `[layers, rows, heads, sources]`, sources as in `SOURCES`; they add to 1."""
    best: np.ndarray
    """float32 `[layers, rows, heads]`, what as many blocks as are read could have held, chosen for this query alone, by
    the mass of its group of heads."""

    def by_source(self) -> list[dict[str, float | int]]:
        """A row for each layer, of means over heads and queries.

        The share of each source; `far`, what lies beyond window, sinks and anchors; of that the part that is read, and
        that the best choice of as many blocks could read; and the part that is read in the worst twentieth of those
        heads and queries of which more than a hundredth is far.
        """
        table = []
        for layer, shares, best in zip(self.layers, self.shares, self.best, strict=True):
            read = shares[..., SOURCES.index("hot")] + shares[..., SOURCES.index("retrieved")]
            far = read + shares[..., SOURCES.index("missed")]
            total = max(float(far.mean()), 1e-30)
            looking = far > 0.01
            worst = float(np.quantile(read[looking] / far[looking], 0.05)) if looking.any() else 1.0
            table.append(
                {"layer": layer}
                | {name: float(shares[..., i].mean()) for i, name in enumerate(SOURCES)}
                | {"far": float(far.mean()), "read of far": float(read.mean()) / total}
                | {"best of far": float(best.mean()) / total, "worst 5 %": worst}
            )
        return table

    def markdown(self) -> str:
        """The table of `by_source`."""
        table = self.by_source()
        lines = [" | ".join(table[0]), " | ".join("---" for _ in table[0])]
        lines += [
            " | ".join(str(value) if isinstance(value, int) else f"{value:.3f}" for value in row.values())
            for row in table
        ]
        return "\n".join(f"| {line} |" for line in lines)


def draw_mass(mass: AttentionMass, path: Path) -> None:
    """Draws the mean share of each source by layer, and what is missed by layer and head.  Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    bars, heads = figure.subplots(1, 2)
    names, base = [str(layer) for layer in mass.layers], np.zeros(len(mass.layers))
    for number in (*range(1, len(SOURCES)), 0):
        share = mass.shares[..., number].mean(axis=(1, 2))
        bars.bar(names, share, bottom=base, label=SOURCES[number], color="lightgrey" if number == 0 else None)
        base += share
    bars.set_xlabel("layer")
    bars.set_ylabel("share of the softmax mass")
    bars.legend(fontsize=8)
    missed = mass.shares[..., 0].mean(axis=1)
    image = heads.imshow(missed.T, cmap="magma_r", vmin=0, aspect="auto")
    heads.set_xticks(range(len(names)), names)
    heads.set_xlabel("layer")
    heads.set_ylabel("head")
    figure.colorbar(image, ax=heads, label="missed")
    figure.savefig(path, dpi=110)


def attention_mass(
    llm: LLM,
    ids: Items[int],
    rows: Items[int],
    layers: Items[int] | None = None,
    policy: Hybrid | None = None,
    profile: HeadProfile | None = None,
) -> AttentionMass:
    """Runs the prompt `ids` with a hybrid policy, as one chunk, and looks at the queries at the positions `rows`.

    `layers` are all if None, `policy` is that of `llm` if None; `profile` says which heads vote.  Every layer reads
    what the layers before it made with hybrid attention, and the mass is that of dense attention over its keys.
    Raises ValueError for a model on more than one device, for a policy that is not hybrid, and for rows and layers
    that do not exist.
    """
    runner = llm.engine.runner
    assert isinstance(runner, Runner)
    count = runner.config.num_layers
    policy = policy or (runner.policy if isinstance(runner.policy, Hybrid) else None)
    if policy is None:
        raise ValueError("expected a hybrid policy: give one, or a model that was loaded with one")
    wanted = tuple(range(count)) if layers is None else tuple(layers)
    if not set(wanted) <= set(range(count)):
        raise ValueError(f"expected layers from 0 to {count - 1}, got {list(wanted)}")
    found = by_layer(llm, ids, rows, policy, _shares, profile=profile)
    shares, best = (np.stack(part) for part in zip(*(found[layer] for layer in wanted), strict=True))
    return AttentionMass(wanted, tuple(rows), shares, best)


def _shares(at: AtLayer) -> tuple[jax.Array, jax.Array]:
    """Shares `[rows, H, sources]` of one layer, and the best `[rows, H]`."""
    mass, rows, policies = at.mass, at.rows, at.policies
    context = mass.shape[2]

    def of_policy(policy, part):
        if not isinstance(policy, Hybrid):
            seen = jnp.arange(context) <= rows[:, None, None]
            whole = jnp.where(seen, SOURCES.index("window"), -1)
            return (jnp.broadcast_to(whole, mass.shape), jnp.zeros(mass.shape[:2])), part
        weights = at.attention.k_b, at.attention.v_b
        dense = jnp.zeros((*at.q.shape[:2], weights[1].shape[1])), jnp.full(at.q.shape[:2], -jnp.inf)
        voting, scale = at.batch.sparse.voters[policies.distinct.index(policy)], softmax_scale(at.attention.config)
        selection = sparse.attend(at.q, *weights, dense, part, at.batch, at.layout, policy, voting, (), scale)[-1]
        block = rows // policy.query_block
        shared = at.batch.sparse.shared[0, policy.sinks :]
        anchor = jnp.zeros(context, bool).at[shared].set(True, mode="drop")
        first = sparse.windows(rows, policy)
        lists = selection.hot[block], selection.blocks[block]
        found = sources(rows, first, anchor, *lists, sinks=policy.sinks, block=policy.block)
        found = jnp.repeat(found, mass.shape[1] // found.shape[1], axis=1)
        far = jnp.where((found == 0) | (found > SOURCES.index("anchors")), mass, 0)
        far = far.reshape(len(rows), policy.head_groups, -1, context // policy.block, policy.block).sum(-1)
        _, best = lax.top_k(far.sum(2), min(lists[1].shape[-1], far.shape[-1]))
        best = jnp.take_along_axis(far, best[:, :, None], axis=3).sum(-1).reshape(mass.shape[:2])
        return (found, best), part

    cache = sparse.write_index(at.cache, at.layer, at.batch, policies)
    (source, best), _ = policies.call(cache, at.layer, of_policy)
    shares = [jnp.sum(jnp.where(source == number, mass, 0), axis=-1) for number in range(len(SOURCES))]
    return jnp.stack(shares, axis=-1), best
