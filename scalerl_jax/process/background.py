"""Work beside the caller: one piece at a time, or the same again and again."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)


class Background:
    """A thread per piece of work; `check`, `wait` and `start` raise what it raised.

    A failure is raised once, with its own traceback.  One thread calls the methods.
    """

    def __init__(self, name: str) -> None:
        """Start no thread yet; `name` is what the threads are called."""
        self._name = name
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, work: Callable[[], None], *, timeout_s: float) -> None:
        """Begin `work`, after the piece before it has ended.

        Raises:
            TimeoutError: that one has not ended within `timeout_s`.
        """
        self.wait(timeout_s)

        def run() -> None:
            try:
                work()
            except BaseException as failure:  # noqa: BLE001  raised by `check`
                self._failure = failure

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the work, if something has; never waits."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait(0.0)

    def wait(self, timeout_s: float) -> None:
        """Return once nothing is under way; raise what ended it.

        Raises:
            TimeoutError: it has not ended within `timeout_s`.
        """
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._name} has not ended within {timeout_s:g} s")
        self._thread, failure, self._failure = None, self._failure, None
        if failure is not None:
            raise failure


@contextlib.contextmanager
def repeated(
    work: Callable[[bool], None], *, name: str, every_s: float, last_s: float
) -> Iterator[None]:
    """Do `work` at once, every so often while the block runs, and at its end.

    Args:
        work: is told whether it is the last time.  An OSError or a RuntimeError is
            logged, once until it succeeds again.
        name: of the thread.
        every_s: from one end to the next beginning.
        last_s: the wait for the last time, at the end of the block.
    """
    ended = threading.Event()

    def run() -> None:
        told = last = False
        while True:
            try:
                work(last)
                told = False
            except (OSError, RuntimeError) as error:
                if not told:
                    _log.warning("%s", error)
                told = True
            if last:
                return
            last = ended.wait(every_s)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(last_s)
