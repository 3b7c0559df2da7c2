"""The TPU kernel on a real TPU, beside what benchmarks.tpu.model says of it: `python -m benchmarks.tpu.measure`.

256 decodes of 4096 keys and two prompts of 2048, 32 query and 8 kv heads of 128, bf16, pages of 128. Some rows of the
output are compared with `sdpa` on the same device. A row says which statements its figures refute. Its least time of a
prompt is that of the whole prompt for each pair that is visible, which computes hidden pairs and masked parts, too.
"""

import argparse
import json
import statistics
import sys
import time

from benchmarks import records
from benchmarks.tpu import aot, bundles
from pallas_kernels.tpu.config import TpuKernelConfig

CASES = {"decode": ((1,) * 256, 4096), "prefill": ((2048,) * 2, 2048)}
"""(new tokens of each request, keys of each request)."""
CHECKED = 4  # requests of a decode whose output is compared
CALLS, ROUNDS = 20, 7
SLOW, FAST = 1.25, 0.98  # a measured time over the least one: beyond these a statement is refuted
TOLERANCE = 0.02  # of bf16 outputs


def pairs(lens: tuple[int, ...], keys: int) -> int:
    """Keys of a decode, or pairs of a query and a key that it sees, of all requests."""
    return sum(sum(range(keys - n + 1, keys + 1)) for n in lens)


def least_of(row: dict, keys: int, config: TpuKernelConfig) -> dict:
    """(ns, limit) for each key of a decode, or for each visible pair of a prompt of so many tokens, by a static row."""
    if row["case"] == "decode":
        return dict(ns=row["ns"], limit=row["limit"])
    pairs_of_part = config.chunk_rows / config.group * config.part_keys
    of_part = (row["milli_bundles"] * config.step_parts, row["part"], row["masked"])
    visible = bundles.prompt(keys, config, [x / 1e3 * pairs_of_part for x in of_part])["visible"]
    compute, memory = row["ns_bundles"] * visible / row["milli_bundles"], row["ns_memory"]
    return dict(ns=round(max(compute, memory), 5), limit="memory" if memory > compute else "bundles")


def refuted(measured_ns: float, least: dict | None, difference: float) -> list[str]:
    """What a time for each key or pair, and the largest difference from sdpa, refute."""
    found = []
    if difference > TOLERANCE:
        found.append(f"the kernel computes what sdpa computes: outputs differ by {difference:.3g}")
    if least is None:
        return [*found, "every generation has a static record: there is none for this one"]
    ratio = measured_ns / least["ns"]
    if ratio < FAST:
        found.append(f"the least time is a lower limit: measured {ratio:.2f} of it, so a clock or a rate is wrong")
    if ratio > SLOW:
        found.append(f"{least['limit']} alone is the limit: measured {ratio:.2f} times the least time")
    return found


def measure(case: str, generation: str, backend: str = "pallas_tpu") -> dict:
    """The row of one case."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jattn
    from jattn.backends.pallas_tpu import kernel_config

    lens, keys = CASES[case]
    columns = -(-keys // 128)
    spec = aot.layer_of(aot.DECODE)
    cache_spec = jattn.KVCacheSpec(num_blocks=len(lens) * columns, block_size=128, num_kv_heads=8, head_dim=128)
    table = np.random.default_rng(0).permutation(len(lens) * columns).reshape(len(lens), columns)
    meta = jattn.CommonAttentionMetadata.from_lengths(lens, [keys] * len(lens), table, 128)
    random = lambda seed, like: jax.random.normal(jax.random.key(seed), like.shape, like.dtype)
    cache = jax.jit(lambda: jax.tree.map(lambda x: random(1, x), jattn.empty_cache(cache_spec, storage="native")))()
    q = random(2, jnp.zeros((sum(lens), 32, 128), jnp.bfloat16))
    attn = jattn.PagedAttention(spec, cache_spec, backend=backend)
    plan = jax.jit(attn.build)(meta)
    attend = jax.jit(lambda q, cache, plan: attn.attend(q, cache, plan).out)
    out = jax.block_until_ready(attend(q, cache, plan))
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            last = attend(q, cache, plan)
        jax.block_until_ready(last)
        seconds.append((time.perf_counter() - begin) / CALLS)
    few = CHECKED if case == "decode" else 1
    part = jattn.CommonAttentionMetadata.from_lengths(lens[:few], [keys] * few, table[:few], 128)
    witness = jattn.PagedAttention(spec, cache_spec, backend="sdpa")
    expected = jax.jit(lambda q, cache: witness.attend(q, cache, witness.build(part)).out)(q[: sum(lens[:few])], cache)
    difference = float(jnp.abs(expected.astype(jnp.float32) - out[: len(expected)].astype(jnp.float32)).max())
    ns = statistics.median(seconds) / pairs(lens, keys) * 1e9
    known = records.newest(records.read(records.RESULTS / "tpu" / "static.jsonl"))
    static = next((row for row in known if (row["chip"], row["case"]) == (generation, case) and "ns" in row), None)
    config = kernel_config(spec, cache_spec, common=meta, chip=generation)
    least = None if static is None else least_of(static, keys, config)
    return dict(
        case=case, generation=generation, ms=round(statistics.median(seconds) * 1e3, 4), ns=round(ns, 5),
        least_ns=None if least is None else least["ns"], difference=difference,
        refutes=refuted(ns, least, difference),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measure, print and keep the rows; 2 without a TPU, 1 if an output is wrong."""
    from jattn import device
    from pallas_kernels.tpu.supports import generation_of

    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu.measure", description=__doc__.splitlines()[0])
    records.add_options(parser)
    args = parser.parse_args(argv)
    chip = device.detect()
    if chip.platform != "tpu":
        print(f"JAX's default device is {chip.platform}, not a TPU: nothing is measured")
        return 2
    wrong = 0
    for case in CASES:
        row = measure(case, generation_of(chip.generation)) | records.provenance()
        wrong += row["difference"] > TOLERANCE
        print(json.dumps(row), flush=True)
        records.write([row], "attention", records.folder_of(args))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
