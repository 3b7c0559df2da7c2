"""A failed allocation is an error of that call, with the number of bytes, and the next call is right."""

import subprocess

import jax
import numpy as np
import pytest

from pallas_kernels.cpu.native import ops, toolchain
from tests.kernels.cpu.native_setup import needs_library
from tests.running import same_bits

LIMIT = 1 << 21
"""Larger allocations of the faulty library fail: see conftest.py."""


def attend(requests=1, queries=1, keys=8, heads=1, dim=8, threads=1):
    """Attention over packed keys, every request over the same ones."""
    rng = np.random.default_rng(dim)
    q = rng.standard_normal((requests * queries, heads, dim)).astype(np.float32)
    k, v = (rng.standard_normal((keys, 1, dim)).astype(np.float32) for _ in range(2))
    batch = ops.NativeBatch(
        query_start_loc=np.arange(requests + 1) * queries,
        seq_lens=np.full(requests, keys),
        kv_lens=np.full(requests, keys),
        kv_start=np.zeros(requests),
    )
    config = ops.NativeConfig(scale=0.5, kv_dtype="float32", out_dtype="float32", threads=threads)
    return jax.block_until_ready(ops.attend(config, q, k, v, batch))


TOO_MUCH = {
    "lengths": (dict(requests=200_000), 4 * (3 * 200_000 + 1)),
    "units of work": (dict(requests=30_000), None),  # the size depends on how the vector grows
    "scratch memory": (dict(dim=512), None),
    "partial results": (dict(requests=64, heads=16, keys=4096, dim=256), 4 * 64 * (2 * 16 * (256 + 2) + 1)),
}


@needs_library
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("wanted", TOO_MUCH)
def test_a_failing_allocation_is_that_calls_error_and_says_how_much(wanted, threads, faulty):
    sizes, count = TOO_MUCH[wanted]
    before = attend(threads=threads)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED: jattn_cpu_attend: ") as error:
        attend(**sizes, threads=threads)
    said = int(str(error.value).split("jattn_cpu_attend: cannot allocate ")[1].split(" bytes")[0])
    assert said > LIMIT and count in (None, said)
    assert same_bits(attend(threads=threads), before)


def test_cached_memory_is_bounded_and_an_arena_checks_its_end(tmp_path):
    """1 MiB stays for the next call, more than 64 MiB is freed, and of many callers one buffer stays."""
    try:
        compiler = toolchain.compiler()
    except toolchain.BuildError as error:
        pytest.skip(str(error))
    driver, program = toolchain.SOURCES.parents[3] / "tests/kernels/cpu/memory_driver.cc", tmp_path / "driver"
    flags = [*toolchain.BASE_FLAGS, "-pthread", f"-I{toolchain.SOURCES}"]
    subprocess.run([*compiler, *flags, str(driver), "-o", str(program)], check=True)
    found = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert found.split() == ["1", "1", "0", "1", "1", "1"]
