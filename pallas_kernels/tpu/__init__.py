"""Mosaic TPU kernels. Nothing here was ever run on a TPU: they are interpreted on CPU and compiled ahead of time."""
