"""Paged attention in C++, called through XLA's FFI: one set of kernels for each ISA; ops.py has the calls."""
