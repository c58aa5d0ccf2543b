import os
import subprocess
import sys
import textwrap

import pytest

SCRIPT = textwrap.dedent(
    """
    import logging, sys, warnings
    import jax
    from scalerl_jax.utils.programs import keep_programs

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


def test_a_directory_that_cannot_be_used_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    counts, said = start(tmp_path / "file")
    assert counts == "hits 0 misses 0"
    assert "compile_cache = " in said and "cannot be used" in said
