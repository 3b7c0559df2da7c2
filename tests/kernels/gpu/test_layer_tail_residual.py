"""The residual, norms and biases of a layer's rest: all threads of the CTAs that add up a token on the PTX model."""

import contextlib
import types
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gpu import layer_tail_biases_sm90 as biases_of
from pallas_kernels.gpu import layer_tail_sm90 as kernel
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.layer_tail_config import SHARES, THREADS, choose
from tests.kernels.gpu.simt import emulated
from tests.kernels.gpu.test_tail_attention import SHARED, Memory

BF16, ROW = ml_dtypes.bfloat16, 3


@contextlib.contextmanager
def alone(machine):
    """On the PTX model, in which no CTA waits for another, and each rank has the sums of this one."""
    summed = lambda cfg, product, share, refs, cta, fours: [[cfg.ranks * y for y in four] for four in fours]
    with (
        emulated(kernel, machine), mock.patch.object(kernel.pairs, "number", lambda _: np.int32(0)),
        mock.patch.object(kernel.arrivals, "one_thread_waits", lambda *_: None),
        mock.patch.object(kernel.ranks, "sum_over_ranks", summed),
    ):  # fmt: skip
        yield


@pytest.mark.parametrize("product", [0, 2])
@pytest.mark.parametrize(
    ("hidden", "biased", "options"),
    [
        (1024, 0, {}),
        (896, 0, dict(factors=(0.22, 1.5))),
        (1024, 1, {}),
        (2048, 1, dict(factors=(1.5, 0.22), one_plus=(True, False), ranks=4)),
        (1152, 0, dict(after_eps=(1e-5, 0.3), after_one_plus=(True, False), one_plus=(False, True))),
        (896, 1, dict(eps=(None, None), after_eps=(1e-2, 1e-5), factors=(0.5, 1.0))),
        (1024, 0, dict(eps=(None, 1e-5), after_eps=(None, 1e-5))),
    ],
)
def test_a_row_gets_its_sums_and_gives_the_norms_tokens_and_squares(product, hidden, biased, options):
    rng, norm = np.random.default_rng(hidden + product), product // 2
    cfg = choose(5, hidden, 1024, 2048, (1024, 256, 256), 132, **options)
    assert cfg is not None
    splits = cfg.products[product].splits
    old, scale, after, bias = (rng.normal(size=shape).astype(BF16) for shape in ((8, hidden), hidden, hidden, hidden))
    parts = rng.normal(size=(splits * 8, hidden)).astype(np.float32)
    empty = lambda *shape, dtype=BF16: np.full(shape, np.nan, dtype)
    memory = Memory(
        256, old=old, scale=scale, after=after, bias=bias, parts=parts, new=empty(8, hidden),
        scaled=empty(8, hidden), squares=empty(8, SHARES, dtype=np.float32),
    )  # fmt: skip
    refs = types.SimpleNamespace(
        counters=0, scratch=SHARED, exchange=(), squares=(memory.squares,) * 2, biases=((memory.bias,) * biased,) * 3,
        norms=[None if eps is None else memory.scale for eps in cfg.eps],
        norms_after=[None if eps is None else memory.after for eps in cfg.after_eps],
        x=memory.old, x1=memory.new if norm == 0 else memory.old, x2=memory.new, n1=memory.scaled, n2=memory.scaled,
    )  # fmt: skip
    with alone(memory.machine):
        for share in range(cfg.shares):
            row, number = (np.full(THREADS, n, np.int32) for n in (ROW, share))
            kernel._add_residual(cfg, product, refs, memory.parts, row, number)
    exact = lambda array: array.astype(np.float64)
    added = exact(exact(parts).reshape(splits, 8, hidden).sum(0)[ROW].astype(BF16))
    added = cfg.ranks * added + biased * exact(bias)
    if (eps := cfg.after_eps[norm]) is not None:
        added *= (exact(after) + cfg.after_one_plus[norm]) / np.sqrt((added**2).mean() + eps)
        added = exact(added.astype(BF16))
    new = exact(memory.seen("new"))
    wanted = exact(old)[ROW] + cfg.factors[norm] * added
    np.testing.assert_allclose(new[ROW], wanted, rtol=2**-8, atol=1e-3)
    np.testing.assert_allclose(exact(memory.seen("squares"))[ROW, : cfg.shares].sum(), (new[ROW] ** 2).sum(), rtol=1e-5)
    tokens = new[ROW] * (1 if cfg.eps[norm] is None else exact(scale) + cfg.one_plus[norm])
    np.testing.assert_allclose(exact(memory.seen("scaled"))[ROW], tokens, rtol=2**-8, atol=1e-6)
    for name in ("new", "scaled", "squares"):
        assert np.isnan(np.delete(exact(memory.seen(name)), ROW, axis=0)).all()


