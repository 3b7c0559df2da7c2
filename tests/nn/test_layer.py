"""Attention layers: paged equals uncached equals the textbook; both Flax modules equal the pure function."""

import dataclasses
import functools
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.nn import AttentionConfig, Norm, Rope, apply_attention
from jattn.nn.weight_spec import is_weight_spec
from tests.nn import dense

HIDDEN, HEADS, KV, D, BLOCK = 12, 4, 2, 6, 4
LENGTHS = (7, 4)
ROPE, NORM = Rope(dim=4, theta=100.0), Norm(eps=1e-3)
SPEC = jattn.AttentionSpec(num_heads=HEADS, num_kv_heads=KV, head_dim=D)
FULL = AttentionConfig(
    spec=dataclasses.replace(SPEC, sliding_window=3, has_sinks=True), hidden_size=HIDDEN, rope=ROPE, qk_norm=NORM,
    qkv_bias=True, out_bias=True,
)  # fmt: skip
ALL_HEADS = dataclasses.replace(FULL, qk_norm_all_heads=True)
EACH_HEAD = dataclasses.replace(FULL, qk_norm_scale_per_head=True)
CLIPPED = dataclasses.replace(FULL, clip_qkv=0.5)
ENCODER = AttentionConfig(spec=dataclasses.replace(SPEC, attn_type="encoder_only"), hidden_size=HIDDEN)
CROSS = AttentionConfig(spec=dataclasses.replace(SPEC, attn_type="encoder_decoder"), hidden_size=HIDDEN)
TABLE = np.array([[5, 2], [7, 1]], np.int32)
ENCODER_LENGTHS = (5, 3)


def weights_of(layer: AttentionConfig, seed: int = 0):
    """Random weights, so that every bias, sink and scale has an effect."""
    rng = np.random.default_rng(seed)
    draw = lambda w: rng.normal(size=w.shape).astype(np.float32) * (0.4 if len(w.shape) > 1 else 1.0)
    return jax.tree.map(draw, layer.weight_specs(), is_leaf=is_weight_spec)


def tokens(*lengths: int, seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, HIDDEN)).astype(np.float32) for n in lengths]


def batch(query_lens, seq_lens=None, table=TABLE, **options) -> jattn.CommonAttentionMetadata:
    return jattn.CommonAttentionMetadata.from_lengths(query_lens, seq_lens or query_lens, table, BLOCK, **options)


def empty(layer: AttentionConfig) -> jattn.PagedKV:
    s = layer.spec
    size = dict(num_blocks=9, block_size=BLOCK, num_kv_heads=s.num_kv_heads, head_dim=s.head_dim, dtype="float32")
    return jattn.empty_cache(jattn.KVCacheSpec(**size))


run = functools.partial(jax.jit, static_argnames=("config", "backend"))(apply_attention)


@pytest.mark.parametrize("sizes", [{}, dict(num_tokens=3)])
@pytest.mark.parametrize("layer", [ALL_HEADS, EACH_HEAD, ENCODER])
def test_a_batch_without_requests(layer, sizes):
    """A size of 0 has no -1 beside it: reshape raised ZeroDivisionError."""
    meta = batch([], [], np.zeros((0, 1), np.int32), **sizes)
    for cache in (None, empty(layer)):
        _, y = run(layer, weights_of(layer), np.ones((meta.num_tokens, HIDDEN), np.float32), meta, cache)
        assert y.shape == (meta.num_tokens, HIDDEN) and np.isfinite(y).all()


def textbook(layer: AttentionConfig, weights, x, keys_from=None) -> np.ndarray:
    exact = functools.partial(jax.tree.map, lambda w: np.asarray(w, np.float64))
    at, options = np.arange(len(x)), dict(keys_from=None if keys_from is None else exact(keys_from))
    if layer.spec.attn_type == "decoder":
        options["seen"] = at[None] <= at[:, None]
        if layer.spec.sliding_window:
            options["seen"] &= at[:, None] - at[None] <= layer.spec.window[0]
    if layer.rope is not None:
        options |= dict(theta=layer.rope.theta, dim=layer.rope.dim)
    if layer.qk_norm is not None:
        options |= dict(eps=layer.qk_norm.eps)
    if layer.clip_qkv is not None:
        options |= dict(clip=layer.clip_qkv)
    if layer.spec.has_sinks:
        options |= dict(sinks=exact(weights["sinks"]))
    return dense.layer(exact(weights), exact(x), HEADS, KV, **options)


