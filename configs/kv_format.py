"""Formats of the latent cache: what a token takes in it, for one layer, and which layer has which."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxinfer.configs.layers import layer_range

_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class KVFormat:
    """How a layer's latents are held.

    Float formats hold the latent and its rotated key as one row.  Quantised ones hold the latent in 8 bits with float32
    scales, and the rotated key in bfloat16: it is an eighth of the numbers, but most of a score, so that in 8 bits it
    would cost several times what the latent does.
    """

    name: str
    dtype: str
    """Of the latent."""
    quantized: bool = False
    group: int | None = None
    """How many numbers of a latent share a scale; None, or where it does not divide a latent: all of them."""

    def parts(self, kv_rank: int, rope: int) -> dict[str, tuple[int, str]]:
        """The arrays that hold a token: for each, how many numbers, and their type."""
        if not self.quantized:
            return {"values": (kv_rank + rope, self.dtype)}
        groups = 1 if self.group is None or kv_rank % self.group else kv_rank // self.group
        return {"values": (kv_rank, self.dtype), "rope": (rope, "bfloat16"), "scale": (groups, "float32")}

    def token_bytes(self, kv_rank: int, rope: int) -> int:
        """Bytes of a token in one layer."""
        return sum(count * _BYTES[dtype] for count, dtype in self.parts(kv_rank, rope).values())


FORMATS = {
    kind.name: kind
    for kind in (
        KVFormat("fp32", "float32"),
        KVFormat("bf16", "bfloat16"),
        KVFormat("int8", "int8", quantized=True),
        KVFormat("fp8_e4m3", "float8_e4m3fn", quantized=True, group=128),
        KVFormat("fp8_e5m2", "float8_e5m2", quantized=True, group=128),
    )
}
"""By the name that an option gives them."""

FLOAT_FORMATS = {kind.dtype: kind for kind in FORMATS.values() if not kind.quantized}
"""By the type of what they hold."""

KV_FORMATS = ("auto", *FORMATS)

KV_FORMS = f"{', '.join(KV_FORMATS)}, and after a comma layers that have another: int8,0-1=bf16,20=fp8_e4m3"


def distinct(formats: Iterable[KVFormat]) -> tuple[KVFormat, ...]:
    """The formats without repetition, in the order in which they come: that of the arrays that hold them."""
    return tuple(dict.fromkeys(formats))


@dataclass(frozen=True)
class LayerFormats:
    """Formats by layer; None stands for auto."""

    default: KVFormat | None
    ranges: tuple[tuple[int, int, KVFormat | None], ...] = ()
    """(first, end, format): layers `first .. end - 1` have a format of their own.  No layer is in two of them."""

    def of_layers(self, layers: int, auto: KVFormat) -> tuple[KVFormat, ...]:
        """The format of each layer of a model.  Raises ValueError if it does not have a layer that is named."""
        kinds = [self.default] * layers
        for first, end, kind in self.ranges:
            if end > layers:
                raise ValueError(f"expected layers of kv below {layers}, got {end - 1}")
            kinds[first:end] = [kind] * (end - first)
        return tuple(kind or auto for kind in kinds)


def parse_formats(text: str) -> LayerFormats:
    """Reads "int8", or "int8,0-1=bf16,20=fp8_e4m3": a format, and layers with another.

    Raises ValueError for anything else, saying what was expected.
    """
    name, *parts = (part.strip() for part in text.split(","))
    if name not in KV_FORMATS:
        raise ValueError(f"expected kv to be one of {KV_FORMS}; got {text!r}")
    ranges: list[tuple[int, int, KVFormat | None]] = []
    for part in parts:
        layers, equals, kind = (piece.strip() for piece in part.partition("="))
        if not equals or kind not in KV_FORMATS:
            raise ValueError(f"expected layers=format in kv, with a format of {', '.join(KV_FORMATS)}; got {part!r}")
        first, end = layer_range(layers)
        if any(first < other_end and other_first < end for other_first, other_end, _ in ranges):
            raise ValueError(
                f"expected each layer once in kv, got {part!r} beside others of the same layers in {text!r}"
            )
        ranges.append((first, end, FORMATS.get(kind)))
    return LayerFormats(FORMATS.get(name), tuple(ranges))
