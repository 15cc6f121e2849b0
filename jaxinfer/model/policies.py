"""The attention policy of each layer of a stack that is scanned."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.configs.attention import Dense, Hybrid


class Policies(NamedTuple):
    """Policies without repetition, and which of them each layer follows."""

    distinct: tuple[Dense | Hybrid, ...]
    of_layer: tuple[int, ...]

    @staticmethod
    def of(policy: Dense | Hybrid, layers: int) -> "Policies":
        """The policies of a model of so many layers."""
        each = [policy.of_layer(layer) if isinstance(policy, Hybrid) else policy for layer in range(layers)]
        distinct = tuple(dict.fromkeys(each))
        return Policies(distinct, tuple(distinct.index(policy) for policy in each))

    def call(self, layer: jax.Array, function: Callable[[Dense | Hybrid], Any]) -> Any:
        """`function` of the policy of a layer whose number is known on the device only; it is traced once for each."""
        if len(self.distinct) == 1:
            return function(self.distinct[0])
        return lax.switch(jnp.asarray(self.of_layer)[layer], [partial(function, policy) for policy in self.distinct])
