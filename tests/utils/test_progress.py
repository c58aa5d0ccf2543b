import io
import re

from scalerl_jax.utils.progress import Progress


class Terminal(io.StringIO):
    """A stream that somebody looks at."""

    def isatty(self):
        return True

    def screen(self):
        """The lines that are to be seen, spaces at their ends left out."""
        lines = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for part in line.split("\r"):
                shown = part + shown[len(part) :]
            lines.append(shown.rstrip())
        return lines


def test_a_file_gets_few_lines_and_always_the_last(tmp_path):
    stream = io.StringIO()
    progress = Progress(first_step=0, num_steps=100, stream=stream)
    for step in range(1, 101):
        progress.show(step, {"pass rate": f"{step / 100}"})
    first, last = stream.getvalue().splitlines()
    assert re.fullmatch(r"step 1/100  pass rate 0\.01  left \d+:\d\d", first)
    assert last == "step 100/100  pass rate 1.0  left 0:00"


def test_notes_stay_in_a_file():
    stream = io.StringIO()
    progress = Progress(first_step=0, num_steps=2, stream=stream)
    progress.show(1, {})
    progress.note("evaluation")
    progress.note("warning")
    progress.show(2, {})
    assert stream.getvalue().splitlines()[1:] == [
        "evaluation",
        "warning",
        "step 2/2  left 0:00",
    ]


def test_a_terminal_shows_one_line_and_the_notes_above_it():
    terminal = Terminal()
    progress = Progress(first_step=0, num_steps=2, stream=terminal)
    progress.show(1, {"tokens/s": "a long figure that leaves nothing behind"})
    progress.note("a note")
    progress.show(2, {})
    assert terminal.screen() == ["a note", "step 2/2  left 0:00"]
    progress.show(2, {"tokens/s": "1"})
    assert terminal.screen() == ["a note", "step 2/2  tokens/s 1  left 0:00"]


def test_what_is_left_counts_from_the_first_step_of_this_process():
    stream = io.StringIO()
    progress = Progress(first_step=50, num_steps=60, stream=stream)
    progress._started_s -= 7200.0  # it began two hours ago
    progress.show(51, {})
    # One step in two hours leaves nine of them, and not 9 / 51 of two hours.
    assert stream.getvalue().startswith("step 51/60  left 18:00:0")
