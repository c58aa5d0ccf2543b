"""Eight CPU devices for every test, whatever the machine has."""

import os

# Most of the tests' time is LLVM's; in the environment, for other processes too.
os.environ.setdefault("XLA_FLAGS", "--xla_llvm_disable_expensive_passes=true")

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# Before the backend starts, which happens at the first array.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def program_cache(tmp_path_factory):
    """Whole runs compile their programs once; as variables, for other processes."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # else the directory of the first compilation
    return {name.upper(): str(value) for name, value in settings.items()}
