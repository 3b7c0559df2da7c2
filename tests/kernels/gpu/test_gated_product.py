"""gate and up of many rows in one launch: its tiles for many shapes, who takes it, derivatives, and that it lowers."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.device import Chip
from jattn.ops import gated_rows, product
from pallas_kernels.gpu import gated_product_sm90 as kernel
from pallas_kernels.gpu.gated_product_config import DEPTH, ROWS, STAGES, choose

SHARED_BYTES = 227 * 1024  # of a CTA on Hopper
SHAPES = [(2048, 8192), (4096, 14336), (1024, 3072), (2048, 5632), (8192, 3584), (896, 4864), (3072, 8256), (256, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("processors", [78, 114, 132])
def test_every_tile_is_computed_once_and_fits(shape, processors):
    inner, width = shape
    for rows in (65, 100, 128, 129, 256, 384, 1000, 2048, 8192):
        config = choose(rows, inner, width, processors)
        assert config is not None and 1 <= config.ctas <= processors
        row_tiles, strips = -(-rows // ROWS), width // config.columns
        assert strips * config.columns == width and row_tiles * ROWS >= rows
        taken = [n for cta in range(config.ctas) for n in range(cta, row_tiles * strips, config.ctas)]
        assert sorted(taken) == list(range(row_tiles * strips)) and config.ctas <= len(taken)
        stage = 2 * DEPTH * (ROWS + 2 * config.columns)
        assert STAGES * stage + 2 * 2 * 2 * 64 * 64 < SHARED_BYTES


@pytest.mark.parametrize(
    ("rows", "inner", "width"), [(64, 2048, 8192), (1, 2048, 8192), (256, 2080, 8192), (256, 192, 512), (256, 2048, 96)]
)
def test_other_shapes_are_not_taken(rows, inner, width):
    assert choose(rows, inner, width, 132) is None


def arrays(rows: int, inner: int, width: int, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(s), dtype) for s in ((rows, inner), (inner, width), (inner, width)))


def on_hopper(monkeypatch, generation="sm_90"):
    """A Hopper GPU is found, and the launch is replaced by a formula."""
    chip = types.SimpleNamespace(detect=lambda: Chip("gpu", generation), processors=lambda: 132)
    monkeypatch.setattr(gated_rows, "device", chip)
    calls = []

    def launch(x, gate, up, config):
        calls.append(x.shape)
        of_gate, of_up = (x.astype(jnp.float32) @ w.astype(jnp.float32) for w in (gate, up))
        return (of_gate * jax.nn.sigmoid(of_gate) * of_up).astype(x.dtype)

    monkeypatch.setattr(gated_rows, "launch", launch)
    return calls


def test_silu_product_takes_it_for_many_bf16_rows_on_hopper_only(monkeypatch):
    calls = on_hopper(monkeypatch)
    product.silu_product(*arrays(100, 256, 64))
    assert calls == [(100, 256)]
    product.silu_product(*arrays(100, 256, 64, "float32"))
    product.silu_product(*arrays(64, 256, 64))
    assert len(calls) == 1
    on_hopper(monkeypatch, "sm_100")
    assert gated_rows.config_of(*arrays(100, 256, 64)) is None


def test_derivatives_and_vmap(monkeypatch):
    calls = on_hopper(monkeypatch)
    x, gate, up = arrays(96, 256, 64)
    wide = [y.astype(jnp.float32) for y in (x, gate, up)]

    def exactly(x, gate, up):
        of_gate = x @ gate
        return of_gate * jax.nn.sigmoid(of_gate) * (x @ up)

    total = lambda f: lambda *args: f(*args).astype(jnp.float32).sum()
    for found, wanted in zip(
        jax.grad(total(product.silu_product), (0, 1, 2))(x, gate, up), jax.grad(total(exactly), (0, 1, 2))(*wide),
        strict=True,
    ):  # fmt: skip
        error = jnp.linalg.norm(found.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
        assert found.dtype == jnp.bfloat16 and error < 2e-2
    both = jax.vmap(product.silu_product, (0, None, None))(jnp.stack([x, 2 * x]), gate, up)
    assert (96, 256) in calls
    for y, given in zip(both, (x, 2 * x), strict=True):
        np.testing.assert_array_equal(y, product.silu_product(given, gate, up))


@pytest.mark.parametrize("shape", [(65, 256, 64), (256, 2048, 8192), (1000, 1024, 3072)])
def test_it_lowers_for_cuda(shape):
    rows, inner, width = shape
    config = choose(*shape, 132)
    args = [jax.ShapeDtypeStruct(dims, jnp.bfloat16) for dims in ((rows, inner), (inner, width), (inner, width))]
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    run = jax.jit(lambda *args: kernel.gated_product(*args, config))
    export = jax.export.export(run, platforms=["cuda"], disabled_checks=[check])(*args)
    assert export.out_avals[0].shape == (rows, width) and "mosaic_gpu_v2" in export.mlir_module()
