"""Characters that a terminal obeys, in names and texts of others: shown, never sent."""

import contextlib
import io
import json
import logging
import re
import subprocess
import sys
import unicodedata

import pytest
import small_commands
import small_run

from scalerl_jax import status
from scalerl_jax.launch import __main__ as launch
from scalerl_jax.process import ending
from scalerl_jax.process.printing import Stderr, guard_terminal, shown
from scalerl_jax.run.progress import Progress

# Clears the screen; renames the window; the same with C1; turns a text around; BEL.
EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\u2066\r\x7f"
SHOWN = r"\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\u2066\r\x7f"


def obeyed(text):
    """What a terminal would obey: by Unicode's classes, not by the module's table."""
    turns = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return [
        each
        for each in text
        if (
            unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp")
            and each not in "\n\t"
        )
        or unicodedata.bidirectional(each) in turns
    ]


def test_every_character_that_a_terminal_obeys_is_written_out():
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    assert not obeyed(shown(everything))
    assert obeyed(everything)
    text = "plain, tab\t, ümläut, 漢字, 🙂, العربية\n"
    assert shown(text) == text
    assert shown(EVIL) == SHOWN and shown(SHOWN) == SHOWN


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder of names and texts of somebody, where the commands run."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"step": n, "compute_chip_hours": n / 10, "pass_rate": 0.2 + 0.6 * n / (n + 4)}
        for n in range(12)
    ]
    for name in (f"run{EVIL}", "plain", f"few{EVIL}"):
        (tmp_path / name).mkdir()
        text = "".join(
            json.dumps(row) + "\n" for row in rows[: 3 if "few" in name else 12]
        )
        (tmp_path / name / "evals.jsonl").write_text(text)
    (tmp_path / f"bad{EVIL}.csv").write_text(f"step,{EVIL}\n1,{EVIL}\n")
    question = {"prompt": f"1 + 1?{EVIL}", "answer": "2", "id": f"a{EVIL}"}
    broken = {"prompt": f"1 + 1?{EVIL}", EVIL: "2"}
    (tmp_path / f"rows{EVIL}.jsonl").write_text(
        json.dumps(question) + "\n" + json.dumps(broken) + "\n"
    )
    (tmp_path / f"answers{EVIL}.jsonl").write_text(
        json.dumps({"completion": f"\\boxed{{{EVIL}}}", "answer": EVIL}) + "\n"
    )
    (tmp_path / f"model{EVIL}").mkdir()
    config = {"model_type": f"qwen3{EVIL}"}
    (tmp_path / f"model{EVIL}" / "config.json").write_text(json.dumps(config))
    (tmp_path / "tiny.py").write_text(
        (small_run.ROOT / "configs" / "tiny.py").read_text()
    )
    (tmp_path / "raising.py").write_text(
        f"def get_config():\n    raise ValueError({EVIL!r})\n"
    )
    return tmp_path


COMMANDS = [
    "scaling fit '{run}'",
    "scaling fit '{run}' plain 'few{evil}'",
    "scaling fit 'bad{evil}.csv'",
    "scaling fit 'nothing{evil}'",
    "scaling compare '{run}' --vs plain",
    "scaling watch '{run}' --once --no-tensorboard",
    "data prepare '--dataset=jsonl:rows{evil}.jsonl' --directory=prepared",
    "data inspect '--dataset=jsonl:rows{evil}.jsonl' --no-check --directory=d",
    "data prepare '--dataset=no{evil}'",
    "rewards judge 'answers{evil}.jsonl'",
    "export '--checkpoint=model{evil}' --out=out",
    "evaluate --config=tiny.py '--checkpoint=model{evil}'",
    "serve '--checkpoint=model{evil}'",
    "main --config=raising.py --workdir=w",
    "main --config=tiny.py '--workdir=tiny.py/{evil}'",
    "scaling '{evil}'",
]


@pytest.mark.parametrize("line", COMMANDS)
def test_no_command_sends_what_a_terminal_obeys(files, line):
    line = line.replace("{run}", f"run{EVIL}").replace("{evil}", EVIL)
    _, out, said = small_commands.outcome(line)
    assert not obeyed(out) and not obeyed(said)
    assert out or said


