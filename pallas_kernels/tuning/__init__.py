"""Measured tile sizes, one JSON file a chip: `python -m jattn bench --tune` writes it, gpu/tile_policy.py reads it."""
