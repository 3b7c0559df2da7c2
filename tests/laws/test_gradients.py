"""The gradients of attention are those of the oracle, which are derived by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from tests.cases import FEATURES, Case, Feature
from tests.ops import latent
from tests.oracle import attention, grad
from tests.problem import Problem

GRADED = {
    "plain": FEATURES["plain"],
    "non_causal": FEATURES["non_causal"],
    "cap_sinks_window": FEATURES["cap_sinks_window"],
    "rswa_mm_prefix_sqrt": FEATURES["rswa_mm_prefix_sqrt"],
    "qq_bias_alibi": Feature(
        "qq_bias_alibi", dict(use_qq_bias=True, has_alibi=True, sliding_window=5), ("alibi_slopes", "qq_bias")
    ),
    "distance_bias_sinks": Feature(
        "distance_bias_sinks", dict(use_distance_bias=True, has_sinks=True), ("sinks", "distance_bias")
    ),
    "everything": Feature(
        "everything",
        {k: v for k, v in FEATURES["everything"].spec.items() if k != "score_fn"},
        ("alibi_slopes", "sinks"),
    ),
}
CASE = Case("three", (1, 4, 9), (7, 11, 9))
DIFFERENTIABLE = ("sdpa",)  # the gradient of the others is that of sdpa, which their own tests check


def problem_of(name: str) -> Problem:
    return Problem(case=CASE, feature=GRADED[name], head_dim=8, v_head_dim=6, pad_tokens=2)


def cotangents(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """dout [T H V], dlse [T H]: random, padding rows included."""
    rng = np.random.default_rng(5)
    shape = problem.num_tokens, problem.heads, problem.v_dim
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[:2]).astype(np.float32)


def witness(problem: Problem) -> dict[str, np.ndarray | list[np.ndarray]]:
    """dq over the packed tokens, dk and dv a request, dslopes and dsinks."""
    dout, dlse = cotangents(problem)
    spec, found, start = (
        problem.feature.spec,
        {"dq": [], "dk": [], "dv": [], "dslopes": 0, "dsinks": 0, "dqq_bias": 0, "ddistance_bias": 0},
        0,
    )
    window = spec.get("sliding_window")
    for r, (n, length) in enumerate(zip(CASE.query_lens, CASE.seq_lens, strict=True)):
        rows = slice(start, start := start + n)
        one = grad.attend_one_grad(
            problem.q[rows], problem.keys[r], problem.values[r], dout[rows], dlse[rows],
            q_pos=np.arange(length - n, length), scale=spec.get("scale") or problem.head_dim**-0.5,
            causal=problem.causal, window=(window - 1, 0) if window else None, chunk_size=spec.get("chunk_size"),
            qq_bias=problem.numbers.get("qq_bias"), distance_bias=problem.numbers.get("distance_bias"),
            alibi_sqrt=problem.spec.use_alibi_sqrt, **problem.feature.reach(problem.lengths)[r],
            soft_cap=spec.get("logits_soft_cap"), mask_fn=spec.get("mask_fn"),
            slopes=problem.numbers.get("alibi_slopes"), sinks=problem.numbers.get("sinks"),
        )  # fmt: skip
        for name in ("dq", "dk", "dv"):
            found[name].append(one[name])
        for name in ("dslopes", "dsinks", "dqq_bias", "ddistance_bias"):
            found[name] = found[name] + one[name]
    return found | {"dq": np.concatenate(found["dq"])}


def close(got, wanted, what: str) -> None:
    """Sums of float32 products: relative to the size of the whole tensor."""
    assert not np.isnan(got).any(), f"{what}: NaN"
    np.testing.assert_allclose(got, wanted, atol=2e-5 * max(1.0, np.abs(wanted).max()), rtol=2e-5, err_msg=what)


def check(problem: Problem, dq, dk: list, dv: list, dparams: jattn.AttentionParams) -> None:
    wanted = witness(problem)
    live = CASE.num_tokens
    close(dq[:live], wanted["dq"], "dq")
    assert not np.asarray(dq)[live:].any(), "padding has no gradient"
    for r in range(len(CASE.query_lens)):
        close(dk[r], wanted["dk"][r], f"dk of request {r}")
        close(dv[r], wanted["dv"][r], f"dv of request {r}")
    for name, mine in (
        ("alibi_slopes", "dslopes"),
        ("sinks", "dsinks"),
        ("qq_bias", "dqq_bias"),
        ("distance_bias", "ddistance_bias"),
    ):
        if name in problem.numbers:
            close(getattr(dparams, name), wanted[mine], name)


@pytest.mark.parametrize("backend", DIFFERENTIABLE)
@pytest.mark.parametrize("name", GRADED)
def test_through_pages_and_the_write(backend, name):
    """Gradients of q, new k and v, cached keys and values, slopes and sinks. NaN in unused slots has no effect."""
    problem = problem_of(name)
    attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend=backend)
    new, cache = (problem.new(problem.keys), problem.new(problem.values)), problem.cache(new=False)
    meta, (dout, dlse) = problem.meta, cotangents(problem)

    @functools.partial(jax.jit)
    def pull(q, k, v, cache, params):
        def forward(q, k, v, cache, params):
            _, state = attn(q, k, v, cache, attn.build(meta), params)
            return state.out, state.lse

        (_, lse), back = jax.vjp(forward, q, k, v, cache, params)
        return back((jnp.asarray(dout), jnp.where(jnp.isfinite(lse), dlse, 0.0)))

    dq, dk_new, dv_new, dcache, dparams = pull(problem.q, *new, cache, problem.params)
    found = []
    for d_new, d_pool in zip((dk_new, dv_new), dcache.logical(), strict=True):
        pool = np.asarray(d_pool).reshape(-1, *d_pool.shape[2:])
        rows, start = [], 0
        for r, (n, computed) in enumerate(zip(CASE.query_lens, CASE.computed, strict=True)):
            old = pool[problem.slots(r)[:computed]]
            rows.append(np.concatenate([old, np.asarray(d_new)[start : start + n]]))
            start += n
        assert not np.asarray(d_new)[start:].any(), "padding has no gradient"
        used = {slot for r, c in enumerate(CASE.computed) for slot in problem.slots(r)[:c]}
        others = np.setdiff1d(np.arange(len(pool)), list(used))
        assert not pool[others].any(), "a slot that nobody reads, or that was overwritten, has no gradient"
        found.append(rows)
    check(problem, dq, *found, dparams)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_through_packed_keys(name):
    problem = problem_of(name).replace(pad_reqs=0)
    meta = jattn.CommonAttentionMetadata.from_lengths(
        CASE.query_lens, CASE.seq_lens, None, 1, num_tokens=problem.num_tokens, causal=problem.causal
    )
    dout, dlse = cotangents(problem)

    @jax.jit
    def pull(q, k, v, params):
        def forward(q, k, v, params):
            state = jattn.attention(q, k, v, meta, problem.spec, params)
            return state.out, state.lse

        (_, lse), back = jax.vjp(forward, q, k, v, params)
        return back((jnp.asarray(dout), jnp.where(jnp.isfinite(lse), dlse, 0.0)))

    packed = np.concatenate(problem.keys), np.concatenate(problem.values)
    dq, dk, dv, dparams = pull(problem.q, *packed, problem.params)
    cuts = np.cumsum(CASE.seq_lens)[:-1]
    check(problem, dq, np.split(np.asarray(dk), cuts), np.split(np.asarray(dv), cuts), dparams)


def test_a_sharper_soft_cap_has_a_smaller_gradient():
    """The oracle's gradient depends on the soft cap, so the comparison above can see it."""
    q, k = np.ones((1, 1, 2)), np.array([[[1.0, 0.0]], [[0.0, 1.5]]])
    sizes = [
        np.abs(grad.attend_one_grad(q, k, k, q, q_pos=[1], scale=1.0, soft_cap=cap)["dq"]).max()
        for cap in (None, 1.0, 0.3)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] / 2
    assert attention.attend_one(q, k, k, q_pos=[1], scale=1.0)[0].shape == (1, 1, 2)


