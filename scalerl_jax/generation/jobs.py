"""Jobs of other threads, which a sampling thread runs between two steps.

While that thread does not run, a job runs in its caller's thread.  Never do two threads
use the sampler: the sampling thread starts and ends between two jobs.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from scalerl_jax.generation.evaluation import Abandoned
from scalerl_jax.process.step_watch import StepWatch

AGAIN: Any = object()  # returned by a job to be called again after the next step
_POLL_S = 0.05  # between two checks of a thread that does a job
_STEP_TIMEOUT_S = 600.0  # for the current step
_Result = TypeVar("_Result")


class Jobs:
    """The jobs that wait for a sampling thread, and whether it runs."""

    def __init__(
        self,
        changed: threading.Condition,
        watch: StepWatch,
        *,
        wake: Callable[[], None],
    ) -> None:
        """Wait for no job; `wake` ends the thread's wait for something to sample."""
        self._changed = changed  # guards the list, and whether the thread runs
        self._watch = watch
        self._wake = wake
        self._waiting: list[tuple[Callable[[], Any], Future[Any]]] = []
        self.running = False  # the thread does the jobs
        self._alone = threading.RLock()  # held while a job runs and the thread does not

    @property
    def waiting(self) -> int:
        """Return the number of jobs for the next pause between two steps."""
        return len(self._waiting)

    def run(self, job: Callable[[], _Result], *, timeout_s: float) -> _Result:
        """Run `job` between two steps, or at once if none runs; return its result.

        A job that returns `AGAIN` is called again after the next step.

        Raises:
            Abandoned: the run has ended before the job.
            TimeoutError: the thread hangs for `timeout_s`, before the job or in it.
        """
        future: Future[_Result] = Future()
        with self._alone:
            with self._changed:
                running = self.running
                if running:
                    self._waiting.append((job, future))
            if not running:
                while (result := job()) is AGAIN:
                    pass
                return result
        self._wake()
        before_s = min(_STEP_TIMEOUT_S, timeout_s)
        while True:
            try:
                # Signal handlers run only when this thread wakes: wait in pieces.
                return future.result(_POLL_S)
            except TimeoutError:
                if future.done():
                    return future.result()
                begun = future.running()
                if hang := self._watch.hang(timeout_s if begun else before_s):
                    future.cancel()
                    raise TimeoutError(
                        f"{hang}; queue.batch_timeout_s = {timeout_s:g} is "
                        f"the most that a step may take"
                    ) from None

    def start(self, thread: threading.Thread) -> None:
        """Start the sampling thread, once no other thread runs a job."""
        with self._alone:
            self.running = True
            thread.start()

    def stop(self) -> None:
        """Leave later jobs to their callers' threads."""
        with self._changed:
            self.running = False
            self._changed.notify_all()

    # -- in the sampling thread -------------------------------------------------------

    def do(self) -> float:
        """Run the waiting jobs, and return results or errors to their callers.

        Returns:
            the seconds that they took, in which no step was made.
        """
        begun_s = time.monotonic()
        with self._changed:
            jobs, self._waiting = self._waiting, []
        for job, future in jobs:
            if not (future.running() or future.set_running_or_notify_cancel()):
                continue
            try:
                result = job()
            except BaseException as error:  # noqa: BLE001  raised in the caller
                future.set_exception(error)
            else:
                if result is AGAIN:
                    with self._changed:
                        self._waiting.append((job, future))
                else:
                    future.set_result(result)
        return time.monotonic() - begun_s

    def end(self) -> None:
        """Do the last jobs; abandon those that have started, as no step follows."""
        with self._alone:
            self.stop()
            begun = [each for each in self._waiting if each[1].running()]
            self._waiting = [each for each in self._waiting if each not in begun]
            self.do()
            for _, future in (*begun, *self._waiting):
                future.set_exception(Abandoned())
