"""How much of the true softmax mass a hybrid selection reads: by layer, head and query, and by source."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.cache import Cache, allocate, cache_spec
from jaxinfer.configs.attention import Hybrid
from jaxinfer.configs.kv_format import FLOAT_FORMATS
from jaxinfer.engine.anchors import Anchors, boundary_codes
from jaxinfer.engine.batching import Batcher
from jaxinfer.engine.request import Request, Sequence
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.step import PrefillSegment
from jaxinfer.kernels.rope import rope as apply_rope
from jaxinfer.kernels.selection.sources import SOURCES, sources
from jaxinfer.llm import LLM
from jaxinfer.model import sparse
from jaxinfer.model.attention import rotations
from jaxinfer.model.batch import PrefillBatch, local
from jaxinfer.model.block import Block
from jaxinfer.model.context import in_order
from jaxinfer.model.index import index_projections
from jaxinfer.model.linear import normalised
from jaxinfer.model.params import apart, together, use
from jaxinfer.model.policies import Policies
from jaxinfer.model.rope import softmax_scale
from jaxinfer.model.transformer import Transformer
from jaxinfer.sharding.layout import Layout
from jaxinfer.sharding.rules import Plan

_TILE_TOKENS = 512


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
    llm: LLM, ids: Items[int], rows: Items[int], layers: Items[int] | None = None, policy: Hybrid | None = None
) -> AttentionMass:
    """Runs the prompt `ids` with a hybrid policy, as one chunk, and looks at the queries at the positions `rows`.

    `layers` are all if None, `policy` is that of `llm` if None.  Every layer reads what the layers before it made with
    hybrid attention, and the mass is that of dense attention over its keys.  Raises ValueError for a model on more than
    one device, for a policy that is not hybrid, and for rows and layers that do not exist.
    """
    runner = llm.engine.runner
    assert isinstance(runner, Runner)
    config = runner.config
    policy = policy or (runner.policy if isinstance(runner.policy, Hybrid) else None)
    if runner.mesh.size != 1:
        raise ValueError(f"expected a model on one device, got one on {runner.mesh.size}")
    if policy is None:
        raise ValueError("expected a hybrid policy: give one, or a model that was loaded with one")
    wanted = tuple(range(config.num_layers)) if layers is None else tuple(layers)
    if not rows or min(rows) < 0 or max(rows) >= len(ids):
        raise ValueError(f"expected rows from 0 to {len(ids) - 1}, got {list(rows)}")
    if not set(wanted) <= set(range(config.num_layers)):
        raise ValueError(f"expected layers from 0 to {config.num_layers - 1}, got {list(wanted)}")
    policy = policy.for_model(config.num_heads, config.latent_dim)
    batch, cache, layout = _prompt(runner, policy, list(ids), llm)
    model = Transformer(config, runner.precision, policy)
    plan, policies = Plan.prefill(runner.rules), model.policies

    def begin(params, batch):
        return model.embed(params["embed"], local(batch).tokens, plan).astype(jnp.float32)

    def step(block: Block, params, number, x, cache, layer, tables, batch, rows):
        sliced, whole = apart(block, params)
        weights = together(jax.tree.map(lambda array: array[number], sliced), whole)
        module, batch = use(block, weights, plan), local(batch)
        batch = replace(batch, sparse=replace(batch.sparse, index=tables["index"]))
        angles = rotations((tables["cos"], tables["sin"]), batch.positions)
        shares = _shares(module, x, cache, layer, batch, angles, layout, plan, policies, rows)
        return *module(x, cache, layer, batch, angles, layout, plan, policies), shares

    def compiled(function):
        everywhere = PartitionSpec()
        return jax.jit(
            jax.shard_map(function, mesh=runner.mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
        )

    index = index_projections(runner.params, config, policy.index_dim, runner.precision.dtype, runner.mesh)
    tables = {**runner.tables, "index": index}
    x, found, layer = compiled(begin)(runner.params, batch), {}, 0
    places = jnp.asarray(rows, jnp.int32)
    for name, group in model.groups.items():
        run = compiled(partial(step, group.block))
        for number in range(group.layers):
            x, cache, shares = run(
                runner.params[name], jnp.int32(number), x, cache, jnp.int32(layer), tables, batch, places
            )
            if layer in wanted:
                found[layer] = jax.tree.map(np.asarray, shares)
            layer += 1
    shares, best = (np.stack(part) for part in zip(*(found[layer] for layer in wanted), strict=True))
    return AttentionMass(wanted, tuple(rows), shares, best)


def _prompt(runner: Runner, policy: Hybrid, ids: list[int], llm: LLM) -> tuple[PrefillBatch, Cache, Layout]:
    """The whole prompt as one chunk, and a cache for it alone."""
    size = max(policy.block, policy.group)
    tokens = -(-len(ids) // size) * size
    layout = Layout(1, size, size)
    capacity = replace(
        runner.capacity,
        layout=layout,
        pages_per_rank=tokens // size,
        chunk_size=tokens,
        max_segments=1,
        max_context=len(ids),
    )
    codes = boundary_codes(llm.tokenizer, capacity.vocab_size)
    anchors = Anchors(codes, policy.anchor_gap, policy.anchor_boundaries)
    sequence = Sequence(
        request=Request(id="mass", prompt_ids=ids),
        index=0,
        token_ids=ids,
        num_prompt=len(ids),
        max_new_tokens=1,
        seed=0,
        pages=[list(range(tokens // size))],
    )
    batcher = Batcher(capacity, _TILE_TOKENS, policy, anchors)
    batch = batcher.prefill([[PrefillSegment(sequence=sequence, start=0, count=len(ids))]], tokens).batch
    kind = FLOAT_FORMATS[runner.precision.dtype.name]
    spec = cache_spec(runner.config, runner.rules, runner.mesh, tokens // size, size, kind, policy)
    return batch, allocate(spec), layout


def _shares(module, x, cache, layer, batch, angles, layout, plan, policies: Policies, rows):
    """Shares `[rows, H, sources]` of one layer, and the best `[rows, H]`."""
    attention, config = module.attention, module.attention.config
    scale, nope = softmax_scale(config), config.qk_nope_head_dim
    hidden = normalised(attention.reader, x, module.attn_norm, module.eps, module.dtype)
    q, cache = attention._project(hidden, cache, layer, batch, angles, plan)
    q = apply_rope(q, *angles)
    absorbed = jnp.einsum("thn,hnc->thc", q[rows, :, :nope], attention.k_b, preferred_element_type=jnp.float32)
    absorbed = jnp.concatenate((absorbed.astype(q.dtype), q[rows, :, nope:]), axis=-1)
    pages = batch.tile_pages.shape[1]
    table, tiles = batch.sparse.pages[0], -(-batch.positions.shape[0] // (pages * layout.page_size))
    context = in_order(cache.latents, layer, table, jnp.int32(tiles), batch.homes[0], layout, tile_pages=pages)
    logits = jnp.einsum("thd,sd->ths", absorbed, context, preferred_element_type=jnp.float32) * scale
    seen = jnp.arange(context.shape[0]) <= rows[:, None, None]
    mass = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)

    def of_policy(policy):
        if not isinstance(policy, Hybrid):
            whole = jnp.where(seen, SOURCES.index("window"), -1)
            return jnp.broadcast_to(whole, mass.shape), jnp.zeros(mass.shape[:2])
        kept = sparse.write_index(cache, layer, batch, policy)
        dense = jnp.zeros((*q.shape[:2], attention.v_b.shape[1])), jnp.full(q.shape[:2], -jnp.inf)
        weights = attention.k_b, attention.v_b
        selection = sparse.attend(q, *weights, dense, kept, layer, batch, layout, policy, (), scale)[-1]
        block = rows // policy.query_block
        shared = batch.sparse.shared[0, policy.sinks :]
        anchor = jnp.zeros(context.shape[0], bool).at[shared].set(True, mode="drop")
        first = sparse.windows(rows, policy)
        lists = selection.hot[block], selection.blocks[block]
        found = sources(rows, first, anchor, *lists, sinks=policy.sinks, block=policy.block)
        found = jnp.repeat(found, mass.shape[1] // found.shape[1], axis=1)
        far = jnp.where((found == 0) | (found > SOURCES.index("anchors")), mass, 0)
        far = far.reshape(len(rows), policy.head_groups, -1, context.shape[0] // policy.block, policy.block).sum(-1)
        _, best = lax.top_k(far.sum(2), min(lists[1].shape[-1], far.shape[-1]))
        return found, jnp.take_along_axis(far, best[:, :, None], axis=3).sum(-1).reshape(mass.shape[:2])

    source, best = policies.call(layer, of_policy)
    shares = [jnp.sum(jnp.where(source == number, mass, 0), axis=-1) for number in range(len(SOURCES))]
    return jnp.stack(shares, axis=-1), best
