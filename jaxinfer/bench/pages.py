"""Pages of a cache one after the other as they are measured: `copy_pages`, a context of a layer in order."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.operation import Case, Operation, Work, float64, spread
from jaxinfer.kernels.pages import copy_pages

_COMPARED = 8
_TYPES = {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}


class CopyPages(Operation):
    """N pages of P rows of D numbers, in random order, out of as many of the second of two layers."""

    name = "copy_pages"
    sizes = ("N", "P", "D")
    forms = tuple(_TYPES)

    def table(self):
        latents = [Case(self.name, "bf16", (pages, 64, 576)) for pages in (1024, 8192, 16384)]
        # The index of groups of four tokens.
        return [*latents, *(Case(self.name, form, (8192, 16, 64)) for form in self.forms)]

    def _order(self, case: Case) -> np.ndarray:
        return np.random.default_rng(0).permutation(case.shape[0]).astype(np.int32)

    def operands(self, case, seed, positive):
        shape = 2, *case.shape
        numbers = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        numbers = jnp.where(positive, jnp.abs(numbers), numbers)
        return numbers.astype(_TYPES[case.form]), jnp.asarray(self._order(case))

    def run(self, case, implementation, *operands):
        array, pages = operands
        return copy_pages(array, jnp.int32(1), pages, implementation=implementation)

    def sample(self, case, operands, result):
        rows = spread(case.shape[0], _COMPARED)
        return {"exact": operands[0][1, self._order(case)[rows]], "taken": result[rows]}

    def compare(self, case, sample):
        return float64(sample["taken"]), float64(sample["exact"])

    def work(self, case):
        return Work(flops=0.0, bytes=2.0 * np.prod(case.shape, dtype=float) * jnp.dtype(_TYPES[case.form]).itemsize)

    def peer(self, case, sets):
        from jaxinfer.bench import peers  # loads torch

        return peers.copy_pages(case.form, self._order(case), case.shape[1:], sets)
