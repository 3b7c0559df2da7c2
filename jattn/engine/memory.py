"""keep_freed_memory: glibc keeps freed memory, so that large results on a CPU need no new pages."""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_MAX_BYTES = 2**31 - 1


def keep_freed_memory(largest: int = _MAX_BYTES) -> bool:
    """Configure malloc to keep freed allocations of up to `largest` bytes; returns False without glibc.

    By default, glibc maps each allocation over 32 MiB anew, and each new 4 KiB page costs a page fault: writing 33 MiB
    takes 12 ms in new memory and 1.3 ms in kept memory. The process then keeps the most memory that it ever needed, so
    the application decides. Call it before JAX starts its threads.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    wanted = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, largest),
        (_M_TRIM_THRESHOLD, _MAX_BYTES),
    )  # one heap, whose free memory fits any size
    return all([mallopt(*option) for option in wanted])
