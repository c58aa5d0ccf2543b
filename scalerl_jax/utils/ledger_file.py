"""A ledger's state on disk, brought up to date every few seconds, for after a kill.

It is written by a thread of its own and replaced in one go.  At most what the last
`WRITE_EVERY_S` seconds before a kill have cost is in no ledger.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalerl_jax.utils.ledger import Ledger
from scalerl_jax.utils.reading import parse_json
from scalerl_jax.utils.run_directory import write_json

LEDGER_FILE = "ledger.json"
WRITE_EVERY_S = 5.0
_LAST_WRITE_S = 60.0  # for a slow disk, at the end of a run

_log = logging.getLogger(__name__)


def read_ledger(directory: Path) -> dict[str, Any] | None:
    """The state that was last written in the directory of a run, if any was.

    Raises:
        ValueError: the file is no ledger's.
    """
    path = directory / LEDGER_FILE
    if not path.exists():
        return None
    try:
        state = parse_json(path.read_bytes())
        if state.keys() != {"chip", "chip_s", "counts"}:
            raise KeyError(f"it holds {sorted(state)}")
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is broken ({error!r}), so what the run has cost since its last "
            f"checkpoint is unknown; remove it to go on without that"
        ) from error
    return state


@contextlib.contextmanager
def kept_on_disk(ledger: Ledger, directory: Path) -> Iterator[None]:
    """Write the ledger's state while the block runs, and once more at its end.

    A file that cannot be written is reported once; the run goes on.
    """
    path, ended = directory / LEDGER_FILE, threading.Event()

    def keep() -> None:
        told = last = False
        while True:
            try:
                write_json(path, ledger.state())
            except OSError as error:
                if not told:
                    _log.warning(
                        "cannot write %s (%s): what is lost if this process is killed "
                        "will be in no ledger",
                        path,
                        error.strerror or error,
                    )
                told = True
            if last:
                return
            last = ended.wait(WRITE_EVERY_S)

    thread = threading.Thread(target=keep, name="ledger", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_LAST_WRITE_S)
