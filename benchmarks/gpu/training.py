"""Value and gradient of jattn.attention on a Hopper card, beside cuDNN through JAX.

    python -m benchmarks.gpu.training [--write | --out DIR] [--seconds 120] [--only TEXT]

A row: microseconds of forward and backward together (`us`), of cuDNN alone on the same arrays (`peer_us`), and the
errors of out, dq, dk and dv against float32 attention of the same bf16 inputs. An error is that of a row (a token and
head), relative to the row's length; the first EARLY rows of a request, some of which are 0, are relative to the longest
row. `naive`: the same errors of attention in bf16 without a kernel, which set the bound. A case in deterministic mode
is compiled with XLA's option, the peer too, and must give the same bits twice.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.gpu import cupti, jobs

EARLY = 32
WITNESS_TOKENS = 8192
RAGGED = (1000, 17, 513, 2048, 1, 300, 129, 64, 777, 1500)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Lengths of the requests, padded to `tokens`; traced: the program does not know the lengths,
    and only where all_new that no key was computed before."""

    lens: tuple[int, ...]
    tokens: int | None = None
    traced: bool = False
    all_new: bool = True
    deterministic: bool = False
    options: dict = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.tokens or sum(self.lens)

    @property
    def compiler_options(self) -> dict[str, bool]:
        return {"xla_gpu_deterministic_ops": True} if self.deterministic else {}

    def spec(self) -> jattn.AttentionSpec:
        return jattn.AttentionSpec(**dict(num_heads=32, num_kv_heads=8, head_dim=128) | self.options)

    def batch(self) -> jattn.CommonAttentionMetadata:
        batch = jattn.CommonAttentionMetadata.from_lengths(self.lens, self.lens, None, 16, num_tokens=self.total)
        return batch if self.all_new else batch.replace(is_all_new=False)

    def arrays(self) -> list[jax.Array]:
        """q, k, v and dout; rows of padding are NaN."""
        spec, keys = self.spec(), jax.random.split(jax.random.key(0), 4)
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, spec.num_heads)
        pad = (jnp.arange(self.total) >= sum(self.lens))[:, None, None]
        draw = lambda key, heads: jax.random.normal(key, (self.total, heads, spec.head_dim), jnp.bfloat16)  # noqa: E731
        return [jnp.where(pad, jnp.nan, draw(*pair)) for pair in zip(keys, heads, strict=True)]


WINDOW = dict(sliding_window=256)
CASES = {
    "train_1x8192": Case(lens=(8192,)),
    "train_4x2048": Case(lens=(2048,) * 4),
    "train_ragged10": Case(lens=RAGGED, tokens=6400, traced=True),
    "train_4x2048_traced": Case(lens=(2048,) * 4, traced=True),
    "train_1x8192_traced": Case(lens=(8192,), traced=True),
    "train_ragged10_odd": Case(lens=RAGGED, traced=True),
    "train_ragged10_window256": Case(lens=RAGGED, tokens=6400, traced=True, options=WINDOW),
    "train_4x2048_d64": Case(lens=(2048,) * 4, options=dict(head_dim=64)),
    "train_4x2048_d256": Case(lens=(2048,) * 4, options=dict(head_dim=256, num_heads=16, num_kv_heads=4)),
    "train_1x8192_deterministic": Case(lens=(8192,), deterministic=True),
    "train_4x2048_deterministic": Case(lens=(2048,) * 4, deterministic=True),
    "train_ragged10_deterministic": Case(lens=RAGGED, tokens=6400, traced=True, deterministic=True),
    "train_4x2048_unknown": Case(lens=(2048,) * 4, traced=True, all_new=False),
}


def both_ways(attend, q, k, v, dout) -> tuple:
    """(out, dq, dk, dv)"""
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(dout.astype(out.dtype))


def ours(case: Case):
    """A jitted function of (q, k, v, dout, meta); the last has no effect unless it is traced."""
    spec, known = case.spec(), case.batch()

    def step(*arrays_and_meta):
        *arrays, meta = arrays_and_meta if case.traced else (*arrays_and_meta[:-1], known)
        return both_ways(lambda q, k, v: jattn.attention(q, k, v, meta, spec, backend="pallas_gpu").out, *arrays)

    return jax.jit(step, compiler_options=case.compiler_options)


