"""What multi-head latent attention costs expanded and absorbed."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device does in a second.

    Attributes:
        expansion: FLOP/s of the products that expand latents.
        expanded, absorbed: FLOP/s of the two attention kernels.
        memory: bytes/s.
    """

    expansion: float
    expanded: float
    absorbed: float
    memory: float


H200 = Rates(expansion=600e12, expanded=600e12, absorbed=500e12, memory=4.2e12)
"""`docs/benchmarks/attention.md` and `docs/benchmarks/gemm.md`, bfloat16."""


def absorbed_is_cheaper(
    tokens: int, keys: int, *, heads: int, nope: int, rope: int, v: int, kv_rank: int, rates: Rates = H200
) -> bool:
    """Whether `tokens` queries of one sequence attend `keys` latents in less time absorbed than expanded.

    With T queries, S keys, H heads, dimensions n, r and v of a head and c of a latent (arXiv 2405.04434, section 2.1):

    - expanded: keys and values of all heads are `2 S H c (n + v)` FLOP, and go through memory as bfloat16 once each
      way, `4 S H (n + v)` bytes; attention is `2 T S H (n + r + v)` FLOP.
    - absorbed: queries and results are multiplied by the expansions, `2 T H c (n + v)` FLOP; attention is
      `2 T S H (2 c + r)` FLOP, in tiles of 64 heads of a query, and reads the latents, `2 S (c + r)` bytes, from memory
      once: the tiles of all queries pass over them side by side.

    For long contexts the terms with S decide, and T is the crossover where `c (n + v) + T (n + r + v) = T (2 c + r)`:
    `c (n + v) / (2 c - n - v)`, 171 queries at DeepSeek-V3's sizes; what goes through memory moves it up, a slower
    kernel down.  Causal limits halve both sides alike where T is close to S.
    """
    both_ways = 2 * heads * kv_rank * (nope + v)
    expanded = keys * both_ways / rates.expansion + 4 * keys * heads * (nope + v) / rates.memory
    expanded += 2 * tokens * keys * heads * (nope + rope + v) / rates.expanded
    rows = tokens * -(-heads // 64) * 64
    attention = 2 * rows * keys * (2 * kv_rank + rope) / rates.absorbed
    absorbed = tokens * both_ways / rates.expansion + max(attention, 2 * keys * (kv_rank + rope) / rates.memory)
    return absorbed < expanded
