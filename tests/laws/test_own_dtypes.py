"""Each backend reads each array in its own dtype, and 'auto' chooses one that supports the queries' dtype."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jattn
from jattn.backends import ContextParallel, gpu_kernel, pallas_tpu, registry, subclass_attention_backend
from jattn.backends.sdpa import SdpaMetadataBuilder
from jattn.backends.split import make_split_backend
from jattn.device import Chip
from jattn.parallel import tensor_parallel
from tests.cases import CASES, FEATURES
from tests.oracle import attention as oracle
from tests.problem import Problem

FLOATS = ("float32", "bfloat16", "float16")
LENS = [3, 1, 5]
META = jattn.CommonAttentionMetadata.from_lengths(LENS, LENS, None, 4, num_tokens=10, num_reqs=4)
SPEC = jattn.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=8)
PACKED = [report.name for report in jattn.explain(SPEC, None) if report.supported]


def normal(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def witness(q, k, v, **options):
    """The oracle's result for the values in the arrays."""
    real = [np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v)]
    edges = np.cumsum(LENS)[:-1]
    keys, values = (np.split(x[: sum(LENS)], edges) for x in real[1:])
    return oracle.ragged(real[0][: sum(LENS)], keys, values, LENS, num_tokens=10, scale=SPEC.scale, **options)


@pytest.mark.parametrize("backend", PACKED)
@pytest.mark.parametrize("dtypes", [d for d in itertools.product(FLOATS, repeat=2) if d[0] != d[1]])
def test_packed_keys_and_values_of_two_dtypes_are_read_each_by_its_own(backend, dtypes):
    """Float32 queries, so that keys and values must not lose a bit."""
    q, k, v = normal(0, 10, 4, 16), normal(1, 10, 2, 16, dtype=dtypes[0]), normal(2, 10, 2, 8, dtype=dtypes[1])
    state = jattn.attention(q, k, v, META, SPEC, backend=backend)
    out, lse = witness(q, k, v)
    np.testing.assert_allclose(state.out, out, atol=2e-6)
    np.testing.assert_allclose(state.lse, lse, atol=2e-6)


def test_the_gradient_comes_back_in_the_dtype_of_each_array():
    q, k, v = normal(0, 10, 4, 16), normal(1, 10, 2, 16, dtype="bfloat16"), normal(2, 10, 2, 8)
    loss = lambda q, k, v: jattn.attention(q, k, v, META, SPEC, backend="sdpa").out.sum()
    grads = jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), q, k, v)
    assert [g.dtype.name for g in grads] == ["float32", "bfloat16", "float32"]


@pytest.mark.parametrize("backend", PACKED)
@pytest.mark.parametrize("dtype", ["int32", "int8", "float8_e4m3fn", "complex64", "bool"])
@pytest.mark.parametrize("which", ["k", "v"])
def test_packed_keys_that_are_no_floats_are_refused_alike(backend, dtype, which):
    arrays = dict(q=jnp.ones((10, 4, 16)), k=jnp.ones((10, 2, 16)), v=jnp.ones((10, 2, 8)))
    arrays[which] = arrays[which].astype(dtype)
    with pytest.raises(ValueError, match=rf"{which}.dtype={dtype} must be"):
        jattn.attention(**arrays, meta=META, spec=SPEC, backend=backend)


def test_cross_attention_and_quantised_queries_over_two_dtypes():
    spec = dataclasses.replace(SPEC, attn_type="encoder_decoder")
    meta = jattn.CommonAttentionMetadata.from_lengths([1, 1, 1], [1, 1, 1], None, 4, encoder_seq_lens=LENS)
    k, v = normal(1, 9, 2, 16, dtype="bfloat16"), normal(2, 9, 2, 8)
    q = normal(0, 3, 4, 16).astype(jnp.float8_e4m3fn)
    params = jattn.AttentionParams(q_scale=0.5)
    real = [np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v)]
    keys, values = (np.split(x, np.cumsum(LENS)[:-1]) for x in real[1:])
    out, lse = oracle.ragged(real[0] * 0.5, keys, values, [1, 1, 1], scale=SPEC.scale, causal=False)
    for backend in PACKED:
        if not registry.load(backend).supports_dtype(q.dtype):
            continue
        state = jattn.attention(q, k, v, meta, spec, params, backend=backend)
        np.testing.assert_allclose(state.out.astype(jnp.float32), out, atol=0.02, err_msg=backend)
        np.testing.assert_allclose(state.lse, lse, atol=2e-5, err_msg=backend)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")])
