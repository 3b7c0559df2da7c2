"""Mosaic GPU kernels; a chip generation is a file suffix."""
