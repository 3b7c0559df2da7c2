"""On 1, 3, 17 and 33 threads, on every instruction set that this machine runs, the answer is right and the same."""

import os
import pathlib
import subprocess
import sys

from tests.kernels.cpu.native_setup import needs_library

THREADS = (1, 3, 17, 33)
IN_A_POOL_OF_33 = f"""
import os, sys
import numpy as np
from pallas_kernels.cpu.native import library, ops
from tests.oracle import attention
from tests.tolerances import rounded

rng, heads, kv_heads, dim, threads = np.random.default_rng(0), 6, 2, 40, {THREADS}
queries = [1] * 40 + [7, 0, 90, 1]                      # decodes, a few rows, none, several tiles, splits
lengths = [*rng.integers(1, 70, 40), 9, 5, 130, 4300]
keys = np.array(lengths, np.int32)
for isa in library.status().isas:
    for dtype, limit in (("float32", 3e-6), ("bfloat16", 2**-7)):
        draw = lambda n, h: rounded(rng.standard_normal((n, h, dim)), dtype)
        q, k, v = draw(sum(queries), heads), draw(sum(lengths), kv_heads), draw(sum(lengths), kv_heads)
        starts = np.cumsum(keys) - keys
        batch = ops.NativeBatch(query_start_loc=np.cumsum([0, *queries]), seq_lens=keys, kv_lens=keys, kv_start=starts,
                          causal=np.ones(len(keys)))
        answers = []
        for count in threads:
            config = ops.NativeConfig(scale=0.2, kv_dtype=dtype, out_dtype=dtype, isa=isa, threads=count)
            out, lse = ops.attend(config, *(np.asarray(x, dtype=ops.jnp.dtype(dtype)) for x in (q, k, v)), batch)
            answers.append((np.asarray(out), np.asarray(lse)))
        parts = lambda x: [x[a : a + n] for a, n in zip(starts, lengths)]
        out, lse = attention.ragged(q, parts(k), parts(v), queries, scale=0.2)
        assert np.abs(answers[0][0].astype(np.float64) - out).max() < limit, (isa, dtype)
        assert np.abs(answers[0][1] - lse).max() < (2e-5 if dtype == "float32" else 1e-2), (isa, dtype)
        for other in answers[1:]:
            assert all(a.tobytes() == b.tobytes() for a, b in zip(answers[0], other)), (isa, dtype)

new = rng.standard_normal((400, kv_heads, dim)).astype(np.float32)
slots = np.argsort(rng.random(400)).astype(np.int32) - 3  # scattered as by a scheduler; three are outside the pool
slots = (slots, np.sort(slots))
for order in slots:
    wanted = np.zeros((400, kv_heads, dim), np.float32)
    wanted[order[order >= 0]] = new[order >= 0]
    for isa in library.status().isas:
        for count in threads:
            pools = tuple(ops.jnp.zeros((100, kv_heads, 4, dim)) for _ in range(2))
            pool = np.asarray(ops.write(new, new, order, (*pools, None, None), kv_dtype="float32", heads_first=True,
                                        isa=isa, threads=count)[0])
            np.testing.assert_array_equal(pool.transpose(0, 2, 1, 3).reshape(400, kv_heads, dim), wanted)

one = ops.NativeBatch(query_start_loc=np.array([0, 1]), seq_lens=np.ones(1), kv_lens=np.ones(1), kv_start=np.zeros(1))
for count in threads:  # more threads than rows
    config = ops.NativeConfig(scale=0.2, kv_dtype="float32", out_dtype="float32", threads=count)
    assert (np.asarray(ops.attend(config, new[:1], new[:1], new[:1], one)[0]) == new[:1]).all()
print(len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 33)
"""


@needs_library
def test_r42_every_number_of_threads_gives_the_same_right_answer():
    environment = {**os.environ, "NPROC": "33", "JAX_PLATFORMS": "cpu"}  # the size of XLA's pool
    root = pathlib.Path(__file__).parents[3]
    command = [sys.executable, "-c", IN_A_POOL_OF_33]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 33, "XLA's pool has fewer than 33 threads"
