"""DeviceKind: the published figures of a device, by which a plan is computed for devices that are not here."""

import dataclasses
import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jattn.errors.arguments import short


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """One device as JAX counts them."""

    name: str
    platform: str  # "cpu", "gpu" or "tpu"
    memory: float  # bytes
    bandwidth: float  # bytes/s of reading that memory
    peak: float  # FLOP/s of products of bfloat16, without sparsity
    link: float  # bytes/s in one direction, over all links

    @property
    def memory_fraction(self) -> float:
        """The share of the memory that JAX gives out: on a GPU XLA_PYTHON_CLIENT_MEM_FRACTION, by default 0.75."""
        return 0.75 if self.platform == "gpu" else 1.0


def _of(name: str, platform: str, gigabytes: float, gb_per_s: float, teraflops: float, link_gb_per_s: float):
    return name, DeviceKind(name, platform, gigabytes * 1e9, gb_per_s * 1e9, teraflops * 1e12, link_gb_per_s * 1e9)


KINDS: dict[str, DeviceKind] = dict(
    (
        # NVIDIA's data sheets, by name: memory, bandwidth, dense bf16 (half of the figure with sparsity), and half of
        # the NVLink or PCIe bandwidth, which counts both directions.
        _of("a100", "gpu", 80, 2039, 312, 300),  # A100 80GB SXM
        _of("h100", "gpu", 80, 3350, 989, 450),  # H100 SXM
        _of("h200", "gpu", 141, 4800, 989, 450),  # H200 SXM
        _of("b200", "gpu", 180, 8000, 2250, 900),  # HGX B200, an eighth of the board
        _of("l4", "gpu", 24, 300, 121, 32),  # PCIe 4.0 x16
        _of("l40s", "gpu", 48, 864, 362, 32),  # PCIe 4.0 x16
        _of("rtx4090", "gpu", 24, 1008, 165, 32),  # Ada whitepaper: bf16 summed in float32; PCIe 4.0 x16
        # docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}; half of the ICI bandwidth, which counts both directions.
        _of("v5e", "tpu", 16, 819, 197, 200),
        _of("v5p", "tpu", 95, 2765, 459, 600),
        _of("v6e", "tpu", 32, 1638, 918, 400),
        _of("tpu7x", "tpu", 96, 3690, 1153, 300),  # a chip is two devices, each with half of its figures
    )
)
"""Memory in 1e9 bytes; drivers show a few percent more."""


def kind_and_count(text: str) -> tuple[str, int]:
    """(name of a kind, number of devices) of "h200x8"; without a number: 1. ValueError if there is no such kind."""
    name, times, number = text.lower().rpartition("x")
    if not (times and number.isascii() and number.isdecimal() and len(number) < 10) or text.lower() in KINDS:
        name, number = text.lower(), "1"
    if name not in (*KINDS, "cpu") or not 1 <= int(number) <= 2**16:
        raise ValueError(
            f"devices={short(text)} must be KIND or KINDxN, as h200x8; the kinds are {', '.join(KINDS)} and cpu"
        )
    return name, int(number)


def device_kind(name: str, count: int) -> DeviceKind:
    """The kind of this name; "cpu": each of `count` devices on this machine, measured now."""
    return _this_cpu(count) if name == "cpu" else KINDS[name]


def _this_cpu(count: int) -> DeviceKind:
    """The free memory of the machine, and the best of five times of a sum and of a product; devices share them."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with jax.default_device(jax.devices("cpu")[0]):
        numbers, size = jnp.ones(2**25, jnp.float32), 1024
        matrix = jnp.ones((size, size), jnp.float32)
        bandwidth = numbers.nbytes / _best(lambda: jnp.sum(numbers))
        peak = 2 * size**3 / _best(lambda: matrix @ matrix)
    return DeviceKind("cpu", "cpu", free / count, bandwidth / count, peak / count, bandwidth / count)


def _best(call: Callable[[], jax.Array]) -> float:
    """Seconds of the fastest of five calls, after one to compile."""
    seconds = []
    for _ in range(6):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])
