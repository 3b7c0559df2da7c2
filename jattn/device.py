"""The chip for which backends are chosen. Public functions detect it once and pass it on."""

import ctypes
import dataclasses
import functools
import importlib.util
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jattn.errors import UnsupportedError
from jattn.errors.arguments import short


@dataclasses.dataclass(frozen=True)
class Chip:
    """A platform and its generation."""

    platform: str  # "cpu" | "gpu" | "tpu"
    generation: str = ""  # e.g. "sm_90" for a GPU, "TPU v6 lite" for a TPU; empty if unknown, and on a CPU

    @property
    def compute_capability(self) -> int:
        """90 for 'sm_90' and 'sm_90a'; 0 if the generation is unknown or is not a GPU's."""
        found = re.fullmatch(r"sm_(\d+)[af]?", self.generation)
        return int(found[1]) if found else 0


PLATFORMS = ("cpu", "gpu", "tpu")
ALIASES = {"cuda": "gpu", "rocm": "gpu"}  # JAX's other names of a platform


def devices() -> list[Any]:
    """JAX's devices; UnsupportedError if JAX cannot start the platform that it is configured for."""
    try:
        return jax.devices()
    # A JAX without CUDA that is configured for "cuda" raises an AssertionError without a message.
    except (RuntimeError, AssertionError) as error:
        configured = getattr(jax.config, "jax_platforms", None)
        setting = f"JAX_PLATFORMS={configured}" if configured else "JAX_PLATFORMS not set"
        why = " ".join(str(error).split()) or "it has no such platform here"
        raise UnsupportedError(
            f"JAX finds no device with {setting}: {why}; unset that variable, name a platform of this machine in it, "
            "or install the JAX for the one that it names"
        ) from error


@functools.cache
def detect() -> Chip:
    """The chip of JAX's default device."""
    device = devices()[0]
    if device.platform == "gpu":
        capability = str(getattr(device, "compute_capability", "")).replace(".", "")
        return Chip("gpu", f"sm_{capability}" if capability else "")
    return Chip(device.platform, device.device_kind if device.platform == "tpu" else "")


def check_context(what: str) -> None:
    """UnsupportedError inside jax.set_mesh of a mesh whose axes are Explicit. There shard_map takes no other mesh, and
    JAX wants to be told the sharding of results that it decides itself elsewhere.

    what: what the caller does, for the error: "an engine places its arrays".
    """
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    if explicit:
        raise UnsupportedError(
            f"jax.set_mesh is on, with the Explicit axes {explicit}, but {what} itself: call it outside, or set a mesh "
            "with axis_types=(jax.sharding.AxisType.Auto, ...)"
        )


def with_auto_axes(function: Callable, result: Callable[[], Any], *args: Any) -> Any:
    """function(*args), computed with Auto axes where arguments are on a mesh with Explicit ones, as of jax.make_mesh.

    With Explicit axes JAX wants to be told the sharding of each gather, cut and loop inside. With Auto axes XLA's
    partitioner decides it. result() is the tree of the PartitionSpecs of the result.
    """
    mesh = _explicit_mesh(args)
    if mesh is None:
        return function(*args)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), result())
    axes: Any = mesh.explicit_axes
    call = jax.sharding.auto_axes(function, axes=axes, out_sharding=places)
    return call(*jax.tree.map(jnp.asarray, args))


