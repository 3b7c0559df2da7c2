"""A packed tree is the tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.engine.packing import pack

TREE = {
    "f": np.float32([[1.5, np.nan, -0.0], [np.inf, 1e-45, 3]]),
    "i": np.int32([-1, 2**31 - 1]),
    "u": np.uint32([[2**32 - 1]]),
    "flag": np.bool_(True),
    "flags": np.array([True, False]),
    "scalar": np.int32(7),
    "none": None,
    "empty": np.zeros((3, 0), np.float32),
    "strided": np.arange(12, dtype=np.int32).reshape(3, 4)[:, 1],
    "apart": jnp.arange(4.0),
}


@pytest.mark.parametrize("traced", [False, True])
def test_each_leaf_comes_back_bit_for_bit(traced):
    packed = pack(TREE)
    assert packed.words.dtype == np.int32 and len(packed.apart) == 1
    unpack = lambda packed: packed.unpacked()
    back = (jax.jit(unpack) if traced else unpack)(packed)
    assert jax.tree.structure(back) == jax.tree.structure(TREE)
    for name, leaf in TREE.items():
        if leaf is not None:
            assert back[name].shape == leaf.shape and back[name].dtype == leaf.dtype
            assert np.asarray(back[name]).tobytes() == np.ascontiguousarray(leaf).tobytes()


def test_trees_of_the_same_shapes_share_a_program_and_others_do_not():
    assert pack(TREE).tree == pack(TREE | {"i": np.int32([5, 6])}).tree
    assert hash(pack(TREE).tree) == hash(pack(TREE).tree)
    assert pack(TREE).tree != pack(TREE | {"i": np.int32([5])}).tree


def test_what_has_no_words_of_32_bits_is_refused():
    with pytest.raises(TypeError, match="float64"):
        pack([np.float64(1)])