# ---------------------------------------------------------------------- through a write to integers
def _through_a_write(backend, dtype, quant):
    """A function of q, k and sinks: attention after a write to such a cache, as a CPU stores it; its arguments."""
    spec = jattn.AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, has_sinks=True)
    cache_spec = jattn.KVCacheSpec(num_blocks=2, block_size=8, num_kv_heads=1, head_dim=8, dtype=dtype, quant=quant)
    attn, cache = jattn.PagedAttention(spec, cache_spec, backend=backend), jattn.empty_cache(cache_spec, storage="bits")
    plan = attn.build(jattn.CommonAttentionMetadata.from_lengths([5], [5], [[1]], 8))
    rng = np.random.default_rng(0)
    q, k, v, sinks = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((5, 2, 8), (5, 1, 8), (5, 1, 8), 2))

    def result(q, k, sinks):
        return jnp.sum(attn(q, k, v, cache, plan, jattn.AttentionParams(sinks=sinks))[1].out ** 2)

    return result, (q, k, sinks)


@pytest.mark.parametrize("quant", ["per_head", "per_token_head"])
@pytest.mark.parametrize("backend", ["sdpa", "cpu_native"])
def test_a_write_to_int8_refuses_a_gradient_instead_of_giving_a_part_of_it(backend, quant):
    """Rounding has the derivative 0: through the token scales alone, a gradient had a fifth of its size."""
    result, args = _through_a_write(backend, "int8", quant)
    with pytest.raises(NotImplementedError, match="int8 cache has no gradient"):
        jax.grad(result, argnums=1)(*args)


