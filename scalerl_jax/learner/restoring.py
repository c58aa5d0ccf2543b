"""The reading of checkpoints: which of a directory is whole, and what it holds.

A checkpoint counts if its manifest and all files are as they were written and its
arrays are finite; the newest that does is read.  Nothing here writes, so a directory in
use can be read.

Several processes read together: each checks every n-th file, and what one finds damaged
no other uses.
"""

import concurrent.futures
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from scalerl_jax.contract import Restored
from scalerl_jax.formats.bounded import MOST_WHOLE
from scalerl_jax.formats.paths import inside
from scalerl_jax.formats.reading import read_json
from scalerl_jax.learner import contents, fitness
from scalerl_jax.learner.places import (
    DISK_THREADS,
    FORMAT,
    MANIFEST,
    CheckpointPlace,
    Folder,
    measure,
    seal,
    share,
)
from scalerl_jax.parallel import multihost
from scalerl_jax.types import PyTree

_log = logging.getLogger(__name__)
T = TypeVar("T")


class DamagedError(Exception):
    """A checkpoint is not as it was written; the message says how."""


class CheckpointReader:
    """Reads the newest good checkpoint of a place; `damaged` are those it found bad."""

    def __init__(self, place: CheckpointPlace, *, timeout_s: float = 1800.0) -> None:
        """Read nothing yet; processes wait at most `timeout_s` for the slowest."""
        self.damaged: set[Folder] = set()
        self._place = place
        self._timeout_s = timeout_s

    def restore(self, abstract_state: PyTree) -> Restored | None:
        """Return the newest good checkpoint, or None if none was ever written.

        `abstract_state` has a `jax.ShapeDtypeStruct` for each array; one without a
        sharding is put on the first device.

        Raises:
            RuntimeError: there are checkpoints, and all of them are damaged or hold
                numbers that are not finite.
            ValueError: the checkpoint is of another model or optimizer.
        """

        def load(step: int, path: Folder, manifest: dict[str, Any]) -> Restored:
            _check_shapes(path, manifest["arrays"], abstract_state)
            return self._together(
                lambda: Restored(
                    step=step,
                    state=_load(path / contents.STATE, abstract_state),
                    host=read_json(path / contents.HOST, most=MOST_WHOLE),
                    groups=contents.read_groups(path),
                )
            )

        return self._newest(load, arrays=lambda restored: restored.state)

    def restore_params(
        self, abstract_params: PyTree, *, name: str = ""
    ) -> tuple[int, PyTree] | None:
        """Return step and params of the newest good checkpoint, and read nothing else.

        Errors are as in `restore`.  With a `name`, such as step_00000050, that
        checkpoint is read.
        """
        wanted = {"params": abstract_params}

        def load(
            step: int, path: Folder, manifest: dict[str, Any]
        ) -> tuple[int, PyTree]:
            params = {
                name: shape
                for name, shape in manifest["arrays"].items()
                if name.startswith("params.")
            }
            _check_shapes(path, params, wanted)
            state = self._together(
                lambda: _load(path / contents.STATE, wanted, partial=True)
            )
            return step, state["params"]

        return self._newest(load, arrays=lambda found: {"params": found[1]}, only=name)

    def _newest(
        self,
        load: Callable[[int, Folder, dict[str, Any]], T],
        *,
        arrays: Callable[[T], PyTree],
        only: str = "",
    ) -> T | None:
        """Return what `load` makes of the newest good checkpoint.

        It gets step, directory and manifest.  The `arrays` of the result must be
        finite.  With a name in `only`, no other checkpoint counts.
        """
        reasons = []
        for step, path in self._place.listed(timeout_s=self._timeout_s):
            if only and path.name != only:
                continue
            manifest, damage = self._verify(path, step)
            if not damage:
                loaded = load(step, path, manifest)
                unfit = fitness.unfit_leaf(arrays(loaded))
                if not unfit:
                    return loaded
                del loaded  # there may be no room for the next one beside it
                damage = f"{unfit} holds numbers that are NaN or infinite"
            self.damaged.add(path)
            reasons.append(f"step {step}: {damage}")
            _log.warning("checkpoint %s is not used: %s", path, damage)
        if reasons:
            raise RuntimeError(
                f"none of the checkpoints in {self._place.directory} can be used "
                f"({'; '.join(reasons)}); put back a copy of one, or start a new run "
                f"with another --workdir"
            )
        return None

    def _verify(self, path: Folder, step: int) -> tuple[dict[str, Any], str]:
        """Return the manifest and what is damaged ("": nothing).

        The processes share the reading of the files.
        """
        manifest: dict[str, Any] = {}
        damage = ""
        try:
            manifest = _read_manifest(path, step=step)
            self._check_share(path, manifest)
        except (DamagedError, OSError) as error:
            damage = str(error)
        all_damage = multihost.exchange(
            damage, name="checkpoint", timeout_s=self._timeout_s
        )
        return manifest, next(filter(None, all_damage), "")

    def _together(self, action: Callable[[], T]) -> T:
        return multihost.together(action, name="checkpoint", timeout_s=self._timeout_s)

    def _check_share(self, path: Folder, manifest: dict[str, Any]) -> None:
        """Refuse a file of this process's share that is not as the manifest says."""
        known = self._place.known_files(path)

        def check(entry: tuple[str, dict[str, Any]]) -> None:
            name, expected = entry
            found = _measured(path, name) if known is None else known.get(name)
            if found is None:
                raise DamagedError(f"{name} is missing")
            if found["bytes"] != expected["bytes"]:
                raise DamagedError(
                    f"{name} has {found['bytes']} of {expected['bytes']} bytes"
                )
            if found != expected:
                raise DamagedError(f"{name} has a wrong checksum")

        with concurrent.futures.ThreadPoolExecutor(DISK_THREADS) as pool:
            list(pool.map(check, share([*manifest["files"].items()])))


