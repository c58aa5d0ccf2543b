"""The whole state of a run on disk: written at one stroke, checked before it is used.

A checkpoint is a directory `step_00000050` that holds the train state (orbax), the
buffered finished groups (flat NumPy arrays), the host's state (JSON) and a manifest
with the SHA-256 of each of these files.  It is written under another name and gets
its own by one rename, so that a kill at any moment leaves it whole or not at all.
What a disk does to it later is found by the manifest, and the one before is used.

Saving is synchronous: on return the arrays of the state may be donated.  States
spread over several processes are refused.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from scalerl_jax.learner import saved_groups
from scalerl_jax.types import Group, PyTree

_FORMAT = 1  # of the directory; to be raised with every change that old code misreads
_MANIFEST = "manifest.json"
_STATE = "state"
_HOST = "host.json"
_GROUPS = "groups.json"
_GROUP_ARRAYS = "groups.npz"
# The second form is a checkpoint on its way out, while another of its step comes in.
_NAME = re.compile(r"step_(\d{8,})(\.replaced)?")
_DISK_THREADS = 4

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint, read back."""

    step: int  # optimizer steps behind it
    state: PyTree  # on the shardings that were asked for
    host: dict[str, Any]  # JSON values
    groups: tuple[Group, ...]


class _DamagedError(Exception):
    """A checkpoint that is not as it was written; says how."""


