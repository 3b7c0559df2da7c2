"""Decodes whose requests share a long prefix, on a Hopper card: keys in levels beside the flat batch.

    python -m benchmarks.gpu.shared_prefix [--write | --out DIR] [--seconds 90] [--only TEXT]

Every case is first checked against float64. `us`: all launches of the levels and their merge; `flat_us`: the same batch
without levels, in the same run; `plan_us`, `flat_plan_us`: building the plan, once a step for all layers. `over_flat`:
flat_us / us.

Expected on an H200: 256 requests with 32k shared and 256 own tokens 310 us, of which 230 are the shared keys at 600
TFLOP/s and 65 the own ones at 4 TB/s; the flat batch at least 3400, as each 64 rows of a product hold 4 queries.
"""

import dataclasses
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.gpu import cupti, jobs

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
BOUND, LSE_BOUND = 6e-3, 1e-4  # of a row's relative error; of the log-sum-exp


@dataclasses.dataclass(frozen=True)
class Case:
    """`rows` requests of one new token: `shared` tokens in common, and `own` ones each."""

    rows: int
    shared: int
    own: int
    kv_dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        eight = "" if self.kv_dtype == "bfloat16" else "_fp8"
        return f"shared_{self.rows}x{self.shared}+{self.own}{eight}"


CASES = (
    Case(256, 32768, 256),
    Case(64, 8192, 512),
    Case(32, 2048, 256),
    Case(16, 1024, 1024),
    Case(8, 4096, 256),
    Case(16, 2048, 128),
    Case(32, 1024, 128),
    Case(8, 512, 128),
    Case(128, 512, 128),
    Case(256, 2048, 1024),
    Case(64, 8192, 512, "float8_e4m3fn"),
)


def setting(case: Case):
    """(attn, q, cache, meta, params): random keys on permuted pages; garbage in unused columns of the table."""
    rng = np.random.default_rng(0)
    common, own = case.shared // PAGE, -(-case.own // PAGE)
    blocks = common + case.rows * own + 3
    free = rng.permutation(blocks)
    mine = free[common : common + case.rows * own].reshape(case.rows, own)
    table = np.concatenate([np.broadcast_to(free[:common], (case.rows, common)), mine], axis=1)
    table = np.pad(table, ((0, 0), (0, 1)), constant_values=2**30).astype(np.int32)
    quant = "none" if case.kv_dtype == "bfloat16" else "per_tensor"
    cache_spec = jattn.KVCacheSpec(
        num_blocks=blocks, block_size=PAGE, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=case.kv_dtype, quant=quant
    )
    spec = jattn.AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    attn = jattn.PagedAttention(spec, cache_spec, "pallas_gpu", dtype="bfloat16")
    empty = jattn.empty_cache(cache_spec)
    draw = jax.jit(lambda key, pool: jax.random.normal(key, pool.shape, jnp.bfloat16).astype(pool.dtype))
    keys = jax.random.split(jax.random.key(0), 3)
    cache = dataclasses.replace(empty, k=draw(keys[0], empty.k), v=draw(keys[1], empty.v))
    lens = [1] * case.rows, [case.shared + case.own] * case.rows
    meta = jattn.CommonAttentionMetadata.from_lengths(*lens, table, PAGE)
    q = jax.random.normal(keys[2], (case.rows, HEADS, DIM), jnp.bfloat16)
    return attn, q, cache, jax.tree.map(jnp.asarray, meta), jattn.AttentionParams()


def errors(case: Case, q, cache, meta, state) -> tuple[float, float]:
    """(largest relative error of a row, of its lse), over the first, a middle and the last request."""
    rel = far = 0.0
    pools = [pool if cache.spec.physical_layout == "NHD" else pool.swapaxes(1, 2) for pool in (cache.k, cache.v)]
    for r in (0, case.rows // 2, case.rows - 1):
        total = int(meta.seq_lens[r])
        pages = meta.block_table[r, : -(-total // PAGE)]
        k, v = (np.asarray(pool[pages].astype(jnp.float32), np.float64).reshape(-1, KV_HEADS, DIM)[:total]
                for pool in pools)  # fmt: skip
        rows = np.asarray(q[r].astype(jnp.float32), np.float64).reshape(KV_HEADS, -1, DIM)
        logits = np.einsum("kgd,skd->kgs", rows, k) * DIM**-0.5
        top = logits.max(-1, keepdims=True)
        p = np.exp(logits - top)
        want = np.einsum("kgs,skd->kgd", p / p.sum(-1, keepdims=True), v).reshape(HEADS, DIM)
        lse = (top[..., 0] + np.log(p.sum(-1))).reshape(HEADS)
        out = np.asarray(state.out[r].astype(jnp.float32), np.float64)
        error = np.linalg.norm(out - want, axis=-1) / np.linalg.norm(want, axis=-1)
        rel = max(rel, float(np.nan_to_num(error, nan=np.inf).max()))
        far = max(far, float(np.nan_to_num(np.abs(np.asarray(state.lse[r]) - lse), nan=np.inf).max()))
    return rel, far


def measure(case: Case) -> dict:
    """Errors, then microseconds with and without levels."""
    attn, q, cache, meta, params = setting(case)
    row, attend = {}, jax.jit(attn.attend)
    for name, prefix in (("", case.shared), ("flat_", 0)):
        build = jax.jit(lambda meta, prefix=prefix: attn.build(meta, common_prefix_len=prefix))
        plan = jax.block_until_ready(build(meta))
        state = jax.block_until_ready(attend(q, cache, plan, params))
        rel, far = errors(case, q, cache, meta, state)
        row["ok"] = row.get("ok", True) and rel < BOUND and far < LSE_BOUND
        row |= {f"{name}rel_err": rel, f"{name}lse_err": far}
        row[f"{name}us"], parts = cupti.micros(attend, q, cache, plan, params)
        row[f"{name}plan_us"], _ = cupti.micros(build, meta)
        print("     ", name or "levels", parts, flush=True)
    row["over_flat"] = row["flat_us"] / row["us"]
    print(f"      {case.name}: levels {row['us']:.1f} us (plan {row['plan_us']:.1f}), flat {row['flat_us']:.1f} "
          f"(plan {row['flat_plan_us']:.1f}): {row['over_flat']:.2f}x", flush=True)  # fmt: skip
    return row


def jobs_of() -> Iterator[jobs.Job]:
    """The jobs, most important first."""
    for case in CASES:
        yield dict(case=case.name, backend="pallas_gpu"), lambda case=case: measure(case)


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    return jobs.main("shared_prefix", __doc__, jobs_of, 90, argv)


if __name__ == "__main__":
    sys.exit(main())
