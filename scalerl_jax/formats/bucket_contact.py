"""Wait for a bucket with a timeout, and find out why it does not answer.

gcsfs retries for minutes, and reports the reason only in its log.
"""

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator


def in_time(work: Callable[[], object], timeout_s: float) -> None:
    """Do `work` in a daemon thread, with a timeout.

    Raises:
        TimeoutError: it has not ended within `timeout_s` seconds.
        Exception: the exception that `work` raised.
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
    """Drops gcsfs's log records with a traceback: it also raises these errors."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True for a record without a traceback."""
        return not record.exc_info


class Retry(logging.Filter):
    """Stores the reason of gcsfs's last retry, which is logged at DEBUG level only."""

    reason = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Store the cause of a retry; pass only records above DEBUG."""
        _, retried, cause = record.getMessage().partition("retrying after exception: ")
        self.reason = cause.splitlines()[0] if retried and cause else self.reason
        return record.levelno > logging.DEBUG


@contextlib.contextmanager
def heard(retry: Retry) -> Iterator[None]:
    """Pass gcsfs's log records to `retry` during the block."""
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
