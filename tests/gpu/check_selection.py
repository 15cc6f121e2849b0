"""Checks and times the choice of blocks on one Hopper GPU: `python -m tests.gpu.check_selection [--out DIR]`.

Cases run in processes of their own (see `workers`), which compile side by side and take turns on the GPU: each part
against the jnp form in float32, and times at the size of DeepSeek-V3, 8,192 queries in 256 query blocks.  Prints a
table last, and writes all answers as JSON.  Exits with 1 if a bound is broken.
"""

import dataclasses
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.bench.timing import alone, measure
from jaxinfer.configs.attention import Hybrid
from jaxinfer.kernels.mosaic import block_masses, block_scores, block_votes
from jaxinfer.kernels.mosaic.block_scores import Blocks
from jaxinfer.kernels.selection import choice, hot, lists
from jaxinfer.kernels.selection.index import TYPE, group_index, query_index
from jaxinfer.kernels.selection.retrieve import retrieve, voting_heads
from jaxinfer.kernels.selection.scores import best_groups, candidate_blocks, shares_of_best, standing
from tests.gpu import workers

MODULE = "tests.gpu.check_selection"
LOCK = "CHECK_GPU_LOCK"
"""Environment variable with the path of the lock that all workers share; they are told by it from their parent."""
HELD_SECONDS, CASE_SECONDS = 12, 90
REPEATS = 12
SCALE = 0.07
PROCESSORS = 132
LOGIT_BOUND, MASS_BOUND, FLIPS_BOUND = 2e-3, 2e-3, 5e-3
SCORE_BOUND = 2.0**-9  # of a row's largest: tensor cores keep 14 bits of sums of e4m3 products, float16 keeps 11
VOTE_BOUND = 2e-5
"""Relative: exponentials of up to -30 in float32."""
RECORDED = 16


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a case; the policy is the balanced one.

    Attributes:
        shared: query blocks in a row that are alike, so that they find the same.
        context: tokens that are there, of `tokens` that there is room for; 0: all.
    """

    tokens: int
    n: int = 256
    heads: int = 128
    dim: int = 576
    shared: int = 1
    context: int = 0

    @property
    def policy(self) -> Hybrid:
        return Hybrid().for_model(self.heads, self.dim)

    @property
    def voters(self) -> int:
        """Of a group of heads."""
        return min(self.policy.voters, self.heads) // self.policy.head_groups

    @property
    def rows(self) -> int:
        """Of a query block and group of heads."""
        return self.policy.probes * self.voters

    @property
    def blocks(self) -> int:
        return self.tokens // self.policy.block

    @property
    def sizes(self) -> dict[str, Any]:
        policy = self.policy
        names = "block", "group", "probes", "candidates"
        return {"scale": SCALE} | {name: getattr(policy, name) for name in names}

    @property
    def ends(self) -> np.ndarray:
        """What query blocks at the end of the context may retrieve up to."""
        policy, context = self.policy, self.context or self.tokens
        start = context - policy.query_block * (self.n - np.arange(self.n)) - policy.window
        return (start // policy.block).astype(np.int32)


def numbers(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Numbers of variance 1, about normal, from a hash of the index: XLA needs no memory beside the result."""
    index = functools.reduce(lambda s, d: s * jnp.uint32(shape[d]) + _along(shape, d), range(len(shape)), jnp.uint32(0))
    bits = (index + jnp.uint32(seed)) * jnp.uint32(2654435761)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(3266489917)
    parts = sum(((bits >> shift) & 255).astype(jnp.float32) for shift in (0, 8, 16, 24))
    return ((parts - 510) / 147.8).astype(jnp.bfloat16)


def _along(shape: tuple[int, ...], dimension: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.uint32, shape, dimension)