def test_an_error_shows_the_name(files):
    _, _, said = small_commands.outcome(f"scaling fit 'nothing{EVIL}'")
    # An error is one line: what counts as white space in it is a space.
    assert said.startswith(rf"error: nothing{SHOWN.replace(chr(92) + 'r', ' ')}")


def test_the_status_of_a_run_is_shown(files, capsys):
    run = files / "plain"
    run.joinpath("config.json").write_text('{"config": {"train": {"num_steps": 30}}}')
    role = {"role": EVIL, "where": f"host{EVIL}", "version": 1}
    said = {"at": 0, "state": f"ended{EVIL}", "roles": [role]}
    run.joinpath("status.json").write_text(json.dumps(said))
    assert ending.answer(lambda: status.main([str(run)])) == 0
    out = capsys.readouterr().out
    assert not obeyed(out) and out.count(SHOWN) == 3


def test_what_a_launched_run_says_is_shown(files, capsys):
    run = files / "bucket" / "run-1"
    run.mkdir(parents=True)
    line = EVIL.replace("\r", "") + "\n"  # a carriage return ends a line
    outcome = {"state": "failed", "command": [], "at": EVIL, "said": f"error: {EVIL}"}
    run.joinpath("launch.json").write_text(json.dumps(outcome))
    run.with_name("run-1.machine").mkdir()
    run.with_name("run-1.machine").joinpath("log.txt").write_text(line)
    job = ["--place=local", "--name=run-1", "--bucket=bucket", "--config=tiny.py"]
    for command in ("status", "logs"):
        ending.answer(lambda command=command: launch.main([command, *job]))
        found = capsys.readouterr()
        assert "owned" in found.out, found.err
        assert not obeyed(found.out) and not obeyed(found.err)


def test_logs_bars_and_notes_are_shown(capsys):
    factory = logging.getLogRecordFactory()
    try:
        guard_terminal()
        record = logging.getLogRecordFactory()(
            *("name", logging.WARNING, "file", 1, "%s is not used", (EVIL,), None)
        )
        assert record.getMessage() == f"{SHOWN} is not used"
    finally:
        logging.setLogRecordFactory(factory)
    handler = logging.StreamHandler(Stderr())
    handler.emit(logging.LogRecord("name", 40, "file", 1, EVIL, (), None))
    with Progress() as progress, progress.bar(f"loading{EVIL}"):
        progress.note(f"a note{EVIL}")
    said = capsys.readouterr().err
    assert not obeyed(said) and said.count("owned") == 3


def test_a_traceback_and_a_warning_are_shown():
    code = (
        "import warnings\n"
        "from scalerl_jax.process.ending import answer\n"
        "def fault():\n"
        f"    warnings.warn({EVIL!r})\n"
        f"    raise KeyError({EVIL!r})\n"
        "answer(fault)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "KeyError" in done.stderr
    assert f"UserWarning: {SHOWN}" in done.stderr
    assert not obeyed(done.stderr)


PRINTS = re.compile(
    r"(?<![.\w])print\(|sys\.(stdout|stderr)(\.buffer)?\.write|__std(out|err)__"
)
# What else writes: pages of help, which have no word of others; a program for another
# machine; a supervisor its run's output, which has gone through this once; what a
# user's own function prints while it is tried; a tool's program, within its sandbox.
OTHERS = {
    *("config/__init__.py", "config/listing.py"),
    "run/metric_table.py",
    *("environments/tools.py", "environments/verdict.py"),
    *("launch/ray_place.py", "launch/supervisor.py", "process/printing.py"),
}


def test_nothing_else_prints():
    package = small_run.ROOT / "scalerl_jax"
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if PRINTS.search(path.read_text())
    }
    assert found == OTHERS


def test_watching_clears_the_terminal_alone(monkeypatch, files):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    run = f"run{EVIL}"
    (files / run / "config.json").write_text('{"config": {"train": {"num_steps": 11}}}')
    with contextlib.redirect_stdout(terminal):
        line = ["watch", run, "--no-tensorboard", "--every=0.01"]
        assert small_commands.COMMANDS["scaling"](*line) in (0, 3)
    assert terminal.getvalue().startswith("\x1b[H\x1b[2J")
    assert not obeyed(terminal.getvalue().removeprefix("\x1b[H\x1b[2J"))
