"""jattn: paged attention for JAX with functional metadata."""
