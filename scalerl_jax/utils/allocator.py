"""The C library's allocator, told to keep the memory that XLA gives back.

XLA's CPU client allocates the temporary memory of a program at every call.  glibc maps
a large block anew each time, and every page of it then costs a fault when it is first
touched: a third of the time of a decode call, and the kernel's, not ours.
"""

import ctypes

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_MOST = 2**31 - 1  # bytes; mallopt takes an int


def keep_freed_memory() -> bool:
    """Large blocks come from one heap, which does not shrink; whether glibc agreed.

    One heap for all threads: the others' hold 64 MiB at most, and map what is larger.
    Call it before JAX's threads begin.  Elsewhere than on Linux with glibc nothing
    happens.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    wanted = {_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _MOST}
    return all(mallopt(option, value) for option, value in wanted.items())
