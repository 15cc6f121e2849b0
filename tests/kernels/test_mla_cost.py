"""Expanded or absorbed: the crossover of the operations, and the two ends."""

import pytest

from jaxinfer.kernels.mla_cost import Rates, absorbed_is_cheaper

V3 = {"heads": 128, "nope": 128, "rope": 64, "v": 128, "kv_rank": 512}
EVEN = Rates(expansion=1e15, expanded=1e15, absorbed=1e15, memory=1e30)


@pytest.mark.parametrize("keys", [65536, 2**20])
def test_operations_cross_where_the_formula_says(keys: int):
    assert absorbed_is_cheaper(170, keys, **V3, rates=EVEN)
    assert not absorbed_is_cheaper(172, keys, **V3, rates=EVEN)


def test_the_two_ends():
    assert absorbed_is_cheaper(1, 8192, **V3)
    assert not absorbed_is_cheaper(8192, 65536, **V3)
    # As many queries as keys: absorbing costs what expanding does.
    assert not absorbed_is_cheaper(128, 128, **V3, rates=EVEN)


def test_memory_favours_absorbed_and_a_slow_kernel_expanded():
    few = Rates(expansion=1e15, expanded=1e15, absorbed=1e15, memory=1e12)
    slow = Rates(expansion=1e15, expanded=1e15, absorbed=4e14, memory=1e30)
    assert absorbed_is_cheaper(200, 2**20, **V3, rates=few)
    assert not absorbed_is_cheaper(100, 2**20, **V3, rates=slow)
