"""TensorBoard event files as a table, read by the tensorboard package itself.

Neither TensorFlow nor anything else than scalars is needed.  What a restart has
declared void is dropped as TensorBoard drops it.
"""

import collections
import logging
from pathlib import Path
from typing import Any

from scalerl_jax.scaling.curves import DEFAULT_X, DEFAULT_Y, CurveError
from scalerl_jax.scaling.tables import RUN_COLUMN, STEP_COLUMN, Row, Table

EVENTS_PATTERN = "events.out.tfevents.*"
TIME_COLUMN = "wall_time_s"  # since the run's first event
PREFIX = "eval/"  # of the tags of this package's own evaluations


def read_events(path: Path) -> Table:
    """Scalars of one event file, or of all below a directory: a row per run and step.

    A run is a directory with event files, named by its path below `path`.  Columns are
    the tags, `step`, `wall_time_s` and `run`.

    Raises:
        CurveError: no scalars; the message says which other data there are.
    """
    folders = (
        sorted({file.parent for file in path.rglob(EVENTS_PATTERN)})
        if path.is_dir()
        else [path]
    )
    rows: list[Row] = []
    for folder in folders:
        run = str(folder.relative_to(path)) if folder != path else path.name
        rows += _read_run(folder, run)
    if not rows:
        raise CurveError(
            f"{path}: its event files hold no scalars, or are empty or damaged"
        )
    tags = dict.fromkeys(name for _, row in rows for name in row)
    own_x, own_y = PREFIX + DEFAULT_X, PREFIX + DEFAULT_Y
    return Table(
        path=path,
        rows=rows,
        x=own_x if own_x in tags else STEP_COLUMN,
        y=own_y if own_y in tags else None,
        group=RUN_COLUMN if len(folders) > 1 else None,
        sparse=True,
    )


def _read_run(path: Path, run: str) -> list[Row]:
    """The scalars of one run, joined on their steps, in the order of time.

    A step that was written again is a row of its own.
    `tf.summary` stores scalars as tensors of no dimension, others as plain values.
    """
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    # It reports every restart as a warning; purging is what is wanted here.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    reader = event_accumulator.EventAccumulator(
        str(path),
        size_guidance={
            event_accumulator.SCALARS: 0,  # all of them
            event_accumulator.TENSORS: 0,
            event_accumulator.IMAGES: 1,
            event_accumulator.HISTOGRAMS: 1,
            event_accumulator.COMPRESSED_HISTOGRAMS: 1,
            event_accumulator.AUDIO: 1,
        },
    )
    reader.Reload()
    try:
        started = reader.FirstEventTimestamp() or 0.0
    except ValueError:  # empty, or no event in it is whole
        return []
    found: dict[tuple[int, int], dict[str, Any]] = {}  # by occurrence and step
    times: dict[tuple[int, int], float] = {}
    seen = collections.Counter[tuple[str, int]]()

    def add(tag: str, step: int, wall_time: float, value: float) -> None:
        again = seen[tag, step]  # a run that was resumed writes steps again
        seen[tag, step] += 1
        row = found.setdefault((again, step), {STEP_COLUMN: step, RUN_COLUMN: run})
        row[TIME_COLUMN] = wall_time - started
        row[tag] = value
        times[again, step] = min(wall_time, times.get((again, step), wall_time))

    tags = reader.Tags()
    for tag in tags[event_accumulator.SCALARS]:
        for event in reader.Scalars(tag):
            add(tag, event.step, event.wall_time, event.value)
    for tag in tags[event_accumulator.TENSORS]:
        if reader.SummaryMetadata(tag).plugin_data.plugin_name != "scalars":
            continue
        for event in reader.Tensors(tag):
            value = float(tensor_util.make_ndarray(event.tensor_proto).item())
            add(tag, event.step, event.wall_time, value)
    return [
        (f"{path} step {step}", found[again, step]) for again, step in sorted(found)
    ]
