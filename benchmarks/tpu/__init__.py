"""TPU kernels without a TPU: compiled by libtpu and counted. Static figures, never times."""
