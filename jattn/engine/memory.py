"""Freed memory that the process keeps, for results on a CPU."""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_MOST = 2**31 - 1


def keep_freed_memory(largest: int = _MOST) -> bool:
    """Ask malloc to keep freed blocks of up to `largest` bytes; False where there is no glibc to ask.

    glibc maps every block over 32 MiB anew and gives the rest back in between, and each 4 KiB of fresh memory is a page
    fault: an array of 33 MiB takes 12 ms to write, kept memory 1.3. An application's choice, for the process then holds
    on to the most that it ever needed; made before JAX is first used, for threads keep the heaps they begin with.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    wanted = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, largest), (_M_TRIM_THRESHOLD, _MOST))  # one heap fits any size
    return all([mallopt(*option) for option in wanted])
