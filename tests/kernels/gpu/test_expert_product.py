"""Rows of experts by wgmma: its items, its numbers in JAX's interpreter, what is served, and that it lowers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu.expert_product import SHAPES as MIXTURES
from jattn.ops.expert_rows import padded_count
from jattn.ops.expert_wgmma import tiles_of
from pallas_kernels.gpu import expert_product_sm90 as kernel
from pallas_kernels.gpu.expert_product_config import (
    COLUMNS,
    ROW_TILES,
    SHARED_BYTES,
    ExpertProductConfig,
    choose,
    supports,
    tile_rows_of,
)

INTERPRETS = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)
SHAPES = MIXTURES | {"phi_3.5_moe": (16, 2, 4096, 6400), "hidden 320": (4, 2, 320, 448)}


def config_of(shape: str, tokens: int, down: bool) -> ExpertProductConfig:
    """The launch for gate and up, or for down."""
    experts, top, hidden, width = SHAPES[shape]
    tile_rows = tile_rows_of(tokens * top, experts, int(np.gcd(hidden, width)), hidden * width)
    how = dict(inner=width, width=hidden) if down else dict(inner=hidden, width=width, matrices=2)
    rows = padded_count(tokens * top, experts, tile_rows)
    config = choose(132, rows=rows, experts=experts, dtype="bfloat16", tile_rows=tile_rows, **how)
    assert config is not None
    return config


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_meets_every_strip_once(shape, down):
    for tokens in (1, 7, 64, 500, 8192):
        config = config_of(shape, tokens, down)
        assert not supports(config)
        assert config.parts == 1 or config.parts % 2 == 0  # two buffers in turn, also from one tile to the next
        assert config.stages >= 3 and config.stages * config.stage_bytes + config.stored_bytes <= SHARED_BYTES
        chosen = np.random.default_rng(tokens).integers(0, config.experts, tokens * SHAPES[shape][1])
        sizes = -(-np.bincount(chosen, minlength=config.experts) // config.tile_rows) * config.tile_rows
        tiles = np.asarray(jax.jit(tiles_of, static_argnums=1)(sizes, config))
        used = sizes.sum() // config.tile_rows
        assert tiles[0, 0] == used <= config.tiles
        of_tile = np.repeat(np.arange(config.experts), sizes // config.tile_rows)
        np.testing.assert_array_equal(tiles[1 : 1 + used, 0], of_tile)
        seen = np.zeros((used, config.strips), int)
        for item in range(used * config.strips):  # by the formula of each_item; the CTAs divide the items
            _, first, count = tiles[item // config.strips + 1]
            place = item - first * config.strips
            seen[first + place % count, place // count] += 1
        assert (seen == 1).all()


def test_tiles_grow_with_the_rows_of_an_expert():
    for numbers in (2048 * 1024, 4096 * 14336):
        tiles = [tile_rows_of(rows, 8, 2048, numbers) for rows in (1, 8, 64, 256, 1024, 4096, 65536)]
        assert tiles == sorted(tiles) and tiles[0] == 8 and tiles[-1] == max(ROW_TILES)
    assert tile_rows_of(65536, 8, 2880, 2880 * 2880) <= 128  # three warpgroups have no registers for more


@pytest.mark.parametrize(
    ("shape", "tokens", "tile_rows"),
    [("gpt_oss_20b", 256, 64), ("gpt_oss_20b", 1024, 128), ("mixtral_8x7b", 256, 96), ("granite_3b", 512, 64)],
)
def test_large_matrices_are_read_by_fewer_tiles(shape, tokens, tile_rows):
    """On an H200 within 3 % of the fastest, of uniform and of skewed choices."""
    assert config_of(shape, tokens, down=True).tile_rows == tile_rows


def case(tile_rows: int, warpgroups: int, matrices: int, inner: int, width: int, dtype: str = "bfloat16"):
    """(config, x, matrices, tiles, the rows that are used and the expert of each)"""
    sizes = np.array([3, 0, tile_rows + 1, tile_rows, 0])
    padded = -(-sizes // tile_rows) * tile_rows
    rows = padded_count(int(sizes.sum()), len(sizes), tile_rows)
    config = ExpertProductConfig(
        rows=rows, inner=inner, width=width, experts=len(sizes), matrices=matrices, tile_rows=tile_rows,
        warpgroups=warpgroups, ctas=3, dtype=dtype,
    )  # fmt: skip
    rng = np.random.default_rng(tile_rows)
    x, *weights = (rng.standard_normal(s) for s in ((rows, inner), *((len(sizes), inner, width),) * matrices))
    weights = [w * inner**-0.5 for w in weights]
    x[padded.sum() :] = np.nan  # rows of no tile
    weights = [np.where(padded[:, None, None] > 0, w, np.nan) for w in weights]  # experts of no row
    x, *weights = (jnp.asarray(a, dtype) for a in (x, *weights))
    return config, x, weights, tiles_of(jnp.asarray(padded), config), np.repeat(np.arange(len(sizes)), padded)


@pytest.mark.skipif(not INTERPRETS, reason="the interpreter of Mosaic GPU kernels needs JAX 0.11")
@pytest.mark.parametrize(
    "shape",
    [
        (8, 2, 1, 192, 128), (16, 1, 2, 128, 128), (32, 2, 2, 64, 256), (96, 2, 2, 64, 256), (64, 3, 1, 192, 192),
        (128, 2, 1, 128, 128, "float16"), (192, 1, 2, 64, 64), (192, 2, 1, 64, 128),
    ],
)  # fmt: skip
def test_is_the_product_of_each_row_and_its_expert(shape):
    """Rows and experts that are not used are NaN. CTAs have more steps than stages, or fewer; many items, or none."""
    from tests.kernels.gpu.interpreter import interpreted

    config, x, weights, tiles, expert = case(*shape)
    with interpreted(detect_races=True):
        found = np.asarray(kernel.expert_product(x, tuple(weights), tiles, config), np.float64)[: len(expert)]
    products = [
        np.einsum("ni,nio->no", np.asarray(x, np.float64)[: len(expert)], np.asarray(w, np.float64)[expert])
        for w in weights
    ]
    wanted = products[0] / (1 + np.exp(-products[0])) * products[1] if config.matrices == 2 else products[0]
    bits = {"bfloat16": 8, "float16": 11}[config.dtype]
    assert (np.abs(found - wanted) <= 2.0**-bits * np.abs(wanted) + 1e-5).all()


@pytest.mark.skipif(not INTERPRETS, reason="the interpreter of Mosaic GPU kernels needs JAX 0.11")
@pytest.mark.parametrize("tokens", [8, 4, 1])
def test_every_tile_has_the_same_tokens(tokens):
    """x is the tokens alone, without the rows that would fill a tile."""
    from tests.kernels.gpu.interpreter import interpreted

    config, x, weights, tiles, expert = case(8, 2, 2, 192, 128)
    config, x = dataclasses.replace(config, tokens=tokens), x[:tokens]
    with interpreted(detect_races=True):
        found = np.asarray(kernel.expert_product(x, tuple(weights), tiles, config), np.float64)
    for tile, (of_tile, _, _) in enumerate(np.asarray(tiles)[1 : 1 + int(tiles[0, 0])]):
        gate, up = (np.asarray(x, np.float64) @ np.asarray(w[of_tile], np.float64) for w in weights)
        wanted = gate / (1 + np.exp(-gate)) * up
        error = np.abs(found[8 * tile : 8 * tile + tokens] - wanted)
        assert (error <= 2.0**-8 * np.abs(wanted) + 1e-5).all()


def test_tiles_of_few_rows_have_narrow_ctas():
    shape = dict(rows=96, inner=128, width=384, experts=4, dtype="bfloat16")
    assert [choose(132, tile_rows=tile_rows, **shape).warpgroups for tile_rows in (8, 16, 32)] == [1, 2, 2]


def test_refuses_with_every_reason():
    config, x, weights, tiles, _ = case(8, 2, 1, 128, 128)
    bad = dataclasses.replace(config, inner=100, width=100, dtype="float32", tile_rows=7)
    reasons = supports(bad, chip="sm_80")
    for part in ("chip sm_80", "dtype float32", "tiles of 7 rows", "inner 100", "width 100"):
        assert any(part in reason for reason in reasons)
    values = dict(tokens=(9, -1), warpgroups=(0,), rows=(0, -8), experts=(0,), ctas=(0,), matrices=(0,))
    for field, value in ((field, value) for field, some in values.items() for value in some):
        (reason,) = supports(dataclasses.replace(config, **{field: value}))
        assert reason.startswith(f"{value} ")
    wide = dataclasses.replace(config, tile_rows=192, rows=192, warpgroups=3, width=192)
    assert supports(wide) == ["sums of 192 rows, 1 matrices: wanted 128"]
    shape = dict(rows=128, inner=128, width=128, experts=4, tile_rows=8)
    assert (
        choose(132, dtype="float32", **shape) is None and choose(132, dtype="bfloat16", chip="sm_100", **shape) is None
    )
    assert choose(132, dtype="bfloat16", **shape | dict(width=100)) is None
    with pytest.raises(NotImplementedError, match="inner 100"):
        kernel.expert_product(x, tuple(weights), tiles, bad)
    with pytest.raises(ValueError, match=r"x bfloat16\[8, 128\] must be bfloat16\[\d+, 128\]"):
        kernel.expert_product(x[:8], tuple(weights), tiles, config)
    with pytest.raises(ValueError, match="2 matrices, and the config has 1"):
        kernel.expert_product(x, (weights[0], weights[0]), tiles, config)


@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_lowers_for_cuda(shape, down, tokens):
    config = config_of(shape, tokens, down)
    array = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    weights = [array(config.experts, config.inner, config.width)] * config.matrices
    tiles = jax.ShapeDtypeStruct((1 + config.tiles, 3), jnp.int32)
    run = lambda x, tiles, *weights: kernel.expert_product(x, weights, tiles, config)
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    export = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=[check])(
        array(config.rows, config.inner), tiles, *weights
    )
    assert export.out_avals[0].shape == (config.rows, config.width) and "mosaic_gpu_v2" in export.mlir_module()


def test_a_strip_has_64_columns_for_each_warpgroup():
    assert config_of("gpt_oss_20b", 64, True).strip == 3 * COLUMNS
    assert config_of("hidden 320", 64, True).strip == COLUMNS
