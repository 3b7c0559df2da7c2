"""Sums over the ranks of a mesh: by a launch where the ranks can write to each other's memory, else by XLA."""

import dataclasses
import functools
from typing import Any

import jax

from jattn import device
from jattn.ops.rank_launches import Peers, by_vmap, exchanged
from pallas_kernels.gpu.rank_sum_sm90 import PIECE, RankSum, exchange, sum_ranks

Axes = tuple[str, ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["peers"], meta_fields=["config"])
@dataclasses.dataclass(frozen=True)
class RankSums:
    """What adds up arrays of all ranks in one step. Each rank rounds its array first, and all get equal bits."""

    peers: Peers | None = None
    config: RankSum | None = None  # None: XLA's all-reduces

    def __call__(self, y: jax.Array, axes: Axes) -> jax.Array:
        """On a rank: the sum over `axes`, which are those of all ranks."""
        if self.config is None or not self.config.serves(y.shape, y.dtype):
            return jax.lax.psum(y, axes)
        return _by_launch(self.config, axes, y, self.peers)


BY_XLA = RankSums()


def rank_sums(ranks: int, tokens: int, hidden: int) -> RankSums:
    """For arrays of at most [tokens, hidden]. Call it on all ranks, which can write to each other's memory."""
    config = RankSum(ranks=ranks, pieces=tokens * hidden // PIECE)
    if device.detect().generation != "sm_90" or not config.serves((tokens, hidden), "bfloat16"):
        return BY_XLA
    return RankSums(exchanged(exchange, config), config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_launch(config: RankSum, axes: Axes, y: jax.Array, peers: Peers) -> jax.Array:
    def instead(axis_size: int, in_batched: Any, y: jax.Array, peers: Peers):
        return jax.lax.psum(y, axes), in_batched[0]

    return by_vmap(functools.partial(sum_ranks, config), instead)(y, peers)


def _backward(config: RankSum, axes: Axes, saved: None, cotangent: jax.Array) -> tuple:
    return jax.lax.psum(cotangent, axes), None


_by_launch.defvjp(lambda config, axes, y, peers: (_by_launch(config, axes, y, peers), None), _backward)
