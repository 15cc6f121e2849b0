"""The votes of level 1 of retrieval, summed: in the interpreter against the jnp form, and lowered at real sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.mosaic import block_votes
from jaxinfer.kernels.selection.scores import shares_of_best, standing
from tests.kernels.products import interpreted, lower_for_cuda

# The exponential of a logit of 40 in float32 is off by 40 * 2^-24 and more, relative to itself.
EXPONENTIALS = {"rtol": 1e-5, "atol": 1e-7}
SCALE, GROUP = 0.3, 8

CASES = {
    # groups of heads, probes, voters, blocks, sets of columns of a piece, stages, (first, end) of the query blocks
    "pieces that stay, some of which are not read": (1, 4, 2, 531, 1, 8, [(1, 531), (130, 260), (3, 3), (7, 8)]),
    "pieces that are read twice": (2, 4, 1, 645, 1, 2, [(1, 645), (0, 200), (900, 2), (300, 601)]),
    "one probe, wide pieces": (1, 1, 2, 1027, 4, 4, [(1, 1027), (600, 1000)]),
    "32 probes": (1, 32, 1, 260, 4, 3, [(0, 257), (4, 4)]),
}


@pytest.mark.parametrize("name", CASES)
def test_votes(name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    groups, probes, voters, num_blocks, together, stages, limits = CASES[name]
    monkeypatch.setattr(block_votes, "_MOST_TOGETHER", together)
    monkeypatch.setattr(block_votes, "_MOST_STAGES", stages)
    n, width = len(limits), -(-num_blocks // 8) * 8
    rng = np.random.default_rng(probes)
    q_scale = rng.uniform(0.5, 2, size=(n, groups, probes, voters)).astype(np.float32)
    products = (rng.normal(size=(*q_scale.shape, width)) * 20 - 120).astype(np.float16)
    # One voter's best is there twice.
    products[0, 0, :, 0, 60] = products[0, 0, :, 0, 200] = products[0, 0, :, 0].max(axis=-1) + 1
    logits = products.astype(np.float32) * SCALE * q_scale[..., None] + np.log(GROUP)
    local_lse = (rng.normal(size=(n, groups, probes, voters)) * 4 - 30).astype(np.float32)
    local_lse[0, 0, 0] = -np.inf
    first, end = np.asarray(limits, np.int32).T
    blocks = np.arange(width)
    eligible = ((blocks >= first[:, None]) & (blocks < end[:, None]))[:, None, None, None]
    garbage = rng.choice(np.asarray([np.nan, np.inf, -np.inf, 6e4], np.float16), logits.shape)
    best = jnp.asarray(np.where(eligible, products, garbage)).reshape(-1, width)
    sizes = {"num_blocks": num_blocks, "scale": SCALE, "group": GROUP, "multiprocessors": 1}
    run = functools.partial(block_votes.block_votes, **sizes)
    with interpreted(capsys):
        found = jax.block_until_ready(jax.jit(run)(best, q_scale, local_lse, first, end))
    shares = shares_of_best(jnp.where(eligible, logits, -jnp.inf), jnp.asarray(local_lse))
    wanted = jax.vmap(jax.vmap(standing))(jnp.max(shares, axis=2))
    np.testing.assert_allclose(found, wanted[..., :num_blocks], **EXPONENTIALS)
    assert (np.asarray(found)[~np.broadcast_to(eligible[:, :, 0, 0, :num_blocks], found.shape)] == 0).all()
    assert found[0, 0].max() > voters  # somebody's best


@pytest.mark.parametrize(
    ("groups", "probes", "voters", "blocks"),
    [(4, 4, 8, 512), (4, 4, 8, 4096), (4, 4, 8, 8192), (1, 1, 32, 77), (1, 2, 16, 4097), (1, 32, 1, 64)],
)
def test_lowers_for_cuda(groups: int, probes: int, voters: int, blocks: int):
    n, shape = 256, jax.ShapeDtypeStruct
    lowered = lower_for_cuda(
        functools.partial(block_votes.block_votes, num_blocks=blocks, scale=SCALE, group=4, multiprocessors=132),
        shape((n * groups * probes * voters, -(-blocks // 8) * 8), jnp.float16),
        shape((n, groups, probes, voters), jnp.float32),
        shape((n, groups, probes, voters), jnp.float32),
        shape((n,), jnp.int32),
        shape((n,), jnp.int32),
    )
    assert "block_votes" in lowered


def test_rows_stay_where_they_fit():
    """Of DeepSeek-V3 up to contexts of 2M: three thread blocks of a multiprocessor to 512K, two to 1M, then one."""
    for blocks, at_a_time in ((512, 3), (4096, 3), (8192, 2), (16384, 1)):
        shape = block_votes._cut(4, 4, 8, blocks)
        assert shape.pieces <= shape.stages and shape.thread_blocks == at_a_time
    assert block_votes.reason_against(4, 2**15) is None
    assert "65536 blocks are more" in str(block_votes.reason_against(4, 2**16))