def test_written_keys_and_values_keep_their_own_numbers(dtypes):
    spec = jattn.KVCacheSpec(num_blocks=2, block_size=4, num_kv_heads=2, head_dim=16, v_head_dim=8, dtype="float32")
    layer = dataclasses.replace(SPEC)
    k, v = normal(1, 5, 2, 16, dtype=dtypes[0]), normal(2, 5, 2, 8, dtype=dtypes[1])
    meta = jattn.CommonAttentionMetadata.from_lengths([5], [5], [[1, 0]], 4)
    for backend in ("sdpa", "cpu_native", "pallas_cpu", "split"):
        attn = jattn.PagedAttention(layer, spec, backend)
        cache, _ = attn(normal(0, 5, 4, 16), k, v, jattn.empty_cache(spec), attn.build(meta))
        for pool, x in zip(cache.logical(), (k, v), strict=True):
            held = np.asarray(pool)[[1, 1, 1, 1, 0], [0, 1, 2, 3, 0]]
            np.testing.assert_array_equal(held, np.asarray(x.astype(jnp.float32)), err_msg=backend)


@pytest.mark.parametrize("wide", [False, True])
def test_latents_and_rotated_keys_of_two_dtypes_lose_nothing_in_the_cache(wide):
    spec = jattn.MLASpec(num_heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
    cache_spec = jattn.mla_cache_spec(spec, 2, 4, dtype="float32")
    if wide:
        cache_spec = jattn.KVCacheSpec(num_blocks=2, block_size=4, num_kv_heads=1, head_dim=12, v_head_dim=8,
                                       dtype="float32")  # fmt: skip
    kv_c, k_pe = normal(1, 3, 8, dtype="bfloat16"), normal(2, 3, 4)
    mla = jattn.MLAAttention(spec, cache_spec)
    m = mla.build(jattn.CommonAttentionMetadata.from_lengths([3], [3], [[1]], 4))
    k, v = mla.write(kv_c, k_pe, mla.empty_cache(), m).logical()
    np.testing.assert_array_equal(k[1, :3, 0, -4:], k_pe)
    np.testing.assert_array_equal((k[..., :8] if wide else v)[1, :3, 0], kv_c.astype(jnp.float32))


# ---------------------------------------------------------------------- 'auto' and the queries' dtype

CACHES = [*((d, "none") for d in FLOATS), ("float8_e4m3fn", "per_tensor"), ("int8", "per_token_head")]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", [*FLOATS, "float8_e4m3fn", "int8"])
def test_what_auto_chooses_for_these_queries_then_runs(dtype, cache):
    cache_spec = jattn.KVCacheSpec(
        num_blocks=2, block_size=4, num_kv_heads=2, head_dim=16, v_head_dim=8, dtype=cache[0], quant=cache[1]
    )
    meta = jattn.CommonAttentionMetadata.from_lengths([2], [3], [[1]], 4)
    params = jattn.AttentionParams(q_scale=None if dtype in FLOATS else 0.1)
    q = normal(0, 2, 4, 16).astype(dtype)
    attn = jattn.PagedAttention(SPEC, cache_spec, dtype=dtype)
    state = attn.attend(q, jattn.empty_cache(cache_spec, fill=0.5), attn.build(meta), params)
    np.testing.assert_allclose(state.out.astype(jnp.float32), 0.5, atol=0.01)
    assert {r.name: r for r in jattn.explain(SPEC, cache_spec, dtype=dtype)}[attn.backend_name].supported


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_chip_s_kernel_is_chosen_only_for_queries_that_it_takes(platform, cache_dtype, dtype):
    """Checked by the kernel itself, with the config of the call."""
    cache_spec = jattn.KVCacheSpec(
        num_blocks=4, block_size=16, num_kv_heads=2, head_dim=128, dtype=cache_dtype,
        quant="none" if cache_dtype in FLOATS else "per_tensor",
    )  # fmt: skip
    spec = jattn.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=128)
    chip = Chip(platform, dict(gpu="sm_90", tpu="v6e")[platform])
    name = f"pallas_{platform}"
    backend, module = registry.load(name), dict(gpu=gpu_kernel, tpu=pallas_tpu)[platform]
    config = module.kernel_config(spec, cache_spec, dtype)
    takes = backend.supports_dtype(dtype) and not module.supports(config, chip=chip.generation)
    takes &= backend.supports_kv_cache_dtype(cache_dtype)
    chosen = jattn.PagedAttention(spec, cache_spec, platform=chip, dtype=dtype).backend_name
    assert (chosen == name) == bool(takes)
    if not takes:
        with pytest.raises(jattn.UnsupportedError, match="dtype"):
            jattn.PagedAttention(spec, cache_spec, name, chip, dtype)