LAYERS = {
    "decoder, everything on": FULL, "norms over all heads": ALL_HEADS, "scales of each head": EACH_HEAD,
    "clipped after the norms": CLIPPED, "encoder": ENCODER,
}  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS.values(), ids=list(LAYERS))
def test_without_a_cache_a_layer_is_the_textbook(layer):
    weights, xs = weights_of(layer), tokens(*LENGTHS)
    cache, y = run(layer, weights, np.concatenate(xs), batch(LENGTHS, table=None))
    assert cache is None
    np.testing.assert_allclose(y, np.concatenate([textbook(layer, weights, x) for x in xs]), atol=2e-5)


@pytest.mark.parametrize("backend", ["sdpa", "auto"])
def test_paged_decoding_is_the_layer_without_a_cache(backend):
    weights, xs, cache = weights_of(FULL), tokens(*LENGTHS), empty(FULL)
    wanted, rows = [textbook(FULL, weights, x) for x in xs], [[], []]
    for first, last in [((0, 0), (4, 1)), *(((n, n - 3), (n + 1, n - 2)) for n in (4, 5, 6))]:
        new = [x[a:b] for x, a, b in zip(xs, first, last, strict=True)]
        meta = batch([len(n) for n in new], list(last))
        cache, y = run(FULL, weights, np.concatenate(new), meta, cache, backend=backend)
        for mine, part in zip(rows, np.split(np.asarray(y), [len(new[0])]), strict=True):
            mine.append(part)
    for mine, exact in zip(rows, wanted, strict=True):
        np.testing.assert_allclose(np.concatenate(mine), exact[: sum(map(len, mine))], atol=2e-5)


def test_cross_attention_reads_the_encoder_once_and_then_its_cache():
    weights, xs, es = weights_of(CROSS), tokens(2, 2), tokens(*ENCODER_LENGTHS, seed=2)
    wanted = np.stack([textbook(CROSS, weights, x, keys_from=e) for x, e in zip(xs, es, strict=True)])
    meta = batch([1, 1], [1, 1], encoder_seq_lens=ENCODER_LENGTHS, cross_block_table=TABLE)
    steps = [np.stack([x[i] for x in xs]) for i in (0, 1)]
    cache, first = run(CROSS, weights, steps[0], meta, empty(CROSS), keys_from=np.concatenate(es))
    cache, second = run(CROSS, weights, steps[1], meta, cache)
    np.testing.assert_allclose(np.stack([first, second], axis=1), wanted, atol=2e-5)
    _, uncached = run(CROSS, weights, steps[1], meta, keys_from=np.concatenate(es))
    np.testing.assert_allclose(uncached, second, atol=2e-6)


def test_one_fused_projection_is_three_split_ones():
    split = weights_of(FULL)
    parts = [split[n] for n in "qkv"]
    qkv = {name: np.concatenate([p[name] for p in parts], axis=-1) for name in ("kernel", "bias")}
    fused = {"qkv": qkv, **{name: w for name, w in split.items() if name not in "qkv"}}
    x, meta = np.concatenate(tokens(*LENGTHS)), batch(LENGTHS, table=None)
    results = [
        run(layer, w, x, meta)[1] for layer, w in ((FULL, split), (dataclasses.replace(FULL, fused_qkv=True), fused))
    ]
    np.testing.assert_allclose(*results, atol=1e-6)


def test_the_flax_twins_are_the_pure_function():
    weights, x, meta = weights_of(FULL), np.concatenate(tokens(*LENGTHS)), batch(LENGTHS)
    cache, wanted = run(FULL, weights, x, meta, empty(FULL))
    options = {f.name: getattr(FULL, f.name) for f in dataclasses.fields(FULL) if f.name not in ("spec", "hidden_size")}
    mine = jattn.nn.PagedAttention(FULL.spec, HIDDEN, rngs=nnx.Rngs(0), **options)
    nnx.update(mine, weights)
    mine_cache, y = nnx.jit(lambda m, *args: m(*args))(mine, x, meta, empty(FULL))
    twin = jattn.nn.linen.PagedAttention(FULL)
    twin_cache, z = jax.jit(twin.apply)({"params": weights}, x, meta, empty(FULL))
    for other, pages in ((y, mine_cache), (z, twin_cache)):
        np.testing.assert_allclose(other, wanted, atol=1e-6)
        np.testing.assert_allclose(pages.k, cache.k, atol=1e-6)