def _explicit_mesh(args: Any) -> AbstractMesh | None:
    """The mesh with Explicit axes that is set, or that an array is on. Numpy arrays are on none, and slow to ask."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.explicit_axes:
        return mesh
    arrays = (x for x in jax.tree.leaves(args) if isinstance(x, jax.Array))
    placed = (x for x in arrays if isinstance(x, Tracer) or isinstance(x.sharding, NamedSharding))
    meshes = (jax.typeof(x).sharding.mesh for x in placed)
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def spec_of(x: Any) -> PartitionSpec:
    """How an array is divided over the Explicit axes of its mesh."""
    return jax.typeof(x).sharding.spec


NVJITLINK = dict(xla_cuda13="libnvJitLink.so.13", xla_cuda12="libnvJitLink.so.12")
"""The library that each CUDA plugin of JAX would load."""


@functools.cache
def keeps_registers() -> bool:
    """Do the warpgroups of a GPU kernel have the registers that the kernel gives to each?

    JAX before 0.12 compiles by ptxas. JAX 0.12 takes nvJitLink where that is installed, which compiles as if other
    programs were to be linked, and ignores `setmaxnreg`: every warpgroup then has the same number.
    """
    libraries = [library for plugin, library in NVJITLINK.items() if _is_installed(f"jax_plugins.{plugin}")]
    return jax.__version_info__ < (0, 12) or not any(map(_can_be_loaded, libraries))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # without any plugin there is no jax_plugins
        return False


def _can_be_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@functools.cache
def processors() -> int | None:
    """Multiprocessors of JAX's default device; None if it is not a GPU, or does not tell."""
    return getattr(devices()[0], "core_count", None) if detect().platform == "gpu" else None


@functools.cache
def card() -> str:
    """JAX's default GPU as files are named after it: nvidia_h200; "" if the default device is not a GPU."""
    return slug(devices()[0].device_kind) if detect().platform == "gpu" else ""


def slug(name: str) -> str:
    """The name in small letters, digits and underscores."""
    return re.sub(r"\W+", "_", name.lower()).strip("_")


MAX_PEERS = 8
"""The most devices of one kernel, its own included: more than the GPUs of one host have no common memory."""


def are_peers(devices: Sequence[Any]) -> bool:
    """Can a Mosaic kernel on one of these devices write to the memory of the others?

    They must be JAX's first devices in order, and of one process: JAX numbers the peers of a kernel so. And the driver
    must let each reach the others: on some hosts, and in some virtual machines, only copies through the host can.
    """
    ids = [device.id for device in devices]
    is_known = jax.process_count() == 1 and ids == list(range(len(ids))) and len(ids) <= MAX_PEERS
    return is_known and _reach_one_another(tuple(getattr(device, "local_hardware_id", None) for device in devices))


@functools.cache
def _reach_one_another(numbers: tuple[int | None, ...]) -> bool:
    """Can each of these GPUs, by CUDA's numbers, reach the memory of the others? Yes where its driver does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    handles, answer = [ctypes.c_int() for _ in numbers], ctypes.c_int()
    for handle, number in zip(handles, numbers, strict=True):
        if number is None or driver.cuDeviceGet(ctypes.byref(handle), number) != 0:
            return True
    return not any(
        driver.cuDeviceCanAccessPeer(ctypes.byref(answer), *pair) == 0 and not answer.value
        for pair in itertools.permutations(handles, 2)
    )


def chip_of(platform: "str | Chip | None") -> Chip:
    """The Chip that a `platform` argument means: a Chip, a platform's name, or None for JAX's default device.

    Compilers name a chip by several targets: sm_90a, sm_100f and sm_120a are sm_90, sm_100 and sm_120.
    """
    if platform is None:
        return detect()
    if isinstance(platform, Chip):
        if not isinstance(platform.generation, str):
            raise ValueError(f"a Chip's generation={short(platform.generation)} must be a text, such as 'sm_86'")
        capability = platform.compute_capability
        return dataclasses.replace(platform, generation=f"sm_{capability}") if capability else platform
    name = ALIASES.get(platform, platform) if isinstance(platform, str) else None
    if name not in PLATFORMS:
        raise ValueError(
            f"platform={short(platform)} is not known; use one of {', '.join(PLATFORMS)}, a "
            "jattn.device.Chip such as Chip('gpu', 'sm_86'), or None to detect"
        )
    here = detect()
    return here if here.platform == name else Chip(name)
