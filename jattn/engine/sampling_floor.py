"""The least likely token that top_k and top_p keep: by the GPU's kernel, or by bisection."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jattn import device
from jattn.backends.gpu_kernel import WARPS_SINCE
from jattn.types import AnyArray
from pallas_kernels.gpu import sampling_floor_sm80 as gpu
from pallas_kernels.gpu.config_sm80 import CHIPS
from pallas_kernels.gpu.logit_row_sm80 import Scaling


def sampling_floor(scaled: jax.Array, top_k: AnyArray, top_p: AnyArray) -> jax.Array:
    """u32[R] the ordered bits of the least likely token that is kept. If all are: 0, or those of the least likely one.

    Kept are the top_k most likely tokens, and of these the fewest that reach top_p of their sum. Ties are kept.
    scaled: f32[R vocab], the logits minus the maximum of their row. A row's floor depends on that row only.
    """
    if not has_kernels():
        return by_bisection(scaled, top_k, top_p)
    by_launch = lambda scaled, *cuts: gpu.sampling_floor(scaled, Scaling.none(len(scaled)), *cuts)
    return jax.lax.platform_dependent(scaled, top_k, top_p, cuda=by_launch, default=by_bisection)


def has_kernels() -> bool:
    """Whether the default device is a GPU for which the kernels of the floor and of the draw are written."""
    generation = device.detect().generation
    return generation == "sm_90" or (generation in CHIPS and jax.__version_info__ >= WARPS_SINCE)


def by_bisection(scaled: jax.Array, top_k: AnyArray, top_p: AnyArray) -> jax.Array:
    """The same, bit by bit: each bit is a pass over all logits, first for top_k, then for top_p.

    On a GPU a sort of the vocabulary takes longer, and to compile a sort takes a third of the time of a dispatch.
    """
    keys, weights = ordered_bits(scaled), jnp.exp(scaled)
    at_least = lambda t: keys >= t[:, None]
    count = jnp.where(top_k > 0, jnp.minimum(top_k, scaled.shape[-1]), scaled.shape[-1])
    kth = _largest(lambda t: jnp.sum(at_least(t), axis=-1, dtype=jnp.int32) >= count, len(count))
    ties = count - jnp.sum(keys > kth[:, None], axis=-1, dtype=jnp.int32)  # of the k-th value, among the first k
    total = jnp.sum(jnp.where(keys > kth[:, None], weights, 0), axis=-1)
    total = total + ties * jnp.max(jnp.where(keys == kth[:, None], weights, 0), axis=-1)
    needed = top_p * total
    last = _largest(lambda t: jnp.sum(jnp.where(at_least(t), weights, 0), axis=-1) >= needed, len(count))
    floor = jnp.where(top_p < 1, jnp.maximum(kth, last), kth)
    return jnp.minimum(floor, jnp.max(keys, axis=-1))


def ordered_bits(x: jax.Array) -> jax.Array:
    """u32 in the order of f32 that are not NaN, and equal for equal floats; larger than 0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """u32[rows] the largest t with holds(t), bool[rows]: true up to some t, false above; 0 if it is never true."""

    def with_bit(i, t):
        larger = t | (jnp.uint32(1 << 31) >> jnp.uint32(i))
        return jnp.where(holds(larger), larger, t)

    return jax.lax.fori_loop(0, 32, with_bit, jnp.zeros(rows, jnp.uint32))
