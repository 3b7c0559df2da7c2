"""Packed trees: about thirty small numpy arrays as one, because on a GPU each array of a call costs about 0.2 ms."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.types import pytree, static


@dataclasses.dataclass(frozen=True)
class PackedTree:
    """The tree of arrays that were packed: its structure, and each leaf's shape and dtype; None for a JAX array."""

    structure: Any  # a PyTreeDef
    leaves: tuple[tuple[tuple[int, ...], str] | None, ...]


@pytree
class Packed:
    """A tree of arrays. Its numpy arrays are joined in `words`; its JAX arrays stay as they are, in `apart`."""

    words: Any  # i32[n] the bytes of all numpy arrays, one after the other
    apart: tuple[jax.Array, ...]
    tree: PackedTree = static()

    def unpacked(self) -> Any:
        """The tree, of JAX arrays. Also inside jit."""
        words, apart, leaves, start = jnp.asarray(self.words), iter(self.apart), [], 0
        for leaf in self.tree.leaves:
            if leaf is None:
                leaves.append(next(apart))
                continue
            shape, dtype = leaf
            part = words[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
            is_flag = dtype == "bool"
            leaves.append(part.astype(dtype) if is_flag else jax.lax.bitcast_convert_type(part, dtype))
        return jax.tree.unflatten(self.tree.structure, leaves)


def pack(tree: Any) -> Packed:
    """The tree with its numpy arrays, of 32 bits or bools, copied into one."""
    leaves, structure = jax.tree.flatten(tree)
    words, apart, kinds = [], [], []
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            apart.append(leaf)
            kinds.append(None)
        else:
            words.append(_words(leaf))
            kinds.append((leaf.shape, _dtype_name(leaf.dtype)))
    joined = np.concatenate(words) if words else np.zeros(0, np.int32)
    joined.setflags(write=False)
    return Packed(words=joined, apart=tuple(apart), tree=PackedTree(structure, tuple(kinds)))


def pack_ranks(trees: Sequence[Any]) -> Packed:
    """The trees of all data ranks, one rank's words after the other's: to be distributed over the ranks.

    They have the same structure and shapes. A JAX array in them is that of all ranks, and the same in each tree.
    """
    packed = [pack(tree) for tree in trees]
    if len(packed) == 1:
        return packed[0]
    words = np.concatenate([each.words for each in packed])
    words.setflags(write=False)
    return Packed(words=words, apart=packed[0].apart, tree=packed[0].tree)


@functools.cache
def _dtype_name(dtype: np.dtype) -> str:
    return dtype.name  # numpy computes it anew each time, which takes longer than to copy a small array


def _words(leaf: np.ndarray | np.generic) -> np.ndarray:
    """The array as i32[n]."""
    if leaf.dtype == bool:
        return np.ravel(leaf).astype(np.int32)
    if leaf.dtype.itemsize != 4:
        raise TypeError(f"an array of {leaf.dtype} cannot be packed into words of 32 bits")
    return np.ravel(leaf).view(np.int32)
