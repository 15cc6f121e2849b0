"""Batches and sampling parameters as one array each: what comes out on a rank is what went in for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.sampling import SamplingRows, pack_rows, unpack_rows
from jaxinfer.model.batch import DecodeBatch, SparseDecode, local, pack, unpack


def test_each_rank_sees_its_own():
    rng = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        return rng.integers(-5, 1000, shape, np.int32)

    replicas, cp, rows = 2, 4, 3
    batch = DecodeBatch(
        tokens=numbers(replicas, rows),
        positions=numbers(replicas, rows),
        homes=numbers(replicas, rows),
        page_table=numbers(replicas, cp, rows, 5),
        write_page=numbers(replicas, cp, rows),
        write_offset=numbers(replicas, cp, rows),
        sparse=SparseDecode(shared=numbers(replicas, rows, 7)),
    )
    packed, form = pack(batch, replicas, cp)
    assert packed.dtype == np.int32 and packed.shape[:2] == (replicas, cp) and hash(form) == hash(pack(batch, 2, 4)[1])
    assert all(begin % 64 == 0 for begin in form.begins) and packed.shape[2] == form.begins[-1]
    for r in range(replicas):
        for rank in range(cp):
            shard = jax.tree.map(
                lambda a, at=(r, rank): a[at[0] : at[0] + 1, at[1] : at[1] + 1] if a.shape[1] == cp else a[at[0]][None],
                batch,
            )
            found, wanted = unpack(jnp.asarray(packed[r : r + 1, rank : rank + 1]), form), local(shard)
            jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_other_types_are_refused():
    batch = SparseDecode(shared=np.zeros((1, 2, 3), np.int64))
    with pytest.raises(ValueError, match="expected batches of int32, got int64"):
        pack(batch, 1, 1)


def test_rows_keep_their_bits():
    shape = (2, 3)
    rows = SamplingRows(
        temperature=np.full(shape, 0.7, np.float32),
        top_k=np.full(shape, 40, np.int32),
        top_p=np.full(shape, 0.95, np.float32),
        min_p=np.full(shape, -0.0, np.float32),
        seed=np.full(shape, 2**32 - 3, np.uint32),
        index=np.full(shape, 17, np.int32),
    )
    found = jax.jit(unpack_rows)(pack_rows(rows))
    jax.tree.map(np.testing.assert_array_equal, found, rows)
    assert [a.dtype for a in jax.tree.leaves(found)] == [a.dtype for a in jax.tree.leaves(rows)]
    assert np.signbit(found.min_p).all()
