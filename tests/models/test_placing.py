"""A weight that is placed has the bits of its view, shares no memory with it, and lies where it was asked for."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jattn import models
from jattn.models import placing
from jattn.ops.quantised import quantise
from tests.models import tiny

VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.swapaxes(-1, -2),
    "a slice": lambda x: x[1:3],
    "a slice, transposed": lambda x: x[1:5].swapaxes(-1, -2),
    "every second": lambda x: x[..., ::2],
    "repeated": lambda x: np.broadcast_to(x[:1], x.shape),
}
SHAPES = ((8, 12), (6, 4, 8))


def bits(x) -> np.ndarray:
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_a_placed_weight_is_a_copy_of_the_view(view, aligned, sharded):
    place = NamedSharding(Mesh(jax.devices()[:2], "t"), PartitionSpec(None, "t")) if sharded else None
    for shape in SHAPES:
        for dtype in ("bfloat16", "float32"):
            memory = np.empty(4096, np.uint8)
            first = -memory.ctypes.data % 64 + (0 if aligned else 2)
            size = np.prod(shape) * jnp.dtype(dtype).itemsize
            x = memory[first : first + size].view(jnp.dtype(dtype)).reshape(shape)
            x[...] = np.random.default_rng(0).standard_normal(shape)
            weight = VIEWS[view](x)
            expected = np.array(weight)
            made = placing.placed(weight, place)
            memory[:] = 255  # NaN
            np.testing.assert_array_equal(bits(made), bits(expected))
            assert made.dtype == dtype and made.committed == sharded
            assert place is None or made.sharding.is_equivalent_to(place, made.ndim)


@pytest.mark.parametrize("spec", [None, PartitionSpec(None, "t"), PartitionSpec("t"), PartitionSpec()])
def test_a_device_transposes_to_the_same_bits_and_place(spec):
    """Accelerators do so; a CPU can."""
    place = None if spec is None else NamedSharding(Mesh(jax.devices()[:2], "t"), spec)
    for shape in SHAPES:
        stored = np.random.default_rng(1).standard_normal(shape, np.float32).astype(jnp.bfloat16)
        made = placing._transposed_on_device(stored, place)
        np.testing.assert_array_equal(bits(made), bits(np.ascontiguousarray(stored.swapaxes(-1, -2))))
        assert place is None or made.sharding.is_equivalent_to(place, made.ndim)


def test_threads_use_the_default_device_and_width_of_the_caller(tmp_path):
    tiny.write(tmp_path)
    wide = {name: x.astype(np.float64) for name, x in tiny.tensors().items()}
    (tmp_path / "wide").mkdir()
    tiny.write(tmp_path / "wide", made=wide)
    assert {x.dtype for x in jax.tree.leaves(models.load(tmp_path / "wide")[1])} == {jnp.dtype("float32")}
    with jax.default_device(jax.devices()[1]), jax.enable_x64(True):
        for x in jax.tree.leaves(models.load(tmp_path / "wide")[1]):
            assert x.dtype == np.float64 and x.devices() == {jax.devices()[1]} and not x.committed


def test_loading_leaves_no_thread_behind(tmp_path):
    tiny.write(tmp_path)
    before = threading.active_count()
    models.load(tmp_path)
    tiny.write(tmp_path, made=tiny.tensors() | {"model.norm.weight": np.full(16, np.nan, np.float32)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight' has NaN"):
        models.load(tmp_path)
    assert threading.active_count() <= before, "those of others may end meanwhile"


@pytest.mark.parametrize(
    ("format", "inputs", "group", "spec"),
    [
        ("int8", 96, 96, PartitionSpec("t")), ("int4", 96, 32, PartitionSpec("t")), ("fp8", 64, 32, PartitionSpec("t")),
        ("int4", 40, 8, PartitionSpec("t")), ("int4", 96, 32, PartitionSpec(None, "t")),
    ],
    ids=["one group", "a group cut", "groups whole", "words cut", "outputs"],
)  # fmt: skip
def test_a_quantised_weight_keeps_its_numbers_and_no_device_needs_anothers_groups(format, inputs, group, spec):
    """Each part alone dequantises to its part of the numbers, unless the inputs are replicated."""
    place = NamedSharding(Mesh(jax.devices()[:2], "t"), spec)
    weight = quantise(jax.random.normal(jax.random.key(0), (inputs, 16)), format, group)
    weight = dataclasses.replace(weight, zero_points=jax.random.randint(jax.random.key(1), weight.scales.shape, -9, 9))
    made = placing.placed(weight, place)
    wanted = np.asarray(weight.dequantise())
    np.testing.assert_array_equal(bits(made.dequantise()), bits(wanted))
    are_words_cut = format == "int4" and inputs == 40
    assert made.values.sharding.is_fully_replicated == are_words_cut
    for rank, device in enumerate([] if are_words_cut else jax.devices()[:2]):
        part = jax.tree.map(lambda x, rank=rank: jnp.asarray(x.addressable_shards[rank].data), made)
        index = place.devices_indices_map(wanted.shape)[device]
        np.testing.assert_array_equal(bits(part.dequantise()), bits(wanted[index]))
