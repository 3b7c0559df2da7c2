"""Runs a problem on each backend that supports it, and compares each result with the oracle."""

import numpy as np

import jattn
from tests import tolerances
from tests.oracle.attention import attend_one
from tests.problem import Answer, Problem
from tests.running import run, takes


def able(problem: Problem) -> list[str]:
    """The backends that support this problem here: at least one, and all that the support matrix names."""
    found = [backend for backend in jattn.list_backends() if takes(backend, problem)]
    assert found, "no backend supports this problem"
    return found


def judge(problem: Problem) -> None:
    """Write and attend on each backend that supports the problem; there must be one."""
    for backend in able(problem):
        cache, state = run(problem, backend)
        problem.answer(cache).check(state)


def single(q, k, v, *, backend="auto", block_size=16, params=None, rows=None, **options):
    """(state, Answer) of one request with these arrays: q [Lq H D] belongs to the last tokens of k [L K D], v [L K V].

    `options` are AttentionSpec's; `rows`: new rows are the last of q (None: all of q).
    """
    (_, heads, dim), (length, kv_heads, v_dim) = q.shape, v.shape
    blocks = -(-length // block_size)
    table = np.random.default_rng(0).permutation(blocks)[None]
    spec = jattn.AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=v_dim, **options)
    cache_spec = jattn.KVCacheSpec(
        num_blocks=blocks, block_size=block_size, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=v_dim, dtype="float32"
    )
    pools = []
    for x in (k, v):
        pool = np.full((blocks * block_size, kv_heads, x.shape[2]), np.nan, np.float32)
        pool[:length] = x
        pages = np.empty((blocks, block_size, kv_heads, x.shape[2]), np.float32)
        pages[table[0]] = pool.reshape(pages.shape)
        pools.append(pages)
    cache = jattn.PagedKV.from_logical(cache_spec, *pools)
    meta = jattn.CommonAttentionMetadata.from_lengths([len(q)], [length], table, block_size)
    params = jattn.AttentionParams() if params is None else params
    state = jattn.paged_attention(q.astype(np.float32), cache, meta, spec, params, backend=backend)
    left, right = spec.window
    asked = dict(
        q_pos=np.arange(length - len(q), length), scale=spec.scale, soft_cap=spec.logits_soft_cap,
        window=(left, right), chunk_size=spec.chunk_size, slopes=params.alibi_slopes, sinks=params.sinks,
        mask_fn=spec.mask_fn, score_fn=spec.score_fn,
    )  # fmt: skip
    exact, rough = attend_one(q, k, v, **asked), tolerances.naive_one(q, k, v, "float32", **asked)
    masses = attend_one(q, k, np.abs(v), **asked)[0], 0.0
    limits = (tolerances.allowed(r, e, "float32", m) for r, e, m in zip(rough, exact, masses, strict=True))
    return state, Answer(*exact, *limits)
