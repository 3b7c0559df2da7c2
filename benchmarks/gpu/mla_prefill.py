"""Latent attention of long prompts on a Hopper card, end to end: numbers against float64, then times.

    python -m benchmarks.gpu.mla_prefill [--write | --out DIR] [--only TEXT] [--seconds 90]

A case is MLAAttention.attend for new tokens of requests whose rows are all in the cache: rows are gathered and
projected, the paged kernel attends, states are merged. FLOP: the products of queries and keys that they see, 2 (nope +
R + V) each, and the projection of every row once, 2 L (nope + V) a head; not the rotated part that the projection
copies. `attention_tflop_s` counts the first alone.
"""

import dataclasses
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.gpu import cupti, jobs
from jattn import CommonAttentionMetadata, MLAAttention, MLAParams, MLASpec, PagedKV, mla_cache_spec
from jattn.backends import mla_gpu_prefill

SPEC = MLASpec(num_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
BOUND = 8e-3  # of a row's relative error
PAGE = 64


@dataclasses.dataclass(frozen=True)
class PrefillCase:
    """A batch, (new tokens, all tokens) of each request."""

    name: str
    lengths: tuple
    heads: int = 128
    dtype: str = "bfloat16"  # of the cache
    constants: tuple = ()  # (name, value) pairs of mla_gpu_prefill
    room: int = 0  # tokens that the block table has room for, as an engine's has; 0: the tokens of the longest request

    @property
    def spec(self) -> MLASpec:
        return dataclasses.replace(SPEC, num_heads=self.heads)

    def flops(self) -> tuple[int, int]:
        """(of attention, of projections)."""
        pairs = sum(n * (s - n) + n * (n + 1) // 2 for n, s in self.lengths if n > 8)
        rows = sum(s for n, s in self.lengths if n > 8)
        return pairs * self.heads * 2 * (192 + 128), rows * self.heads * 2 * 512 * (128 + 128)


CASES = (
    PrefillCase("mla_pre_2k_of_16k_h128", ((2048, 16384),)),
    PrefillCase("mla_pre_2k_of_16k_h128", ((2048, 16384),), constants=(("JOINED", False),)),
    PrefillCase("mla_pre_4x512_of_4k_h128", ((512, 4096),) * 4),
    PrefillCase("mla_pre_1x8k_h128", ((8192, 8192),)),
    PrefillCase("mla_pre_2k_of_64k_h16", ((2048, 65536),), heads=16),
    PrefillCase("mla_pre_2k_of_6k_h16_room", ((2048, 6144),), heads=16, room=131072),
    PrefillCase("mla_pre_2k_of_16k_h128_room", ((2048, 16384),), room=131072),
    PrefillCase("mla_pre_2k_of_16k_h128_fp8", ((2048, 16384),), dtype="float8_e4m3fn"),
    PrefillCase("mla_mixed_32d_2k_of_16k_h128", (*((1, 4096),) * 32, (2048, 16384))),
    PrefillCase("mla_pre_2k_of_40k_h128", ((2048, 40960),)),
)


def measure(case: PrefillCase, iterations: int) -> dict:
    """One row: the error of sampled rows, then microseconds."""
    with mock.patch.dict(vars(mla_gpu_prefill), dict(case.constants)):
        return _measure(case, iterations)


def _measure(case: PrefillCase, iterations: int) -> dict:
    spec, rng = case.spec, np.random.default_rng(0)
    counts = [-(-s // PAGE) for _, s in case.lengths]
    order, used = rng.permutation(sum(counts)), np.cumsum([0, *counts])
    table = np.zeros((len(counts), max(*counts, case.room // PAGE)), np.int32)
    for r, n in enumerate(counts):
        table[r, :n] = order[used[r] : used[r] + n]
    eight = case.dtype != "bfloat16"
    cache_spec = mla_cache_spec(
        spec, sum(counts), PAGE, dtype=case.dtype, quant="per_tensor" if eight else "none", layout="NHD"
    )
    mla = MLAAttention(spec, cache_spec, "mla_pallas_gpu")
    keys = jax.random.split(jax.random.key(1), 5)
    empty = jax.eval_shape(mla.empty_cache)
    normal = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)  # noqa: E731
    cache = PagedKV(
        k=normal(keys[0], *empty.k.shape).astype(case.dtype), v=normal(keys[1], *empty.v.shape).astype(case.dtype),
        k_token_scale=None, v_token_scale=None, spec=cache_spec,
    )  # fmt: skip
    scales = dict(kv_c_scale=0.5, k_pe_scale=2.0) if eight else {}
    params = MLAParams(
        w_uk=normal(keys[2], case.heads, 128, 512) * 0.04, w_uv=normal(keys[3], case.heads, 512, 128) * 0.04, **scales
    )
    queries, totals = zip(*case.lengths, strict=True)
    q = normal(keys[4], sum(queries), case.heads, 192)
    m = mla.build(CommonAttentionMetadata.from_lengths(queries, totals, table, PAGE))
    attend = jax.jit(mla.attend)
    state = jax.block_until_ready(attend(q, cache, m, params))
    error = _error(case, q, cache, params, table, state)
    us, kernels = cupti.micros(attend, q, cache, m, params, iterations=iterations)
    attention, projections = case.flops()
    most = dict(sorted(kernels.items(), key=lambda item: -item[1])[:10])
    return dict(
        us=us, parts=most, rel_err=error, ok=error < BOUND, flop=attention + projections,
        tflop_s=(attention + projections) / us / 1e6, attention_tflop_s=attention / us / 1e6,
    )  # fmt: skip


def _error(case: PrefillCase, q, cache: PagedKV, params: MLAParams, table, state) -> float:
    """The largest relative error of three tokens of the first and of the last request, for three heads."""
    wide = lambda x: np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)  # noqa: E731
    worst, starts = 0.0, np.cumsum([0, *(n for n, _ in case.lengths)])
    heads = np.array([0, case.heads // 2, case.heads - 1])
    w_uk, w_uv = wide(params.w_uk[heads]), wide(params.w_uv[heads])
    for r in {0, len(case.lengths) - 1}:
        n, total = case.lengths[r]
        pages = jnp.asarray(table[r, : -(-total // PAGE)])
        kv_c, k_pe = (
            wide(pool[pages]).reshape(-1, width)[:total] * (1.0 if scale is None else scale)
            for pool, width, scale in ((cache.v, 512, params.kv_c_scale), (cache.k, 64, params.k_pe_scale))
        )
        for i in sorted({0, n // 3, n - 1}):
            t, seen = starts[r] + i, total - n + i + 1
            query = wide(q[t, heads])
            for h in range(3):
                x = kv_c[:seen] @ (w_uk[h].T @ query[h, :128]) + k_pe[:seen] @ query[h, 128:]
                p = np.exp((x - x.max()) * SPEC.scale)
                want = (p / p.sum()) @ kv_c[:seen] @ w_uv[h]
                got = wide(state.out[t, heads[h]])
                worst = max(worst, float(np.nan_to_num(np.linalg.norm(got - want) / np.linalg.norm(want), nan=np.inf)))
    return worst


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    parser = jobs.parser_of("mla_prefill", __doc__, seconds=90)
    parser.add_argument("--iterations", type=int, default=8)
    args = parser.parse_args(argv)

    def listed():
        for case in CASES:
            names = dict(case=case.name, backend="mla_pallas_gpu")
            if case.constants:
                names["variant"] = ",".join(f"{name}={value}" for name, value in case.constants)
            yield names, lambda c=case: measure(c, args.iterations)

    return int(jobs.run(listed(), args, records.provenance(), "mla_prefill") > 0)


if __name__ == "__main__":
    sys.exit(main())
