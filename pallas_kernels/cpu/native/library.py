"""Loads the library once, registers its calls with XLA, and says which ISAs run here, or why none does."""

import ctypes
import dataclasses
import functools
import logging
import os

import jax

from pallas_kernels import switches
from pallas_kernels.cpu.native import build, kept

log = logging.getLogger(__name__)

ATTEND, WRITE, FILL = "jattn_cpu_attend", "jattn_cpu_write", "jattn_cpu_fill"
DRAW = "jattn_cpu_draw"
PRODUCT, HEAD_PRODUCT = "jattn_cpu_product", "jattn_cpu_head_product"
EXPERT_PRODUCT, PACKED_EXPERT_PRODUCT = "jattn_cpu_expert_product", "jattn_cpu_packed_expert_product"
PACKED_PRODUCT = "jattn_cpu_packed_product"
_SYMBOLS = {
    ATTEND: "JattnAttend",
    WRITE: "JattnWrite",
    PRODUCT: "JattnProduct",
    HEAD_PRODUCT: "JattnHeadProduct",
    PACKED_PRODUCT: "JattnPackedProduct",
    EXPERT_PRODUCT: "JattnExpertProduct",
    PACKED_EXPERT_PRODUCT: "JattnPackedExpertProduct",
    DRAW: "JattnDraw",
    FILL: "JattnFill",
}


@dataclasses.dataclass(frozen=True)
class LibraryStatus:
    """The usable ISAs, best first, or the reason why there are none."""

    isas: tuple[str, ...] = ()
    reason: str = ""
    path: str = ""
    prebuilt: bool = False
    """True where the library came with the package, False where it was compiled on this machine."""

    @property
    def available(self) -> bool:
        """True where the custom calls are registered."""
        return bool(self.isas)


@functools.cache
def status() -> LibraryStatus:
    """Build if needed, load, register; cached: only the first call takes time, some seconds if it builds.

    Without a library one line of the log says why; attention and products on a CPU then run as plain XLA.
    """
    found = _load()
    if not found.available:
        log.warning("attention and products on this CPU run as plain XLA, several times slower: %s", found.reason)
    return found


def _load() -> LibraryStatus:
    if not switches.is_on("JATTN_NATIVE"):
        return LibraryStatus(reason="the native library is switched off by JATTN_NATIVE=0")
    try:
        found, handle = _open()
    except (build.BuildError, OSError) as error:
        return LibraryStatus(reason=f"the native library is absent: {error}")
    path, prebuilt = str(found.path), found.path.parent == build.HERE
    handle.jattn_isas.restype = ctypes.c_char_p
    isas = tuple(filter(None, handle.jattn_isas().decode().split(", ")))
    if not isas:
        return LibraryStatus(reason="this processor has none of the instruction sets of the native library", path=path)
    for target, symbol in _SYMBOLS.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(handle, symbol)), platform="cpu")
    return LibraryStatus(isas=isas, path=path, prebuilt=prebuilt)


def _open() -> tuple[kept.Library, ctypes.CDLL]:
    """The library; if the packaged one cannot be loaded (another libc, say), one that is compiled here."""
    found = build.library()
    try:
        return found, found.load()
    except OSError:
        os.close(found.fd)
        found = build.library(prebuilt=False)
        return found, found.load()


def check_isa(isa: str) -> str:
    """`isa` if it runs here or is 'auto'; else ValueError naming those that do."""
    known = ("auto", *status().isas)
    if isa not in known:
        raise ValueError(f"Unsupported CPU attention ISA hint: {isa!r}; here {', '.join(known)} are known")
    return isa