def _read_manifest(path: Folder, *, step: int) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        DamagedError: it is not as it was written.
        ValueError: the checkpoint is of another format.
    """
    manifest = _unsealed(path / MANIFEST)
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {manifest['format']} and this code reads {FORMAT}; "
            f"resume with the code that wrote it (git_revision in config.json)"
        )
    if manifest["step"] != step:
        raise DamagedError(f"its manifest is of step {manifest['step']}")
    return manifest


def _unsealed(path: Folder) -> dict[str, Any]:
    try:
        if not path.exists():
            raise DamagedError(f"{MANIFEST} is missing")
        found = read_json(path)
        if found["sha256"] == seal(found["manifest"]):
            return found["manifest"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{MANIFEST} is broken: {error!r}") from error
    raise DamagedError(f"{MANIFEST} is broken: its checksum differs")


def _measured(checkpoint: Path, name: str) -> dict[str, Any] | None:
    """Return size and checksum of a file of this machine; None: it is missing."""
    try:
        path = inside(checkpoint, name)
    except ValueError as error:
        raise DamagedError(f"{MANIFEST}: {error}") from error
    return measure(path) if path.is_file() else None


def _check_shapes(path: Folder, arrays: dict[str, list[Any]], wanted: PyTree) -> None:
    """Refuse a state of other arrays, naming the first that differ."""
    here = contents.describe(wanted)
    differences = [
        f"{name} is {_text(arrays.get(name))} there and {_text(here.get(name))} here"
        for name in [*here, *(arrays.keys() - here.keys())]
        if arrays.get(name) != here.get(name)
    ]
    if differences:
        raise ValueError(
            f"{path} is of another model or optimizer: {'; '.join(differences[:5])} "
            f"({len(differences)} in all); resume with the settings that it was "
            f"written with, or choose another --workdir"
        )


def _text(shape: list[Any] | None) -> str:
    return "absent" if shape is None else f"{shape[0]}{shape[1]}"


def _load(directory: Folder, abstract: PyTree, *, partial: bool = False) -> PyTree:
    """Read the arrays that `abstract` describes: all, or with `partial` some."""
    target = jax.tree.map(_placed, abstract)
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True)
    try:
        return handler.restore(
            epath.Path(directory),
            args=ocp.args.PyTreeRestore(
                target, restore_args=restore_args, partial_restore=partial
            ),
        )
    finally:
        handler.close()


def _placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return leaf.update(sharding=leaf.sharding or first)
