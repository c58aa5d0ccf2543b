"""The whole state of a run on disk: written atomically, checked before it is used.

A checkpoint is a directory `step_00000050` that holds the train state (orbax), the
buffered finished groups (flat NumPy arrays), the host's state (JSON) and a manifest
with the SHA-256 of each of these files.  A kill at any moment leaves it whole or not at
all (`places`).  A checkpoint is good if its manifest and all files are as they were
written and its arrays are finite.  The newest good one is read, so damage on the disk
costs the steps since the one before.  Reading writes nothing: a directory in use can be
read.

`save` returns when everything in the checkpoint is copied: the state may then be
donated, and the books may change.  A thread writes the copy, one checkpoint at a time;
a checkpoint is certain to be on disk only once `wait` has returned.

Several processes save and restore together, in a directory that all of them see: each
writes its own shards, the first does the rest, and what fails in one fails in all.  The
state can be restored by any number of processes: each of n checks every n-th file, and
a checkpoint that one finds damaged is used by none.

The file is above 400 lines: what is written and what is checked is one format.
"""

import concurrent.futures
import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from etils import epath

from scalerl_jax.contract import Restored
from scalerl_jax.formats.bounded import MOST_WHOLE
from scalerl_jax.formats.paths import inside
from scalerl_jax.formats.reading import is_remote, read_json
from scalerl_jax.learner import contents, fitness
from scalerl_jax.learner.places import (
    DISK_THREADS,
    FORMAT,
    MANIFEST,
    BucketPlace,
    CheckpointPlace,
    Folder,
    measure,
    seal,
    share,
)
from scalerl_jax.parallel import multihost
from scalerl_jax.process.background import Background
from scalerl_jax.process.full_disk import lacks_space, why_full
from scalerl_jax.types import Group, PyTree

_log = logging.getLogger(__name__)
# Digests of params that belong to a state and are not in it, by name; "": none.
Beside = Mapping[str, str]
NOTHING: Beside = {}
# Name -> what it is called, and where it comes from.
_BESIDE = {
    "base": ("frozen params", "model.checkpoint or model.param_dtype"),
    "teacher": ("params of a teacher", "teacher.checkpoint or model.compute_dtype"),
}
_OF_PROCESS = re.compile(r"process \d+: ")  # with which `multihost` begins an error
T = TypeVar("T")


class UnsavedError(RuntimeError):
    """A checkpoint cannot be written."""


class DamagedError(Exception):
    """A checkpoint is not as it was written; the message says how."""


