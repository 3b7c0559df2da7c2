"""What chip are we on: asked once, at the user's door, and passed inwards."""

import dataclasses
import functools
from typing import Any

import jax

from jattn.errors import UnsupportedError
from jattn.errors.arguments import short


@dataclasses.dataclass(frozen=True)
class Chip:
    """A platform and, where it matters, its generation."""

    platform: str  # "cpu" | "gpu" | "tpu"
    generation: str = ""  # "sm_90", "v6e"; empty when unknown or meaningless

    @property
    def compute_capability(self) -> int:
        """90 for 'sm_90'; 0 where there is none."""
        return int(self.generation[3:]) if self.generation.startswith("sm_") else 0


PLATFORMS = ("cpu", "gpu", "tpu")


def devices() -> list[Any]:
    """JAX's devices; UnsupportedError where it cannot start the platform that it is told to use."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError, without words: "cuda" in a JAX without CUDA
        asked = getattr(jax.config, "jax_platforms", None)
        told = f"JAX_PLATFORMS={asked}" if asked else "JAX_PLATFORMS not set"
        raise UnsupportedError(
            f"JAX finds no device with {told}: {' '.join(str(error).split()) or 'it has no such platform here'}; unset "
            "that variable, name a platform of this machine in it, or install the JAX for the one that it names"
        ) from error


@functools.cache
def detect() -> Chip:
    """The chip of JAX's default device."""
    device = devices()[0]
    if device.platform == "gpu":
        capability = str(getattr(device, "compute_capability", "")).replace(".", "")
        return Chip("gpu", f"sm_{capability}" if capability else "")
    return Chip(device.platform, device.device_kind if device.platform == "tpu" else "")


def resolve(platform: "str | Chip | None") -> Chip:
    """A Chip from what the user gave: None asks JAX, a name is taken at its word."""
    if platform is None:
        return detect()
    if isinstance(platform, Chip):
        return platform
    name = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform) if isinstance(platform, str) else None
    if name not in PLATFORMS:
        raise ValueError(
            f"platform={short(platform)} is not known; use one of {', '.join(PLATFORMS)}, or None to detect"
        )
    here = detect()
    return here if here.platform == name else Chip(name)
