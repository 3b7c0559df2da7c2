"""Tile sizes, one JSON file a chip, read by gpu/tile_policy.py and tpu/tile_policy.py.

Those of GPUs are measured by `python -m jattn bench --tune`, those of TPUs counted by `benchmarks.tpu.sweep --tables`.
"""

import pathlib


def table_path(chip: str) -> pathlib.Path:
    """The file of a chip's or card's table."""
    return pathlib.Path(__file__).with_name(f"{chip}.json")