@pytest.mark.parametrize("widths", [(1024, 256, 256), (896, 128, 128), (1536,)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_next_projections_are_sums_times_the_norms_factor_and_their_biases(widths, biased):
    cfg = choose(5, 896, 1024, 2048, widths, 132, eps=(1e-5, 1e-3))
    assert cfg is not None
    rng, width, splits = np.random.default_rng(sum(widths)), sum(widths), cfg.products[3].splits
    parts = rng.normal(size=(splits * 8, width)).astype(np.float32)
    squares = rng.uniform(50, 200, (8, SHARES)).astype(np.float32)
    biases = {f"bias_{n}": rng.normal(size=each).astype(BF16) for n, each in enumerate(widths)}
    memory = Memory(256, parts=parts, squares=squares, out=np.full((5, width), np.nan, BF16), **biases)
    refs = types.SimpleNamespace(
        counters=0, squares=(0, memory.squares), out=memory.out,
        biases=((), (), (), tuple(getattr(memory, name) for name in biases) if biased else ()),
    )  # fmt: skip
    with alone(memory.machine):
        for share in range(cfg.shares):
            row, number = (np.full(THREADS, n, np.int32) for n in (ROW, share))
            kernel._add_rows(cfg, cfg.products[3], refs, memory.parts, row, number)
    exact = lambda array: array.astype(np.float64)
    factor = 1 / np.sqrt(exact(squares)[ROW, : cfg.shares].sum() / 896 + 1e-3)
    wanted = exact(parts).reshape(splits, 8, width).sum(0)[ROW] * factor
    wanted += np.concatenate([exact(bias) for bias in biases.values()]) * biased
    found = exact(memory.seen("out"))
    np.testing.assert_allclose(found[ROW], wanted, rtol=2**-8, atol=1e-5)
    assert np.isnan(np.delete(found, ROW, axis=0)).all()


@pytest.mark.parametrize("first", [128, 224])
def test_a_strip_has_the_bias_of_each_of_its_columns_for_all_tokens(first):
    """Of columns behind the weights' end it has any finite number: here that of the last column."""
    gated = types.SimpleNamespace(widths=(256, 256))
    cfg, bias = types.SimpleNamespace(rows8=24, products=(None, gated)), np.random.default_rng(3).normal(size=256)
    bias = bias.astype(BF16)
    memory = Memory(256, bias=bias)
    with emulated(biases_of, memory.machine):
        fragment = biases_of.of_columns(cfg, memory.bias, np.int32(first))
    lane = np.arange(THREADS)
    for (second, _), pair in zip(rows.pair_places(fragment), fragment.registers.flat, strict=True):
        column = np.minimum(first + lane // 32 * 16 + 8 * second + lane % 32 // 4, 255)
        for number in pair:
            np.testing.assert_array_equal(number, bias[column].astype(np.float32))


@pytest.mark.parametrize(("heads", "wide", "rows", "in_pairs"), [(4096, 14336, 13, False), (1024, 3584, 8, True)])
def test_it_lowers_for_cuda_with_biases(heads, wide, rows, in_pairs):
    hidden, following = 4096, (1024, 256, 256)
    cfg = choose(rows, hidden, heads, wide, following, 132, activation="gelu_tanh", factors=(0.5, 0.25))
    assert cfg is not None and cfg.in_pairs == in_pairs
    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)
    weights = ((shape(heads, hidden),), (shape(hidden, wide),) * 2, (shape(wide, hidden),))
    weights += (tuple(shape(hidden, width) for width in following),)
    biases = tuple(tuple(shape(weight.shape[1]) for weight in group) for group in weights)
    counters = (shape(kernel.arrivals.WORDS, dtype=jnp.int32),) * 2
    args = shape(rows, heads), shape(rows, hidden), weights, (shape(hidden),) * 2, counters
    run = jax.jit(lambda *args: kernel.layer_tail(*args[:-1], cfg, (), args[-1]))
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    export = jax.export.export(run, platforms=["cuda"], disabled_checks=[check])(*args, biases)
    assert "mosaic_gpu_v2" in export.mlir_module()
