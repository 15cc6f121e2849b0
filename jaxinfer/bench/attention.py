"""Attention over latents as it is measured: `mla_prefill` and `mla_decode`, with the head sizes of DeepSeek-V3."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.operation import Case, Operation, Published, Work, float64, spread
from jaxinfer.configs.kv_format import FORMATS, KVFormat
from jaxinfer.kernels.latents import QuantizedLatents, expand, quantize_latents, take_pages
from jaxinfer.kernels.mla_decode import mla_decode
from jaxinfer.kernels.mla_prefill import mla_prefill

NOPE, ROPE, VALUE, RANK = 128, 64, 128, 512
LATENT = RANK + ROPE
SCALE = (NOPE + ROPE) ** -0.5
PAGE_SIZE = 64
_ROWS, _HEADS, _SEQUENCES = 16, 4, 4
"""Compared, of each result."""

_FLASH_ATTENTION_3: dict[tuple[int, ...], Published] = {
    (8192, 8192, 128): Published(name="FlashAttention-3", tflops=768),
    (8192, 65536, 128): Published(name="FlashAttention-3", tflops=674),
}
_FLASH_ATTENTION_3_E4M3: dict[tuple[int, ...], Published] = {
    (8192, 8192, 128): Published(name="FlashAttention-3", tflops=915),
    (8192, 65536, 128): Published(name="FlashAttention-3", tflops=967),
}
_FLASH_MLA: dict[tuple[int, ...], Published] = {
    (128, 128, 4096): Published(name="FlashMLA", tflops=576),
    (128, 16, 8192): Published(name="FlashMLA", terabytes=3.84),
}


def _attend(q: np.ndarray, latents: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Absorbed attention in float64: `q [T, H, LATENT]`, `latents [S, LATENT]`, keys that each query sees `[T]`."""
    scores = np.einsum("thd,sd->ths", q, latents, optimize=True) * SCALE
    scores[np.broadcast_to(np.arange(len(latents)) >= limits[:, None, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("ths,sd->thd", weights, latents[:, :RANK], optimize=True)


class Prefill(Operation):
    """A chunk of T queries at the end of S keys.  The whole operation also expands keys and values from latents.

    The exact answer is that of the operands in bfloat16: the error of e4m3 is mostly that of the casts.
    """

    name = "mla_prefill"
    sizes = ("T", "S", "H")
    forms = ("bf16", "e4m3")
    autotuned = True
    of_kernel = True

    def table(self):
        return [Case(self.name, form, (8192, keys, 128)) for form in self.forms for keys in (8192, 65536)]

    def cases(self, shape):
        if shape[0] > shape[1]:
            raise ValueError(f"mla_prefill: expected no more queries than keys, got {shape}")
        return super().cases(shape)

    def _limits(self, case: Case) -> np.ndarray:
        tokens, keys, _ = case.shape
        return np.arange(keys - tokens + 1, keys + 1, dtype=np.int32)

    def operands(self, case, seed, positive):
        tokens, keys, heads = case.shape
        key = jax.random.split(jax.random.key(seed), 4)
        q = jax.random.normal(key[0], (tokens, heads, NOPE + ROPE), jnp.bfloat16)
        latents = jax.random.normal(key[1], (keys, LATENT), jnp.bfloat16)
        k_b = RANK**-0.5 * jax.random.normal(key[2], (heads, NOPE, RANK), jnp.bfloat16)
        v_b = RANK**-0.5 * jax.random.normal(key[3], (heads, VALUE, RANK), jnp.bfloat16)
        latents, v_b = (jnp.where(positive, jnp.abs(a), a) for a in (latents, v_b))
        return q, latents, k_b, v_b, jnp.asarray(self._limits(case))

    def run(self, case, implementation, *operands):
        return mla_prefill(*operands, scale=SCALE, e4m3=case.form == "e4m3", implementation=implementation)

    def sample(self, case, operands, result):
        q, latents, k_b, v_b, _ = operands
        tokens, _, heads = case.shape
        rows, some = spread(tokens, _ROWS)[:, None], spread(heads, _HEADS)
        flat = some.ravel()
        return {
            "q": q[rows, some],
            "latents": latents,
            "k_b": k_b[flat],
            "v_b": v_b[flat],
            "out": result[0][rows, some],
        }

    def compare(self, case, sample):
        q, latents, k_b, v_b, out = (float64(sample[name]) for name in ("q", "latents", "k_b", "v_b", "out"))
        absorbed = np.concatenate((np.einsum("thn,hnc->thc", q[..., :NOPE], k_b), q[..., NOPE:]), axis=-1)
        limits = self._limits(case)[spread(case.shape[0], _ROWS)]
        return out, np.einsum("thc,hvc->thv", _attend(absorbed, latents, limits), v_b)

    def work(self, case):
        tokens, keys, heads = case.shape
        pairs = float(self._limits(case).sum(dtype=np.int64))
        moved = 2 * tokens * heads * (NOPE + ROPE) + 4 * tokens * heads * (VALUE + 1)
        moved += 2 * keys * LATENT + 2 * heads * (NOPE + VALUE) * RANK
        flops = 2 * heads * (NOPE + ROPE + VALUE) * pairs
        return Work(
            flops=flops,
            bytes=moved,
            flops_8_bit=flops if case.form == "e4m3" else 0.0,
            more_flops=2.0 * keys * heads * RANK * (NOPE + VALUE),
        )

    def published(self, case):
        return (_FLASH_ATTENTION_3_E4M3 if case.form == "e4m3" else _FLASH_ATTENTION_3).get(case.shape)

    def peer(self, case, sets):
        from jaxinfer.bench import peers  # loads torch

        tokens, keys, heads = case.shape
        return peers.attention(tokens, keys, heads, NOPE + ROPE, VALUE, SCALE, sets)


class Decode(Operation):
    """One token of each of B sequences with S keys; `one long`: S keys in the first, at most 4,096 in the others.

    The form begins with the format of the cache.  The exact answer is that of the quantised cache multiplied out.
    """

    name = "mla_decode"
    sizes = ("B", "H", "S")
    forms = ("bf16", "int8", "bf16, one long", "int8, one long")

    def table(self):
        even = (128, 128, 4096), (128, 16, 8192), (8, 16, 131072)
        one_long = (64, 128, 524288), (64, 16, 524288)
        shapes = {"bf16": even, "int8": even, "bf16, one long": one_long, "int8, one long": one_long}
        return [Case(self.name, form, shape) for form in shapes for shape in shapes[form]]

    def _format(self, case: Case) -> KVFormat:
        return FORMATS[case.form.split(",")[0]]

    def _lengths(self, case: Case) -> np.ndarray:
        batch, _, keys = case.shape
        lengths = np.full(batch, keys, np.int32)
        if case.form.endswith("one long"):
            lengths[1:] = np.random.default_rng(1).integers(1, min(keys, 4096) + 1, batch - 1)
        return lengths

    def _table(self, case: Case) -> np.ndarray:
        """int32 `[B, most pages]`: pages in random order."""
        counts = -(-self._lengths(case) // PAGE_SIZE)
        order = np.random.default_rng(0).permutation(counts.sum()).astype(np.int32)
        table = np.zeros((len(counts), counts.max()), np.int32)
        table[np.arange(table.shape[1]) < counts[:, None]] = order
        return table

    def operands(self, case, seed, positive):
        batch, heads, _ = case.shape
        key_q, key_cache = jax.random.split(jax.random.key(seed))
        table = self._table(case)
        pages = int((-(-self._lengths(case) // PAGE_SIZE)).sum())
        q = jax.random.normal(key_q, (batch, 1, heads, LATENT), jnp.bfloat16)
        cache = jax.random.normal(key_cache, (1, pages, PAGE_SIZE, LATENT), jnp.bfloat16)
        cache = jnp.where(positive, jnp.abs(cache), cache)
        if self._format(case).quantized:
            values, scale = quantize_latents(cache[..., :RANK], 1, jnp.dtype(self._format(case).dtype))
            cache = QuantizedLatents(values, cache[..., RANK:], scale)
        return q, cache, jnp.int32(0), jnp.asarray(table), jnp.asarray(self._lengths(case))

    def run(self, case, implementation, *operands):
        return mla_decode(*operands, kv_rank=RANK, scale=SCALE, implementation=implementation)

    def _compared(self, case: Case) -> np.ndarray:
        """Sequences: the longest, the shortest and some between."""
        order = np.argsort(self._lengths(case), kind="stable")
        return order[spread(len(order), _SEQUENCES)]

    def sample(self, case, operands, result):
        q, cache, layer = operands[:3]
        lengths, table = self._lengths(case), self._table(case)
        heads = spread(case.shape[1], _HEADS)
        found = {}
        for row in self._compared(case):
            pages = jnp.asarray(table[row, : -(-int(lengths[row]) // PAGE_SIZE)])
            found[f"q{row}"], found[f"out{row}"] = q[row][:, heads], result[0][row][:, heads]
            keys = expand(take_pages(cache, layer, pages), jnp.float32)
            found[f"keys{row}"] = keys.reshape(-1, LATENT)[: lengths[row]]
        return found

    def compare(self, case, sample):
        got, exact = [], []
        for row in self._compared(case):
            q, keys, out = (float64(sample[f"{name}{row}"]) for name in ("q", "keys", "out"))
            got.append(out)
            exact.append(_attend(q, keys, np.asarray([len(keys)])))
        return np.stack(got), np.stack(exact)

    def work(self, case):
        batch, heads, _ = case.shape
        keys = float(self._lengths(case).sum(dtype=np.int64))
        form = self._format(case)
        moved = keys * form.token_bytes(RANK, ROPE) + batch * heads * (2 * LATENT + 4 * (RANK + 1))
        in_8_bits = 2 * heads * keys * RANK if form.quantized else 0.0
        return Work(flops=2 * heads * keys * (LATENT + RANK), bytes=moved, flops_8_bit=in_8_bits)

    def published(self, case):
        return _FLASH_MLA.get(case.shape) if case.form == "bf16" else None
