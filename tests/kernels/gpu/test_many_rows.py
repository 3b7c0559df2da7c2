"""Products of many rows in one launch: its tiles for many shapes, who takes it, derivatives, and that it lowers."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.device import Chip
from jattn.models import MLP
from jattn.models.mlp import KERNEL_GATES
from jattn.ops import many_rows, product
from pallas_kernels.gpu import gates
from pallas_kernels.gpu import many_rows_sm90 as kernel
from pallas_kernels.gpu.many_rows_config import DEPTH, ROWS, STAGES, ManyRowsConfig, choose
from tests.ops.test_quantised import drawn
from tests.oracle.gates import activated

INTERPRETS = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)
SHARED_BYTES = 227 * 1024  # of a CTA on Hopper
SHAPES = {  # inner, widths, gated
    "gate and up of Llama 1B": (2048, (8192, 8192), True),
    "gate and up of Llama 8B": (4096, (14336, 14336), True),
    "gate and up of Qwen3 0.6B": (1024, (3072, 3072), True),
    "gate and up of TinyLlama": (2048, (5632, 5632), True),
    "gate and up of hidden 896": (896, (4864, 4864), True),
    "gate and up, small": (256, (64, 64), True),
    "q, k and v of Llama 1B": (2048, (2048, 512, 512), False),
    "q, k and v of Llama 8B": (4096, (4096, 1024, 1024), False),
    "q, k and v of hidden 896": (896, (896, 128, 128), False),
    "q, k and v with one kv head": (2048, (2048, 64, 64), False),
    "q, k and v, k wider than v": (512, (1536, 192, 128), False),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("processors", [78, 114, 132])
def test_every_tile_is_computed_once_and_fits(shape, processors):
    inner, widths, together = SHAPES[shape]
    groups = [widths] if together else [(width,) for width in widths]
    for rows in (65, 100, 128, 129, 256, 384, 1000, 2048, 8192):
        config = choose(rows, inner, widths, processors, together=together)
        if config is None:  # too few tiles, even narrow ones
            assert -(-rows // ROWS) * sum(group[0] for group in groups) // 64 < processors / 2
            continue
        assert processors / 2 <= config.ctas <= processors
        found = np.zeros((-(-rows // ROWS), sum(group[0] for group in groups) // config.columns), int)
        for cta in range(config.ctas):  # as the loops of many_rows_sm90._kernel
            before = 0
            for group in groups:
                count = found.shape[0] * (group[0] // config.columns)
                for number in range((cta - before) % config.ctas, count, config.ctas):
                    found[number % found.shape[0], before // found.shape[0] + number // found.shape[0]] += 1
                before += count
        assert (found == 1).all()
        stage = 2 * DEPTH * (ROWS + len(groups[0]) * config.columns)
        assert STAGES * stage + 2 * 2 * 2 * 64 * 64 < SHARED_BYTES
        assert len(groups[0]) * config.columns <= 256  # float32 sums of a thread: two rows of 64 columns for each 128


@pytest.mark.parametrize(
    ("rows", "inner", "width"), [(64, 2048, 8192), (1, 2048, 8192), (256, 2080, 8192), (256, 192, 512), (256, 2048, 96)]
)
def test_other_shapes_are_not_taken(rows, inner, width):
    assert choose(rows, inner, (width, width), 132, together=True) is None
    assert choose(rows, inner, (2048, width), 132) is None


def arrays(rows: int, inner: int, width: int, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(s), dtype) for s in ((rows, inner), (inner, width), (inner, width)))


def exactly(activation: str, x, gate, up):
    return activated(activation, x @ gate, jnp) * (x @ up)


def on_hopper(monkeypatch, generation="sm_90"):
    """A Hopper GPU is found, and the launch is replaced by a formula."""
    chip = types.SimpleNamespace(detect=lambda: Chip("gpu", generation), processors=lambda: 2)
    monkeypatch.setattr(many_rows, "device", chip)
    calls = []

    def joined(x, weights, config):
        calls.append(x.shape)
        return jnp.concatenate([x.astype(jnp.float32) @ w.astype(jnp.float32) for w in weights], 1).astype(x.dtype)

    def gated(x, gate, up, config, activation):
        calls.append(x.shape)
        return exactly(activation, *(y.astype(jnp.float32) for y in (x, gate, up))).astype(x.dtype)

    monkeypatch.setattr(many_rows, "kernels", types.SimpleNamespace(joined_product=joined, gated_product=gated))
    return calls


def test_gated_product_takes_it_for_many_bf16_rows_on_hopper_only(monkeypatch):
    calls = on_hopper(monkeypatch)
    product.gated_product(*arrays(100, 256, 64))
    assert calls == [(100, 256)]
    product.gated_product(*arrays(100, 256, 64, "float32"))
    product.gated_product(*arrays(64, 256, 64))
    assert len(calls) == 1
    x, *weights = arrays(100, 256, 64)
    on_hopper(monkeypatch, "sm_100")
    assert many_rows.config_of(x, weights) is None


def test_products_take_it_for_several_weights(monkeypatch):
    calls = on_hopper(monkeypatch)
    x, *weights = arrays(100, 256, 64)
    for found, weight in zip(product.products(x, weights, dtype=x.dtype), weights, strict=True):
        wanted = x.astype(jnp.float32) @ weight.astype(jnp.float32)
        assert float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)) < 4e-3
    assert len(calls) == 1
    product.products(x, weights)  # float32 results
    product.products(x, weights[:1], dtype=x.dtype)
    product.products(x, [w.T for w in weights], transposed=True, dtype=x.dtype)
    assert len(calls) == 1


@pytest.mark.parametrize("format", ["int8", "fp8", "int4", "fp4"])
def test_quantised_weights_of_more_rows_than_a_packed_kernel_takes_are_dequantised_for_it(format, monkeypatch):
    calls = on_hopper(monkeypatch)
    monkeypatch.setattr(product.device, "detect", lambda: Chip("gpu", "sm_90"))
    monkeypatch.setattr(product.device, "processors", lambda: 132)
    weights = [drawn(format, 256, 128, 64, seed=seed)[0] for seed in (1, 2)]
    x = arrays(300, 256, 64)[0]
    matrices = [weight.dequantise("bfloat16") for weight in weights]
    for found, wanted in zip(
        (*product.products(x, weights, dtype=x.dtype), product.gated_product(x, *weights)),
        (*product.products(x, matrices, dtype=x.dtype), product.gated_product(x, *matrices)), strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(found, wanted)
    assert set(calls) == {(300, 256)}
    count = len(calls)  # JAX 0.11 traces equal calls once
    chosen = product._choose(x[:256], tuple(weights), x.dtype).name
    assert chosen == "gpu_packed" and product._packed_or_plain(x[:256], tuple(weights), x.dtype) == tuple(weights)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # XLA's partitioner divides no launch
        divided = str(jax.make_jaxpr(product.gated_product)(x, *weights))
    assert len(calls) == count and divided.count("dot_general") == 2 and "concatenate" not in divided

    def total(product_of, scales, x):
        each = [dataclasses.replace(weight, scales=scale) for weight, scale in zip(weights, scales, strict=True)]
        return (product_of(x, each).astype(jnp.float32) ** 2).sum()

    scales = [weight.scales for weight in weights]
    by_launch = lambda x, each: product.gated_product(x, *each)
    in_float32 = lambda x, each: exactly("silu", x.astype(jnp.float32), *(w.dequantise("float32") for w in each))
    for found, wanted in zip(
        *(jax.tree.leaves(jax.grad(total, (1, 2))(way, scales, x)) for way in (by_launch, in_float32)), strict=True
    ):
        error = jnp.linalg.norm((found - wanted).astype(jnp.float32)) / jnp.linalg.norm(wanted.astype(jnp.float32))
        assert found.dtype == wanted.dtype and error < 2e-2


@pytest.mark.parametrize("activation", many_rows.GATES)
def test_kernels_and_steps_have_the_same_gates(activation):
    assert set(many_rows.GATES) == set(gates.ACTIVATIONS) == set(KERNEL_GATES.values())
    gate = jnp.linspace(-9, 9, 512)
    wanted = activated(activation, np.asarray(gate, np.float64))
    for found in (gates.gated(activation, gate, 1.0), many_rows.GATES[activation](gate)):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "activation"), [("silu", "silu"), ("gelu_pytorch_tanh", "gelu_tanh")])
def test_the_gate_of_an_mlp_is_in_the_launch(name, activation, monkeypatch):
    calls = on_hopper(monkeypatch)
    x, *kernels = arrays(100, 256, 64)
    weights = {name: dict(kernel=kernel) for name, kernel in zip(("gate", "up"), kernels, strict=True)}
    found = MLP(width=64, activation=name).inner(weights, x)
    wanted = exactly(activation, *(y.astype(jnp.float32) for y in (x, *kernels)))
    assert calls == [(100, 256)] and jnp.linalg.norm(found - wanted) < 4e-3 * jnp.linalg.norm(wanted)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_derivatives_and_vmap(activation, monkeypatch):
    calls = on_hopper(monkeypatch)
    x, gate, up = arrays(96, 256, 64)
    wide = [y.astype(jnp.float32) for y in (x, gate, up)]
    gated = functools.partial(product.gated_product, activation=activation)
    total = lambda f: lambda *args: f(*args).astype(jnp.float32).sum()
    for found, wanted in zip(
        jax.grad(total(gated), (0, 1, 2))(x, gate, up),
        jax.grad(total(functools.partial(exactly, activation)), (0, 1, 2))(*wide), strict=True,
    ):  # fmt: skip
        error = jnp.linalg.norm(found.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
        assert found.dtype == jnp.bfloat16 and error < 2e-2
    both = jax.vmap(gated, (0, None, None))(jnp.stack([x, 2 * x]), gate, up)
    assert (96, 256) in calls
    for y, given in zip(both, (x, 2 * x), strict=True):  # both are compiled: step by step, XLA's tanh has other bits
        np.testing.assert_array_equal(y, jax.jit(gated)(given, gate, up))


@pytest.mark.parametrize("rows", [200, 256, 8192])
@pytest.mark.parametrize("shape", ["gate and up of Llama 1B", "q, k and v of Llama 1B", "q, k and v of Llama 8B"])
def test_it_lowers_for_cuda(shape, rows):
    inner, widths, together = SHAPES[shape]
    config = choose(rows, inner, widths, 132, together=together)
    x, *weights = (jax.ShapeDtypeStruct(dims, jnp.bfloat16) for dims in ((rows, inner), *((inner, w) for w in widths)))
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    gated = lambda x, *weights: kernel.gated_product(x, *weights, config)
    run = gated if together else lambda x, *weights: kernel.joined_product(x, weights, config)
    export = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=[check])(x, *weights)
    assert export.out_avals[0].shape == (rows, widths[0] if together else sum(widths))
    assert "mosaic_gpu_v2" in export.mlir_module()


@pytest.mark.skipif(not INTERPRETS, reason="the interpreter of Mosaic GPU kernels needs JAX 0.11")
@pytest.mark.parametrize(("columns", "activation"), [(64, "silu"), (128, "silu"), (128, "gelu_tanh")])
def test_no_result_is_overwritten_before_it_is_copied(columns, activation):
    """A warpgroup stores a tile of 64 columns at once, and the next tile soon after."""
    from tests.kernels.gpu.interpreter import interpreted

    rng = np.random.default_rng(columns)
    x, gate, up = (rng.standard_normal(s) for s in ((300, 256), *((256, 128),) * 2))
    x, gate, up = (jnp.asarray(y, jnp.bfloat16) for y in (x, gate / 16, up / 16))
    wide = [np.asarray(y, np.float64) for y in (x, gate, up)]
    with interpreted(detect_races=True):
        gated = kernel.gated_product(x, gate, up, ManyRowsConfig(columns, 2), activation)
        joined = kernel.joined_product(x, (gate, up), ManyRowsConfig(columns, 2))
    both = np.hstack([wide[0] @ wide[1], wide[0] @ wide[2]])
    for found, wanted in ((gated, exactly(activation, *wide)), (joined, both)):
        assert np.abs(np.asarray(found, np.float64) - wanted).max() < 2.0**-8 * np.abs(wanted).max()
