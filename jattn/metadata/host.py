"""Functions for numpy arrays on the host and for JAX arrays, also inside jit."""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def array_module(*arrays) -> ModuleType:
    """jax.numpy if one of them is a JAX array, else numpy."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def is_traced(*arrays) -> bool:
    """Is one of them a tracer, e.g. inside jit, scan or vmap?"""
    return any(isinstance(x, Tracer) for x in arrays)


def on_host(x, function: str, way_out: str) -> np.ndarray:
    """x as a numpy array; ValueError if it is traced. function, way_out: for the message."""
    if is_traced(x):
        raise ValueError(f"{function} needs values, but this array is traced; {way_out}")
    return np.asarray(x)


def inclusive_sum(x, xp: ModuleType):
    """i32 cumulative sum; without the dtype, numpy's has 64 bits."""
    return xp.cumsum(x, dtype=xp.int32)


def starts_of(lens, xp: ModuleType):
    """i32[n+1] starts of consecutive segments of these lengths, and the end of the last."""
    return xp.concatenate([xp.zeros(1, xp.int32), inclusive_sum(lens, xp)])


def segment_of(ends, count: int, xp: ModuleType):
    """i32[count] the segment of each of 0 .. count-1, given the segments' ends; past the last end: the last segment."""
    segment = xp.searchsorted(ends, xp.arange(count, dtype=xp.int32), side="right")
    return xp.minimum(segment, max(ends.shape[0] - 1, 0)).astype(xp.int32)


def minimum(x, bound: int):
    """min(x, bound), as numpy if x is numpy's."""
    return np.minimum(x, np.int32(bound)) if isinstance(x, (np.ndarray, np.generic)) else jnp.minimum(x, bound)


def extended(x, more: int, fill):
    """x with `more` rows of `fill` at its end, as numpy if x is numpy's; None stays None."""
    if x is None or more == 0:
        return x
    xp = np if isinstance(x, np.ndarray) else jnp
    return xp.concatenate([x, xp.broadcast_to(xp.asarray(fill, x.dtype), (more, *x.shape[1:]))])