def test_without_a_dtype_the_cache_s_is_meant(toy):
    """The toy supports float32 only. It is first in order, but not chosen for a bfloat16 cache."""
    spec = jattn.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8)
    pages = dict(num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8)
    registry.unregister_backend("toy")
    registry.register_backend("toy", toy, before="cpu_native")
    named = lambda cache, **options: jattn.PagedAttention(spec, jattn.KVCacheSpec(**pages, dtype=cache), **options)
    assert named("float32").backend_name == "toy"
    assert named("float32", dtype="bfloat16").backend_name != "toy"
    assert named("float32", dtype=jnp.float32).backend_name == "toy"
    with pytest.raises(jattn.UnsupportedError, match="toy: dtype not supported: bfloat16 seen, float32 supported"):
        named("float32", backend="toy", dtype="bfloat16")
    with pytest.raises(ValueError, match="dtype='float64' must be one of"):
        named("float32", dtype="float64")


@pytest.fixture
def toy():
    from tests.backends.toy import ToyBackend

    registry.register_backend("toy", ToyBackend)
    yield ToyBackend
    registry.unregister_backend("toy")


def test_a_split_chooses_halves_that_take_the_queries(toy):
    """The toy of the decode half supports float32 only; for bfloat16 queries another backend is chosen."""
    spec = jattn.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8)
    cache_spec = jattn.KVCacheSpec(num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
    registry.unregister_backend("toy")
    registry.register_backend("toy", toy, before="cpu_native")
    meta = jattn.CommonAttentionMetadata.from_lengths([1], [3], [[1]], 4)
    for dtype, expected in (("float32", True), ("bfloat16", False)):
        attn = jattn.PagedAttention(spec, cache_spec, "split", dtype=dtype)
        m = attn.build(meta)
        assert (m.halves["decode"].backend == "toy") == expected
        attn.attend(normal(0, 1, 4, 8, dtype=dtype), jattn.empty_cache(cache_spec), m)


# ---------------------------------------------------------------------- several devices


def test_heads_over_ranks_share_one_bias_among_the_new_tokens():
    problem = Problem(case=CASES["mixed"], feature=FEATURES["qq_bias_alibi_score_fn"], heads=8, kv_heads=4)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    step = jax.jit(tensor_parallel(problem.spec, problem.cache_spec, mesh, "x", backend="sdpa"))
    new = problem.new(problem.keys), problem.new(problem.values)
    cache, state = step(problem.q, *new, problem.cache(new=False), problem.meta, problem.params)
    problem.answer(cache).check(state)
    same, again = step(problem.q, None, None, cache, problem.meta, problem.params)
    np.testing.assert_array_equal(again.out, state.out)


def test_split_hands_parallel_to_the_builders_of_its_halves():
    seen = []

    class Recording(SdpaMetadataBuilder):
        def build(self, *args):
            seen.append(self.parallel)
            return None

    half = subclass_attention_backend("Recording", registry.load("sdpa"), Recording)
    registry.register_backend("recording", half)
    split = make_split_backend("split_of_recording", decode="recording", prefill="recording")
    problem = Problem(case=CASES["mixed"], pad_reqs=0)
    parallel = ContextParallel(dcp_axis="x", dcp_world_size=2)
    try:
        split.get_builder_cls()(problem.spec, problem.cache_spec, Chip("cpu"), parallel).build(0, problem.meta)
    finally:
        registry.unregister_backend("split_of_recording")
        registry.unregister_backend("recording")
    assert seen == [parallel, parallel]
