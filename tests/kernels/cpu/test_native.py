"""The native kernels, on every instruction set that this machine runs, against the numpy oracle."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from pallas_kernels.cpu.native import library, ops
from tests.cases import CASES, COMBINED, FEATURES, Case
from tests.kernels.cpu.native_setup import ISAS, layer, needs_library, run
from tests.oracle import attention
from tests.problem import Problem
from tests.running import same_bits, step

pytestmark = needs_library

PROBLEMS = {
    "f32": Problem(feature=COMBINED["chunk_alibi_sinks"], case=CASES["mixed_unsorted"]),
    "bf16": Problem(feature=COMBINED["cap_sinks_window"], dtype="bfloat16", head_dim=40, layout="NHD"),
    "f16": Problem(feature=FEATURES["plain"], dtype="float16", head_dim=24, v_head_dim=72, block_size=3),
    "per_request_causal": Problem(feature=FEATURES["per_request_causal"], dtype="bfloat16", heads=6, kv_heads=1),
    "chunk": Problem(feature=COMBINED["chunk_alibi_sinks"], dtype="bfloat16", heads=40, kv_heads=2, block_size=1),
    **{
        f"{held}-{mode}-{q}": Problem(
            feature=FEATURES["plain"], dtype=q, cache_dtype=held, quant=mode, head_dim=40, case=CASES["mixed"]
        )
        for held in ("float8_e4m3fn", "float8_e5m2", "int8")
        for mode, q in (("per_head", "float32"), ("per_token_head", "bfloat16"))
    },
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_instruction_set_agrees_with_the_witness(name, isa):
    problem = PROBLEMS[name]
    cache, state = run(problem, isa)
    problem.answer(cache).check(state)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("queries", [1, 9, 300])
def test_long_requests_are_split_and_merged_as_if_whole(queries, dtype, isa):
    """Requests of more than 2048 keys (few rows) or 4096 (many) are split; a sink counts once."""
    rng, length, heads, dim, page = np.random.default_rng(queries), 9001, 2, 16, 128
    q, k, v = (
        jnp.asarray(rng.standard_normal((n, h, dim)), dtype) for n, h in ((queries, heads), (length, 1), (length, 1))
    )
    sinks = rng.standard_normal(heads).astype(np.float32)
    blocks = -(-length // page)
    table = rng.permutation(blocks)[None].astype(np.int32)
    pool = np.full((2, blocks, page, dim), np.nan, np.float32)
    for x, pages in zip((k, v), pool, strict=True):
        flat = np.full((blocks * page, dim), np.nan, np.float32)
        flat[:length] = np.asarray(x, np.float32)[:, 0]
        pages[table[0]] = flat.reshape(blocks, page, dim)
    pools = [jnp.asarray(pages[:, None], dtype) for pages in pool]
    config = ops.NativeConfig(scale=0.25, kv_dtype=dtype, out_dtype=dtype, isa=isa)
    batch = ops.NativeBatch(
        query_start_loc=np.array([0, queries]), seq_lens=np.array([length]), kv_lens=np.array([length]),
        block_table=table, causal=np.ones(1, np.int32),
    )  # fmt: skip
    out, lse = ops.attend(config, q, *pools, batch, sinks=sinks)
    wanted, wanted_lse = attention.ragged(q, [k], [v], [queries], scale=0.25, sinks=sinks)
    np.testing.assert_allclose(np.asarray(lse), wanted_lse, rtol=0, atol=2e-5)
    limit = 2e-6 if dtype == "float32" else 2**-9
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, rtol=0, atol=limit)
    alone = ops.attend(config, q, *pools, batch, sinks=sinks)[0] if queries == 1 else out
    assert same_bits(alone, out)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_do_not_depend_on_the_number_of_threads(threads):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((70, 4, 32)).astype(np.float32)
    k, v = (rng.standard_normal((5000, 2, 32)).astype(np.float32) for _ in range(2))
    batch = ops.NativeBatch(
        query_start_loc=np.array([0, 1, 70]), seq_lens=np.array([4000, 1000]), kv_lens=np.array([4000, 1000]),
        kv_start=np.array([0, 4000]),
    )  # fmt: skip
    config = lambda n: ops.NativeConfig(scale=0.2, kv_dtype="float32", out_dtype="float32", threads=n)
    assert same_bits(ops.attend(config(threads), q, k, v, batch)[0], ops.attend(config(1), q, k, v, batch)[0])


@pytest.mark.parametrize("r", range(3))
def test_a_request_alone_has_the_bits_it_has_in_company(r):
    problem = Problem(case=Case("three", (1, 5, 70), (40, 9, 75)), feature=COMBINED["cap_sinks_window"], heads=8)
    first = sum(problem.case.query_lens[:r])
    rows = slice(first, first + problem.case.query_lens[r])
    together, alone = run(problem)[1], run(problem.alone(r))[1]
    assert same_bits(together.out[rows], alone.out[: rows.stop - rows.start])


def test_unknown_instruction_sets_are_refused_by_name():
    with pytest.raises(ValueError, match=r"Unsupported CPU attention ISA hint: 'mmx'; here auto, .*avx"):
        library.check_isa("mmx")


def test_garbage_lengths_and_tables_touch_nothing_outside():
    """No crash, and outputs of 0; the fuzz driver does the same under sanitizers."""
    rng = np.random.default_rng(1)
    pool = jnp.zeros((4, 2, 8, 16))
    q = jnp.ones((6, 4, 16))
    config = ops.NativeConfig(scale=1.0, kv_dtype="float32", out_dtype="float32")
    call = jax.jit(
        lambda *arrays: ops.attend(config, q, pool, pool, ops.NativeBatch(**dict(zip(NAMES, arrays, strict=True))))
    )
    for _ in range(200):
        extreme = lambda *shape: rng.choice([-(2**31), -7, -1, 0, 1, 2, 5, 6, 9, 2**31 - 1], shape).astype(np.int32)
        out, _ = call(extreme(4), extreme(3), extreme(3), extreme(3, 5), extreme(3))
        assert not np.asarray(out).any()


NAMES = ("query_start_loc", "seq_lens", "kv_lens", "block_table", "causal")


def test_gradients_are_those_of_sdpa():
    problem = Problem(feature=COMBINED["cap_sinks_window"])
    caches = problem.cache(new=False, storage="native")
    new = problem.new(problem.keys), problem.new(problem.values)
    finite = [np.nan_to_num(x) for x in (problem.q, *new)]
    cache = jax.tree.map(jnp.nan_to_num, caches)

    def loss(backend):
        attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend=backend)

        def value(q, k, v, params):
            return jnp.sum(step(attn, cache, q, k, v, problem.meta, params)[1].out ** 2)

        return jax.grad(value, argnums=(0, 1, 2, 3))(*finite, problem.params)

    for ours, theirs in zip(jax.tree.leaves(loss("cpu_native")), jax.tree.leaves(loss("sdpa")), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=2e-4, atol=2e-5)


def test_vmap_runs_the_call_once_per_element():
    problem = Problem()
    attn, cache = layer(problem), problem.cache()
    m = attn.build(problem.meta)
    one = lambda q: attn.attend(q, cache, m, problem.params).out
    q = jnp.asarray(problem.q)
    assert same_bits(jax.vmap(one)(jnp.stack([q, 2 * q]))[1], one(2 * q))


def test_calls_from_several_threads_do_not_disturb_each_other():
    """Several callers at once, each with requests that are split over the threads of the pool and merged."""
    rng, lengths = np.random.default_rng(3), np.array([4500, 3000, 4500])
    k, v = (rng.standard_normal((lengths.sum(), 2, 64)).astype(np.float32) for _ in range(2))
    batch = ops.NativeBatch(
        query_start_loc=np.arange(4), seq_lens=lengths, kv_lens=lengths, kv_start=np.cumsum(lengths) - lengths
    )
    config = ops.NativeConfig(scale=0.1, kv_dtype="float32", out_dtype="float32", threads=3)
    call = jax.jit(lambda *arrays: ops.attend(config, *arrays, batch)[0])
    devices = [jax.devices()[i % jax.device_count()] for i in range(4)]  # calls on one device may wait for each other
    questions = [
        jax.device_put((rng.standard_normal((3, 4, 64)).astype(np.float32), k, v), device) for device in devices
    ]
    alone = [np.asarray(call(*question)) for question in questions]
    several_times = lambda question: [np.asarray(call(*question)) for _ in range(30)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found, wanted in zip(pool.map(several_times, questions), alone, strict=True):
            assert all(same_bits(x, wanted) for x in found)


def test_every_device_of_a_mesh_runs_its_own():
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((len(devices), 9, 2, 16)).astype(np.float32) for _ in range(3))
    config = ops.NativeConfig(scale=1.0, kv_dtype="float32", out_dtype="float32")

    def one(q, k, v):
        lens = jnp.array([9], jnp.int32)
        batch = ops.NativeBatch(
            query_start_loc=jnp.array([0, 9]), seq_lens=lens, kv_lens=lens, kv_start=jnp.zeros(1, jnp.int32)
        )
        return ops.attend(config, q, k, v, batch)[0]

    spec = jax.sharding.PartitionSpec("x")
    sharded = jax.shard_map(
        lambda *xs: one(*(x[0] for x in xs))[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    got = jax.jit(sharded)(q, k, v)
    for i in range(len(devices)):
        assert same_bits(got[i], one(q[i], k[i], v[i]))
