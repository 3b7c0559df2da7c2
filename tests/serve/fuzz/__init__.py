"""A fuzzer of the server: `python -m tests.serve.fuzz --seconds 60 --seed 0`."""
