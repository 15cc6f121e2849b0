"""The choice of blocks in hybrid attention, as it is measured: both levels of retrieval for a chunk."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.operation import Case, Operation, Work, float64, spread
from jaxinfer.configs.attention import Hybrid
from jaxinfer.kernels.selection.index import group_index
from jaxinfer.kernels.selection.probes import probe_rows
from jaxinfer.kernels.selection.retrieve import retrieve, voting_heads

LATENT = 576
SCALE = 0.14
"""Logits spread by 3.4: a few keys hold much of the mass."""
_COMPARED = 3
"""Query blocks that are compared."""


class Selection(Operation):
    """T queries at the end of S tokens, which retrieve by the balanced policy.

    The error is of the softmax masses of the blocks that were found, for the voters of the first group of heads.
    """

    name = "selection"
    sizes = ("T", "S", "H")
    forms = ("bf16",)
    autotuned = True

    def table(self):
        return [Case(self.name, "bf16", (8192, tokens, 128)) for tokens in (65536, 524288)]

    def cases(self, shape):
        policy = Hybrid()
        unit, least = policy.query_block, policy.window + policy.block * (policy.candidates + 1)
        if shape[0] % unit or shape[1] % policy.block or shape[1] < shape[0] + least:
            raise ValueError(
                f"selection: expected T a multiple of {unit}, S one of {policy.block} and >= T + {least}, got {shape}"
            )
        return super().cases(shape)

    def _policy(self, case: Case) -> Hybrid:
        return Hybrid().for_model(case.shape[2], LATENT)

    def _ends(self, case: Case) -> np.ndarray:
        queries, tokens, _ = case.shape
        policy = self._policy(case)
        starts = np.arange(tokens - queries, tokens, policy.query_block) - policy.window
        return (starts // policy.block).astype(np.int32)

    def operands(self, case, seed, positive):
        queries, tokens, heads = case.shape
        policy, end = self._policy(case), jnp.asarray(self._ends(case))
        n, size = queries // policy.query_block, policy.query_block
        keys = jax.random.split(jax.random.key(seed), 4)
        q = jax.random.normal(keys[0], (n, size, heads, LATENT), jnp.bfloat16)
        context = jax.random.normal(keys[1], (tokens, LATENT), jnp.bfloat16)
        context = jnp.where(positive, jnp.abs(context), context)
        lse = jax.random.normal(keys[2], (n, size, heads), jnp.float32) + 14
        projection = jax.random.normal(keys[3], (LATENT, policy.index_dim), jnp.bfloat16) / policy.index_dim**0.5
        free = jnp.arange(tokens) % policy.anchor_gap != 0
        return (
            q,
            jnp.ones((n, size), bool),
            lse,
            jnp.full_like(end, policy.sinks // policy.block),
            end,
            context,
            group_index(context, projection, policy.group),
            projection,
            free,
            jnp.asarray(voting_heads(heads, policy.head_groups, policy.voters)),
        )

    def run(self, case, implementation, *operands):
        policy = self._policy(case)
        names = "block", "group", "probes", "candidates"
        sizes = {name: getattr(policy, name) for name in names}
        return retrieve(*operands, scale=SCALE, **sizes, implementation=implementation)

    def sample(self, case, operands, result):
        q, valid, lse, _, _, context, *_, free, voting = operands
        policy = self._policy(case)
        some = spread(q.shape[0], _COMPARED)
        rows = probe_rows(valid[0], policy.probes)
        place = some[:, None, None], rows[:, None], voting[0]
        found = result.candidates[some, 0]
        tokens = found[..., None] * policy.block + jnp.arange(policy.block)
        return {
            "q": q[place],
            "lse": lse[place],
            "keys": context[tokens],
            "free": free[tokens],
            "masses": result.masses[some, 0],
        }

    def compare(self, case, sample):
        q, lse, keys = (float64(sample[name]) for name in ("q", "lse", "keys"))
        logits = np.einsum("npvd,nckd->npvck", q, keys, optimize=True) * SCALE
        weights = np.where(sample["free"][:, None, None], np.exp(logits), 0.0).sum(axis=-1)
        shares = weights / (np.exp(lse) + weights.sum(axis=-1))[..., None]
        return float64(sample["masses"]), shares.max(axis=1).mean(axis=1)

    def work(self, case):
        _, tokens, heads = case.shape
        policy, ends = self._policy(case), self._ends(case)
        rows = policy.probes * min(policy.voters, heads)
        groups = float(ends.sum()) * policy.block / policy.group
        keys = float(len(ends)) * policy.candidates * policy.block
        moved = 2 * LATENT * (tokens + len(ends) * rows) + policy.index_dim * tokens / policy.group
        moved += 8 * len(ends) * policy.head_groups * policy.candidates
        return Work(flops=2 * rows * (policy.index_dim * groups + LATENT * keys), bytes=moved)