def operands_of(size: Size) -> tuple[jax.Array, ...]:
    """What `retrieve` takes; what lies beyond the context is NaN, and a key in 512 is an anchor."""
    policy, end = size.policy, jnp.asarray(size.ends)
    q = numbers((size.n // size.shared, policy.query_block, size.heads, size.dim), 1)
    q = jnp.repeat(q, size.shared, axis=0)
    tokens = numbers((size.tokens, size.dim), 2)
    # Some keys that whole groups share, so that their index shows.
    tokens = tokens * 0.8 + 0.6 * jnp.repeat(numbers((size.tokens // policy.group, size.dim), 4), policy.group, axis=0)
    written = jnp.arange(size.tokens) < (size.context or size.tokens)
    tokens = jnp.where(written[:, None], tokens.astype(jnp.bfloat16), jnp.nan)
    lse = numbers((size.n, policy.query_block, size.heads), 3).astype(jnp.float32) + 8
    valid = jnp.ones((size.n, policy.query_block), bool)
    free = jnp.arange(size.tokens) % 512 != 77
    # One projection for both, so that products of what is projected are about those of what was.
    projection = numbers((size.dim, policy.index_dim), 7) / policy.index_dim**0.5
    index = group_index(tokens, projection, policy.group)
    voting = jnp.asarray(voting_heads(size.heads, policy.head_groups, policy.voters))
    return q, valid, lse, jnp.ones_like(end), end, tokens, index, projection, free, voting


def lists_of(size: Size) -> np.ndarray:
    """int32 `[n G, C]`: random candidates, -1 at the end of some."""
    rng = np.random.default_rng(0)
    policy = size.policy
    count = size.n // size.shared * policy.head_groups
    some = [np.sort(rng.permutation(size.blocks - 1)[: policy.candidates]) for _ in range(count)]
    found = np.stack(some).reshape(-1, policy.head_groups, policy.candidates).astype(np.int32)
    found[0, 0, policy.candidates // 2 :] = -1
    return np.repeat(found, size.shared, axis=0).reshape(-1, policy.candidates)


def _level_1(size: Size):
    """Operands of the first level: rows of successive query blocks, index, limits."""
    count, policy = size.n * policy_rows(size), size.policy
    index = numbers((size.blocks, policy.block // policy.group, policy.index_dim), 2).astype(TYPE)
    end = jnp.repeat(jnp.asarray(size.ends), policy_rows(size))
    q, _ = query_index(numbers((count, policy.index_dim), 1), jnp.eye(policy.index_dim, dtype=jnp.bfloat16))
    return q, index, jnp.ones_like(end), end


def policy_rows(size: Size) -> int:
    """Rows of a query block."""
    return size.rows * size.policy.head_groups


def scores_of(blocks: Blocks | None = None) -> Callable:
    return functools.partial(block_scores.block_scores, multiprocessors=PROCESSORS, blocks=blocks)


def masses_of() -> Callable:
    return functools.partial(block_masses.block_masses, scale=SCALE, multiprocessors=PROCESSORS)


def verdict(good: bool, said: str, bound: str) -> dict[str, Any]:
    said = f"{'ok' if good else 'BAD'} {said}"
    return {"said": said} if good else {"said": said, "failed": f"; bounds {bound}"}


def check_level_1(size: Size, blocks: Blocks | None = None) -> dict[str, Any]:
    """Some of the rows against float32."""
    policy = size.policy
    sample = np.unique(np.linspace(0, size.n * policy_rows(size) - 1, 256).astype(np.int32))

    def compare(q, index, first, end, best):
        q, first, end, best = (array[sample] for array in (q, first, end, best))
        q, flat = q.astype(jnp.float32), index.reshape(-1, policy.index_dim).astype(jnp.float32)
        products = jnp.einsum("rd,md->rm", q, flat, precision="highest")
        of_row = functools.partial(best_groups, per_block=policy.block // policy.group)
        wanted = jax.vmap(of_row)(products, first, end)
        eligible, largest = jnp.isfinite(wanted), jnp.max(jnp.abs(products), axis=1, keepdims=True)
        error = jnp.where(eligible, jnp.abs(best[:, : size.blocks] - wanted) / largest, 0.0)
        return jnp.max(error), jnp.all(jnp.any(eligible, axis=1))

    make = jax.jit(functools.partial(_level_1, size)).lower().compile()
    kernel = jax.jit(scores_of(blocks)).lower(*make.out_info).compile()
    compare = jax.jit(compare).lower(*make.out_info, kernel.out_info).compile()
    with alone(os.environ[LOCK], HELD_SECONDS):
        operands = make()
        best = kernel(*operands)
        error, some = map(float, compare(*operands, best))
        same = bool(jnp.all(kernel(*operands)[sample, 1:100] == best[sample, 1:100]))
    good = error <= SCORE_BOUND and same and bool(some)
    return verdict(good, f"products off by {error:.1e} of the largest, repeats {same}", f"{SCORE_BOUND}")


def _scores(size: Size, end: np.ndarray):
    """Operands of the votes: products, not a number where a block may not be retrieved, scales, and limits."""
    policy, blocks = size.policy, jnp.arange(size.blocks)
    lead = size.n, policy.head_groups, policy.probes, size.voters
    eligible = (blocks >= 1) & (blocks < end[:, None])
    products = numbers((*lead, size.blocks), 5).astype(jnp.float16) * 30
    best = jnp.where(eligible[:, None, None, None], products, jnp.nan)
    q_scale = jnp.exp2(jnp.round(numbers(lead, 6).astype(jnp.float32))) / 10
    local_lse = numbers(lead, 3).astype(jnp.float32) + 10
    return best.reshape(-1, size.blocks), q_scale, local_lse, jnp.ones(size.n, jnp.int32), jnp.asarray(end, jnp.int32)


def votes_of(size: Size) -> Callable:
    sizes = {"num_blocks": size.blocks, "scale": 1.0, "group": size.policy.group, "multiprocessors": PROCESSORS}
    return functools.partial(block_votes.block_votes, **sizes)


def check_votes(size: Size) -> dict[str, Any]:
    """Against the jnp form, for query blocks that may retrieve nothing to all."""

    def compare(best, q_scale, local_lse, first, end, stands):
        del first, end
        logits = best.reshape(*local_lse.shape, -1) * q_scale[..., None] + np.log(size.policy.group).astype(np.float32)
        shares = shares_of_best(jnp.where(jnp.isnan(logits), -jnp.inf, logits), local_lse)
        wanted = jax.vmap(jax.vmap(standing))(jnp.max(shares, axis=2))
        return jnp.max(jnp.abs(stands - wanted) / jnp.maximum(wanted, 1e-12)), jnp.max(wanted)

    ends = np.linspace(0, size.blocks, size.n).astype(np.int32)
    make = jax.jit(functools.partial(_scores, size, ends)).lower().compile()
    kernel = jax.jit(votes_of(size)).lower(*make.out_info).compile()
    compare = jax.jit(compare).lower(*make.out_info, kernel.out_info).compile()
    with alone(os.environ[LOCK], HELD_SECONDS):
        operands = make()
        stands = kernel(*operands)
        error, most = map(float, compare(*operands, stands))
        same = bool(jnp.all(kernel(*operands) == stands))
    said = f"off by {error:.1e} of themselves, the largest {most:.2f}, repeats {same}"
    return verdict(error <= VOTE_BOUND and same and most > size.voters, said, f"{VOTE_BOUND}")


def check_level_2(size: Size) -> dict[str, Any]:
    """Some of the lists against float32."""
    policy = size.policy
    listed = lists_of(size)
    sample = np.unique(np.linspace(0, len(listed) - 1, 24).astype(np.int32))

    def operands():
        keys = numbers((size.blocks, policy.block, size.dim), 2).at[-1].set(jnp.nan)
        free = (jnp.arange(size.tokens) % 512 != 77) & (jnp.arange(size.tokens) // policy.block != int(listed[3, 5]))
        return numbers((len(listed), size.rows, size.dim), 1), keys, free.reshape(size.blocks, policy.block)

    def exact(q, keys, free):
        def of_list(item):
            q, blocks = item
            seen, rows = free[blocks], keys[blocks].astype(jnp.float32)
            rows = jnp.where(seen[..., None], rows, 0.0)
            logits = jnp.einsum("rd,ckd->crk", q.astype(jnp.float32), rows, precision="highest") * SCALE
            return jax.nn.logsumexp(jnp.where(seen[:, None], logits, -jnp.inf), axis=-1)

        return lax.map(of_list, (q[sample], jnp.maximum(listed[sample], 0)))

    make = jax.jit(operands).lower().compile()
    q, keys, free = make.out_info
    kernel = jax.jit(masses_of()).lower(q, keys, listed, free).compile()
    exact = jax.jit(exact).lower(*make.out_info).compile()
    with alone(os.environ[LOCK], HELD_SECONDS):
        q, keys, free = make()
        runs = [np.asarray(kernel(q, keys, listed, free)) for _ in range(2)]
        wanted = np.asarray(exact(q, keys, free))
    there = listed >= 0
    same = bool(np.array_equal(runs[0][there], runs[1][there]))
    got, wanted = runs[0][sample][there[sample]], wanted[there[sample]]
    empty = np.isneginf(wanted)
    error = float(np.max(np.abs(got - wanted)[~empty]))
    good = error <= LOGIT_BOUND and same and bool(np.isneginf(got[empty]).all()) and not np.isnan(runs[0][there]).any()
    return verdict(good, f"log-sum-exp {error:.1e}, {empty.sum()} without keys, repeats {same}", f"{LOGIT_BOUND}")


def check_candidates(size: Size) -> dict[str, Any]:
    """Lists are the same as of whole rankings, with sums that are random, often equal, or nearly all zero."""
    policy, n = size.policy, 96
    first, end = np.ones(n, np.int32), np.linspace(10, size.blocks, n).astype(np.int32)

    def stands():
        bits = numbers((n, size.blocks), 5).astype(jnp.float32)
        kinds = jnp.exp(bits - 9), jnp.round(jnp.exp(bits) * 4) / 256, jnp.where(bits > 3.1, jnp.exp(bits - 9), 0.0)
        return jnp.concatenate([kind[i :: len(kinds)] for i, kind in enumerate(kinds)])

    make = jax.jit(stands).lower().compile()
    of_each = jax.vmap(lambda stands, first, end: candidate_blocks(stands, first, end, policy.candidates))
    program = jax.jit(of_each).lower(make.out_info, first, end).compile()
    with alone(os.environ[LOCK], HELD_SECONDS):
        given = make()
        found, given = np.asarray(program(given, first, end)), np.asarray(given)
    order = [
        f + np.argsort(-s[f:e], kind="stable")[: policy.candidates] for s, f, e in zip(given, first, end, strict=True)
    ]
    wrong = sum(f[f >= 0].tolist() != sorted(wanted.tolist()) for f, wanted in zip(found, order, strict=True))
    return verdict(wrong == 0, f"{wrong} of {n} lists differ from those of whole rankings", "0")


def check_retrieve(size: Size) -> dict[str, Any]:
    """The kernels against the jnp form, of the same rounded numbers: what sums turn around is counted."""
    make = jax.jit(functools.partial(operands_of, size)).lower().compile()
    forms = "mosaic", "reference"
    programs = [
        jax.jit(functools.partial(retrieve, **size.sizes, implementation=form)).lower(*make.out_info).compile()
        for form in forms
    ]
    with alone(os.environ[LOCK], HELD_SECONDS):
        operands = make()
        found, wanted = (jax.device_get(program(*operands)) for program in programs)
    pairs = zip(
        found.candidates.reshape(-1, found.candidates.shape[-1]),
        wanted.candidates.reshape(-1, wanted.candidates.shape[-1]),
        strict=True,
    )
    flips = sum(len(set(ours.tolist()) ^ set(theirs.tolist())) for ours, theirs in pairs) / 2 / wanted.candidates.size
    equal = (found.candidates == wanted.candidates).all(axis=-1)
    relative = np.abs(found.masses - wanted.masses)[equal] / np.maximum(wanted.masses[equal], 1e-6)
    error, listed = float(relative.max(initial=0.0)), float((wanted.candidates >= 0).mean())
    good = flips <= FLIPS_BOUND and error <= 5 * MASS_BOUND and bool(equal.any())
    said = f"{flips:.2%} of the candidates differ, masses off by {error:.1e} of themselves; {listed:.0%} listed"
    return verdict(good, said, f"{FLIPS_BOUND:.1%}, {5 * MASS_BOUND}")


def timed(make: Callable, run: Callable) -> tuple[Any, str]:
    """The timing of a function, and its longest kernels in words."""
    make = jax.jit(make).lower().compile()
    program = jax.jit(run).lower(*make.out_info).compile()
    with alone(os.environ[LOCK], HELD_SECONDS):
        operands = make()
        timing = measure(lambda _: program(*operands), jax.block_until_ready, REPEATS)
    parts: dict[str, list[float]] = defaultdict(list)
    for name, seconds in timing.kernels:
        parts[name.replace("_mosaic_gpu_kernel", "")[:44]].append(seconds)
    order = sorted(parts.items(), key=lambda part: -sum(part[1]))[:9]
    words = ", ".join(f"{name}{f' x{len(s)}' if len(s) > 1 else ''} {sum(s) * 1e6:.0f}" for name, s in order)
    return timing, f"{timing.clock}, {len(timing.kernels)} kernels: {words}"


def time_retrieve(size: Size, wide: int = lists._WIDE) -> dict[str, Any]:
    """`wide` times the list is what is sorted whole."""
    run = functools.partial(retrieve, **size.sizes, implementation="mosaic")
    with mock.patch.object(lists, "_WIDE", wide):
        timing, words = timed(functools.partial(operands_of, size), run)
    return {"said": f"{timing.seconds * 1e3:.3f} ms; {words}"} | dataclasses.asdict(timing)


def time_level_1(size: Size, blocks: Blocks) -> dict[str, Any]:
    policy = size.policy
    flops = 2.0 * policy_rows(size) * policy.index_dim * float(size.ends.sum()) * policy.block / policy.group
    timing, words = timed(functools.partial(_level_1, size), scores_of(blocks))
    seconds = sum(s for name, s in timing.kernels if "block_scores" in name) or timing.seconds
    said = f"{seconds * 1e3:.3f} ms, {flops / seconds / 1e12:.0f} TFLOP/s; {words}"
    return {"said": said, "flops": flops} | dataclasses.asdict(timing)


def time_votes(size: Size) -> dict[str, Any]:
    timing, words = timed(functools.partial(_scores, size, size.ends), votes_of(size))
    moved = 2.0 * policy_rows(size) * float(size.ends.sum()) + 4.0 * size.n * size.policy.head_groups * size.blocks
    seconds = sum(s for name, s in timing.kernels if "block_votes" in name) or timing.seconds
    said = f"{seconds * 1e3:.3f} ms, {moved / seconds / 1e12:.2f} TB/s; {words}"
    return {"said": said, "bytes": moved} | dataclasses.asdict(timing)


def time_level_2(size: Size) -> dict[str, Any]:
    policy, listed = size.policy, lists_of(size)
    flops = 2.0 * size.rows * size.dim * policy.block * float((listed >= 0).sum())

    def operands():
        keys = numbers((size.blocks, policy.block, size.dim), 2)
        free = (jnp.arange(size.tokens) % 512 != 77).reshape(size.blocks, policy.block)
        return numbers((len(listed), size.rows, size.dim), 1), keys, jnp.asarray(listed), free

    timing, words = timed(operands, masses_of())
    seconds = sum(s for name, s in timing.kernels if "block_masses" in name) or timing.seconds
    said = f"{seconds * 1e3:.3f} ms, {flops / seconds / 1e12:.0f} TFLOP/s; {words}"
    return {"said": said, "flops": flops} | dataclasses.asdict(timing)


def time_candidates(size: Size, wide: int) -> dict[str, Any]:
    """From sums of votes to candidates; `wide` times the list is what is sorted whole."""
    policy = size.policy

    def stands():
        stands = jnp.exp(numbers((size.n, policy.head_groups, size.blocks), 5).astype(jnp.float32) - 9)
        return stands, jnp.ones(size.n, jnp.int32), jnp.asarray(size.ends)

    of_group = jax.vmap(lambda s, f, e: candidate_blocks(s, f, e, policy.candidates), in_axes=(0, None, None))
    with mock.patch.object(lists, "_WIDE", wide):
        timing, words = timed(stands, jax.vmap(of_group))
    return {"said": f"{timing.seconds * 1e3:.3f} ms; {words}"} | dataclasses.asdict(timing)


def time_rest(size: Size) -> dict[str, Any]:
    """Records, hot blocks and the choice of what is read, as `model.sparse` has them."""
    policy = size.policy

    def operands():
        masses = jnp.exp(numbers((size.n, policy.head_groups, policy.candidates), 6).astype(jnp.float32) - 5)
        found = jnp.asarray(lists_of(size)).reshape(masses.shape)
        rows = size.tokens // policy.query_block
        blocks = jnp.asarray(np.random.default_rng(1).zipf(1.5, (rows, RECORDED)) % size.blocks, jnp.int32)
        return masses, found, jnp.stack((blocks, blocks * 7 % 1000), axis=-1), jnp.asarray(size.ends)

    def run(masses, found, records, end):
        counts = jax.vmap(lambda m, b: hot.amounts(m, b, size.blocks))(masses, found)
        left = jax.vmap(lambda counts: hot.record(counts, RECORDED))(counts)
        by_epoch = records.reshape(size.tokens // policy.hot_epoch, -1, 2)
        weights = hot.hot_weights(hot.epoch_masses(by_epoch, size.blocks))
        epochs = jnp.clip(end * policy.block // policy.hot_epoch + 1, 0, weights.shape[0] - 1)
        warm = jax.vmap(lambda w, e: hot.hot_blocks(w, 1, e, policy.hot_blocks))(weights[epochs], end)

        def of_group(masses, found, warm):
            least, most = policy.min_retrieved, policy.max_retrieved
            return choice.retrieved_blocks(masses, found, warm, least=least, most=most, mass=None)

        kept = jax.vmap(jax.vmap(of_group, in_axes=(0, 0, None)))(masses, found, warm)
        return left, jax.vmap(lists.join)(warm, kept)

    timing, words = timed(operands, run)
    return {"said": f"{timing.seconds * 1e3:.3f} ms; {words}"} | dataclasses.asdict(timing)


K = 1024
VARIANTS = {
    "pieces of 256 groups, 4 stages": Blocks(piece=256, stages=4),
    "pieces of 128 groups, 8 stages": Blocks(piece=128, stages=8),
}


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Most important first."""
    v3 = {name: Size(tokens) for name, tokens in {"512K": 512 * K, "64K": 64 * K, "256K": 256 * K, "1M": K * K}.items()}
    small = Size(32 * K, n=48, heads=4, dim=320)
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "check level 1, 64K": functools.partial(check_level_1, v3["64K"]),
        "check level 2, 64K": functools.partial(check_level_2, v3["64K"]),
        "check votes, 512K": functools.partial(check_votes, v3["512K"]),
        "check candidates, 512K": functools.partial(check_candidates, v3["512K"]),
        "check retrieve, 64K": functools.partial(check_retrieve, dataclasses.replace(v3["64K"], n=48)),
    }
    found |= {f"time retrieve, {name}": functools.partial(time_retrieve, size) for name, size in v3.items()}
    found |= {
        f"time level 1, 512K, {name}": functools.partial(time_level_1, v3["512K"], blocks)
        for name, blocks in VARIANTS.items()
    }
    found |= {f"time votes, {name}": functools.partial(time_votes, v3[name]) for name in ("512K", "1M", "64K")}
    found |= {
        "time level 2, 512K": functools.partial(time_level_2, v3["512K"]),
        "time level 2, 512K, 8 query blocks alike": functools.partial(
            time_level_2, dataclasses.replace(v3["512K"], shared=8)
        ),
        "time rest, 512K": functools.partial(time_rest, v3["512K"]),
    }
    found |= {
        f"time candidates, {name}, {wide} times the list sorted": functools.partial(time_candidates, v3[name], wide)
        for name, wide in [("1M", 4), ("1M", 8), ("1M", 16), ("512K", 4), ("512K", 16), ("64K", 4)]
    }
    found |= {
        "time retrieve, 64K in a program for 512K": functools.partial(
            time_retrieve, dataclasses.replace(v3["512K"], context=64 * K)
        ),
        "check votes, 1M": functools.partial(check_votes, v3["1M"]),
        "check votes, 2M, read twice": functools.partial(check_votes, Size(2 * K * K, n=64)),
        "check level 1, 1M": functools.partial(check_level_1, v3["1M"]),
        "check level 2, 1M": functools.partial(check_level_2, v3["1M"]),
        "check retrieve, 32K, 4 heads": functools.partial(check_retrieve, small),
        "check retrieve, 48K in a program for 64K": functools.partial(
            check_retrieve, dataclasses.replace(v3["64K"], n=48, context=48 * K)
        ),
        "check candidates, 1M": functools.partial(check_candidates, v3["1M"]),
    }
    found |= {
        f"check level 1, 64K, {name}": functools.partial(check_level_1, v3["64K"], blocks)
        for name, blocks in VARIANTS.items()
        if blocks != block_scores.choose(v3["64K"].policy.index_dim, 32)
    }
    found |= {
        f"time level 1, 64K, {name}": functools.partial(time_level_1, v3["64K"], blocks)
        for name, blocks in VARIANTS.items()
    }
    found |= {
        "time retrieve, 128K, 4 heads": functools.partial(time_retrieve, Size(128 * K, heads=4, dim=320)),
        "time retrieve, 1M, 8 times the list sorted": functools.partial(time_retrieve, v3["1M"], 8),
        "time rest, 1M": functools.partial(time_rest, v3["1M"]),
    }
    return found


if __name__ == "__main__":
    sys.exit(workers.main(MODULE, __doc__, LOCK, case_seconds=CASE_SECONDS, seconds=120))
