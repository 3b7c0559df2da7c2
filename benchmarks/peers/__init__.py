"""Kernels of other projects, called as their own library calls them."""
