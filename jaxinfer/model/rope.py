"""Tables of the rotary embedding: plain and YaRN (arXiv 2309.00071) with DeepSeek's mscale rules."""

import math

import numpy as np

from jaxinfer.configs.model import ModelConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, dim: int) -> np.ndarray:
    """Angle per position of each of the `dim / 2` pairs, float32 `[dim / 2]`.

    YaRN divides the slow pairs by `factor`, leaves the fast ones, and ramps linearly between the pairs that turn
    `beta_fast` and `beta_slow` times over the original context (arXiv 2309.00071, section 3.2).
    """
    pairs = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    plain = 1.0 / np.power(np.float32(rope.theta), pairs, dtype=np.float32)
    if rope.factor is None:
        return plain

    def pair_turning(turns: float) -> float:
        return dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_turning(rope.beta_fast)), 0)
    high = min(math.ceil(pair_turning(rope.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1).astype(np.float32)
    return (plain / np.float32(rope.factor) * ramp + plain * (1 - ramp)).astype(np.float32)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_factor(rope: RopeConfig) -> float:
    """Factor on cos and sin: 1 for plain RoPE; for YaRN the configured one, or the ratio of the two mscales."""
    if rope.factor is None:
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def softmax_scale(config: ModelConfig) -> float:
    """`qk_head_dim^-0.5`, times the square of YaRN's mscale over all dimensions where one is configured."""
    scale = config.qk_head_dim**-0.5
    if config.rope.factor is not None and config.rope.mscale_all_dim:
        scale *= _mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
    return scale


def rope_table(rope: RopeConfig, dim: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, float32 `[positions, dim / 2]` each.

    The angle is the float32 product of position and frequency, as in the code the models were trained with; only its
    cosine and sine are taken more exactly than float32 would.
    """
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse_frequencies(rope, dim)
    factor = attention_factor(rope)
    wide = angles.astype(np.float64)
    return (np.cos(wide) * factor).astype(np.float32), (np.sin(wide) * factor).astype(np.float32)
