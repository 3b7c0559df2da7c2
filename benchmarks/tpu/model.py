"""The least time of a TPU kernel by data sheets: its bundles over the clock, or its bytes over the memory's rate.

A core issues a bundle each cycle at most, and a page is copied by DMA while bundles run, so the larger of the two is a
lower limit. The bundles have those that start a DMA and wait for it; a wait costs more only if the memory is the limit,
which is the other figure. 32 query and 8 kv heads of 128 in bf16: 4096 bytes a key. A Pallas kernel without parallel
grid axes runs on one core of a v5p, which gets half of the memory's rate here.
"""

from benchmarks.tpu.limits import CHIPS

KEY_BYTES = 2 * 8 * 128 * 2  # of all kv heads
LATENT_BYTES = (512 + 128) * 2  # of a row of 512 + 64, whose ropes are padded to 128 lanes
LATENT_TILE_QUERIES = 4  # of 128 heads each
TILE_QUERIES = 128  # queries that share one pass over the keys, in our kernel
KERNELS = {"": "jattn", "mla_": "jattn, latent", "jax_": "JAX's kernel", "rpa3_": "RPA v3"}


def least(row: dict) -> dict:
    """Nanoseconds for a key of a decode, or for a pair of query and key that every row sees; and the limit."""
    chip = CHIPS[row["chip"]]
    latent = row["case"].startswith("mla_")
    moved = LATENT_BYTES if latent else KEY_BYTES
    if row["case"].endswith("decode"):
        bundles = row["bundles_per_key"]
    else:
        bundles = row["milli_bundles"] / 1e3
        own = LATENT_TILE_QUERIES if latent else TILE_QUERIES
        moved = row.get("key_bytes", moved) / row.get("tile_queries", row.get("queries", own))
    compute, memory = bundles / chip.clock * 1e9, moved / (chip.hbm / chip.cores) * 1e9
    return dict(
        ns_bundles=round(compute, 5), ns_memory=round(memory, 5), ns=round(max(compute, memory), 5),
        limit="memory" if memory > compute else "bundles",
    )  # fmt: skip


def table(rows: list[dict]) -> str:
    """The least times of all kernels side by side, one line for each chip and kind of batch."""
    found = {(row["chip"], row["case"]): row for row in rows}
    lines = [f"{'least ns':22}" + "".join(f"{name:>24}" for name in KERNELS.values())]
    for chip in dict.fromkeys(row["chip"] for row in rows):
        for kind, unit in (("decode", "a key"), ("prefill", "a pair")):
            cells = [_cell(found.get((chip, prefix + kind))) for prefix in KERNELS]
            lines.append(f"{chip + ' ' + kind + ', ' + unit:22}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def _cell(row: dict | None) -> str:
    if row is None:
        return "-"
    return "does not compile" if "error" in row else f"{row['ns']:.4f} by {row['limit']}"
