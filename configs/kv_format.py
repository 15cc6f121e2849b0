"""Formats of the latent cache: what a token takes in it, for one layer."""

from dataclasses import dataclass

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
