"""Compiled programs kept between processes, so that a command starts faster again.

JAX's persistent compilation cache, switched on for every program however small.  A
machine has a folder of its own, since XLA compiles for the very CPU that it runs on.
"""

import hashlib
import logging
import os
import platform
import time
from pathlib import Path

import jax

# Not public; JAX itself has no command that looks for damage.
from jax._src.compilation_cache import decompress_executable

_log = logging.getLogger(__name__)

_CHECKED = ".checked"  # its time: entries older than it are whole


def keep_programs(directory: str) -> None:
    """Read compiled programs from `directory`, and write new ones into it.

    Call it before anything is compiled.  An empty name keeps nothing; JAX's own
    setting (`JAX_COMPILATION_CACHE_DIR`), where it is given, wins.  A directory that
    cannot be used is a warning: the command then compiles as if it had none.
    """
    if not directory or jax.config.values["jax_compilation_cache_dir"]:
        return
    place = Path(directory).expanduser() / _machine()
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
    """A name that two machines share only if they run the same instructions."""
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
    stamp.touch()
    # What another process writes meanwhile is looked at next time.
    os.utime(stamp, (begun, begun))
