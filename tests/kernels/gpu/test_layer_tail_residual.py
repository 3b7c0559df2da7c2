"""The residual and the norm of a layer's rest: all threads of the CTAs that add up a token on the PTX model."""

import contextlib
import types
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gpu import layer_tail_sm90 as kernel
from pallas_kernels.gpu.layer_tail_config import SHARES, THREADS, choose
from tests.kernels.gpu.simt import emulated
from tests.kernels.gpu.test_tail_attention import SHARED, Memory

BF16, ROW = ml_dtypes.bfloat16, 3


@contextlib.contextmanager
def alone(machine):
    """On the PTX model, in which no CTA waits for another."""
    with (
        emulated(kernel, machine), mock.patch.object(kernel.pairs, "number", lambda _: np.int32(0)),
        mock.patch.object(kernel.arrivals, "one_thread_waits", lambda *_: None),
    ):  # fmt: skip
        yield


@pytest.mark.parametrize("product", [0, 2])
@pytest.mark.parametrize(
    ("hidden", "options"),
    [
        (1024, {}),
        (896, dict(factors=(0.22, 1.5))),
        (2048, dict(factors=(1.5, 0.22), one_plus=(True, False))),
        (1152, dict(after_eps=(1e-5, 0.3), after_one_plus=(True, False), one_plus=(False, True))),
        (896, dict(eps=(None, None), after_eps=(1e-2, 1e-5), factors=(0.5, 1.0))),
        (1024, dict(eps=(None, 1e-5), after_eps=(None, 1e-5))),
    ],
)
def test_a_row_gets_its_sums_and_gives_the_norms_tokens_and_squares(product, hidden, options):
    rng, norm = np.random.default_rng(hidden + product), product // 2
    cfg = choose(5, hidden, 1024, 2048, (1024, 256, 256), 132, **options)
    assert cfg is not None
    splits = cfg.products[product].splits
    old, scale, after = (rng.normal(size=shape).astype(BF16) for shape in ((8, hidden), hidden, hidden))
    parts = rng.normal(size=(splits * 8, hidden)).astype(np.float32)
    empty = lambda *shape, dtype=BF16: np.full(shape, np.nan, dtype)
    memory = Memory(
        256, old=old, scale=scale, after=after, parts=parts, new=empty(8, hidden), scaled=empty(8, hidden),
        squares=empty(8, SHARES, dtype=np.float32),
    )  # fmt: skip
    refs = types.SimpleNamespace(
        counters=0, scratch=SHARED, exchange=(), squares=(memory.squares,) * 2,
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
