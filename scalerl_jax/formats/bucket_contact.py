"""Waiting for a bucket no longer than a limit, and why it does not answer.

gcsfs tries again for minutes, and says why only in its log.
"""

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator


def in_time(work: Callable[[], object], timeout_s: float) -> None:
    """Do `work` in a thread, which an end of this process does not wait for.

    Raises:
        TimeoutError: it has not ended within `timeout_s`.
        Exception: whatever it raised.
    """
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised by `result`
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="bucket", daemon=True).start()
    done.result(timeout_s)


class Quiet(logging.Filter):
    """Drops what gcsfs logs of errors, with traceback: it raises them as well."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to keep a record: one without a traceback."""
        return not record.exc_info


class Retry(logging.Filter):
    """Keeps why gcsfs has tried again, which it says at its lowest level only."""

    reason = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Take the cause of a retry, and let pass what is for others."""
        _, retried, cause = record.getMessage().partition("retrying after exception: ")
        self.reason = cause.splitlines()[0] if retried and cause else self.reason
        return record.levelno > logging.DEBUG


@contextlib.contextmanager
def heard(retry: Retry) -> Iterator[None]:
    """Pass gcsfs's records of its retries to `retry`, while the block runs."""
    log = logging.getLogger("gcsfs")
    level = log.level
    log.addFilter(retry)
    log.setLevel(logging.DEBUG)
    logging.getLogger("gcsfs.credentials").setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeFilter(retry)
