"""The latent attention kernel on a Hopper card: numbers against float64, then times beside mla_sdpa and FlashMLA.

    python -m benchmarks.gpu.mla_decode [--write | --out DIR] [--only TEXT] [--seconds 240] [--flashmla SCRIPT LIBRARY]
                                        [--parts check,time,several,write,variants,sdpa,tuned]

A case that fails is reported and the others go on. A case that takes longer than --stuck seconds ends the process, as a
kernel that waits for ever cannot be stopped otherwise: run it again with --only or other --parts. `us` is the launch
and the merge, without the work list; the row of variant "layer" is a whole MLAAttention.attend, projections included.
FlashMLA: a script that takes OUT.json LIBRARY and writes microseconds by case name.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.gpu import check, cupti, jobs
from benchmarks.gpu.sweep_cases import beside
from benchmarks.gpu.write import REPEATS, time_of
from jattn import CommonAttentionMetadata, MLAAttention, MLAParams, MLASpec, PagedKV, mla_cache_spec
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.gpu import mla_sm90
from pallas_kernels.gpu.mla_config import MlaKernelConfig, heads_of_unit
from pallas_kernels.gpu.mla_sm90 import latent_attention
from pallas_kernels.gpu.work_list import build_work_list

SCALE = 192**-0.5
BOUND, LSE_BOUND = 6e-3, 1e-4  # of a row's relative error; of the log-sum-exp
LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 700, 2000, 4096, 31, 1000, 320, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentCase:
    """A batch, (q_len, seq_len) of each request, over latent pages."""

    name: str
    lengths: tuple
    heads: int
    page: int = 64
    pads: int = 0  # padding tokens
    options: tuple = ()  # (name, value) pairs: fields of MlaKernelConfig

    @property
    def config(self) -> MlaKernelConfig:
        longest = max(n for n, _ in self.lengths)
        group = heads_of_unit(self.heads, longest)
        fields = dict(num_heads=self.heads, group=group, max_rows=group * longest, page_size=self.page)
        fields |= dict(dtype="float16") if "kv_dtype" in dict(self.options) else {}  # as MLAAttention does
        return MlaKernelConfig(**(fields | dict(logits=LogitRule(scale=SCALE)) | dict(self.options)))

    def read_bytes(self) -> int:
        """Every visible row once, queries and output once."""
        rows, tokens = sum(s for _, s in self.lengths), sum(n for n, _ in self.lengths)
        return rows * 576 * jnp.dtype(self.config.cache_dtype).itemsize + tokens * self.heads * (576 + 512) * 2

    def flops(self) -> int:
        pairs = sum(n * (s - n) + n * (n + 1) // 2 for n, s in self.lengths)
        return pairs * self.heads * 2 * (576 + 512)


def ragged(heads: int, q_len: int, page: int, **options) -> LatentCase:
    lengths = tuple((min(r % q_len + 1, max(s, 1)), s) for r, s in enumerate(LENGTHS))
    more = "".join(f"_{value}" for value in options.values())
    name = f"mla_ragged_h{heads}_q{q_len}_p{page}{more}"
    return LatentCase(
        name=name, lengths=lengths, heads=heads, page=page, pads=70 if q_len == 1 else 5, options=(*options.items(),)
    )


PAGES = (64, 16, 128)
CHECKED = [ragged(16, 1, 64), ragged(128, 1, 64)]
CHECKED += [ragged(h, q, PAGES[(i + q) % 3]) for q in (2, 4, 1, 3) for i, h in enumerate((8, 16, 32, 64, 128))]
CHECKED += [ragged(16, 1, 64, whole_rows=True), ragged(64, 8, 16), ragged(16, 2, 64, dtype="float16")]
E4M3 = (("kv_dtype", "float8_e4m3fn"),)
CHECKED_8BIT = [ragged(16, 1, 64, kv_dtype="float8_e4m3fn"), ragged(128, 1, 16, kv_dtype="float8_e4m3fn")]
CHECKED_8BIT += [ragged(h, q, PAGES[q % 3], kv_dtype="float8_e4m3fn") for h, q in ((8, 8), (32, 3), (64, 2), (16, 5))]
CHECKED_8BIT += [
    ragged(16, 1, 16, kv_dtype="float8_e5m2", whole_rows=True),
    ragged(128, 4, 128, kv_dtype="int8"),
    ragged(16, 4, 64, kv_dtype="int8", dtype="bfloat16"),
    ragged(8, 2, 128, kv_dtype="float8_e5m2"),
    ragged(4, 4, 16, kv_dtype="int8", whole_rows=True),
    ragged(16, 1, 64, kv_dtype="float8_e4m3fn", dtype="bfloat16"),
]
TIMED = [
    LatentCase(name="mla_dec_128x4k_h16", lengths=((1, 4096),) * 128, heads=16),
    LatentCase(name="mla_dec_32x8k_h128", lengths=((1, 8192),) * 32, heads=128),
    LatentCase(name="mla_dec_16x4k_h16", lengths=((1, 4096),) * 16, heads=16),
]
FEW = [  # one request in a step of four rows
    LatentCase(name=f"mla_dec_1x{keys}_h{heads}", lengths=((1, keys),), heads=heads, pads=3)
    for heads in (16, 128)
    for keys in (600, 8192)
]
SEVERAL = [  # new tokens of each request
    LatentCase(name=f"mla_dec_{b}x{k}k_h{heads}_q{n}", lengths=((n, 1024 * k),) * b, heads=heads)
    for b, k, heads in ((32, 8, 128), (128, 4, 16))
    for n in (2, 4)
]
RAGGED_LENGTHS = {
    "tiny": beside(0, 0, 256, 50, 800),
    "long_and_short": beside(2, 32000, 60, 100, 500),
    "one_long": beside(1, 64000, 30, 500, 1500),
    "law": tuple((1, int(n)) for n in np.exp(np.random.default_rng(1).uniform(np.log(100), np.log(30000), 64))),
}
RAGGED = [
    LatentCase(name=f"mla_dec_{name}_h{heads}", lengths=lengths, heads=heads)
    for name, lengths in RAGGED_LENGTHS.items()
    for heads in (16, 128)
]
TIMED_8BIT = [dataclasses.replace(case, name=f"{case.name}_fp8", options=E4M3) for case in TIMED]
VARIANTS = (dict(page=16), dict(page=128), dict(whole_rows=True))
TUNED = {  # variant -> constants of mla_sm90.py, and the cases whose kernel has them
    "registers 168,128,48": (dict(REGISTERS=(168, 128, 48)), TIMED[1:2]),
    "merge 2 chunks": (dict(MERGE=dict(in_flight=4, chunks=2)), TIMED[1:2]),
    "merge 8 parts": (dict(MERGE=dict(in_flight=8, chunks=2)), TIMED[1:2]),
    "merge by 16 CTAs": (dict(CTAS_OF_FEW=16), FEW),
}
LARGE = 30  # of a cache of 8 bits, the standard deviation of an integer


@dataclasses.dataclass
class Batch:
    """The kernel's arrays for a case."""

    q: jax.Array
    latents: jax.Array
    ropes: jax.Array | None
    table: np.ndarray
    starts: np.ndarray
    seqs: np.ndarray


