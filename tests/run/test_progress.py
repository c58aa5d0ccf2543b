import contextlib
import io
import logging
import os
import pty
import re
import sys

import pytest
import small_run
from rich.console import Console

from scalerl_jax.process.printing import Stderr
from scalerl_jax.run.progress import Progress

FACTS = {
    "reward": "-0.42",
    "pass rate": "0.913",
    "length": "480",
    "staleness": "1.2",
    "tokens/s": "1234",
    "train pass rate": "0.850",
    "staleness in flight": "0.5",
    "queued": "0.7",
    "max": "2",
}
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(width):
    """A display on a terminal of this width, and the line that it shows."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    console.is_interactive = True
    progress = Progress(console)

    def line():
        with console.capture() as shown:
            console.print(progress)
        (line,) = ESCAPE.sub("", shown.get()).splitlines()
        assert len(line) <= width
        return line.rstrip()

    return progress, line


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_step_is_one_line_that_fits_its_terminal(width):
    progress, line = on_a_terminal(width)
    with progress.bar("step", total=300, done=100):
        for step in (119, 120):
            progress.show(FACTS, done=step)
        shown = line()
    assert re.match(r"step 120/300 +left \d:\d\d +reward -0\.42 +pass", shown)
    short = ["pass 0.913", "len 480", "stale 1.2", "tok/s 1234"]
    long = [f"{name} {value}" for name, value in FACTS.items()]
    assert all(words in shown for words in (long if width == 200 else short)), shown


def test_a_sampler_without_work_is_said_to_wait():
    facts = {name: FACTS[name] for name in ("reward", "pass rate", "length")}
    facts |= {"staleness": "1.2", "sampler": "waiting for the learner"}
    for width, words in ((80, "sampler waits"), (200, "waiting for the learner")):
        progress, line = on_a_terminal(width)
        with progress.bar("step", total=300, done=298):
            progress.show(facts, done=299)
            assert words in line()


def test_programs_are_a_bar_or_said_beside_one():
    progress, line = on_a_terminal(80)
    with progress.bar("compiling the sampler"):
        progress.program(7, 23)
        assert line().startswith("compiling the sampler 7/23  ")
        with progress.bar("evaluation at step 0: prompt", total=300) as bar:
            progress.program(8, 23)
            progress.advance(bar)
            assert "step 0: prompt 1/300 " in line()
            assert "compiling program 8/23" in line()
        assert line().startswith("compiling the sampler 7/23  ")


def test_as_many_prompts_as_programs_are_still_counted():
    progress, line = on_a_terminal(80)
    with progress.bar("prompt", total=23):
        progress.program(8, 23)
        assert line().startswith("prompt 0/23 ")
        assert "compiling program 8/23" in line()


def test_where_no_terminal_is_the_first_program_is_a_plain_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with Progress() as progress:
        progress.program(1, 23)
        with progress.bar("prompt", total=9, every_s=1000.0):
            progress.program(2, 23)  # at once: it would be a line too many
    assert stream.getvalue() == "compiling program 1/23\n"


def test_where_no_terminal_is_a_step_is_a_plain_line(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as build servers say
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with Progress() as progress:
        with progress.bar("loading"), progress.bar("reading: question", total=9):
            pass
        with progress.bar("step", total=3, done=1):
            progress.show(FACTS, done=2)
            progress.note("warning: [bold]not markup[/bold] " + "long " * 40)
            progress.show({"reward": "1.00"}, done=3)
        with progress.bar("prompt", total=9, every_s=1000.0):
            progress.show(FACTS, done=5)
    facts = "  ".join(f"{name} {value}" for name, value in FACTS.items())
    assert stream.getvalue().splitlines() == [
        "loading",
        f"step 2/3  0:00  {facts}",
        "warning: [bold]not markup[/bold] " + "long " * 40,
        "step 3/3  left 0:00  reward 1.00",
    ]


def test_logs_go_above_the_line_of_a_terminal(monkeypatch):
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        handler = logging.StreamHandler(Stderr())
        with Progress() as progress, progress.bar("loading"):
            progress.refresh()
            handler.emit(logging.LogRecord("", 20, "", 0, "a warning", None, None))
            handler.close()
        assert sys.stderr is terminal
    with open(reader, "rb", buffering=0) as shown, contextlib.suppress(OSError):
        seen = b""
        while part := shown.read(4096):  # an error once all is read
            seen += part
    seen = seen.decode()
    # The line is erased before the warning, and drawn again below it.
    assert re.search(r"loading.*\x1b\[2K.*a warning\r\n.*loading", seen, re.DOTALL)
    # It is gone at the end, and the cursor is always there.
    assert seen.rindex("\x1b[2K") > seen.rindex("loading")
    assert re.findall(r"\x1b\[\?25[lh]", seen)[:2] == ["\x1b[?25l", "\x1b[?25h"]


NOTES = """
from scalerl_jax.run.progress import Progress

with Progress() as progress:
    for _ in range(1000):
        progress.note("a line" * 20)
print("ended")
"""


def test_a_reader_that_leaves_ends_no_run():
    with small_run.start("-c", NOTES) as process:
        process.stderr.close()  # as that of a `tee` that was killed
        assert process.stdout.read() == "ended\n"
    assert process.returncode == 0
