"""What nobody should type, and files that nobody should have: a line, and no work.

`hostile.tsv` has a row for each: exit status, command line, and what the one line on
stderr holds.  The files are made by `small_commands` and `small_odd`.
"""

import os
import re
import subprocess
import sys

import pytest
import small_commands
import small_odd
import small_run

ROWS = [
    line.split("\t")
    for line in (small_run.ROOT / "tests" / "hostile.tsv").read_text().splitlines()
]
# Each command as a process of its own: nothing of Python comes after its main function.
WHOLE = (
    "main --workdir=nothing",
    "main --config=tiny.py",
    "main --config=syntax.py",
    "data prepare --dataset=jsonl:/dev/zero",
    "warmstart",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with all files, where the commands run; the hub cannot be reached."""
    import huggingface_hub.constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.chdir(tmp_path_factory.mktemp("hostile"))
        small_commands.make_files()
        small_odd.make_odd()
        yield os.getcwd()


def test_the_table_is_whole():
    assert len(ROWS) >= 700
    assert len({line for _, line, _ in ROWS}) == len(ROWS)
    assert {line.split()[0] for _, line, _ in ROWS} == set(small_commands.COMMANDS)


@pytest.mark.parametrize(
    "number", range(len(ROWS)), ids=[line[:90] for _, line, _ in ROWS]
)
def test_hostile_input_is_answered_by_a_line(files, number):
    status, line, words = ROWS[number]
    line = re.sub(r"--workdir=w\b", f"--workdir=w{number}", line)
    found, said = small_commands.run(line)
    errors = [each for each in said if each.startswith("error: ")]
    assert found == int(status), said
    assert len(errors) == (found != 0), said
    assert all(words in each.replace(f"{files}/", "") for each in errors), said
    assert not [each for each in said if "Traceback" in each], said


@pytest.mark.parametrize("start", WHOLE)
def test_so_is_it_in_a_process(files, start):
    (_, line, words) = next(row for row in ROWS if row[1].startswith(start))
    name, *arguments = line.split()
    done = subprocess.run(
        [sys.executable, "-m", f"scalerl_jax.{name}", *arguments],
        env=os.environ | {"PYTHONPATH": str(small_run.ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    (said,) = done.stderr.splitlines()
    assert done.returncode == 2 and words in said, done.stderr
