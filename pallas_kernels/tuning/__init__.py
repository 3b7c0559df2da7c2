"""Tile sizes, one JSON file a chip, read by gpu/tile_policy.py and tpu/tile_policy.py.

Those of GPUs are measured by `python -m jattn bench --tune`, those of TPUs counted by `benchmarks.tpu.sweep --tables`.
"""
