"""Progress of a command: a bar at the bottom of a terminal, plain lines elsewhere."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from rich import progress
from rich.console import Console, RenderableType
from rich.highlighter import ReprHighlighter
from rich.table import Column
from rich.text import Text

from scalerl_jax.process.common_flags import is_quiet
from scalerl_jax.process.printing import shown

_AVERAGE_S = 3600.0  # window for the estimate of the remaining time
_PROGRAM_S = 5.0  # between two plain lines about compiled programs
_LEAST_BAR = 2  # columns
_SHORT = {  # abbreviations for a line that is too long
    "sampler waiting for the learner": "sampler waits",
    "pass rate": "pass",
    "length": "len",
    "staleness": "stale",
    "tokens/s": "tok/s",
    "  ": " ",
}


class Progress(progress.Progress):
    """The newest progress bar of a command, with notes above it."""

    def __init__(self, console: Console | None = None) -> None:
        """Draw on standard error, unless another console is given."""
        # Environment variables that force colours must not make a file a terminal.
        interactive = None if sys.stderr.isatty() else False
        console = console or _Console(stderr=True, force_interactive=interactive)
        super().__init__(
            _Line(console),
            progress.BarColumn(bar_width=None),
            console=console,
            disable=not console.is_interactive or is_quiet(),
            expand=True,
            refresh_per_second=4,
            speed_estimate_period=_AVERAGE_S,
            transient=True,
        )
        self._program_due_s = 0.0

    def start(self) -> None:
        """Start drawing, if there is a terminal."""
        super().start()
        if not self.disable:
            self.console.show_cursor()  # a killed process could not restore it

    def note(self, text: str) -> None:
        """Write a permanent line; with --quiet only if it is a warning."""
        if is_quiet() and not text.startswith("warning: "):
            return
        self.console.print(
            shown(text), markup=False, highlight=False, emoji=False, soft_wrap=True
        )

    @contextlib.contextmanager
    def bar(
        self,
        text: str,
        *,
        total: int | None = None,
        done: int = 0,
        every_s: float = 0.0,
    ) -> Iterator[progress.TaskID]:
        """Show a bar during the block; without a terminal or `total`, a plain line.

        `show` writes plain lines at least `every_s` seconds apart.
        """
        if self.disable and total is None:
            self.note(text)
        fields = {"facts": "", "compiling": "", "every_s": every_s, "due_s": every_s}
        fields["of_programs"] = total is None
        task = self.add_task(text, total=total, completed=done, **fields)
        try:
            yield task
        finally:
            self.remove_task(task)

    def show(self, facts: dict[str, str], *, done: int) -> None:
        """Update the newest bar; without a terminal, write a plain line."""
        task = self.tasks[-1]
        shown = "  ".join(f"{name} {value}" for name, value in facts.items())
        self.update(task.id, completed=done, facts=shown, compiling="")
        elapsed_s = task.elapsed or 0.0
        if self.disable and elapsed_s >= task.fields["due_s"]:
            task.fields["due_s"] = elapsed_s + task.fields["every_s"]
            self.note(_line(task))

    def program(self, number: int, total: int) -> None:
        """Show that program `number` of `total` is being compiled.

        A bar without a count of its own shows this count.  Without a terminal, plain
        lines are written, `_PROGRAM_S` seconds apart.
        """
        said = f"compiling program {number}/{total}"
        for task in self.tasks[-1:]:
            if task.fields["of_programs"]:
                self.update(task.id, total=total, completed=number)
            else:
                self.update(task.id, compiling=said)
        if self.disable and time.monotonic() >= self._program_due_s:
            self._program_due_s = time.monotonic() + _PROGRAM_S
            self.note(said)

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield only the newest bar."""
        yield self.make_tasks_table(self.tasks[-1:])


class _Console(Console):
    """A console whose reader may leave: the run goes on, as it does without one."""

    def on_broken_pipe(self) -> None:
        """Write no more; the library's own version ends the process."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class _Line(progress.ProgressColumn):
    """The text of a bar, abbreviated if the terminal is narrow."""

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True))  # the bar gets the remaining columns
        self._console = console

    def render(self, task: progress.Task) -> Text:
        line = _line(task)
        if len(line) > self._console.width - _LEAST_BAR:
            for words, fewer in _SHORT.items():
                line = line.replace(words, fewer)
        return ReprHighlighter()(Text(line, no_wrap=True, overflow="ellipsis"))


def _line(task: progress.Task) -> str:
    """Return the full text of a bar."""
    count = f" {task.completed:.0f}/{task.total:.0f}" if task.total else ""
    time = _duration(task.elapsed or 0.0)
    if task.time_remaining is not None:  # it can be estimated
        time = f"left {_duration(task.time_remaining)}"
    facts = [task.fields["compiling"], task.fields["facts"]]
    said = "  ".join(filter(None, [f"{task.description}{count}", time, *facts]))
    return shown(said)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}" if hours else f"{minutes}:{rest:02d}"
