"""XLA in this process: compilation cache, host memory, and out-of-memory errors."""

import contextlib
import ctypes
import hashlib
import logging
import operator
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax

# Not public; JAX has no public function that checks entries of its cache.
from jax._src.compilation_cache import decompress_executable

from scalerl_jax.formats.reading import is_remote
from scalerl_jax.formats.remote import open_path
from scalerl_jax.run.writing import replace_file

_log = logging.getLogger(__name__)

_CHECKED = ".checked"  # entries older than this file are complete


def keep_programs(directory: str) -> None:
    """Turn on JAX's persistent compilation cache in `directory`, for all programs.

    Small programs are cached too, so that later commands start faster.  Each kind of
    machine has its own folder, since XLA compiles for the CPU that it runs on.  Call
    this before anything is compiled.  An empty name turns the cache off; JAX's own
    setting (`JAX_COMPILATION_CACHE_DIR`) takes precedence.  An unusable directory or a
    silent bucket is a warning: the command then compiles without a cache.

    The directory can be in a bucket (gs://BUCKET/PATH).  Of the processes of one mesh
    JAX lets only the first one write, so that the others find programs only in what
    they share with it.

    Raises:
        ValueError: the path is a file, or below one; or there is no such bucket, or it
            denies access.
    """
    given = Path(directory).expanduser()
    if directory and any(map(os.path.isfile, (given, *given.parents))):
        raise ValueError(
            f"compile_cache = {directory!r} is a file, or below one; name a directory, "
            f"or '' for none"
        )
    if not directory or jax.config.values["jax_compilation_cache_dir"]:
        return
    try:
        if is_remote(directory):
            place = open_path(directory, setting="compile_cache = ") / _machine()
            # XLA keeps files of its own in local directories only.
            jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        else:
            place = given / _machine()
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


def exact_products(dtype: str) -> None:
    """Multiply float32 arrays in float32, for a model that computes in `dtype`.

    Otherwise GPUs round their operands to TensorFloat-32, and TPUs to bfloat16, which
    takes sampler and learner apart: by 3e-4 nats a token on an H100.  Models in
    bfloat16, CPUs, and JAX's own setting (`JAX_DEFAULT_MATMUL_PRECISION`) are left
    unchanged.  Call this after the devices are known and before anything is compiled.
    """
    given = "JAX_DEFAULT_MATMUL_PRECISION" in os.environ
    if not given and jax.default_backend() != "cpu":
        precision = "highest" if dtype == "float32" else None
        jax.config.update("jax_default_matmul_precision", precision)


def _machine() -> str:
    """Return a name that machines share only if their CPUs have equal instructions."""
    facts = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        names = ("flags", "model name", "Features")  # the last one on ARM
        facts = str(sorted({line for line in lines if line.startswith(names)}))
    digest = hashlib.sha256(facts.encode()).hexdigest()
    return f"{platform.machine()}-{digest[:12]}"


def _remove_torn(place: Path) -> None:
    """Remove entries that a kill left incomplete.

    JAX writes an entry in place and never rewrites it: an incomplete one would cause a
    warning and a compilation at every later start.
    """
    begun = time.time()
    stamp = place / _CHECKED
    since = stamp.stat().st_mtime if stamp.exists() else 0.0
    for entry in place.glob("*-cache"):
        if entry.stat().st_mtime >= since:
            try:
                decompress_executable(entry.read_bytes())
            except Exception:  # noqa: BLE001  the type depends on the compression
                entry.unlink(missing_ok=True)
    replace_file(stamp, b"")
    # Entries that another process writes meanwhile are checked next time.
    os.utime(stamp, (begun, begun))


# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_MOST = 2**31 - 1  # bytes; mallopt takes an int
SMALL_MODEL = 2**24  # parameters


def keep_freed_memory(num_params: int) -> bool:
    """Make malloc keep freed memory in one heap; return True if that was set.

    XLA's CPU client allocates the temporary memory of a program at every call.  glibc
    maps a large block anew each time, and each of its pages causes a page fault when
    first touched: in the kernel, a third of the time of a small model's decode call.
    Programs of a large model compute longer per page, and keeping their blocks would
    double the memory of the process.  So with more than `SMALL_MODEL` parameters, or
    without Linux and glibc, nothing is changed.

    All threads share one heap, since the heaps of other threads hold at most 64 MiB and
    map larger blocks.  Call this before JAX's threads start.
    """
    if num_params > SMALL_MODEL:
        return False
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    wanted = {_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _MOST}
    return all(mallopt(option, value) for option, value in wanted.items())


def return_freed_memory() -> None:
    """Give the memory that malloc keeps back to the system; without glibc do nothing.

    Call this after a compilation: a compiler frees hundreds of MiB that no program of
    the run fits into.
    """
    if trim := _of_glibc("malloc_trim"):
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    try:
        return getattr(ctypes.CDLL("libc.so.6"), name)
    except (OSError, AttributeError):
        return None


Program = Literal["the train step", "publishing params", "the sampler"]


@contextlib.contextmanager
def explained(program: Program, config: Any) -> Iterator[None]:
    """Name the settings to change if the block runs out of device memory.

    Args:
        program: the program in the block; `_WAYS` has the settings of each.
        config: the run's config.

    Raises:
        RuntimeError: XLA ran out of memory while it compiled or ran the program.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_full(error):
            raise

        raise RuntimeError(ways_out(program, config, error)) from error


def is_broken_off(error: BaseException | None) -> bool:
    """Return True if a program of several processes may have lost one of them."""
    return type(error).__name__ == "JaxRuntimeError" and not is_full(error)


def is_full(error: BaseException | None) -> bool:
    """Return True if the error is XLA's out-of-memory error."""
    return "RESOURCE_EXHAUSTED" in str(error)


# Program -> advice on settings that reduce its memory; values are added to the names.
_WAYS = {
    "the train step": (
        "lower batch.rows_per_microbatch, batch.row_tokens, batch.row_segments (with "
        "cuDNN's attention), model.head_chunk_tokens or model.head_chunk_vocab, set "
        "model.remat to 'attention' or 'full', or cut the state into more shards by "
        "mesh.fsdp"
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
    """Return the message on which settings of `config` to change to save memory."""
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
