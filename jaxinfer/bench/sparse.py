"""Block-sparse attention over latents as it is measured: `mla_sparse`, with the head sizes of DeepSeek-V3.

The lists are drawn as real ones are: neighbouring query blocks share most of their blocks, and about one key in 512 is
an anchor, which does not count.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.attention import LATENT, RANK, SCALE
from jaxinfer.bench.operation import Case, Operation, Published, Work, float64, spread
from jaxinfer.kernels.mla_sparse import mla_blocks

QUERIES, GROUPS, BLOCK = 32, 4, 128
"""Queries of a query block, groups of heads with lists of their own, and keys of a block."""
_SHARED, _ANCHOR_GAP = 0.7, 512
_UNIT = 2.0**-3
"""Of latents in e4m3: normal numbers."""
_COMPARED, _HEADS = 4, 8
"""Query blocks and heads compared."""

_FLASH_MLA: dict[tuple[int, ...], Published] = {
    # 2,048 single tokens of 64K for each query.
    (8192, 65536, 128, 20): Published(name="FlashMLA", tflops=550),
}


class Blocks(Operation):
    """T queries of H heads, each of which reads N blocks of 128 keys of S.

    The exact answer is that of the operands in bfloat16: the error of e4m3 is mostly that of the casts.
    """

    name = "mla_sparse"
    sizes = ("T", "S", "H", "N")
    forms = ("bf16", "e4m3")

    def table(self):
        return [case for keys in (65536, 262144, 524288) for case in self.cases((8192, keys, 128, 20))]

    def cases(self, shape):
        cases = super().cases(shape)
        tokens, keys, heads, listed = shape
        if tokens % QUERIES or keys % BLOCK or heads % GROUPS or listed > keys // BLOCK:
            raise ValueError(
                f"mla_sparse: expected T % {QUERIES} = S % {BLOCK} = H % {GROUPS} = 0 and N <= S / {BLOCK}, got {shape}"
            )
        return cases

    def _blocks(self, case: Case) -> np.ndarray:
        """int32 `[T / 32, 4, N]`, ascending."""
        tokens, keys, _, listed = case.shape
        rng, number = np.random.default_rng(0), keys // BLOCK
        found = np.empty((tokens // QUERIES, GROUPS, listed), np.int32)
        for group in range(GROUPS):
            chosen = rng.permutation(number)[:listed]
            for index in range(len(found)):
                kept = chosen[rng.random(listed) < _SHARED]
                fresh = rng.permutation(np.setdiff1d(np.arange(number), kept))
                chosen = np.concatenate((kept, fresh[: listed - len(kept)]))
                found[index, group] = np.sort(chosen)
        return found

    def _free(self, case: Case) -> np.ndarray:
        return np.random.default_rng(1).random(case.shape[1]) >= 1 / _ANCHOR_GAP

    def operands(self, case, seed, positive):
        tokens, keys, heads, _ = case.shape
        key_q, key_context = jax.random.split(jax.random.key(seed))
        q = jax.random.normal(key_q, (tokens // QUERIES, QUERIES, heads, LATENT), jnp.bfloat16)
        context = jax.random.normal(key_context, (keys, LATENT), jnp.bfloat16)
        context = jnp.where(positive, jnp.abs(context), context)
        return q, context, jnp.asarray(self._blocks(case)), jnp.asarray(self._free(case))

    def run(self, case, implementation, *operands):
        sizes = {"block": BLOCK, "kv_rank": RANK, "scale": SCALE}
        unit = jnp.float32(_UNIT) if case.form == "e4m3" else None
        return mla_blocks(*operands, **sizes, unit=unit, implementation=implementation)

    def _compared(self, case: Case) -> tuple[np.ndarray, np.ndarray]:
        """Query blocks, and heads."""
        return spread(case.shape[0] // QUERIES, _COMPARED), spread(case.shape[2], _HEADS)

    def sample(self, case, operands, result):
        q, context = operands[:2]
        rows, heads = self._compared(case)
        some = rows[:, None], slice(None), heads
        keys = context.reshape(-1, BLOCK, LATENT)[self._blocks(case)[rows]]
        return {"q": jnp.moveaxis(q[some], 2, 1), "keys": keys, "out": jnp.moveaxis(result[0][some], 2, 1)}

    def compare(self, case, sample):
        rows, heads = self._compared(case)
        q, keys, out = (float64(sample[name]) for name in ("q", "keys", "out"))
        free = self._free(case).reshape(-1, BLOCK)[self._blocks(case)[rows]]
        exact = np.empty_like(out)
        for row, head in np.ndindex(len(rows), len(heads)):
            group = heads[head] * GROUPS // case.shape[2]
            seen = keys[row, group].reshape(-1, LATENT)[free[row, group].ravel()]
            scores = q[row, :, head] @ seen.T * SCALE
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            exact[row, :, head] = weights / weights.sum(-1, keepdims=True) @ seen[:, :RANK]
        return out, exact

    def work(self, case):
        tokens, _, heads, listed = case.shape
        read = np.unique(self._blocks(case)).size * BLOCK
        moved = 2 * (read * LATENT + tokens * heads * (LATENT + RANK)) + 4 * tokens * heads
        pairs = tokens * heads * listed * BLOCK
        eight = 2.0 * pairs * 2 * RANK if case.form == "e4m3" else 0.0
        return Work(flops=2.0 * pairs * (LATENT + RANK), bytes=moved, flops_8_bit=eight)

    def published(self, case):
        return _FLASH_MLA.get(case.shape) if case.form == "bf16" else None