class Checkpointer:
    """Saves and restores the state of one run in `directory`.

    Only `save` writes, so a second process may restore from a directory in use.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int,
        keep: int,
        background: bool = False,
        before_seal: Callable[[], None] | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        """Save every `every` optimizer steps, and keep the `keep` newest on disk.

        `background`: `save` leaves the writing to a thread.  `before_seal` runs before
        a bucket's checkpoint gets its manifest.  Processes wait at most `timeout_s` for
        the slowest of them, and a save for the save before it.

        Raises:
            ValueError: the bucket cannot be used.
        """
        if is_remote(directory):
            self._place = BucketPlace(os.fspath(directory), before_seal=before_seal)
        else:
            self._place = CheckpointPlace(Path(directory).absolute())
        self._directory = self._place.directory
        self._every = every
        self._keep = keep
        self._timeout_s = timeout_s
        self._damaged: set[Folder] = set()
        self._writing = Background("writing a checkpoint") if background else None
        self._arrays = contents.ArrayFiles()
        self._bytes = 0  # of the arrays that are being saved

    def due(self, step: int, *, since: int) -> bool:
        """Return whether a save was due at any of the steps `since` + 1 to `step`."""
        return step // self._every > since // self._every

    def save(
        self,
        step: int,
        *,
        state: PyTree,
        host: dict[str, Any],
        groups: Sequence[Group],
        beside: Beside = NOTHING,
    ) -> None:
        """Copy a checkpoint off the devices, and write it or have it written.

        All processes save the same step and state; the host's state and the groups are
        those of the first.  `beside` names params that belong to the state and are not
        in it.

        Raises:
            UnsavedError: this checkpoint or the one before it cannot be written, or the
                state is not finite; the checkpoints on disk are untouched.
            ValueError: a value would not read back unchanged.
        """
        self.wait()
        if unfit := fitness.unfit_leaf(state):
            raise UnsavedError(
                f"the state of step {step} is not saved, as {unfit} holds numbers that "
                f"are NaN or infinite; {self._untouched()}: start again with the same "
                f"--workdir to go on from the newest"
            )
        contents.check_json(host, name="host")
        contents.check_processes(state)
        books, (columns, rows) = json.dumps(host), contents.flatten(groups)
        manifest = _manifest(step, state, beside)
        self._bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        name = self._place.partial_name(step)
        with self._told(step):
            what = "the step of the checkpoint"
            multihost.agree(str(step), name=what, timeout_s=self._timeout_s)
            partial = self._directory / self._exchange(name)[0]
            with self._discarded(partial):
                self._first(lambda: self._place.make(partial, contents.STATE))
                written = self._together(
                    lambda: self._arrays.copy(partial / contents.STATE, state)
                )

        def write() -> None:
            """Write this process's part."""
            for future in written:
                future.result()
            if not multihost.process_index():
                contents.write_groups(partial, columns, rows)
                (partial / contents.HOST).write_text(books)

        if self._writing is None:
            self._complete(partial, write, manifest)
        else:
            self._writing.start(
                lambda: self._complete(partial, write, manifest),
                timeout_s=self._timeout_s,
            )

    def check(self) -> None:
        """Raise the error of a save that has failed; never waits."""
        if self._writing is not None:
            self._writing.check()

    def wait(self) -> None:
        """Return when every checkpoint is on disk.

        Raises:
            UnsavedError: a checkpoint cannot be written, or not within the time limit.
        """
        if self._writing is None:
            return
        try:
            self._writing.wait(self._timeout_s)
        except TimeoutError as error:
            raise UnsavedError(
                f"{error} in {self._directory}; {self._untouched()}: a faster disk, or "
                f"a larger checkpoint.every, and the same --workdir to resume"
            ) from error

    def _complete(
        self, partial: Folder, write: Callable[[], None], manifest: dict[str, Any]
    ) -> None:
        """Write the copy, and make it the newest checkpoint."""
        step = manifest["step"]
        with self._told(step), self._discarded(partial):
            self._together(write)
            self._first(lambda: self._arrays.finalize(partial / contents.STATE))
            mine = self._together(lambda: self._place.describe(partial))
            for text in self._exchange(json.dumps(mine)):
                manifest["files"] |= json.loads(text)
            self._first(lambda: self._place.put(partial, manifest))
        self._damaged.discard(self._place.target(step))
        self._first(lambda: self._place.prune(self._keep, self._damaged))

    @contextlib.contextmanager
    def _told(self, step: int) -> Iterator[None]:
        """Turn an error into UnsavedError, with the checkpoints left on disk."""
        try:
            yield
        except Exception as error:
            said = " ".join(str(error).split())
            if full := why_full(error):  # in the system's words, not a library's
                where = _OF_PROCESS.match(said)
                said = f"{where[0] if where else ''}{full}"
            raise UnsavedError(
                f"cannot write the checkpoint of step {step} to "
                f"{self._place.target(step)} ({said}{self._room(error)}); "
                f"{self._untouched()}: free space or rights there and start again with "
                f"the same --workdir to resume"
            ) from error

    def _room(self, error: Exception) -> str:
        """Return a text on checkpoint size and free space; "": space is not the cause.

        The files that were begun have been removed, so the space is that before them.
        """
        free = self._place.free_bytes() if lacks_space(error) else None
        if free is None:
            return ""
        return f"; its arrays take {self._bytes:,} bytes, and {free:,} are free"

    def _untouched(self) -> str:
        """Return a sentence about the checkpoints that are still on disk."""
        try:
            return f"those of steps {self._listed()} are untouched"
        except Exception:  # noqa: BLE001  what cannot be written may be out of reach
            return "those before it are untouched"

    @contextlib.contextmanager
    def _discarded(self, partial: Folder) -> Iterator[None]:
        """Remove the half-written directory after an error."""
        try:
            yield
        except Exception:
            if not multihost.process_index():
                self._place.remove(partial)
            raise

    def restore(
        self, abstract_state: PyTree, *, beside: Beside = NOTHING
    ) -> Restored | None:
        """Return the newest good checkpoint, or None if none was ever written.

        Errors are those of `CheckpointReader.restore`, and a ValueError if there was a
        checkpoint and all have been removed.
        """
        if not self._place.listed(timeout_s=self._timeout_s):
            self._first(self._place.require_none_was_here)
            return None

        reader = CheckpointReader(self._place, timeout_s=self._timeout_s)
        try:
            return reader.restore(abstract_state, beside=beside)
        finally:
            self._damaged |= reader.damaged

    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, oldest first, damaged ones included.

        Raises:
            UnsavedError: the checkpoint under way cannot be written.
        """
        self.wait()
        return self._listed()

    def damaged(self) -> set[int]:
        """Steps of the checkpoints that are known to be damaged."""
        found = self._place.found()
        good = {step for step, path in found if path not in self._damaged}
        return {step for step, _ in found} - good

    def good(self) -> list[int]:
        """Steps of the checkpoints on disk, oldest first, without `damaged` ones.

        Raises:
            UnsavedError: the checkpoint under way cannot be written.
        """
        self.wait()
        found = self._place.found()
        return sorted({step for step, path in found if path not in self._damaged})

    def _listed(self) -> list[int]:
        return sorted({step for step, _ in self._place.found()})

    def close(self) -> None:
        """Stop the writing threads once the save under way has ended."""
        try:
            self.wait()
        finally:
            self._arrays.close()

    def _exchange(self, text: str) -> list[str]:
        return multihost.exchange(text, name="checkpoint", timeout_s=self._timeout_s)

    def _together(self, action: Callable[[], T]) -> T:
        return multihost.together(action, name="checkpoint", timeout_s=self._timeout_s)

    def _first(self, action: Callable[[], None]) -> None:
        """Run an action in the first process; the others wait, and fail if it does."""
        self._together(lambda: None if multihost.process_index() else action())


class CheckpointReader:
    """Reads the newest good checkpoint of a place; `damaged` are those it found bad."""

    def __init__(self, place: CheckpointPlace, *, timeout_s: float = 1800.0) -> None:
        """Read nothing yet; processes wait at most `timeout_s` for the slowest."""
        self.damaged: set[Folder] = set()
        self._place = place
        self._timeout_s = timeout_s

    def restore(
        self, abstract_state: PyTree, *, beside: Beside = NOTHING
    ) -> Restored | None:
        """Return the newest good checkpoint, or None if none was ever written.

        `beside` is as in `Checkpointer.save`.  `abstract_state` has a
        `jax.ShapeDtypeStruct` for each array; one without a sharding is put on the
        first device.

        Raises:
            RuntimeError: there are checkpoints, and all of them are damaged or hold
                numbers that are not finite.
            ValueError: the checkpoint is of another model, base, teacher or optimizer.
        """

        def load(
            step: int, path: Folder, manifest: dict[str, Any]
        ) -> Callable[[], Restored]:
            _check_shapes(path, manifest["arrays"], abstract_state)
            for name in _BESIDE:
                _check_beside(path, manifest, name, beside.get(name, ""))
            return lambda: Restored(
                step=step,
                state=_load(path / contents.STATE, abstract_state),
                host=read_json(path / contents.HOST, most=MOST_WHOLE),
                groups=contents.read_groups(path),
            )

        return self._newest(load, arrays=lambda restored: restored.state)

    def restore_params(
        self, abstract_params: PyTree, *, name: str = "", base: str = ""
    ) -> tuple[int, PyTree] | None:
        """Return step and params of the newest good checkpoint, and read nothing else.

        `base` is the digest of the params that were frozen, and errors are as in
        `restore`.  With a `name`, such as step_00000050, that checkpoint is read.
        """
        wanted = {"params": abstract_params}

        def load(
            step: int, path: Folder, manifest: dict[str, Any]
        ) -> Callable[[], tuple[int, PyTree]]:
            params = {
                name: shape
                for name, shape in manifest["arrays"].items()
                if name.startswith("params.")
            }
            _check_shapes(path, params, wanted)
            _check_beside(path, manifest, "base", base)
            state = path / contents.STATE
            return lambda: (step, _load(state, wanted, partial=True)["params"])

        return self._newest(load, arrays=lambda found: {"params": found[1]}, only=name)

    def _newest(
        self,
        load: Callable[[int, Folder, dict[str, Any]], Callable[[], T]],
        *,
        arrays: Callable[[T], PyTree],
        only: str = "",
    ) -> T | None:
        """Load the newest good checkpoint by `load`; None: there is no checkpoint.

        `load` gets step, directory and manifest, and returns what reads the files.  The
        `arrays` that these give must be finite.  With a name in `only`, no other
        checkpoint counts.
        """
        reasons = []
        for step, path in self._place.listed(timeout_s=self._timeout_s):
            if only and path.name != only:
                continue
            manifest, damage = self._verify(path, step)
            if not damage:
                read = load(step, path, manifest)
                try:
                    loaded = self._together(read)
                except Exception:
                    # Were they damaged after they were checked?
                    _, damage = self._verify(path, step)
                    if not damage:
                        raise
                else:
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

        Raises:
            OSError: a bucket cannot be read now, which says nothing of a checkpoint.
        """
        manifest: dict[str, Any] = {}
        damage = ""
        try:
            manifest = _read_manifest(path, step=step)
            self._check_share(path, manifest)
        except DamagedError as error:
            damage = str(error)
        except OSError as error:
            if isinstance(self._place, BucketPlace):
                raise
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


