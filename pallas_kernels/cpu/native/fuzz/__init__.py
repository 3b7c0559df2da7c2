"""Random batches through the native kernels, outside Python and JAX: see __main__."""