def peer(case: Case):
    """The same by cuDNN through JAX: equal lengths as a dense batch, others as segments that the program knows."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    spec, lens = case.spec(), np.array(case.lens, np.int32)
    window = spec.window[0] + 1 if spec.sliding_window else None
    options = dict(scale=spec.scale, mask_type=cudnn.MaskType.CAUSAL, sliding_window_length=window)
    rows = len(lens)
    if len(set(case.lens)) > 1:
        starts = np.append(0, np.cumsum(lens)).astype(np.int32)
        seqlen, offsets = lens[None], starts[None]
        options |= dict(
            mask_type=cudnn.MaskType.PADDING_CAUSAL, q_seqlen=seqlen, kv_seqlen=seqlen, q_offsets=offsets,
            kv_offsets=offsets,
        )  # fmt: skip
        rows = 1

    def attend(q, k, v):
        q, k, v = (x.reshape(rows, -1, *x.shape[1:]) for x in (q, k, v))
        return cudnn.dot_product_attention(q, k, v, **jax.tree.map(_array, options)).reshape(-1, *q.shape[2:])

    return jax.jit(functools.partial(both_ways, attend), compiler_options=case.compiler_options)


def _array(x):
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


@functools.partial(jax.jit, static_argnums=0)
def plain(scale: float, window: int, request, q, k, v, dout):
    """(out, dq, dk, dv) of one kv head, q [T G D], without a kernel; request i32[T], -1: padding."""
    token = jnp.arange(request.shape[0])
    distance = token[:, None] - token[None, :]
    mask = (request[:, None] == request[None, :]) & (distance >= 0) & (distance < window) & (request >= 0)[:, None]

    def attend(q, k, v):
        logits = jnp.einsum("tgd,sd->gts", q, k, preferred_element_type=jnp.float32, precision="highest") * scale
        weights = jax.nn.softmax(jnp.where(mask, logits, -1e30)).astype(q.dtype)
        return jnp.einsum("gts,sd->tgd", weights, v, precision="highest")

    live = (request >= 0)[:, None, None]
    q, k, v, dout = (jnp.where(live if x.ndim == 3 else live[..., 0], x, 0) for x in (q, k, v, dout))
    return both_ways(attend, q, k, v, dout)


def errors(case: Case, got: tuple, kv_head: int, inputs: list[jax.Array], request: np.ndarray) -> dict:
    """{"out": {"ours": (largest error of late rows, of early rows), "naive": ...}, ...} of one kv head.

    `plain` is compiled for one number of tokens.
    """
    spec, group = case.spec(), case.spec().group_size
    of_head = lambda x: (
        x[:, kv_head * group : (kv_head + 1) * group] if x.shape[1] > spec.num_kv_heads else x[:, kv_head]
    )  # noqa: E501, E731
    window = spec.window[0] + 1 if spec.sliding_window else 2**30
    more = max(WITNESS_TOKENS - case.total, 0)
    request = np.pad(request, (0, more), constant_values=-1)
    cut = [jnp.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1)) for x in map(of_head, inputs)]
    want = plain(spec.scale, window, request, *(x.astype(jnp.float32) for x in cut))
    naive = plain(spec.scale, window, request, *cut)
    first = np.concatenate([np.arange(n) < EARLY for n in case.lens])
    live = sum(case.lens)
    found = {}
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), got, naive, want, strict=True):
        a, b, c = (np.asarray(x.astype(jnp.float32), np.float64).reshape(x.shape[0], -1, spec.head_dim)[:live]
                   for x in (of_head(a), b, c))  # fmt: skip
        size = np.linalg.norm(c, axis=-1)
        rows = {"ours": np.linalg.norm(a - c, axis=-1), "naive": np.linalg.norm(b - c, axis=-1)}
        found[name] = {
            who: (float((e / np.maximum(size, 1e-30))[~first].max(initial=0)), float(e[first].max() / size.max()))
            for who, e in rows.items()
        }
    return found


def measure(case: Case) -> dict:
    """Errors, then microseconds."""
    step, arrays = ours(case), case.arrays()
    args = (*arrays, jax.tree.map(jnp.asarray, case.batch()))
    begin = time.time()
    got = jax.block_until_ready(step(*args))
    compile_s = time.time() - begin
    lens, live = case.lens, sum(case.lens)
    request = np.concatenate([np.repeat(np.arange(len(lens)), lens), np.full(case.total - live, -1)]).astype(np.int32)
    last = case.spec().num_kv_heads - 1
    row = dict(compile_s=round(compile_s, 1), errors={}, ok=True)
    for kv_head in (0, last):
        row["errors"][kv_head] = found = errors(case, got, kv_head, arrays, request)
        for name, whose in found.items():
            print(f"      kv head {kv_head} {name:4}", *(f"{k} {a:.4f} {b:.4f}" for k, (a, b) in whose.items()))
            row["ok"] &= all(a <= 2 * b + 5e-3 for a, b in zip(whose["ours"], whose["naive"], strict=True))
    row["rel_err"] = max(e["ours"][0] for head in row["errors"].values() for e in head.values())
    row["zeros"] = all(bool(jnp.all(x[live:] == 0)) for x in got)
    row["same_bits"] = all(bool(jnp.array_equal(a, b)) for a, b in zip(got, step(*args), strict=True))
    row["ok"] = bool(row["ok"] and row["zeros"] and (row["same_bits"] or not case.deterministic))
    print("      same bits:", row["same_bits"], flush=True)
    row["us"], row["parts"] = cupti.micros(step, *args)
    print("      parts", row["parts"], flush=True)
    row["wall_us"] = _wall(step, args)
    if case.total % 2 == 0:
        by_cudnn = peer(case)
        row["peer_us"], parts = cupti.micros(by_cudnn, *arrays)
        row["over_peer"], row["peer_wall_us"] = row["us"] / row["peer_us"], _wall(by_cudnn, arrays)
        print("      peer ", parts, flush=True)
        print(f"      {row['us']:.0f} us (wall {row['wall_us']:.0f}), cuDNN alone {row['peer_us']:.0f} us "
              f"(wall {row['peer_wall_us']:.0f}): {row['over_peer']:.3f}", flush=True)  # fmt: skip
    return row


def _wall(step, arrays, count: int = 10) -> float:
    """Microseconds a call by the clock, of several that follow each other without waiting."""
    jax.block_until_ready(step(*arrays))
    begin = time.perf_counter()
    for _ in range(count):
        out = step(*arrays)
    jax.block_until_ready(out)
    return (time.perf_counter() - begin) / count * 1e6


def jobs_of() -> Iterator[jobs.Job]:
    """The jobs, most important first."""
    for name, case in CASES.items():
        yield dict(case=name, backend="pallas_gpu"), lambda case=case: measure(case)


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    return jobs.main("training", __doc__, jobs_of, 120, argv)


if __name__ == "__main__":
    sys.exit(main())
