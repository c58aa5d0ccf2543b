"""XLA in this process: programs and memory that are kept, and memory that ran out."""

import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import small_bucket
import xla_flags

from scalerl_jax.config import Config
from scalerl_jax.parallel.xla import explained, keep_programs

CONFIG = Config()


def too_much():
    """A program that asks for 256 TB."""
    return jax.jit(lambda x: jnp.cumsum(jnp.full(1 << 46, 1.0) * x))(2.0)


@pytest.mark.parametrize(
    "program, words",
    [
        (
            "the train step",
            "batch.rows_per_microbatch = 8, batch.row_tokens = 16384, "
            "batch.row_segments = 128 (with cuDNN's attention), "
            "model.head_chunk_tokens = 1024 or model.head_chunk_vocab = 16384, "
            "set model.remat = 'none' to 'attention' or 'full', or cut the state into "
            "more shards by mesh.fsdp = 1;",
        ),
        ("publishing params", "by mesh.fsdp = 1, lower sampler.cache_tokens = 0 ("),
        ("the sampler", "lower sampler.cache_tokens = 0 (0 is every slot"),
    ],
)
def test_a_full_memory_names_the_settings_and_their_values(program, words):
    with pytest.raises(RuntimeError) as failure, explained(program, CONFIG):
        jax.block_until_ready(too_much())
    message = str(failure.value)
    assert message.startswith(f"the devices have not enough memory for {program}: ")
    assert words in message
    assert "`scalerl preflight`" in message
    assert "Out of memory allocating 281474976710656 bytes" in message
    assert isinstance(failure.value.__cause__, jax.errors.JaxRuntimeError)


def test_the_innermost_program_is_the_one_that_is_named():
    with (
        pytest.raises(RuntimeError, match="memory for the train step"),
        explained("the sampler", CONFIG),
        explained("the train step", CONFIG),
    ):
        jax.block_until_ready(too_much())


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("INTERNAL: broken"), ValueError("no memory")]
)
def test_other_errors_pass_as_they_are(error):
    with pytest.raises(type(error)) as failure, explained("the sampler", CONFIG):
        raise error
    assert failure.value is error


SCRIPT = textwrap.dedent(
    """
    import logging, sys, warnings
    import jax
    from scalerl_jax.parallel.xla import keep_programs

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    warnings.simplefilter("error")
    found = []
    jax.monitoring.register_event_listener(
        lambda name, **_: found.append(name.rpartition("/")[2])
    )
    keep_programs(sys.argv[1])
    print(jax.jit(lambda x: x * 3 + 1)(2.0))
    print("hits", found.count("cache_hits"), "misses", found.count("cache_misses"))
    """
)


def start(directory, **environment):
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory)],
        capture_output=True,
        text=True,
        env=inherited | {"JAX_PLATFORMS": "cpu"} | environment,
        check=True,
    )
    result, counts = done.stdout.splitlines()
    assert float(result) == 7.0
    return counts, done.stderr


def entries(directory):
    return [path for path in directory.rglob("*-cache") if path.is_file()]


@pytest.mark.slow
def test_the_second_start_compiles_nothing_and_a_torn_entry_is_made_again(tmp_path):
    first, _ = start(tmp_path)
    assert first.startswith("hits 0 ") and not first.endswith("misses 0")
    second, _ = start(tmp_path)
    assert second.endswith("misses 0")
    whole = {path: path.read_bytes() for path in entries(tmp_path)}
    assert whole
    for path, content in whole.items():
        path.write_bytes(content[: len(content) // 2])
    third, said = start(tmp_path)
    assert third == first and "Error reading" not in said
    assert {path: len(path.read_bytes()) > 0 for path in whole} == dict.fromkeys(
        whole, True
    )
    fourth, _ = start(tmp_path)
    assert fourth == second


@pytest.mark.parametrize("settings", [{}, {"JAX_COMPILATION_CACHE_DIR": "own"}])
def test_nothing_is_kept_where_nothing_is_asked_for(tmp_path, settings):
    settings = {name: str(tmp_path / value) for name, value in settings.items()}
    start("" if not settings else tmp_path / "ours", **settings)
    assert not (tmp_path / "ours").exists()


@pytest.mark.slow
@small_bucket.NEEDS_EXTRA
def test_programs_in_a_bucket_are_there_for_another_machine(tmp_path):
    bucket = small_bucket.empty()
    for home, compiled in (("one", True), ("two", False)):
        counts, said = start("gs://bucket/programs/", HOME=str(tmp_path / home))
        assert counts.endswith("misses 0") is not compiled, counts + said
    names = bucket.names()
    assert any(name.endswith("-cache") for name in names)
    assert all(name.startswith(f"programs/{platform.machine()}-") for name in names)
    assert not (tmp_path / "two").exists() and not Path("gs:").exists()


@small_bucket.NEEDS_EXTRA
def test_a_bucket_that_is_not_there_is_refused():
    small_bucket.empty()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        start("gs://nowhere/x")
    assert "compile_cache = gs://nowhere/x: there is no bucket" in failed.value.stderr


@pytest.mark.parametrize("name", ["file", "file/under/it"])
def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=f"compile_cache = .*/{name}' is a file, or below"
    ):
        keep_programs(str(tmp_path / name))


def test_a_directory_that_cannot_be_used_is_a_warning(tmp_path):
    counts, said = start(tmp_path / ("longer than a name can be" * 20))
    assert counts == "hits 0 misses 0"
    assert "compile_cache = " in said and "cannot be used" in said


PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
from scalerl_jax.parallel.xla import keep_freed_memory

if not keep_freed_memory(int(sys.argv[1])) and sys.argv[1] == "1":
    sys.exit(3)

@jax.jit
def program(x):
    # Two readers of a product that is too large for any cache: it is temporary memory.
    big = jnp.outer(x, x)
    return (big @ x) + big.max(axis=1)

x = jnp.arange(4096.0)  # 64 MiB
for _ in range(12):  # the heap finds its size
    program(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    program(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(num_params):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(num_params)], capture_output=True, text=True
    )
    if done.returncode == 3:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_a_program_of_a_small_model_does_not_fault_its_memory_in_again():
    pages = 30 * 64 * 2**20 // 4096
    assert faults(1) < pages / 4
    assert faults(10**9) > pages / 2


def test_of_flags_only_those_that_xla_knows_are_kept():
    devices, none = "--xla_force_host_platform_device_count=2", "--xla_no_such_flag=1"
    assert xla_flags.known(devices) == devices
    assert xla_flags.known(none, devices) == devices
