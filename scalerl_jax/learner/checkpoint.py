"""The whole state of a run on disk: written at one stroke, checked before it is used.

A checkpoint is a directory `step_00000050` that holds the train state (orbax), the
buffered finished groups (flat NumPy arrays), the host's state (JSON) and a manifest
with the SHA-256 of each of these files.  It is written under another name and gets
its own by one rename, so that a kill at any moment leaves it whole or not at all.
What a disk does to it later is found by the manifest, and the one before is used.

Saving is synchronous: on return the arrays of the state may be donated.

Several processes save and restore together, in a directory that all of them see: each
writes its own shards and host state, the first does the rest, and what fails in one
fails in all.  The state can be restored by any number of processes.
"""

import dataclasses
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from scalerl_jax.learner import group_io
from scalerl_jax.learner import manifest as manifests
from scalerl_jax.parallel import multihost
from scalerl_jax.types import Group, PyTree

_STATE = "state"
_HOST = "host.json"
# The second form is a checkpoint on its way out, while another of its step comes in.
_NAME = re.compile(r"step_(\d{8,})(\.replaced)?")
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostPart:
    """Host state that one process gave besides its shards."""

    host: dict[str, Any]  # JSON values
    groups: tuple[Group, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint, read back."""

    step: int  # optimizer steps behind it
    state: PyTree  # on the shardings that were asked for
    parts: tuple[HostPart, ...]  # of the processes that wrote it, in their order

    @property
    def host(self) -> dict[str, Any]:
        """The host's state, as the first process gave it."""
        return self.parts[0].host

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that the first process gave."""
        return self.parts[0].groups


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
        timeout_s: float = 1800.0,
    ) -> None:
        """`every` optimizer steps one is due; the `keep` newest stay on disk.

        Processes wait `timeout_s` at most for the slowest of them.
        """
        if every < 1 or keep < 1:
            raise ValueError(
                f"checkpoint.every = {every} and checkpoint.keep = {keep} must be "
                f"above 0"
            )
        self._directory = Path(directory).absolute()
        self._every = every
        self._keep = keep
        self._timeout_s = timeout_s
        self._damaged: set[Path] = set()
        for library in ("absl", "asyncio"):  # used by orbax
            logging.getLogger(library).addFilter(_is_no_echo)
        # OCDBT packs the arrays into a few files; weights do not compress.
        self._arrays = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True, use_compression=False
        )

    def due(self, step: int, *, since: int) -> bool:
        """Return whether one is due after any of the steps `since` + 1 to `step`."""
        return step // self._every > since // self._every

    def save(
        self, step: int, *, state: PyTree, host: dict[str, Any], groups: Sequence[Group]
    ) -> None:
        """Write a checkpoint; when this returns, it is on disk and is the newest.

        All processes save the same step and state, and each its own host and groups.

        Raises:
            UnsavedError: it cannot be written; the ones before it are untouched.
            ValueError: a value that would not read back as it is.
        """
        group_io.check_json(host, name="host")
        _check_processes(state)
        arrays, rows = group_io.flatten(groups)
        target = self._directory / f"step_{step:08d}"
        # A new name each time: after a failure orbax's threads may still be writing.
        name = f".saving_{step:08d}_{time.monotonic_ns()}"
        partial = self._directory / name

        def write() -> None:
            self._arrays.save(
                epath.Path(partial / _STATE), args=ocp.args.PyTreeSave(state)
            )
            folder = _part_folder(partial, multihost.process_index())
            folder.mkdir(exist_ok=True)
            group_io.write(folder, arrays, rows)
            (folder / _HOST).write_text(json.dumps(host))

        try:
            multihost.agree(
                str(step),
                name="the step of the checkpoint",
                timeout_s=self._timeout_s,
            )
            partial = self._directory / self._exchange(name)[0]
            self._first(lambda: self._make(partial))
            self._together(write)
            self._first(lambda: self._arrays.finalize(epath.Path(partial / _STATE)))
            files = self._describe(partial)
            self._first(lambda: self._finish(partial, target, int(step), files, state))
        except Exception as error:
            if not multihost.process_index():
                shutil.rmtree(partial, ignore_errors=True)
            raise manifests.UnsavedError(
                f"cannot write the checkpoint of step {step} to {target} ({error}); "
                f"those of steps {self.steps()} are untouched: free space or rights "
                f"there and start again with the same --workdir to resume"
            ) from error
        self._damaged.discard(target)
        self._first(self._prune)

    def restore(self, abstract_state: PyTree) -> Restored | None:
        """The newest good checkpoint, or None if none was ever written.

        `abstract_state` has a `jax.ShapeDtypeStruct` for each array; one without a
        sharding is put on the first device.

        Raises:
            RuntimeError: there are checkpoints, and all of them are damaged.
            ValueError: the checkpoint is of another model or optimizer.
        """
        found = self._newest()
        if found is None:
            return None
        step, path, manifest = found
        _check_shapes(path, manifest["arrays"], abstract_state)

        def load() -> Restored:
            return Restored(
                step=step,
                state=self._load_arrays(path, abstract_state),
                parts=tuple(
                    _load_part(_part_folder(path, process))
                    for process in range(manifest.get("processes", 1))
                ),
            )

        return self._together(load)

    def restore_params(self, abstract_params: PyTree) -> tuple[int, PyTree] | None:
        """Step and params of the newest good checkpoint, without memory for the rest.

        As `restore`, for the field `params` of the state alone.
        """
        found = self._newest()
        if found is None:
            return None
        step, path, manifest = found
        wanted = {"params": abstract_params}
        params = {
            name: shape
            for name, shape in manifest["arrays"].items()
            if name.startswith("params.")
        }
        _check_shapes(path, params, wanted)
        state = self._together(lambda: self._load_arrays(path, wanted, partial=True))
        return step, state["params"]

    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, oldest first, damaged ones included."""
        return sorted({step for step, _ in self._found()})

    def close(self) -> None:
        """Stop the threads that write."""
        self._arrays.close()

    def _exchange(self, text: str) -> list[str]:
        return multihost.exchange(text, name="checkpoint", timeout_s=self._timeout_s)

    def _together(self, action: Callable[[], _Result]) -> _Result:
        return multihost.together(action, name="checkpoint", timeout_s=self._timeout_s)

    def _first(self, action: Callable[[], None]) -> None:
        """Let the first process act; the others wait, and fail if it does."""
        self._together(lambda: None if multihost.process_index() else action())

    def _newest(self) -> tuple[int, Path, dict[str, Any]] | None:
        """Step, directory and manifest of the newest checkpoint that is good."""
        reasons = []
        # What the first process sees: a shared directory may be behind elsewhere.
        listed = self._exchange(
            json.dumps([(step, path.name) for step, path in self._found()])
        )[0]
        for step, name in json.loads(listed):
            path = self._directory / name
            manifest, damage = self._verify(path, step)
            if not damage:
                return step, path, manifest
            self._damaged.add(path)
            reasons.append(f"step {step}: {damage}")
            _log.warning("checkpoint %s is not used: %s", path, damage)
        if reasons:
            raise RuntimeError(
                f"none of the checkpoints in {self._directory} can be used "
                f"({'; '.join(reasons)}); put back a copy of one, or start a new run "
                f"with another --workdir"
            )
        return None

    def _verify(self, path: Path, step: int) -> tuple[dict[str, Any], str]:
        """The manifest, and what is damaged, if anything is; the processes share."""
        manifest: dict[str, Any] = {}
        damage = ""
        try:
            manifest = manifests.verify(path, step=step, **_share())
        except (manifests.DamagedError, OSError) as error:
            damage = str(error)
        return manifest, next(filter(None, self._exchange(damage)), "")

    def _found(self) -> list[tuple[int, Path]]:
        """Steps and directories of the checkpoints, newest first."""
        if not self._directory.is_dir():
            return []
        found = []
        for path in self._directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                found.append((int(match[1]), match[2] is None, path))
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def _make(self, partial: Path) -> None:
        """An empty directory for a checkpoint; what is left of others goes."""
        for path in self._directory.glob(".saving_*"):
            shutil.rmtree(path, ignore_errors=True)
        (partial / _STATE).mkdir(parents=True)

    def _describe(self, partial: Path) -> dict[str, Any]:
        """Every file of a directory, for its manifest; the processes share."""
        mine = self._together(lambda: manifests.describe(partial, **_share()))
        files: dict[str, Any] = {}
        for text in self._exchange(json.dumps(mine)):
            files |= json.loads(text)
        return dict(sorted(files.items()))

    def _finish(
        self,
        partial: Path,
        target: Path,
        step: int,
        files: dict[str, Any],
        state: PyTree,
    ) -> None:
        arrays = {name: _shape(leaf) for name, leaf in _named_leaves(state).items()}
        count = multihost.process_count()
        more = {"processes": count} if count > 1 else {}
        manifests.write(partial, step=step, files=files, arrays=arrays, **more)
        self._put(partial, target)

    def _put(self, partial: Path, target: Path) -> None:
        """Rename `partial` to `target`; one of that step that exists goes after it."""
        replaced = target.with_name(f"{target.name}.replaced")
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        partial.rename(target)
        manifests.sync(self._directory)

    def _prune(self) -> None:
        """Remove what a newer checkpoint has made superfluous."""
        good = [path for _, path in self._found() if path not in self._damaged]
        current = [path for path in good if not path.name.endswith(".replaced")]
        for _, path in self._found():
            if path not in current[: self._keep]:
                shutil.rmtree(path, ignore_errors=True)

    def _load_arrays(
        self, path: Path, abstract: PyTree, *, partial: bool = False
    ) -> PyTree:
        target = jax.tree.map(_placed, abstract)
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        return self._arrays.restore(
            epath.Path(path / _STATE),
            args=ocp.args.PyTreeRestore(
                target, restore_args=restore_args, partial_restore=partial
            ),
        )


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Return whether a record is no log, array by array, of what `save` raises."""
    return not re.search("_SignalingThread|async_serialize", record.getMessage())


def _share() -> dict[str, int]:
    """Return this process's share of the files to read."""
    return {"share": multihost.process_index(), "of": multihost.process_count()}


def _part_folder(checkpoint: Path, process: int) -> Path:
    """Return the folder in which a process writes its host state."""
    return checkpoint / f"process_{process:04d}" if process else checkpoint


def _load_part(folder: Path) -> HostPart:
    return HostPart(
        host=json.loads((folder / _HOST).read_bytes()),
        groups=group_io.read(folder),
    )


def _placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in leaves
    }


