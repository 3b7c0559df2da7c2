"""Tile sizes as measured: one file a chip, written by `python -m jattn bench --tune`, read when a kernel is made."""

import functools
import json
import pathlib

FILES = {"sm_90": "nvidia_h200.json"}
KEYS = ("head_dim", "v_head_dim", "kv_dtype", "kind")
CHOSEN = ("block_kv", "stages")


@functools.cache
def table(generation: str = "sm_90") -> dict[tuple, dict[str, int]]:
    """(head_dim, v_head_dim, kv_dtype, kind) -> block_kv and stages."""
    path = pathlib.Path(__file__).with_name(FILES[generation])
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {tuple(row[key] for key in KEYS): {name: row[name] for name in CHOSEN} for row in rows}


def tiles(**shape) -> dict[str, int]:
    """What was measured best for this shape; nothing where nobody measured it.

    kind: "long" (prefill and mixed), "few" (decode) or "narrow" (decode of an 8-bit cache by warps).
    """
    return table().get(tuple(shape[key] for key in KEYS), {})