class Checkpointer:
    """Saves and restores the state of one run in `directory`.

    Only `save` writes, so a second process may restore from a directory in use.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, every: int, keep: int
    ) -> None:
        """`every` optimizer steps one is due; the `keep` newest stay on disk."""
        if every < 1 or keep < 1:
            raise ValueError(
                f"checkpoint.every = {every} and checkpoint.keep = {keep} must be "
                f"above 0"
            )
        self._directory = Path(directory).absolute()
        self._every = every
        self._keep = keep
        self._damaged: set[Path] = set()
        # OCDBT packs the arrays into a few files; weights do not compress.
        self._arrays = ocp.Checkpointer(
            ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
        )

    def due(self, step: int) -> bool:
        """Whether a checkpoint belongs after optimizer step `step`."""
        return step % self._every == 0

    def save(
        self, step: int, *, state: PyTree, host: dict[str, Any], groups: Sequence[Group]
    ) -> None:
        """Write a checkpoint; when this returns, it is on disk and is the newest.

        Raises:
            RuntimeError: it cannot be written; the ones before it are untouched.
            ValueError: a value that would not read back as it is.
        """
        saved_groups.check_json(host, name="host")
        _check_addressable(state)
        arrays, rows = saved_groups.flatten(groups)
        target = self._directory / f"step_{step:08d}"
        # A new name each time: after a failure orbax's threads may still be writing.
        partial = self._directory / f".saving_{step:08d}_{time.monotonic_ns()}"
        try:
            self._remove_partials()
            partial.mkdir(parents=True)
            self._arrays.save(partial / _STATE, args=ocp.args.PyTreeSave(state))
            np.savez(partial / _GROUP_ARRAYS, allow_pickle=False, **arrays)
            (partial / _GROUPS).write_text(json.dumps(rows))
            (partial / _HOST).write_text(json.dumps(host))
            _write_manifest(partial, step=int(step), state=state)
            self._put(partial, target)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise RuntimeError(
                f"cannot write the checkpoint of step {step} to {target} ({error}); "
                f"those of steps {self.steps()} are untouched: free space or rights "
                f"there and start again with the same --workdir to resume"
            ) from error
        self._damaged.discard(target)
        self._prune()

    def restore(self, abstract_state: PyTree) -> Restored | None:
        """The newest good checkpoint, or None if none was ever written.

        `abstract_state` has a `jax.ShapeDtypeStruct` for each array; one without a
        sharding is put on the first device.

        Raises:
            RuntimeError: there are checkpoints, and all of them are damaged.
            ValueError: the checkpoint is of another model or optimizer.
        """
        reasons = []
        for step, path in self._found():
            try:
                manifest = _verify(path, step=step)
            except (_DamagedError, OSError) as error:
                self._damaged.add(path)
                reasons.append(f"step {step}: {error}")
                _log.warning("checkpoint %s is not used: %s", path, error)
                continue
            return self._load(path, step, manifest, abstract_state)
        if reasons:
            raise RuntimeError(
                f"none of the checkpoints in {self._directory} can be used "
                f"({'; '.join(reasons)}); put back a copy of one, or start a new run "
                f"with another --workdir"
            )
        return None

    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, oldest first, damaged ones included."""
        return sorted({step for step, _ in self._found()})

    def close(self) -> None:
        """Stop the threads that write."""
        self._arrays.close()

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

    def _put(self, partial: Path, target: Path) -> None:
        """Rename `partial` to `target`; one of that step that exists goes after it."""
        replaced = target.with_name(f"{target.name}.replaced")
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        partial.rename(target)
        _sync(self._directory)

    def _prune(self) -> None:
        """Remove what a newer checkpoint has made superfluous."""
        good = [path for _, path in self._found() if path not in self._damaged]
        current = [path for path in good if not path.name.endswith(".replaced")]
        for _, path in self._found():
            if path not in current[: self._keep]:
                shutil.rmtree(path, ignore_errors=True)

    def _remove_partials(self) -> None:
        if self._directory.is_dir():
            for path in self._directory.glob(".saving_*"):
                shutil.rmtree(path, ignore_errors=True)

    def _load(
        self, path: Path, step: int, manifest: dict[str, Any], abstract_state: PyTree
    ) -> Restored:
        _check_shapes(path, manifest["arrays"], abstract_state)
        target = jax.tree.map(_placed, abstract_state)
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        state = self._arrays.restore(
            path / _STATE,
            args=ocp.args.PyTreeRestore(target, restore_args=restore_args),
        )
        with np.load(path / _GROUP_ARRAYS, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        rows = json.loads((path / _GROUPS).read_bytes())
        return Restored(
            step=step,
            state=state,
            host=json.loads((path / _HOST).read_bytes()),
            groups=saved_groups.unflatten(arrays, rows),
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


def _check_addressable(state: PyTree) -> None:
    for name, leaf in _named_leaves(state).items():
        if not leaf.is_fully_addressable:
            raise ValueError(
                f"{name} is spread over several processes, which a checkpoint cannot "
                f"be written from; use one process"
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


def _write_manifest(directory: Path, *, step: int, state: PyTree) -> None:
    """Describe every file of `directory`, and see that all of it is on the disk."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    with concurrent.futures.ThreadPoolExecutor(_DISK_THREADS) as pool:
        digests = list(pool.map(_digest, paths))
    manifest = {
        "format": _FORMAT,
        "step": step,
        "files": {
            str(path.relative_to(directory)): {
                "bytes": path.stat().st_size,
                "sha256": digest,
            }
            for path, digest in zip(paths, digests, strict=True)
        },
        "arrays": {name: _shape(leaf) for name, leaf in _named_leaves(state).items()},
    }
    sealed = {"sha256": _seal(manifest), "manifest": manifest}
    (directory / _MANIFEST).write_text(json.dumps(sealed, indent=1))
    folders = [path for path in directory.rglob("*") if path.is_dir()]
    with concurrent.futures.ThreadPoolExecutor(_DISK_THREADS) as pool:
        list(pool.map(_sync, (*paths, directory / _MANIFEST, *folders, directory)))


def _seal(manifest: dict[str, Any]) -> str:
    """SHA-256 of the manifest itself, whatever its white space."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _verify(path: Path, *, step: int) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all as they were written."""
    manifest = _read_manifest(path / _MANIFEST)
    if manifest["format"] != _FORMAT:
        raise ValueError(
            f"{path} has format {manifest['format']} and this code reads {_FORMAT}; "
            f"resume with the code that wrote it (git_revision in config.json)"
        )
    if manifest["step"] != step:
        raise _DamagedError(f"its manifest is of step {manifest['step']}")
    with concurrent.futures.ThreadPoolExecutor(_DISK_THREADS) as pool:
        checks = [
            pool.submit(_verify_file, path / name, name, expected)
            for name, expected in manifest["files"].items()
        ]
        for check in checks:
            check.result()
    return manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        sealed = json.loads(path.read_bytes())
        if sealed["sha256"] == _seal(sealed["manifest"]):
            return sealed["manifest"]
    except FileNotFoundError:
        raise _DamagedError(f"{_MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise _DamagedError(f"{_MANIFEST} is broken: {error!r}") from error
    raise _DamagedError(f"{_MANIFEST} is broken: its checksum differs")


def _verify_file(path: Path, name: str, expected: dict[str, Any]) -> None:
    if not path.is_file():
        raise _DamagedError(f"{name} is missing")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise _DamagedError(f"{name} has {size} of {expected['bytes']} bytes")
    if _digest(path) != expected["sha256"]:
        raise _DamagedError(f"{name} has a wrong checksum")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file or the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
