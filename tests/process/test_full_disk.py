"""A full disk, said in one line whoever meets it: system, libraries, commands."""

import errno
import subprocess
import sys

import pytest
import small_run

from scalerl_jax.process.full_disk import naming, why_full
from scalerl_jax.scaling.__main__ import main

CURVE = "hours,rate\n" + "".join(f"{x},{x / (x + 3)}\n" for x in range(12))


@pytest.mark.parametrize(
    "error, words",
    [
        (OSError(errno.ENOSPC, "?"), "No space left on device"),
        (OSError(errno.EDQUOT, "?"), "Disk quota exceeded"),
        (OSError(errno.EROFS, "?", "a"), "Read-only file system"),
        (OSError(errno.EFBIG, "?"), "File too large"),
        (ValueError("Failed [os_error_code='28']"), "No space left on device"),
        (Exception("I/O error: ... (os error 122)"), "Disk quota exceeded"),
        (OSError(errno.ENOENT, "?"), ""),
        (OSError("No space left on device"), ""),
        (ValueError("Failed [os_error_code='2']"), ""),
    ],
    ids=repr,
)
def test_a_full_disk_is_known_by_the_systems_number(error, words):
    assert why_full(error) == words
    kind = RuntimeError if words else type(error)
    with pytest.raises(kind) as caught, naming("here"):
        raise error
    assert (caught.value is error) == (not words)
    assert not words or f"cannot write here ({words}); free" in str(caught.value)


@pytest.mark.parametrize("command, name", [("fit", "a.svg"), ("report", "a.html")])
def test_a_command_names_what_it_cannot_write(tmp_path, capsys, command, name):
    (tmp_path / "curve.csv").write_text(CURVE)
    columns = ["--x=hours", "--y=rate"]
    with small_run.mounted(tmp_path / "disk", "size=4k") as disk:
        given = [command, str(tmp_path / "curve.csv"), *columns]
        assert main([*given, f"--out={disk / name}"]) == 1
        said = capsys.readouterr().err
    assert f"error: cannot write {disk / name} (No space left on device); free" in said
    assert said.count("error:") == 1 and "Traceback" not in said


def test_a_full_standard_output_is_one_line(tmp_path):
    (tmp_path / "curve.csv").write_text(CURVE)
    command = [sys.executable, "-m", "scalerl_jax.scaling", "fit", "curve.csv"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, "--x=hours", "--y=rate"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "a file or the output (No space left on device)" in done.stderr
