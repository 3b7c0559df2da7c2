"""Checks and times the Hopper kernel on every case: one line and one row each.

    python -m benchmarks.gpu.check [--write | --out DIR] [--only NAME,...] [--no-check]

The reference is numpy float64 over sampled rows; unreferenced pages and page tails hold NaN.
"""

import argparse
import dataclasses
import functools
import time
import traceback

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks import name_lists, records
from benchmarks.gpu import cases, cupti
from jattn import device
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.token_ranges import token_ranges
from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.paged_attention_sm90 import ragged_paged_attention
from pallas_kernels.gpu.supports import COPY_ROWS
from pallas_kernels.gpu.tile_policy import default_config
from pallas_kernels.gpu.tile_policy_sm80 import warp_config
from pallas_kernels.gpu.work_list import build_work_list


def config_of(case, chip=None, processors=None, **extra) -> GpuKernelConfig:
    """The config that the backend would choose for this batch, changed by the options of the case and the call.

    chip: of a config of the warp-level kernel, for a GPU of so many processors. any_rows, among the options: as for a
    batch of unknown lengths, which pallas_gpu_invariant takes.
    """
    options = dict(case.options) | extra
    window = options.pop("window", None)
    mask = options.pop("mask", MaskRule(causal=True, left=-1 if window is None else window - 1))
    logits = LogitRule(
        scale=case.head_dim**-0.5,
        soft_cap=options.pop("soft_cap", None),
        has_alibi=options.pop("alibi", False),
        score_fn=options.pop("score_fn", None),
    )
    if chip is None and case.page % COPY_ROWS != 0:
        chip = "sm_90"
    config = functools.partial(warp_config, chip=chip, processors=processors)
    if chip is None:
        keys = -(-int(case.seq_lens.max()) // case.page) * case.page
        config = functools.partial(default_config, keys=keys, requests=len(case.lengths), card=device.card())
    longest = int(case.q_lens.max()) * (case.num_heads // case.num_kv_heads)
    return config(
        rows=None if options.pop("any_rows", False) else longest,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        page_size=case.page,
        kv_dtype=options.pop("kv_dtype", case.kv_dtype),
        mask=mask,
        logits=logits,
        **options,
    )


def make_inputs(case, config, seed=0, poison=True):
    """Random q, permuted pages; with poison, NaN wherever no token lives."""
    rng = np.random.default_rng(seed)
    q_lens, seqs = case.q_lens, case.seq_lens
    pages = -(-seqs // case.page)
    width = max(int(pages.max()), 1)
    total = int(pages.sum()) + 3
    ids = rng.permutation(total)
    reqs = len(q_lens) + case.pad_reqs
    table = np.full((reqs, width), 2**30 if poison else 0, np.int32)
    used = 0
    for r, n in enumerate(pages):
        table[r, :n] = ids[used : used + n]
        used += n
    starts = np.concatenate([[0], np.cumsum(np.concatenate([q_lens, np.zeros(case.pad_reqs, int)]))])
    tokens = int(starts[-1]) + case.pad_tokens
    keys = jax.random.split(jax.random.key(seed), 3)
    hnd = (total, case.num_kv_heads, case.page)
    shape = hnd if config.layout == "HND" else (total, case.page, case.num_kv_heads)
    kv_type = jnp.dtype(config.kv_dtype)

    def pool(key, dim):
        x = jax.random.normal(key, (*shape, dim), jnp.bfloat16)
        if kv_type == jnp.int8:
            return jnp.clip(jnp.round(x.astype(jnp.float32) * 40), -127, 127).astype(jnp.int8)
        return x.astype(kv_type)

    k, v = pool(keys[0], case.head_dim), pool(keys[1], case.v_head_dim)
    if poison and kv_type != jnp.int8:
        axes = (owners(case, table, total) >= 0)[..., None]
        axes = axes[:, None] if config.layout == "HND" else axes[:, :, None]
        k, v = (jnp.where(axes, x, jnp.array(jnp.nan, kv_type)) for x in (k, v))
    q = jax.random.normal(keys[2], (tokens, case.num_heads, case.head_dim), jnp.dtype(config.dtype))
    seq_pad = np.concatenate([seqs, np.zeros(case.pad_reqs, int)]).astype(np.int32)
    return q, k, v, jnp.asarray(table), jnp.asarray(starts, jnp.int32), jnp.asarray(seq_pad)


def owners(case, table, total: int):
    """i32[total, page]: the request whose token a slot holds, or -1."""
    owner = np.full((total, case.page), -1)
    for r, n in enumerate(case.seq_lens):
        for j in range(-(-n // case.page)):
            owner[table[r, j], : min(case.page, n - j * case.page)] = r
    return owner


def token_scales(case, config, table, total: int):
    """Scales of each stored row, f32 as the pools lie, NaN where no token lives; None where there are none.

    Keys' are near 1. Values' make rows of 1e-6 to 1e2 in even requests, and of less than 1e-6 in odd ones: float16
    could hold neither, so outputs of that type get 1e-3 to 10.
    """
    if not config.token_scales:
        return None
    rng, owner = np.random.default_rng(2), owners(case, np.asarray(table), total)
    owner = np.repeat(owner[:, None], case.num_kv_heads, 1)
    ranges = ((-2, 0), (-3, 1)) if config.dtype == "float16" else ((-8, -6), (-6, 2))
    tiny, mixed = (10.0 ** rng.uniform(*exponents, owner.shape) for exponents in ranges)
    both = rng.uniform(0.5, 1.5, owner.shape), np.where(owner % 2 == 1, tiny, mixed)
    both = (np.where(owner < 0, np.nan, x).astype(np.float32) for x in both)
    return tuple(jnp.asarray(x if config.layout == "HND" else np.swapaxes(x, 1, 2)) for x in both)


@dataclasses.dataclass(frozen=True)
class Reach:
    """What masks and biases depend on besides positions."""

    spans: list  # of each request: [(first, last)], of which the later one is among the new tokens
    bias: np.ndarray  # f32[16, 16] among new tokens, with some -inf off the diagonal

    @classmethod
    def of(cls, case) -> "Reach":
        bias = np.random.default_rng(3).normal(size=(16, 16)).astype(np.float32)
        bias[(np.abs(bias) > 1.2) & ~np.eye(16, dtype=bool)] = -np.inf
        lengths = [*case.lengths, *((0, 0),) * case.pad_reqs]
        spans = [[(s // 5, s // 5 + 40), (max(s - 150, s // 2), s - 3)] if s > 100 else [] for _, s in lengths]
        return cls(spans, bias)

    def of_tokens(self, case, num_tokens: int) -> np.ndarray:
        """i32[T, 2]: each token's own span, or (-1, -1)."""
        rows = np.full((num_tokens, 2), -1, np.int32)
        first = 0
        for (q_len, seq), spans in zip(case.lengths, self.spans, strict=False):
            for i in range(q_len):
                own = [span for span in spans if span[0] <= seq - q_len + i <= span[1]]
                rows[first + i] = own[0] if own else (-1, -1)
            first += q_len
        return rows


def _eight_bits(x):
    """float64 values rounded to float8_e4m3fn."""
    return np.asarray(np.clip(x, -448, 448), ml_dtypes.float8_e4m3fn).astype(np.float64)


def reference_row(case, config, host, req, i, head, rounds: bool = True):
    """float64 (out, lse) of one row, straight from the definition. rounds: as compute_dtype says, if it is given."""
    q, k, v, table, starts, seqs, slopes, sinks, scales, tokens, reach = host
    seq, page = int(seqs[req]), case.page
    q_len = int(starts[req + 1] - starts[req])
    pos = seq - q_len + i
    kv = np.arange(seq)
    mask, rule = config.mask, config.logits
    seen = np.ones(seq, bool)
    if mask.causal and (not config.per_request_causal or req % 2 == 0):
        seen &= kv <= pos
    if mask.left >= 0:
        seen &= kv >= pos - mask.left
    if mask.right >= 0:
        seen &= kv <= pos + mask.right
    if mask.chunk > 0:
        chunks_back = pos // mask.chunk - kv // mask.chunk
        seen &= (chunks_back >= 0) & (chunks_back <= mask.lookback)
    if mask.spans and (own := [span for span in reach.spans[req] if span[0] <= pos <= span[1]]):
        left = pos - mask.left if mask.clamp_spans else 0
        seen |= (kv >= max(own[0][0], left)) & (kv <= own[0][1])
    if mask.mask_fn is not None:
        seen &= np.asarray(mask.mask_fn(head, pos, kv))
    if not seen.any():
        return np.zeros(case.v_head_dim), -np.inf
    kv = kv[seen]
    kv_head = head // config.group
    blocks = table[req, kv // page]
    at = (blocks, kv_head, kv % page) if config.layout == "HND" else (blocks, kv % page, kv_head)
    keys, values = (np.asarray(x[tuple(map(jnp.asarray, at))].astype(jnp.float32), np.float64) for x in (k, v))
    if tokens is not None:
        keys, values = (x * np.asarray(y[at], np.float64)[:, None] for x, y in zip((keys, values), tokens, strict=True))
    row = np.asarray(q[int(starts[req]) + i, head].astype(jnp.float32), np.float64)
    rounds = rounds and config.compute_dtype is not None
    if rounds and row.any():
        power = 2.0 ** (7 - np.floor(np.log2(abs(row).max())))
        row = _eight_bits(row * power) / power
    x = keys @ row * rule.scale * scales[0]
    if rule.soft_cap:
        x = rule.soft_cap * np.tanh(x / rule.soft_cap)
    if rule.has_alibi:
        x = x + slopes[head] * (kv - pos)
    if config.qq_bias:
        j, size = kv - (seq - q_len), len(reach.bias)
        new = (j >= 0) & (j < size) & (i < size)
        x = x + np.where(new, reach.bias[min(i, size - 1), np.clip(j, 0, size - 1)], 0.0)
    if rule.score_fn is not None:
        x = rule.score_fn(x, head, pos, kv)
    if np.isneginf(x).all() and not config.has_sinks:
        return np.zeros(case.v_head_dim), -np.inf
    top = max(x.max(), sinks[head]) if config.has_sinks else x.max()
    p = np.exp(x - top)
    total = p.sum() + (np.exp(sinks[head] - top) if config.has_sinks else 0.0)
    if rounds:
        shift = np.ceil(x.max() * np.log2(np.e)) - 8
        p = _eight_bits(np.exp2(x * np.log2(np.e) - shift)) * np.exp2(shift - top * np.log2(np.e))
    return (p / total) @ values * scales[1], np.log(total) + top


def check(case, config, inputs, params, out, lse, samples, seed=0, rounds=True):
    """(largest |out - ref|, largest relative row error, largest |lse - ref|) over sampled rows; pads must be 0."""
    q, k, v, table, starts, seqs = inputs
    host = (q, k, v, np.asarray(table), np.asarray(starts), np.asarray(seqs), *params)
    rng = np.random.default_rng(seed)
    out, lse = np.asarray(out.astype(jnp.float32)), np.asarray(lse)
    rows = [(r, i) for r, (n, _) in enumerate(case.lengths) for i in range(n)]
    picks = [rows[j] for j in rng.choice(len(rows), min(samples, len(rows)), replace=False)]
    for r, (n, _) in enumerate(case.lengths):
        if n and len(case.lengths) < 20:
            picks += [(r, 0), (r, n - 1)]
    worst, relative, worst_lse = 0.0, 0.0, 0.0
    for r, i in picks:
        head = int(rng.integers(case.num_heads))
        want, want_lse = reference_row(case, config, host, r, i, head, rounds)
        t = int(starts[r]) + i
        err = np.abs(out[t, head] - want)
        worst = max(worst, np.nan_to_num(err.max(), nan=np.inf))
        scale = np.linalg.norm(want) + 1e-9
        relative = max(relative, np.nan_to_num(np.linalg.norm(out[t, head] - want) / scale, nan=np.inf))
        if np.isinf(want_lse):
            worst_lse = max(worst_lse, 0.0 if lse[t, head] == want_lse else np.inf)
        else:
            worst_lse = max(worst_lse, np.nan_to_num(abs(lse[t, head] - want_lse), nan=np.inf))
    pads = slice(int(starts[-1]), None)
    if not (np.all(out[pads] == 0) and np.all(np.isneginf(lse[pads]))):
        worst = np.inf
    if not np.isfinite(out).all():
        worst = np.inf
    return worst, relative, worst_lse


def run_case(case, args, **extra):
    config = config_of(case, **extra)
    inputs = make_inputs(case, config, poison=not args.no_check and case.name not in BIG)
    q, k, v, table, starts, seqs = inputs
    tokens = q.shape[0]
    rng = np.random.default_rng(1)
    slopes = rng.uniform(0.01, 0.5, case.num_heads).astype(np.float32)
    sinks = rng.normal(size=case.num_heads).astype(np.float32)
    scales = (0.5, 2.0) if config.quantised else (1.0, 1.0)
    causal = np.arange(len(seqs)) % 2 == 0 if config.per_request_causal else None
    reach = Reach.of(case)
    spans = jnp.asarray(reach.of_tokens(case, tokens))

    @jax.jit
    def plan(starts, seqs):
        rule = config.mask
        own = dict(ranges=token_ranges(starts, seqs, tokens, rule, causal, spans)) if rule.spans else {}
        return build_work_list(starts, seqs, tokens, config, causal, **own)

    kind = dict(k_scale=scales[0], v_scale=scales[1])
    kind |= dict(alibi_slopes=slopes) if config.logits.has_alibi else {}
    kind |= dict(sinks=sinks) if config.has_sinks else {}
    kind |= dict(qq_bias=reach.bias) if config.qq_bias else {}
    scale_pools = token_scales(case, config, table, k.shape[0])

    @jax.jit
    def attend(q, k, v, t, w, pools):
        own = {} if pools is None else dict(k_token_scale=pools[0], v_token_scale=pools[1])
        own |= dict(counters=jnp.zeros(config.workers, jnp.int32)) if config.merges_inside else {}
        return ragged_paged_attention(q, k, v, t, w, config, **kind, **own)

    work = jax.block_until_ready(plan(starts, seqs))
    out, lse = jax.block_until_ready(attend(q, k, v, table, work, scale_pools))
    row = dict(case=case.name, **{key: str(value) for key, value in extra.items()})
    if not args.no_check:
        pools = None if scale_pools is None else [np.asarray(x) for x in scale_pools]
        params = (slopes, sinks, scales, pools, reach)
        worst, relative, worst_lse = check(case, config, inputs, params, out, lse, args.samples)
        scale = abs(np.asarray(out, np.float32)).max()
        row["out_max"] = float(scale)
        if config.compute_dtype is not None:
            errors = check(case, config, inputs, params, out, lse, args.samples, rounds=False)
            row |= dict(exact_rel_err=float(errors[1]), exact_lse_err=float(errors[2]))
        again = jax.block_until_ready(attend(q, k, v, table, work, scale_pools))[0]
        row |= dict(max_err=float(worst), rel_err=float(relative), lse_err=float(worst_lse))
        row["same_bits"] = bool((np.asarray(again) == np.asarray(out)).all())
    if args.time:
        if (wait := getattr(args, "before_timing", None)) is not None:
            wait()
        with cupti.alone():
            row |= _timed(case, args, attend, (q, k, v, table, work, scale_pools), plan, (starts, seqs))
    return row


def _timed(case, args, attend, run, plan, batch) -> dict:
    """The columns of time."""
    us, parts = cupti.micros(attend, *run, iterations=args.iterations)
    row = dict(us=us, parts=parts, list_us=cupti.micros(plan, *batch, iterations=args.iterations)[0])
    row |= dict(bytes=case.read_bytes(), flop=case.flops())
    row |= dict(tb_s=row["bytes"] / us / 1e6, tflop_s=row["flop"] / us / 1e6)
    if case.name.startswith(("pre_", "chunk_")):
        row["sustained_us"] = cupti.sustained(attend, *run, us=us)
        row["sustained_tflop_s"] = row["flop"] / row["sustained_us"] / 1e6
    return row


BIG = {c.name for c in cases.TIMED}


def show(row):
    keys = ("max_err", "rel_err", "lse_err", "us", "list_us", "tb_s", "tflop_s")
    cells = [f"{k}={row[k]:.4g}" for k in keys if k in row]
    extra = [f"{k}={row[k]}" for k in row if k not in keys and k not in ("case", "bytes", "flop", "parts")]
    print(f"{row['case']:24s}", *cells, *extra, row.get("parts", ""), flush=True)


def ceilings():
    """Read, copy and matrix-product rates of this card, measured in this run."""
    x = jax.random.normal(jax.random.key(0), (1 << 30,), jnp.float32)
    m = jax.random.normal(jax.random.key(1), (8192, 8192), jnp.bfloat16)
    time_of = lambda f, *a: cupti.micros(jax.jit(f), *a, iterations=5, pick=min)[0] * 1e-6
    product = jax.jit(lambda a: a @ a)
    busy = cupti.sustained(product, m, us=cupti.micros(product, m, iterations=3)[0]) * 1e-6
    return dict(
        ceiling_read_tb_s=x.nbytes / time_of(jnp.sum, x) / 1e12,
        ceiling_copy_tb_s=2 * x.nbytes / time_of(lambda a: a + 1, x) / 1e12,
        ceiling_mm_tflop_s=2 * 8192**3 / time_of(lambda a: a @ a, m) / 1e12,
        sustained_mm_tflop_s=2 * 8192**3 / busy / 1e12,
    )


def main(argv: list[str] | None = None) -> None:
    """Check and time the cases, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.check", description=__doc__.splitlines()[0])
    records.add_options(parser)
    parser.add_argument("--only", default="", help="beginnings of case names, separated by commas")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", dest="time", action="store_false")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--set", default="", help="python dict of Config fields for every case")
    args = parser.parse_args(argv)
    every = [case.name for case in cases.CHECKED + cases.TIMED]
    wanted = name_lists.matching(parser, "--only", args.only, every, "case", lambda part, name: name.startswith(part))
    extra = eval(args.set) if args.set else {}
    base = dict(backend="pallas_gpu") | records.provenance()
    if args.time:
        base |= ceilings()
    print(base, flush=True)
    for case in cases.CHECKED + cases.TIMED:
        if case.name not in wanted:
            continue
        begin = time.time()
        try:
            row = run_case(case, args, **extra)
        except Exception as error:  # a refused or broken case must not hide the others
            print(case.name, "FAILED", type(error).__name__, str(error)[:300], flush=True)
            traceback.print_exc(limit=-3)
            continue
        row["wall_s"] = round(time.time() - begin, 1)
        show(row)
        if extra:  # not the default: a row of its own
            row["variant"] = ",".join(f"{name}={value}" for name, value in extra.items())
        records.write([base | row], "attention" if args.time else "correctness", records.folder_of(args))


if __name__ == "__main__":
    main()
