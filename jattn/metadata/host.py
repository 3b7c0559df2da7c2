"""Where metadata lives: numpy as long as the host holds it, jax.numpy inside jit; one body serves both."""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def array_module(*arrays) -> ModuleType:
    """numpy where every array is the host's (numpy, numbers, lists, None), else jax.numpy."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def is_traced(*arrays) -> bool:
    """True where some array has no value yet: inside jit, scan, vmap."""
    return any(isinstance(x, Tracer) for x in arrays)


def on_host(x, asker: str, way_out: str) -> np.ndarray:
    """The values of x as numpy; ValueError where there are none to look at."""
    if is_traced(x):
        raise ValueError(f"{asker} looks at values, and this array is traced; {way_out}")
    return np.asarray(x)


def inclusive_sum(x, xp: ModuleType):
    """i32 cumulative sum (numpy's own would widen to 64 bits)."""
    return xp.cumsum(x, dtype=xp.int32)


def starts_of(lens, xp: ModuleType):
    """i32[n+1] starts of consecutive runs: 0 and the cumulative sum."""
    return xp.concatenate([xp.zeros(1, xp.int32), inclusive_sum(lens, xp)])


def segment_of(ends, count: int, xp: ModuleType):
    """i32[count] which run each of 0 .. count-1 falls into, given the runs' ends; past the last: the last."""
    run = xp.searchsorted(ends, xp.arange(count, dtype=xp.int32), side="right")
    return xp.minimum(run, max(ends.shape[0] - 1, 0)).astype(xp.int32)
