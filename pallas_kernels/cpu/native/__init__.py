"""Paged attention in C++, called through XLA's FFI: one set of kernels for each ISA; see ops.py for what it computes."""
