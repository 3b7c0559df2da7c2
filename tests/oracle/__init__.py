"""The witness: attention in numpy float64, one request at a time, sharing no code with what it judges."""
