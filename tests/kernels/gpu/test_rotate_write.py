"""The kernel that rotates and writes: every address of every thread on the PTX model, and that it lowers for CUDA."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jattn
from jattn.device import Chip
from pallas_kernels.gpu import rotate_write_sm90 as kernel
from tests.kernels.gpu.simt import Machine, emulated

SIZES = dict(tokens=19, heads=6, kv_heads=3, blocks=5, page=8, counters=200)
SLOTS = np.array([7, -1, 39, 40, 2**31 - 1, -(2**31), 0, 12, 25, 31, 8, 9, 24, 38, 1, 2, 17, 16, 33], np.int32)
BF16 = ml_dtypes.bfloat16


def rotated(x, angle, dim):
    """float64 [T heads D]: pairs (i, i + dim / 2) turned by angle [T dim/2]."""
    turn = np.exp(1j * angle)[:, None, :]
    pairs = (x[..., : dim // 2] + 1j * x[..., dim // 2 : dim]) * turn
    return np.concatenate([pairs.real, pairs.imag, x[..., dim:]], axis=-1)


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(("head_dim", "v_head_dim", "dim"), [(64, 64, 64), (96, 32, 32), (32, 80, 32)])
def test_queries_are_rotated_and_each_key_and_value_lands_in_its_slot(head_dim, v_head_dim, dim, heads_first):
    sizes = kernel.RotateWrite(**SIZES, head_dim=head_dim, v_head_dim=v_head_dim, dim=dim, heads_first=heads_first)
    rng, tokens = np.random.default_rng(dim), sizes.tokens
    rows = rng.normal(size=(tokens, sizes.width)).astype(BF16)
    angle = rng.uniform(0, 2 * np.pi, (tokens, dim // 2)).astype(np.float32)
    order = (5, 3, 8) if heads_first else (5, 8, 3)
    arrays = dict(
        rows=rows, cos=np.cos(angle), sin=np.sin(angle), slots=SLOTS, k=np.full((*order, head_dim), 9, BF16),
        v=np.full((*order, v_head_dim), 9, BF16), out=np.full((tokens, 6, head_dim), 9, BF16),
    )  # fmt: skip
    starts, size = {}, 1024  # no array lies below this address
    for name, array in arrays.items():
        starts[name], size = size, size + -(-array.nbytes // 256) * 256
    machine = Machine(kernel.THREADS, size)
    for name, array in arrays.items():
        machine.memory[starts[name] : starts[name] + array.nbytes] = array.view(np.uint8).ravel()
    with emulated(kernel, machine):
        for first in range(0, sizes.jobs, kernel.THREADS):
            kernel._job(sizes, np.int32(first), *(starts[n] for n in ("rows", "cos", "sin", "slots", "k", "v", "out")))
    seen = {
        name: machine.memory[starts[name] : starts[name] + x.nbytes].view(x.dtype).reshape(x.shape)
        for name, x in arrays.items()
    }
    q, k, v = np.split(rows.astype(np.float64), np.cumsum([6 * head_dim, 3 * head_dim]), axis=1)
    q, k = (rotated(x.reshape(tokens, -1, head_dim), angle, dim) for x in (q, k))
    want_k, want_v = arrays["k"].astype(np.float64), arrays["v"].astype(np.float64)
    for token, slot in enumerate(SLOTS):
        if 0 <= slot < 40:
            at = (slot // 8, slice(None), slot % 8) if heads_first else (slot // 8, slot % 8)
            want_k[at], want_v[at] = k[token], v[token].reshape(3, -1)
    for name, want in (("out", q), ("k", want_k), ("v", want_v)):
        error = abs(seen[name].astype(np.float64) - want)
        assert (error <= 2.0**-8 * abs(want) + 1e-6).all(), name  # one rounding to bf16
    np.testing.assert_array_equal(seen["v"].astype(np.float64), want_v)  # values are copied
    np.testing.assert_array_equal(seen["out"][..., dim:], q[..., dim:])  # as are dimensions without an angle
    for name in ("rows", "cos", "sin", "slots"):
        np.testing.assert_array_equal(seen[name], arrays[name])


def attention(**changes):
    layer = dict(num_heads=4, num_kv_heads=2, head_dim=64) | changes
    spec = jattn.AttentionSpec(**layer)
    cache_spec = jattn.KVCacheSpec(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=layer["head_dim"])
    return jattn.PagedAttention(spec, cache_spec, "pallas_gpu", Chip("gpu", "sm_90"))


def lowered(attn, rope, dtype="bfloat16"):
    """The names of the kernels of one attention call, which rotates and writes; and their operand aliases."""
    dim = attn.spec.head_dim

    def step(q, k, v, cache):
        meta = jattn.CommonAttentionMetadata.from_lengths([1, 1], [9, 30], np.arange(8).reshape(2, 4), 16)
        return attn(q, k, v, cache, attn.build(meta), None, rope.angles(meta.positions()))

    cache = jattn.empty_cache(attn.cache_spec, storage="native")
    q, kv = jax.ShapeDtypeStruct((2, 4, dim), dtype), jax.ShapeDtypeStruct((2, 2, dim), dtype)
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    export = jax.export.export(jax.jit(step, donate_argnums=3), platforms=["cuda"], disabled_checks=[check])
    text = export(q, kv, kv, cache).mlir_module()
    kernels = ("rotate_and_write", "write_kv_pages")
    names = [n for n in kernels if re.search(rf'{n}_mosaic|["/]{n}[/"]', text)]
    return names, text.count("custom_call @mosaic_gpu_v2")


def test_one_launch_rotates_and_writes():
    names, launches = lowered(attention(), jattn.nn.Rope(dim=64))
    assert launches == 2  # with attention: two short requests are not split
    assert names == ["rotate_and_write"]


def test_interleaved_pairs_are_rotated_by_xla():
    names, launches = lowered(attention(), jattn.nn.Rope(dim=64, interleaved=True))
    assert launches == 2
    assert names == ["write_kv_pages"]


def test_its_gradient_is_that_of_rotating_and_writing(monkeypatch):
    from jattn.backends import pallas_gpu
    from jattn.cache import write_kv
    from jattn.nn import Rope, rotate

    attn, rng = attention(), np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    cache = jattn.empty_cache(attn.cache_spec, storage="native")
    args = (array(3, 4, 64), array(3, 2, 64), array(3, 2, 64), Rope(dim=64).angles(jnp.arange(3)), cache)
    slots = jnp.asarray([5, -1, 40], jnp.int32)
    want = lambda q, k, v, angles, cache: (rotate(q, angles), write_kv(cache, rotate(k, angles), v, slots))
    out, pull = jax.vjp(want, *args)
    counters = jnp.zeros(264, jnp.int32)
    launch = lambda rows, cos, sin, slots, pools, sizes: (out[0], (out[1].k, out[1].v), counters)
    monkeypatch.setattr(pallas_gpu, "rotate_and_write", launch)
    cotangent = jax.tree.map(lambda x: array(*x.shape), out)
    seen = jax.vjp(lambda *args: pallas_gpu._rotate_and_write(attn.impl, *args, slots), *args)[1](
        (*cotangent, np.zeros(counters.shape, jax.dtypes.float0))
    )
    jax.tree.map(np.testing.assert_array_equal, seen, pull(cotangent))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_call_that_rotates_and_writes_has_a_gradient(interleaved):
    attn = attention()
    meta = jattn.CommonAttentionMetadata.from_lengths([1, 1], [9, 30], np.arange(8).reshape(2, 4), 16)
    angles = jattn.nn.Rope(dim=64, interleaved=interleaved).angles(meta.positions())

    def total(q, k, v, cache):
        cache, state = attn(q, k, v, cache, attn.build(meta), None, angles)
        return sum(y.astype(jnp.float32).sum() for y in (state.out, cache.k, cache.v))

    shape = lambda heads: jax.ShapeDtypeStruct((2, heads, 64), jnp.bfloat16)
    args = shape(4), shape(2), shape(2), jattn.empty_cache(attn.cache_spec, storage="native")
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert shapes(jax.eval_shape(jax.grad(total, argnums=(0, 1, 2, 3)), *args)) == shapes(args)