def test_weights_of_an_nnx_layer_may_be_variables_of_any_kind():
    """A weight that is not trained is often an nnx.Variable of a class of its own."""

    class Frozen(nnx.Variable):
        pass

    weights, x, meta = weights_of(FULL), np.concatenate(tokens(*LENGTHS)), batch(LENGTHS)
    options = dict(rope=ROPE, qk_norm=NORM, qkv_bias=True, out_bias=True)
    layer: Any = jattn.nn.PagedAttention(FULL.spec, HIDDEN, rngs=nnx.Rngs(0), **options)
    nnx.update(layer, weights)
    layer.sinks = Frozen(layer.sinks.get_value())
    layer.q = nnx.Dict({name: Frozen(w.get_value()) for name, w in layer.q.items()})
    np.testing.assert_allclose(layer(x, meta)[1], run(FULL, weights, x, meta)[1], atol=1e-6)
    trained = nnx.grad(lambda layer: jnp.sum(layer(x, meta)[1]))(layer)
    assert trained.keys() == weights.keys() - {"q", "sinks"}


def test_scales_of_the_cache_may_be_variables_of_a_layer():
    """They had no effect in nnx if they were not of the class Param, and never in linen."""
    spec = jattn.KVCacheSpec(
        num_blocks=8, block_size=4, num_kv_heads=FULL.spec.num_kv_heads, head_dim=FULL.spec.head_dim,
        dtype="int8", quant="per_tensor",
    )  # fmt: skip
    x, meta = np.concatenate(tokens(*LENGTHS)), batch(LENGTHS)
    layer: Any = jattn.nn.PagedAttention(FULL.spec, HIDDEN, rngs=nnx.Rngs(0))
    wanted = np.asarray(layer(x, batch(LENGTHS, table=None))[1])
    layer.k_scale, layer.v_scale = nnx.Variable(jnp.float32(0.05)), nnx.Cache(jnp.float32(0.05))
    got = np.asarray(layer(x, meta, jattn.empty_cache(spec))[1])
    assert np.abs(got - wanted).max() < 0.1 * np.abs(wanted).max()
    twin = jattn.nn.linen.PagedAttention(layer.config)
    _, y = twin.apply({"params": layer.weights}, x, meta, jattn.empty_cache(spec))
    np.testing.assert_allclose(y, got, atol=1e-6)


def test_both_twins_make_the_same_tree_and_name_its_axes():
    made = FULL.weight_specs()
    mine = jattn.nn.PagedAttention(
        FULL.spec, HIDDEN, rngs=nnx.Rngs(0), rope=ROPE, qk_norm=NORM, qkv_bias=True, out_bias=True
    )
    twin = jattn.nn.linen.PagedAttention(FULL)
    x, meta = np.concatenate(tokens(*LENGTHS)), batch(LENGTHS)
    variables = jax.eval_shape(twin.init, jax.random.key(0), x, meta, empty(FULL))
    shapes = jax.tree.map(lambda w: w.shape, made, is_leaf=is_weight_spec)
    assert jax.tree.map(jnp.shape, mine.weights) == shapes
    assert jax.tree.map(jnp.shape, flax.linen.unbox(variables)["params"]) == shapes
    axes = jax.tree.map(lambda w: jax.sharding.PartitionSpec(*w.axes), made, is_leaf=is_weight_spec)
    assert flax.linen.get_partition_spec(variables)["params"] == axes
    assert nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(mine, nnx.Param))) == axes


def test_training_goes_through_the_same_layer():
    weights, xs = weights_of(FULL), tokens(*LENGTHS)
    meta, x = batch(LENGTHS, table=None), np.concatenate(xs)
    value, slopes = jax.jit(jax.value_and_grad(lambda w: jnp.sum(jnp.sin(apply_attention(FULL, w, x, meta)[1]))))(
        weights
    )
    assert all(np.abs(g).max() > 1e-4 for g in jax.tree.leaves(slopes)), "every weight gets a gradient"
    towards = jax.tree.map(lambda w: np.random.default_rng(9).normal(size=w.shape).astype(np.float32), weights)
    exact = lambda h: sum(
        np.sin(textbook(FULL, jax.tree.map(lambda w, d: np.float64(w) + h * d, weights, towards), x)).sum() for x in xs
    )
    numeric = (exact(1e-5) - exact(-1e-5)) / 2e-5
    mine = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(slopes), jax.tree.leaves(towards), strict=True))
    np.testing.assert_allclose(value, exact(0.0), rtol=1e-4)
    np.testing.assert_allclose(mine, numeric, rtol=1e-3)


