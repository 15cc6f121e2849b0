"""Attention policy and cache format of each layer of a stack that is scanned."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache import Cache, LayerCache
from jaxinfer.configs.attention import Dense, Hybrid
from jaxinfer.configs.kv_format import KVFormat
from jaxinfer.configs.kv_format import distinct as without_repetition
from jaxinfer.kernels.latents import Latents

type Attend = Callable[[Dense | Hybrid, LayerCache], tuple[Any, LayerCache]]


class Policies(NamedTuple):
    """Policies without repetition, which of them each layer follows, and where each layer's latents are.

    A scanned layer's number is known on the device only.  Where all layers of the scan are of one kind, nothing is
    looked up and nothing branches.
    """

    distinct: tuple[Dense | Hybrid, ...]
    of_layer: tuple[int, ...]
    formats: tuple[int, ...]
    """Of each layer, which of the cache's latents hold its own."""
    scanned: range
    """The layers of the scan."""

    @staticmethod
    def of(policy: Dense | Hybrid, layers: int, formats: Sequence[KVFormat] = ()) -> "Policies":
        """The policies of a model of so many layers; `formats` are theirs, one for each, or none: all have the same."""
        each = [policy.of_layer(layer) if isinstance(policy, Hybrid) else policy for layer in range(layers)]
        distinct, kinds = tuple(dict.fromkeys(each)), without_repetition(formats)
        numbers = tuple(kinds.index(kind) for kind in formats) or (0,) * layers
        return Policies(distinct, tuple(distinct.index(policy) for policy in each), numbers, range(layers))

    def scan(self, first: int, end: int) -> "Policies":
        """What a scan of the layers `first .. end - 1` needs to know."""
        return self._replace(scanned=range(first, end))

    @property
    def hybrid(self) -> Hybrid | None:
        """A policy of the scanned layers that is not dense, None if all are: what all such share can be read of it."""
        each = (self.distinct[self.of_layer[layer]] for layer in self.scanned)
        return next((policy for policy in each if isinstance(policy, Hybrid)), None)

    def call(self, cache: Cache, layer: jax.Array, attend: Attend) -> tuple[Any, Cache]:
        """`attend(policy, layer's part of the cache)`: its result, and the cache with the records and reads it returns.

        It is traced once for each kind of layer.  Latents and index, whatever it returns of them, stay as they are.
        """
        kinds = [(self.of_layer[number], self.formats[number]) for number in self.scanned]
        distinct = list(dict.fromkeys(kinds))
        beside = cache.records, cache.reads

        def of_kind(kind, beside, row):
            (policy, form), (records, reads) = kind, beside
            place = self._place(layer, form)
            part = LayerCache(cache.latents[form], place, cache.index, layer, records, reads, row)
            result, part = attend(self.distinct[policy], part)
            return result, (part.records, part.reads)

        if len(distinct) == 1:
            result, beside = of_kind(distinct[0], beside, layer)
        else:
            # XLA may copy what a branch changes: that is the rows of this layer only, and never the latents.
            rows = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, layer, 1), beside)
            which = jnp.asarray([distinct.index(kind) for kind in kinds])[layer - self.scanned.start]
            branches = [partial(of_kind, kind) for kind in distinct]
            result, rows = lax.switch(which, branches, rows, jnp.int32(0))
            beside = jax.tree.map(lambda all, own: lax.dynamic_update_slice_in_dim(all, own, layer, 0), beside, rows)
        records, reads = beside
        return result, cache._replace(records=records, reads=reads)

    def write(
        self,
        cache: Cache,
        layer: jax.Array,
        page: jax.Array,
        put: Callable[[Latents, jax.Array, jax.Array], Latents],
    ) -> Cache:
        """The cache with the latents `put(latents, place, page)`: it is called for each format of the scanned layers,
        with the layer's place among those of this format, and with pages out of range where the layer has another."""
        latents = list(cache.latents)
        for form in self._forms:
            pages = jax.tree.leaves(latents[form])[0].shape[1]
            mine = self._where([other == form for other in self.formats], layer, page, pages)
            latents[form] = put(latents[form], self._place(layer, form), mine)
        return cache._replace(latents=tuple(latents))

    def read(self, cache: Cache, layer: jax.Array, take: Callable[[Latents, jax.Array], jax.Array]) -> jax.Array:
        """`take(latents, place)` of the layer, for a few rows: they are taken in each format of the scanned layers,
        which costs less than a branch."""
        first, *others = self._forms
        found = take(cache.latents[first], self._place(layer, first))
        for form in others:
            other = take(cache.latents[form], self._place(layer, form))
            found = self._where([number != form for number in self.formats], layer, found, other)
        return found

    def if_hybrid(self, layer: jax.Array, value: jax.Array, other: jax.Array | int) -> jax.Array:
        """`value` where the layer's policy is hybrid, else `other`."""
        return self._where([isinstance(self.distinct[number], Hybrid) for number in self.of_layer], layer, value, other)

    @property
    def _forms(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.formats[layer] for layer in self.scanned))

    def _place(self, layer: jax.Array, form: int) -> jax.Array:
        """Where the layer lies among those of a format; 0 if it has another."""
        mine = [number for number, other in enumerate(self.formats) if other == form]
        if len(mine) == len(self.formats):
            return layer
        return jnp.asarray([mine.index(number) if number in mine else 0 for number in range(len(self.formats))])[layer]

    def _where(self, chosen: Sequence[bool], layer: jax.Array, value: jax.Array, other: jax.Array | int) -> jax.Array:
        """`value` in the layers that are chosen, else `other`."""
        if all(chosen[number] for number in self.scanned):
            return value
        return jnp.where(jnp.asarray(chosen)[layer], value, other)