def make_batch(case: LatentCase, poison: bool) -> Batch:
    """Random rows on permuted pages; with poison, NaN (int8: -128) where no token lives and garbage in the table."""
    config, rng = case.config, np.random.default_rng(0)
    seqs = np.array([s for _, s in case.lengths], np.int32)
    counts = -(-seqs // case.page)
    order, total = rng.permutation(int(counts.sum()) + 3), int(counts.sum()) + 3
    table = np.full((len(seqs), max(int(counts.max()), 1) + poison), 2**30 if poison else 0, np.int32)
    lives, used = np.zeros((total, case.page, 1), bool), 0
    for r, n in enumerate(counts):
        table[r, :n], used = order[used : used + n], used + n
        places = np.arange(n * case.page).reshape(n, case.page, 1)
        lives[table[r, :n]] = places < seqs[r]
    starts = np.cumsum([0, *(n for n, _ in case.lengths)]).astype(np.int32)
    keys, dtype = jax.random.split(jax.random.key(0)), jnp.dtype(config.cache_dtype)
    size, nowhere = (LARGE, -128) if dtype == jnp.int8 else (1, jnp.nan)
    q = jax.random.normal(keys[0], (int(starts[-1]) + case.pads, case.heads, 576), jnp.float32) / size
    q = q.astype(config.dtype)

    def random_rows(key, lives):
        rows = size * jax.random.normal(key, (total, case.page, 576), jnp.bfloat16)
        return (jnp.where(lives, rows, jnp.asarray(nowhere, jnp.bfloat16)) if poison else rows).astype(dtype)

    rows = jax.jit(random_rows)(keys[1], jnp.asarray(lives))
    latents, ropes = (rows, None) if config.whole_rows else (rows[..., :512], rows[..., 512:])
    return Batch(q, jax.block_until_ready(latents), ropes, table, starts, seqs)


def programs(case: LatentCase, batch: Batch):
    """(jitted kernel, its arguments, jitted planner, its arguments)."""
    config, tokens = case.config, batch.q.shape[0]
    plan = jax.jit(lambda starts, seqs: build_work_list(starts, seqs, tokens, config.list_of(len(case.lengths))))
    lengths = jnp.asarray(batch.starts), jnp.asarray(batch.seqs)
    attend = jax.jit(lambda *arrays: latent_attention(*arrays[:-1], config, arrays[-1]))
    work = jax.block_until_ready(plan(*lengths))
    q, factors = batch.q, None
    if config.is_decoded:  # powers of two: queries divided by them are exact
        factors = jnp.exp2((jnp.arange(tokens * case.heads) % 5 - 2).astype(jnp.float32)).reshape(tokens, case.heads)
        q = q / factors[..., None].astype(q.dtype)
    return attend, (q, batch.latents, batch.ropes, jnp.asarray(batch.table), work, factors), plan, lengths


def errors(case: LatentCase, batch: Batch, out, lse, requests) -> dict:
    """The largest relative error of a row, and of its lse, over these requests; padding must be (0, -inf)."""
    out, lse = np.asarray(out.astype(jnp.float32), np.float64), np.asarray(lse, np.float64)
    q, page = np.asarray(batch.q.astype(jnp.float32), np.float64), case.page
    relative = worst_lse = 0.0
    for r in requests:
        n, total = case.lengths[r]
        own = jnp.asarray(batch.table[r, : -(-total // page)])
        pools = [pool[own] for pool in (batch.latents, batch.ropes) if pool is not None]
        rows = np.asarray(jnp.concatenate(pools, axis=-1).astype(jnp.float32), np.float64).reshape(-1, 576)[:total]
        for i in range(n):
            t, seen = int(batch.starts[r]) + i, rows[: max(total - n + i + 1, 0)]
            if not len(seen):
                assert (out[t] == 0).all() and np.isneginf(lse[t]).all(), f"request {r} sees no key"
                continue
            x = q[t] @ seen.T * SCALE
            top = x.max(axis=1, keepdims=True)
            p = np.exp(x - top)
            want, want_lse = p / p.sum(axis=1, keepdims=True) @ seen[:, :512], (top[:, 0] + np.log(p.sum(axis=1)))
            error = np.linalg.norm(out[t] - want, axis=1) / np.linalg.norm(want, axis=1)
            relative = max(relative, float(np.nan_to_num(error, nan=np.inf).max()))
            worst_lse = max(worst_lse, float(np.nan_to_num(np.abs(lse[t] - want_lse), nan=np.inf).max()))
    pads = slice(int(batch.starts[-1]), None)
    clean = bool((out[pads] == 0).all() and np.isneginf(lse[pads]).all())
    return dict(rel_err=relative, lse_err=worst_lse, pads_ok=clean)


def tuned(case: LatentCase, constants: dict, iterations: int) -> dict:
    """measure with other constants of mla_sm90.py."""
    with mock.patch.multiple(mla_sm90, **constants):
        return measure(case, True, iterations)


def measure(case: LatentCase, timed: bool, iterations: int) -> dict:
    """One row: errors, then microseconds of the kernel and its merge; `ok` says whether to believe it."""
    batch = make_batch(case, poison=not timed)
    attend, args, plan, lengths = programs(case, batch)
    out, lse = jax.block_until_ready(attend(*args))
    few = range(len(case.lengths)) if not timed else (0, len(case.lengths) // 2, len(case.lengths) - 1)
    row = errors(case, batch, out, lse, few)
    row["same_bits"] = bool((np.asarray(attend(*args)[0]) == np.asarray(out)).all())
    row["ok"] = row["rel_err"] < BOUND and row["lse_err"] < LSE_BOUND and row["same_bits"] and row["pads_ok"]
    if timed:
        us, kernels = cupti.micros(attend, *args, iterations=iterations)
        row |= dict(us=us, parts=kernels, list_us=cupti.micros(plan, *lengths, iterations=iterations)[0])
        row |= dict(bytes=case.read_bytes(), flop=case.flops())
        row |= dict(tb_s=row["bytes"] / us / 1e6, tflop_s=row["flop"] / us / 1e6)
    return row


def layer(case: LatentCase, backend: str, iterations: int) -> dict:
    """Microseconds of MLAAttention.attend, projections of queries and output included."""
    spec = MLASpec(
        num_heads=case.heads, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, scale=SCALE
    )
    batch, tokens = make_batch(case, poison=False), len(case.lengths)
    mla = MLAAttention(spec, mla_cache_spec(spec, batch.latents.shape[0], case.page), backend)
    empty = jax.eval_shape(mla.empty_cache)
    cache = PagedKV(
        k=batch.ropes.reshape(empty.k.shape), v=batch.latents.reshape(empty.v.shape), k_token_scale=None,
        v_token_scale=None, spec=mla.cache_spec,
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(1), 3)
    normal = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16) * 0.05  # noqa: E731
    params = MLAParams(w_uk=normal(keys[0], case.heads, 128, 512), w_uv=normal(keys[1], case.heads, 512, 128))
    queries, totals = zip(*case.lengths, strict=True)
    m = mla.build(CommonAttentionMetadata.from_lengths(queries, totals, batch.table, case.page))
    attend = jax.jit(mla.forward_mqa)
    us, kernels = cupti.micros(
        attend, normal(keys[2], tokens, case.heads, 192), cache, m, params, iterations=iterations
    )
    most = sorted(kernels.items(), key=lambda item: -item[1])[:6]
    return dict(us=us, parts=dict(most), ok=True)


def write(dtype: str, tokens: int, iterations: int) -> dict:
    """The backend's write of latent rows beside XLA's: microseconds of both, and how many stored values differ."""
    spec = MLASpec(num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    eight = dtype != "bfloat16"
    cache_spec = mla_cache_spec(spec, 2048, 64, dtype=dtype, quant="per_tensor" if eight else "none")
    params = MLAParams(kv_c_scale=0.013, k_pe_scale=0.31) if eight else MLAParams()
    rng, rows = np.random.default_rng(0), []
    for i in range(REPEATS):
        keys = jax.random.split(jax.random.key(i))
        slots = rng.permutation(cache_spec.capacity_tokens)[:tokens].astype(np.int32)
        slots[0], slots[-1] = -1, cache_spec.capacity_tokens
        kv_c, k_pe = (jax.random.normal(k, (tokens, n), jnp.bfloat16) for k, n in zip(keys, (512, 64), strict=True))
        rows.append((kv_c, k_pe, jnp.asarray(slots)))
    found, cache = {}, MLAAttention(spec, cache_spec, "mla_sdpa").empty_cache(0.5)
    for backend in ("mla_pallas_gpu", "mla_sdpa"):
        impl = MLAAttention(spec, cache_spec, backend).impl

        def run(cache, kv_c, k_pe, slots, impl=impl):
            return impl.do_kv_cache_update(cache, kv_c, k_pe, argparse.Namespace(slot_mapping=slots), params)

        new = jax.jit(run)(cache, *rows[0])
        us, launches = time_of(run, cache, rows, iterations)
        found[backend] = dict(us=us, launches=launches, k=new.k, v=new.v)
    ours, xla = found.values()
    differ = sum(int((ours[n].astype(jnp.float32) != xla[n].astype(jnp.float32)).sum()) for n in "kv")
    ok = differ <= 1e-4 * tokens * 576 and bool((ours["k"] != cache.k).any())
    return dict(us=ours["us"], parts=ours["launches"], xla_us=xla["us"], differ=differ, ok=ok)


def flashmla(script: str, library: str) -> dict[str, float]:
    """Case name -> microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "times.json")
        subprocess.run([sys.executable, script, path, library], check=True, timeout=120)
        with open(path, encoding="utf-8") as file:
            return json.load(file)


def jobs_of(names: list[str], iterations: int, peer: dict[str, float]) -> Iterator[jobs.Job]:
    """The jobs of these parts, most important first."""
    ours = "mla_pallas_gpu"
    if "check" in names:
        for case in CHECKED[:2]:
            yield dict(case=case.name, backend=ours), lambda c=case: measure(c, False, iterations)
    if "time" in names:
        for case in (*TIMED, *FEW, *RAGGED):
            yield dict(case=case.name, backend=ours), lambda c=case: measure(c, True, iterations)
        for case in (*TIMED, *RAGGED):
            if case.name in peer:
                yield dict(case=case.name, backend="flashmla"), lambda c=case: dict(us=peer[c.name], ok=True)
    if "check" in names:
        for case in CHECKED_8BIT[:2]:
            yield dict(case=case.name, backend=ours), lambda c=case: measure(c, False, iterations)
    if "time" in names:
        for case in TIMED_8BIT:
            yield dict(case=case.name, backend=ours), lambda c=case: measure(c, True, iterations)
    if "tuned" in names:
        for variant, (constants, cases) in TUNED.items():
            for case in cases:
                label = dict(case=case.name, backend=ours, variant=variant)
                yield label, lambda c=case, k=constants: tuned(c, k, iterations)
    if "several" in names:
        for case in SEVERAL:
            yield dict(case=case.name, backend=ours), lambda c=case: measure(c, True, iterations)
    if "check" in names:
        for case in (*CHECKED_8BIT[2:], *CHECKED[2:]):
            yield dict(case=case.name, backend=ours), lambda c=case: measure(c, False, iterations)
    if "write" in names:
        for dtype, tokens in (("bfloat16", 8192), ("float8_e4m3fn", 8192), ("float8_e4m3fn", 128), ("int8", 8192)):
            label = dict(case=f"mla_write_{tokens}_{dtype}", backend=ours)
            yield label, lambda d=dtype, t=tokens: write(d, t, iterations)
    if "variants" in names:
        for fields in VARIANTS:
            for case in TIMED:
                text = ",".join(f"{name}={value}" for name, value in fields.items())
                names_of_row = dict(case=case.name, backend=ours, variant=text)
                yield names_of_row, lambda c=case, f=fields: measure(with_fields(c, f), True, iterations)
    if "sdpa" in names:
        for case in TIMED:
            for backend in (ours, "mla_sdpa"):
                names_of_row = dict(case=case.name, backend=backend, variant="layer")
                yield names_of_row, lambda c=case, b=backend: layer(c, b, iterations)


def with_fields(case: LatentCase, fields: dict) -> LatentCase:
    """The case with these fields of its config, or its page."""
    page = fields.get("page", case.page)
    options = tuple((name, value) for name, value in fields.items() if name != "page")
    return dataclasses.replace(case, page=page, options=options)


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    parser = jobs.parser_of("mla_decode", __doc__, seconds=240)
    parser.add_argument("--parts", default="check,time,several,write,variants,sdpa")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--flashmla", nargs=2, metavar=("SCRIPT", "LIBRARY"))
    args = parser.parse_args(argv)
    peer = cupti.attempt(lambda: flashmla(*args.flashmla)) if args.flashmla else {}
    names = args.parts.split(",")
    origin = records.provenance() | (check.ceilings() if "time" in names else {})
    print(origin, peer, flush=True)
    return int(jobs.run(jobs_of(names, args.iterations, peer), args, origin, "mla") > 0)


if __name__ == "__main__":
    sys.exit(main())