@pytest.mark.parametrize(("dtype", "quant"), [("bfloat16", "none"), ("int8", "per_token_head")])
@pytest.mark.parametrize("backend", ["sdpa", "cpu_native", "split"])
def test_what_is_not_written_has_a_gradient_beside_such_a_write(backend, dtype, quant):
    """The write of cpu_native took all params, so a gradient of the sinks was one of the write, too."""
    result, args = _through_a_write(backend, dtype, quant)
    dq, dsinks = jax.grad(result, argnums=(0, 2))(*args)
    step = lambda i, by: [x + by if i == j else x for j, x in enumerate(args)]
    for i, found in ((0, dq), (2, dsinks)):
        wanted = (result(*step(i, 0.05)) - result(*step(i, -0.05))) / 0.1
        np.testing.assert_allclose(jnp.sum(found), wanted, rtol=0.02, atol=2e-3)


# ---------------------------------------------------------------------- outside jit
def _packed_door():
    """(a function of q, k and v; its arguments)"""
    spec = jattn.AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8)
    meta = jattn.CommonAttentionMetadata.from_lengths([3, 4], [3, 4], None, 1)
    return lambda q, k, v: jattn.attention(q, k, v, meta, spec).out, [(7, 2, 8), (7, 1, 8), (7, 1, 8)]


def _paged_door():
    spec = jattn.AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8)
    cache_spec = jattn.KVCacheSpec(num_blocks=3, block_size=8, num_kv_heads=1, head_dim=8, dtype="float32")
    attn, cache = jattn.PagedAttention(spec, cache_spec), jattn.empty_cache(cache_spec)
    plan = attn.build(jattn.CommonAttentionMetadata.from_lengths([3, 4], [3, 4], [[1], [2]], 8))
    return lambda q, k, v: attn(q, k, v, cache, plan)[1].out, [(7, 2, 8), (7, 1, 8), (7, 1, 8)]


def _latent_door():
    spec, cache_spec = latent.PLAIN.mla.spec, latent.PLAIN.mla.cache_spec
    mla, params = jattn.MLAAttention(spec, cache_spec), latent.PLAIN.params
    cache, rank, rotated = mla.empty_cache(), spec.kv_lora_rank, spec.qk_rope_head_dim
    plan = mla.build(jattn.CommonAttentionMetadata.from_lengths([3, 4], [3, 4], [[1], [2]], latent.S))
    shapes = [(7, spec.num_heads, spec.qk_nope_head_dim + rotated), (7, rank), (7, rotated)]
    return lambda q, kv_c, k_pe: mla(q, kv_c, k_pe, cache, plan, params)[1].out, shapes


@pytest.mark.parametrize("door", [_packed_door, _paged_door, _latent_door])
def test_gradients_outside_jit_compile_whole_functions_once(compiles, door):
    """Operation by operation the first call compiled over 300 programs, and every later one its loops again."""
    function, shapes = door()
    args = [
        jax.random.normal(key, shape) for key, shape in zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)
    ]
    value = jax.grad(lambda *args: function(*args).sum(), argnums=(0, 1, 2))
    with compiles() as first:
        jax.block_until_ready(value(*args))
    with compiles() as later:
        jax.block_until_ready(value(*args))
    assert first.total <= 12, first.names
    assert later.names == []
