"""The file that says how every process of a run stands, for `scalerl status`."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalerl_jax.utils.background import repeated
from scalerl_jax.utils.run_directory import STATUS_FILE, write_json

_EVERY_S = 1.0
_LAST_WRITE_S = 10.0


def kept_up_to_date(
    directory: Path, rows: Callable[[], list[dict[str, Any]]]
) -> contextlib.AbstractContextManager[None]:
    """Write the rows of `rows` every second, while the block runs and at its end."""

    def write(last: bool) -> None:
        said = {"at": time.time(), "state": "ended" if last else "running"}
        write_json(directory / STATUS_FILE, said | {"roles": rows()})

    return repeated(write, name="status", every_s=_EVERY_S, last_s=_LAST_WRITE_S)
