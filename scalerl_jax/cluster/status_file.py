"""The file that says how every process of a run stands, for `scalerl status`."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scalerl_jax.utils.run_directory import STATUS_FILE, write_json

_EVERY_S = 1.0
_LAST_WRITE_S = 10.0


@contextlib.contextmanager
def kept_up_to_date(
    directory: Path, rows: Callable[[], list[dict[str, Any]]]
) -> Iterator[None]:
    """Write the rows of `rows` every second, while the block runs and at its end.

    The first failure to write ends it: a disk without room is told by what must write.
    """
    path, ended = directory / STATUS_FILE, threading.Event()

    def keep() -> None:
        over = False
        with contextlib.suppress(OSError):
            while not over:
                over = ended.wait(_EVERY_S)
                state = "ended" if over else "running"
                write_json(path, {"at": time.time(), "state": state, "roles": rows()})

    thread = threading.Thread(target=keep, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_LAST_WRITE_S)
