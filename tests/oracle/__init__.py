"""The oracle (also called witness): attention in numpy float64, one request at a time. It imports nothing of jattn."""
