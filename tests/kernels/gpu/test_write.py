"""The page writer: every address of every thread on the PTX model, and that it lowers in place for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.algebra import quant
from pallas_kernels.gpu import write_sm90 as writer
from tests.kernels.gpu.simt import Machine, emulated

HEADS, PAGE, BLOCKS, TOKENS = 3, 8, 5, 19
SLOTS = np.array([7, -1, 39, 40, 2**31 - 1, -(2**31), 0, 12, 25, 31, 8, 9, 24, 38, 1, 2, 17, 16, 33], np.int32)


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("row_bytes", [16, 160, 256])
def test_each_row_lands_in_its_slot_and_no_other_byte_changes(row_bytes, heads_first):
    rng = np.random.default_rng(row_bytes)
    shape = writer._Pool(HEADS, row_bytes // 16, BLOCKS, PAGE, heads_first)
    new = rng.integers(0, 256, (TOKENS, HEADS, row_bytes), np.uint8)
    scales = rng.normal(size=(TOKENS, HEADS)).astype(np.float32)
    order = (BLOCKS, HEADS, PAGE) if heads_first else (BLOCKS, PAGE, HEADS)
    pool = np.full((*order, row_bytes), 0xEE, np.uint8)
    kept = np.full(order, 9.0, np.float32)
    arrays = dict(slots=SLOTS, new=new, pool=pool, scales=scales, kept=kept)
    starts, size = {}, 1024  # no array lies below this address
    for name, array in arrays.items():
        starts[name], size = size, size + -(-array.nbytes // 256) * 256
    machine = Machine(writer.THREADS, size)
    for name, array in arrays.items():
        machine.memory[starts[name] : starts[name] + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    step = writer.THREADS * writer.CHUNKS
    with emulated(writer, machine):
        for first in range(0, TOKENS * HEADS * shape.chunks, step):
            writer._move(shape, starts["slots"], starts["new"], starts["pool"], np.int32(first), TOKENS)
            writer._move_scales(shape, starts["slots"], starts["scales"], starts["kept"], np.int32(first), TOKENS)
    for token, slot in enumerate(SLOTS):
        if 0 <= slot < BLOCKS * PAGE:
            block, offset = divmod(slot, PAGE)
            at = (block, slice(None), offset) if heads_first else (block, offset)
            pool[at], kept[at] = new[token], scales[token]
    for name, want in arrays.items():
        seen = machine.memory[starts[name] : starts[name] + want.nbytes]
        np.testing.assert_array_equal(seen, np.ascontiguousarray(want).view(np.uint8).ravel(), err_msg=name)


def machine_with(arrays: dict[str, np.ndarray]) -> tuple[Machine, dict[str, int]]:
    """(a machine whose memory holds the arrays, the address of each)"""
    starts, size = {}, 1024
    for name, array in arrays.items():
        starts[name], size = size, size + -(-array.nbytes // 256) * 256
    machine = Machine(writer.THREADS, size)
    for name, array in arrays.items():
        machine.memory[starts[name] : starts[name] + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    return machine, starts


@pytest.mark.parametrize("source", writer.SOURCES)
@pytest.mark.parametrize("target", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_quantised_rows_are_what_quant_stores(source, target):
    """In place of the PTX of the conversion: numpy, on the words that each thread passes to it."""
    rng, dim = np.random.default_rng(5), 48
    shape = writer._Pool(HEADS, dim // 16, BLOCKS, PAGE, False, source, target)
    new = np.array(jnp.asarray(rng.normal(size=(TOKENS, HEADS, dim)) * 300, source))
    new[0, 0, :3] = np.nan, np.inf, -np.inf
    divisors = rng.uniform(0.5, 3, HEADS).astype(np.float32)
    pool = np.full((BLOCKS, PAGE, HEADS, dim), 0xEE, np.uint8)
    machine, starts = machine_with(dict(slots=SLOTS, new=new, pool=pool, divisors=divisors))
    with emulated(writer, machine):
        for first in range(0, TOKENS * HEADS * shape.chunks, writer.THREADS * writer.CHUNKS):
            where = [starts[name] for name in ("slots", "new", "pool")]
            writer._move(shape, *where, np.int32(first), TOKENS, starts["divisors"])
    want = np.asarray(quant.to_dtype(jnp.asarray(new), target, jnp.asarray(divisors)[None, :, None])).view(np.uint8)
    for token, slot in enumerate(SLOTS):
        if 0 <= slot < BLOCKS * PAGE:
            pool[divmod(slot, PAGE)] = want[token]
    seen = machine.memory[starts["pool"] : starts["pool"] + pool.nbytes].reshape(pool.shape)
    np.testing.assert_array_equal(seen, pool)


@pytest.mark.parametrize(("source", "target"), [("bfloat16", "float8_e4m3fn"), ("float16", "int8")])
@pytest.mark.parametrize("dim", [128, 48])
def test_rows_get_scales_of_their_own(dim, source, target):
    """quant.token_head_scale, and rows divided by it; dim 48 leaves one lane in four idle."""
    rng, chunks = np.random.default_rng(dim), 2
    shape = writer._Pool(HEADS, dim // 16, BLOCKS, PAGE, True, source, target)
    new = np.array(jnp.asarray(rng.normal(size=(TOKENS, HEADS, dim)), source))
    new[3, 1], new[4, 0, 5] = 0, np.nan
    arrays = dict(
        slots=SLOTS, new=new, pool=np.full((BLOCKS, HEADS, PAGE, dim), 0xEE, np.uint8),
        kept=np.full((BLOCKS, HEADS, PAGE), 9.0, np.float32),
    )  # fmt: skip
    machine, starts = machine_with(arrays)
    with emulated(writer, machine):
        for first in range(0, TOKENS * HEADS * writer.lanes_of_row(dim // 16), writer.THREADS * chunks):
            where = [starts[name] for name in ("slots", "new", "pool", "kept")]
            writer.quantise_rows(shape, *where, np.int32(first), TOKENS, chunks)
    x = jnp.asarray(new).astype(jnp.float32)
    scale = quant.token_head_scale(x, target)
    want = np.asarray(quant.to_dtype(x, target, scale)).view(np.uint8)
    seen = {
        name: machine.memory[starts[name] : starts[name] + x.nbytes].view(x.dtype).reshape(x.shape)
        for name, x in arrays.items()
    }
    for token, slot in enumerate(SLOTS):
        if 0 <= slot < BLOCKS * PAGE:
            at = (slot // PAGE, slice(None), slot % PAGE)
            np.testing.assert_allclose(seen["kept"][at], np.asarray(scale)[token, :, 0], rtol=2e-7)
            arrays["kept"][at] = seen["kept"][at]
            close = abs(seen["pool"][at].astype(int) - want[token].astype(int)) <= 1  # a scale of another last bit
            assert close.all() and (seen["pool"][at] == want[token]).mean() > 0.99
            arrays["pool"][at] = seen["pool"][at]
    np.testing.assert_array_equal(seen["pool"], arrays["pool"])
    np.testing.assert_array_equal(seen["kept"], arrays["kept"])


@pytest.mark.parametrize(("source", "target"), [("bfloat16", "int8"), ("float16", "float8_e4m3fn")])
def test_a_quantising_write_is_one_launch(source, target):
    shape = jax.ShapeDtypeStruct

    def step(new, divisors, slots, pools):
        return writer.write_rows(new, (), slots, pools, (), page_size=PAGE, heads_first=False, divisors=divisors)

    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    exported = jax.export.export(jax.jit(step, donate_argnums=3), platforms=["cuda"], disabled_checks=[check])(
        tuple(shape((33, HEADS, dim), jnp.dtype(source)) for dim in (64, 512)), (shape((HEADS,), jnp.float32),) * 2,
        shape((33,), jnp.int32), tuple(shape((BLOCKS, PAGE, HEADS, dim), jnp.dtype(target)) for dim in (64, 512)),
    )  # fmt: skip
    text = exported.mlir_module()
    assert text.count("custom_call @mosaic_gpu_v2") == 1 and "stablehlo.divide" not in text


@pytest.mark.parametrize(("dtype", "scaled"), [("bfloat16", False), ("uint16", False), ("int8", True)])
def test_it_lowers_for_cuda_and_writes_in_place(dtype, scaled):
    shape = jax.ShapeDtypeStruct
    rows = lambda dim: shape((33, HEADS, dim), jnp.dtype(dtype))
    pools = lambda dim: shape((BLOCKS, PAGE, HEADS, dim), jnp.dtype(dtype))
    f32 = lambda *dims: shape(dims, jnp.float32)
    scales = (f32(33, HEADS),) * 2 if scaled else ()
    scale_pools = (f32(BLOCKS, PAGE, HEADS),) * 2 if scaled else ()

    def step(new, scales, slots, pools, scale_pools):
        return writer.write_rows(new, scales, slots, pools, scale_pools, page_size=PAGE, heads_first=False)

    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    exported = jax.export.export(jax.jit(step, donate_argnums=(3, 4)), platforms=["cuda"], disabled_checks=[check])(
        (rows(80), rows(48)), scales, shape((33,), jnp.int32), (pools(80), pools(48)), scale_pools
    )
    text = exported.mlir_module()
    assert text.count("custom_call @mosaic_gpu_v2") == 1
    assert text.count("output_operand_alias<") == 2 + len(scale_pools)
