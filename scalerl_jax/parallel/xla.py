"""XLA in this process: programs and memory kept, and memory that ran out."""

import contextlib
import ctypes
import hashlib
import logging
import operator
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax

# Not public; JAX itself has no command that looks for damage.
from jax._src.compilation_cache import decompress_executable

from scalerl_jax.run.writing import replace_file

_log = logging.getLogger(__name__)

_CHECKED = ".checked"  # its time: entries older than it are whole


def keep_programs(directory: str) -> None:
    """Read compiled programs from `directory`, and write new ones into it.

    JAX's persistent compilation cache, switched on for every program however small, so
    that a command starts faster again.  A machine has a folder of its own, since XLA
    compiles for the very CPU that it runs on.  Call it before anything is compiled.  An
    empty name keeps nothing; JAX's own setting (`JAX_COMPILATION_CACHE_DIR`), where it
    is given, wins.  A directory that cannot be used is a warning: the command then
    compiles as if it had none.

    Raises:
        ValueError: it is a file, or lies under one.
    """
    given = Path(directory).expanduser()
    if directory and any(map(os.path.isfile, (given, *given.parents))):
        raise ValueError(
            f"compile_cache = {directory!r} is or lies under a file; name a directory, "
            f"or '' for none"
        )
    if not directory or jax.config.values["jax_compilation_cache_dir"]:
        return
    place = given / _machine()
    try:
        place.mkdir(parents=True, exist_ok=True)
        _remove_torn(place)
    except OSError as error:
        _log.warning(
            "compile_cache = %r cannot be used (%s): programs are compiled again at "
            "every start; name another directory, or '' for none",
            directory,
            error,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _machine() -> str:
    """Return a name that two machines share only if they run the same instructions."""
    facts = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        names = ("flags", "model name", "Features")  # the last one on ARM
        facts = str(sorted({line for line in lines if line.startswith(names)}))
    digest = hashlib.sha256(facts.encode()).hexdigest()
    return f"{platform.machine()}-{digest[:12]}"


def _remove_torn(place: Path) -> None:
    """Remove entries that a kill left half written.

    JAX writes an entry in place and never writes one again: a torn one would be a
    warning, and a compilation, at every start from then on.
    """
    begun = time.time()
    stamp = place / _CHECKED
    since = stamp.stat().st_mtime if stamp.exists() else 0.0
    for entry in place.glob("*-cache"):
        if entry.stat().st_mtime >= since:
            try:
                decompress_executable(entry.read_bytes())
            except Exception:  # noqa: BLE001  whatever library did the packing
                entry.unlink(missing_ok=True)
    replace_file(stamp, b"")
    # Entries that another process writes meanwhile are looked at next time.
    os.utime(stamp, (begun, begun))


# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_MOST = 2**31 - 1  # bytes; mallopt takes an int
SMALL_MODEL = 2**24  # parameters


def keep_freed_memory(num_params: int) -> bool:
    """Take large blocks from one heap that never shrinks; return whether it is set so.

    XLA's CPU client allocates the temporary memory of a program at every call.  glibc
    maps a large block anew each time, and every page of it then costs a fault when it
    is first touched: a third of the time of a decode call of a small model, and the
    kernel's, not ours.  Programs of a large model compute for longer per page, and
    their blocks, kept, would double the memory of the process: with more than
    `SMALL_MODEL` parameters, and elsewhere than on Linux with glibc, nothing happens.

    One heap for all threads: the others' hold 64 MiB at most, and map what is larger.
    Call it before JAX's threads begin.
    """
    if num_params > SMALL_MODEL:
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    wanted = {_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _MOST}
    return all(mallopt(option, value) for option, value in wanted.items())


Program = Literal["the train step", "publishing params", "the sampler"]


@contextlib.contextmanager
def explained(program: Program, config: Any) -> Iterator[None]:
    """Name the settings to change if the block runs out of device memory.

    Args:
        program: what it is; `_WAYS` has the settings of each.
        config: the run's.

    Raises:
        RuntimeError: XLA found no memory, when it compiled or when it ran.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_full(error):
            raise

        raise RuntimeError(ways_out(program, config, error)) from error


def is_broken_off(error: BaseException | None) -> bool:
    """Return whether a program of several processes may have lost one of them."""
    return type(error).__name__ == "JaxRuntimeError" and not is_full(error)


def is_full(error: BaseException | None) -> bool:
    """Return whether XLA says that there is no memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


# Settings that each needs its memory for; they are shown with their values.
_WAYS = {
    "the train step": (
        "lower batch.rows_per_microbatch, batch.row_tokens, model.head_chunk_tokens or "
        "model.head_chunk_vocab, set model.remat to 'attention' or 'full', or cut the "
        "state into more shards by mesh.fsdp"
    ),
    "publishing params": (
        "cut the state into more shards by mesh.fsdp, lower sampler.cache_tokens (0 is "
        "every slot at its full length), give the sampler devices of its own by "
        "generators.devices, or set model.sampler_dtype to 'bfloat16'"
    ),
    "the sampler": (
        "lower sampler.cache_tokens (0 is every slot at its full length), "
        "sampler.slots or sampler.prefill_tokens, give the sampler more devices of its "
        "own by generators.devices, or set model.sampler_dtype to 'bfloat16'"
    ),
}


def ways_out(program: str, config: Any, error: Exception) -> str:
    """Return in words which settings of `config` take less of the memory."""
    ways = re.sub(
        r"\b[a-z]+\.[a-z_]+",
        lambda name: f"{name[0]} = {operator.attrgetter(name[0])(config)!r}",
        _WAYS[program],
    )
    reason = " ".join(str(error).split())
    return (
        f"the devices have not enough memory for {program}: {ways}; `scalerl "
        f"preflight` with the same --config says beforehand what fits "
        f"(XLA: {reason[:300]})"
    )
