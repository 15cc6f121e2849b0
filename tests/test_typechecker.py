"""The annotations of jaxinfer are checked while the tests run, in the linked folders too."""

from typing import Any

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from jaxinfer.configs.model import RopeConfig
from jaxinfer.sharding.collectives import all_reduce
from jaxinfer.sharding.layout import Layout


def test_a_wrong_field_of_a_dataclass_is_caught() -> None:
    wrong: Any = "two"
    with pytest.raises(TypeCheckError, match="cp"):
        Layout(cp=wrong, stripe=8, page_size=8)


def test_a_wrong_argument_of_a_function_is_caught() -> None:
    wrong: Any = "tp"
    with pytest.raises(TypeCheckError, match="axes"):
        all_reduce(jnp.ones(3), wrong)


def test_an_int_is_accepted_as_a_float() -> None:
    whole: Any = 10000
    assert RopeConfig(theta=whole).theta == 10000
