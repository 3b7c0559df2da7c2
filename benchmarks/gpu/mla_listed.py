"""Sparse latent attention on a Hopper card: tokens that list their keys; numbers against float64, then times.

    python -m benchmarks.gpu.mla_listed [--write | --out DIR] [--only TEXT] [--seconds 60]

`us` is the kernel and its merge; `list_us` what makes rows of the pool of the tokens' positions (a sort of each list).
FLOP: 2 (576 + 512) for each listed key and head.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.gpu import cupti, jobs
from jattn import CommonAttentionMetadata, MLAAttention, MLASpec, mla_cache_spec
from jattn.backends.mla_gpu_listed import listed_rows
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.gpu.mla_config import MlaKernelConfig, heads_of_unit
from pallas_kernels.gpu.mla_sm90 import latent_attention
from pallas_kernels.gpu.work_list import build_work_list

SCALE, PAGE, BOUND = 192**-0.5, 64, 6e-3


@dataclasses.dataclass(frozen=True)
class ListedCase:
    """`requests` of `new` tokens each, after `total` keys, of which each token lists `width`."""

    name: str
    requests: int
    new: int
    total: int
    width: int = 2048
    heads: int = 128


CASES = (
    ListedCase("mla_sparse_ragged_h128", 3, 40, 700, 300),
    ListedCase("mla_sparse_dec_64x32k_top2k_h128", 64, 1, 32768),
    ListedCase("mla_sparse_pre_2k_of_16k_top2k_h128", 1, 2048, 16384),
    ListedCase("mla_sparse_dec_128x8k_top2k_h16", 128, 1, 8192, heads=16),
)


def measure(case: ListedCase, iterations: int) -> dict:
    """One row: the error of sampled tokens, then microseconds."""
    rng, count = np.random.default_rng(0), case.requests * case.new
    pages = -(-case.total // PAGE)
    table = rng.permutation(case.requests * pages).reshape(case.requests, pages).astype(np.int32)
    spec = MLASpec(
        num_heads=case.heads, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, scale=SCALE
    )
    mla = MLAAttention(spec, mla_cache_spec(spec, table.size, PAGE), "mla_pallas_gpu")
    meta = CommonAttentionMetadata.from_lengths([case.new] * case.requests, [case.total] * case.requests, table, PAGE)
    level = mla.build(meta).level
    first = case.total - case.new + 1  # keys that the first token sees; some of its list may be repeated or too late
    listed = np.stack([rng.permutation(first)[: case.width] for _ in range(min(count, 256))]).astype(np.int32)
    listed = np.resize(listed, (count, case.width))
    if "ragged" in case.name:
        listed[:, ::7], listed[:, 1::9], listed[:, 2] = -1, listed[:, :1], case.total + 5
    config = MlaKernelConfig(
        num_heads=case.heads, group=heads_of_unit(case.heads, 1), page_size=PAGE, listed=True,
        logits=LogitRule(scale=SCALE),
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (count, case.heads, 576), jnp.bfloat16)
    latents, ropes = (
        jax.random.normal(key, (table.size, PAGE, n), jnp.bfloat16) for key, n in zip(keys[1:], (512, 64), strict=True)
    )
    prepare = jax.jit(lambda level, listed: listed_rows(level, True, listed, PAGE))
    rows, counts = prepare(level, jnp.asarray(listed))
    work = jax.jit(lambda n: build_work_list(jnp.arange(count + 1), n, count, config.attention))(counts)
    attend = jax.jit(lambda *x: latent_attention(*x, config))
    args = (q, latents, ropes, rows, work)
    out, lse = jax.block_until_ready(attend(*args))
    worst = 0.0
    for t in sorted({0, count // 2, count - 1}):
        held = np.asarray(rows[t])
        seen = np.concatenate(
            [np.asarray(x.reshape(-1, x.shape[-1])[held[held >= 0]].astype(jnp.float32)) for x in (latents, ropes)], 1
        ).astype(np.float64)
        x = np.asarray(q[t].astype(jnp.float32), np.float64) @ seen.T * SCALE
        p = np.exp(x - x.max(axis=1, keepdims=True))
        want = p / p.sum(axis=1, keepdims=True) @ seen[:, :512]
        got = np.asarray(out[t].astype(jnp.float32), np.float64)
        error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
        worst = max(worst, float(np.nan_to_num(error, nan=np.inf).max()))
    us, kernels = cupti.micros(attend, *args, iterations=iterations)
    list_us = cupti.micros(prepare, level, jnp.asarray(listed), iterations=iterations)[0]
    flop = int((np.asarray(rows) >= 0).sum()) * case.heads * 2 * (576 + 512)
    return dict(us=us, parts=kernels, list_us=list_us, rel_err=worst, ok=worst < BOUND, tflop_s=flop / us / 1e6)


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    parser = jobs.parser_of("mla_listed", __doc__, seconds=60)
    parser.add_argument("--iterations", type=int, default=8)
    args = parser.parse_args(argv)
    listed = ((dict(case=c.name, backend="mla_pallas_gpu"), lambda c=c: measure(c, args.iterations)) for c in CASES)
    return int(jobs.run(listed, args, records.provenance(), "mla_listed") > 0)


if __name__ == "__main__":
    sys.exit(main())