OPTIONS = {
    "rope": dict(rope=None),
    "rope theta": dict(rope=Rope(dim=4, theta=50.0)),
    "rope pairs": dict(rope=Rope(dim=4, theta=100.0, interleaved=True)),
    "qk_norm": dict(qk_norm=None),
    "norm after": dict(qk_norm_after_rope=True),
    "clip": dict(clip_qkv=0.5),
    "growth": dict(temperature_tuning=(2.0, 0.5)),
    "growth from 0": dict(temperature_tuning=(2.0, 0.5), temperature_tuning_offset=0),
    "alibi": dict(spec=dataclasses.replace(FULL.spec, has_alibi=True), alibi_slopes=(0.5, 0.25, 0.1, 0.05)),
    "soft cap": dict(spec=dataclasses.replace(FULL.spec, logits_soft_cap=1.0)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_moves_the_result(name):
    weights, meta = weights_of(FULL), batch(LENGTHS, table=None)
    x = np.concatenate(tokens(*LENGTHS))
    plain, other = (run(y, weights, x, meta)[1] for y in (FULL, dataclasses.replace(FULL, **OPTIONS[name])))
    assert np.abs(plain - other).max() > 1e-3


@pytest.mark.parametrize(
    ("message", "bad"),
    [
        ("alibi", lambda: dataclasses.replace(FULL, alibi_slopes=(1.0,) * HEADS)),
        ("rope", lambda: dataclasses.replace(FULL, rope=Rope(dim=D + 2))),
        ("rotary", lambda: dataclasses.replace(CROSS, rope=ROPE)),
        ("keys_from", lambda: apply_attention(CROSS, {}, None, batch([1, 1], encoder_seq_lens=[2, 2]))),
        ("keys_from", lambda: apply_attention(FULL, {}, None, batch([1, 1]), keys_from=np.zeros((1, HIDDEN)))),
        ("plan", lambda: apply_attention(FULL, {}, None, batch([1, 1]), plan=1)),
        ("norm", lambda: Norm(kind="batch")),
        ("qk_norm", lambda: dataclasses.replace(FULL, qk_norm=None, qk_norm_all_heads=True)),
        ("qk_norm", lambda: dataclasses.replace(FULL, qk_norm=None, qk_norm_after_rope=True)),
        ("qk_norm", lambda: dataclasses.replace(ALL_HEADS, qk_norm_scale_per_head=True)),
    ],
)
def test_what_cannot_mean_anything_is_refused(message, bad):
    with pytest.raises(ValueError, match=message):
        bad()


def test_a_list_of_tokens_is_refused_by_the_names_of_the_arrays_that_are_taken():
    with pytest.raises(TypeError, match=r"x must be jax\.Array or numpy\.ndarray, got list"):
        run(FULL, weights_of(FULL), [[0.0] * HIDDEN], batch([1], table=None))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("message", "bad"),
    [
        ("config must be AttentionConfig, got AttentionSpec", lambda: jattn.nn.linen.PagedAttention(SPEC)),
        ("param_dtype=.*int32.* must be one of", lambda: jattn.nn.linen.PagedAttention(FULL, param_dtype=jnp.int32)),
    ],
)
def test_a_linen_module_of_the_wrong_kind_says_so_when_it_is_used(message, bad):
    with pytest.raises((TypeError, ValueError), match=message):
        bad().init(jax.random.key(0), np.zeros((1, HIDDEN), np.float32), batch([1, 1]))


@pytest.mark.parametrize(
    ("message", "bad"),
    [
        ("rngs must be Rngs, got int; e.g. nnx.Rngs", dict(rngs=0)),
        ("rope must be Rope, got int; make one with jattn.nn.Rope", dict(rope=8)),
        ("param_dtype='bf' is not a dtype", dict(param_dtype="bf")),
        ("param_dtype=.*int32.* must be one of", dict(param_dtype=jnp.int32)),
        ("use_qq_bias=True: this layer has no qq_bias", dict(spec=dataclasses.replace(SPEC, use_qq_bias=True))),
        ("PagedAttention has no argument qk_nrm; did you mean qk_norm", dict(qk_nrm=NORM)),
    ],
)
def test_an_nnx_layer_that_could_not_work_is_refused(message, bad):
    given = dict(spec=SPEC, hidden_size=HIDDEN, rngs=nnx.Rngs(0)) | bad
    with pytest.raises((TypeError, ValueError), match=message):
        jattn.nn.PagedAttention(**given)
