"""Paged attention in C++ behind XLA's FFI, one set of kernels an ISA; see ops.py for what it computes."""