def _check_processes(state: PyTree) -> None:
    """Refuse arrays that belong to one of several processes."""
    count = multihost.process_count()
    for name, leaf in _named_leaves(state).items():
        if count > 1 and leaf.is_fully_addressable:
            raise ValueError(
                f"{name} is on the devices of one process, which a checkpoint of "
                f"{count} cannot hold; put it on a mesh of all of them"
            )


def _check_shapes(
    path: Path, arrays: dict[str, list[Any]], abstract_state: PyTree
) -> None:
    """Refuse a state of other arrays, naming the first that differ."""
    wanted = {
        name: _shape(leaf) for name, leaf in _named_leaves(abstract_state).items()
    }
    differences = [
        f"{name} is {_text(arrays.get(name))} there and {_text(wanted.get(name))} here"
        for name in [*wanted, *(arrays.keys() - wanted.keys())]
        if arrays.get(name) != wanted.get(name)
    ]
    if differences:
        raise ValueError(
            f"{path} is of another model or optimizer: {'; '.join(differences[:5])} "
            f"({len(differences)} in all); resume with the settings that it was "
            f"written with, or choose another --workdir"
        )


def _shape(leaf: jax.Array | jax.ShapeDtypeStruct) -> list[Any]:
    return [str(leaf.dtype), list(leaf.shape)]


def _text(shape: list[Any] | None) -> str:
    return "absent" if shape is None else f"{shape[0]}{shape[1]}"
