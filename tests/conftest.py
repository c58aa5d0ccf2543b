"""Eight CPU devices for every test, whatever the machine has, and one program cache.

Whole runs, and what several tests compile alike, are compiled once for all of them and
for the processes that they start.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import os
import shutil
import tempfile

import xla_flags

# Most of the tests' time is the compiler's: with these it takes a third of it.  In the
# environment, for other processes too.
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = xla_flags.known(*xla_flags.QUICK)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers get that of the first
    programs = tempfile.mkdtemp(prefix="programs-")
    atexit.register(shutil.rmtree, programs, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import jaxtyping
import pytest

# No test asserts a time.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Before the first import of the package; in this process, not in those it starts.
jaxtyping.install_import_hook(
    [
        f"scalerl_jax.{package}"
        for package in ("algo", "batching", "learner", "model", "sampler")
    ],
    "checked_annotations.checked",
)

# Traces are many small objects that are all kept: to look for garbage among them every
# 700th was a sixth of a run's time.
gc.set_threshold(50_000, 20, 100)

# Before the backend starts, which happens at the first array.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


def pytest_ignore_collect(collection_path, config):
    """Leave a file without slow tests unread if only these run: that took a minute."""
    if config.option.markexpr != "slow" or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    return None if "mark.slow" in text or "tpu_compiler" in text else True


# Where the slow tests are that take longest, which begin first: none runs on alone.
_LONGEST = (
    "tests/cluster",
    "tests/test_commands.py",
    "tests/test_resume.py",
    "tests/launch/test_cloud.py",
    "tests/test_notebooks.py",
    "tests/test_bucket_run.py",
    "tests/test_smollm2.py",
    "tests/study/test_smoke.py",
    "tests/test_train.py",
    "tests/controller/test_fleet_run.py",
)


def _together(nodeid):
    """Return what a worker takes at once: a file, or all clusters, which take turns."""
    path = nodeid.partition("::")[0]
    return "tests/cluster" if path.startswith("tests/cluster/") else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Have slow tests that share whole runs and their programs run in one worker."""
    if config.option.markexpr != "slow":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class LoadFiles(LoadScopeScheduling):
        _split_scope = staticmethod(_together)

    config.option.loadscopereorder = False  # the order is that of the collection
    return LoadFiles(config, log)


def pytest_collection_modifyitems(config, items):
    """Begin with the slow tests that take longest."""
    if config.option.markexpr == "slow":
        places = {name: place for place, name in enumerate(_LONGEST)}
        items.sort(key=lambda item: places.get(_together(item.nodeid), len(places)))


def pytest_collection_finish():
    """Let the garbage collector pass over modules and tests, which stay to the end."""
    gc.collect()
    gc.freeze()


def _return_freed_memory():
    """Give the system back what was freed: a compiler's blocks lie far apart."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture(scope="module", autouse=True)
def programs_of_a_module(request):
    """Programs leave the memory with the module that they were compiled for."""
    yield
    jax.clear_caches()
    for each in vars(request.module).values():
        if isinstance(each, functools._lru_cache_wrapper):
            each.cache_clear()  # of what the tests of a module compile but once
    _return_freed_memory()


@pytest.fixture(scope="module")
def shared_parts():
    """Whole runs of a module share programs and verifier processes."""
    import shared_parts

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as opened:
        shared_parts.share(patch, opened)
        yield


@pytest.fixture
def no_program_cache():
    """Every program is compiled, so that a test can see which are."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
