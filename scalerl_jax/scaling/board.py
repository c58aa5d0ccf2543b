"""What a watched run shows in TensorBoard: the fit's numbers and its picture.

Written with TensorBoard's own writer, as a run beside the training's own.
"""

import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

# Message classes are made at import, where a type checker cannot see them.
Event = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
Summary = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]


class Board:
    """Scalars and pictures under `scaling/`; each is on disk on return."""

    def __init__(self, directory: Path) -> None:
        """Open an event file in `directory`."""
        self._writer = EventFileWriter(str(directory))

    def write(self, step: int, scalars: dict[str, float], png: bytes | None) -> None:
        """Append numbers by their names, and a picture."""
        values: list[Any] = [
            Summary.Value(tag=f"scaling/{name}", simple_value=value)
            for name, value in scalars.items()
        ]
        if png is not None:
            width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
            image = Summary.Image(
                encoded_image_string=png, width=width, height=height, colorspace=4
            )
            values.append(Summary.Value(tag="scaling/fit", image=image))
        summary = Summary(value=values)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
