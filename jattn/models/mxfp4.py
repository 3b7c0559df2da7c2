"""MXFP4, the packed form of gpt-oss's experts: 4-bit floats, two a byte, and one power of two for every 32."""

import ml_dtypes
import numpy as np

CODES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)  # sign in the highest of four bits
VALUES = np.concatenate([CODES, -CODES])
BIAS = 127  # of the stored exponents


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """blocks u8[E out groups 16], scales u8[E out groups] -> bfloat16 [E, in, out], exact (in = 32 * groups)."""
    nibbles = np.stack([blocks & 0xF, blocks >> 4], axis=-1)  # the low half comes first
    real = np.ldexp(VALUES[nibbles], scales.astype(np.int32)[..., None, None] - BIAS)
    rows = real.astype(ml_dtypes.bfloat16).reshape(*blocks.shape[:2], -1)
    return rows.swapaxes(1, 2)
