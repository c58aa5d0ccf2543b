"""Background threads: for one task at a time, or for a periodic task."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)


class Background:
    """Runs one task at a time in a thread; `check`, `wait` and `start` raise its error.

    An error is raised once, with its own traceback.  Call the methods from one thread.
    """

    def __init__(self, name: str) -> None:
        """Store the name of the threads; start none."""
        self._name = name
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, work: Callable[[], None], *, timeout_s: float) -> None:
        """Start `work`, after the previous task has ended.

        Raises:
            TimeoutError: the previous task has not ended within `timeout_s`.
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
        """Raise the error of a failed task, if any, without waiting."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait(0.0)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the task, if any; raise its error.

        Raises:
            TimeoutError: the task has not ended within `timeout_s`.
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
    """Call `work` at once, periodically during the block, and at its end.

    Args:
        work: its argument is True for the last call.  An OSError or RuntimeError is
            logged, and logged again only after a call has succeeded.
        name: name of the thread.
        every_s: pause between two calls.
        last_s: timeout of the last call, at the end of the block.
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