def _manifest(step: int, state: PyTree, beside: Beside) -> dict[str, Any]:
    """Return the manifest of a checkpoint, without its files."""
    arrays = contents.describe(state)
    assert beside.keys() <= _BESIDE.keys(), "each has a text for its refusal"
    return {
        "format": FORMAT,
        "step": int(step),
        "files": {},
        "arrays": arrays,
    } | {name: digest for name, digest in beside.items() if digest}


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
            _check_manifest(found["manifest"])
            return found["manifest"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST} is broken: {error!r}") from error
    raise DamagedError(f"{MANIFEST} is broken: its checksum differs")


def _check_manifest(manifest: Any) -> None:
    """Raise an error unless a manifest of this format has all that is read of it."""
    if manifest["format"] != FORMAT:
        return  # refused by who reads it
    measures = [each["bytes"] for each in manifest["files"].values()]
    shapes = [size for _, shape in manifest["arrays"].values() for size in shape]
    digests = [manifest.get(name, "") for name in _BESIDE]
    if {*map(type, [manifest["step"], *measures, *shapes])} != {int}:
        raise TypeError("a step or a size is no integer")
    if {*map(type, digests)} != {str}:
        raise TypeError("a digest is no text")


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


def _check_beside(
    path: Folder, manifest: dict[str, Any], name: str, digest: str
) -> None:
    """Refuse params that were trained beside others, which have this name."""
    saved = manifest.get(name, "")
    if saved != digest:
        called, source = _BESIDE[name]
        raise ValueError(
            f"{path} was trained beside {called} of digest {saved[:16] or None}, "
            f"and those here have {digest[:16] or None}: {source} is another one, or "
            f"its files have changed; put back what the run began with"
        )


def _text(shape: list[Any] | None) -> str:
    return "absent" if shape is None else f"{shape[0]}{shape[1]}"


def _load(directory: Folder, abstract: PyTree, *, partial: bool = False) -> PyTree:
    """Read the arrays that `abstract` describes: all, or with `partial` some."""
    import orbax.checkpoint as ocp  # a tenth of what importing a run takes

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
