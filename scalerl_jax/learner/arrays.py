"""The arrays of a train state in files: written and read by orbax, compared by name.

`ArrayFiles.copy` returns when the state may change or be donated; the files are whole
only after `ArrayCopy.write`, which may be called in another thread.
"""

import dataclasses
import logging
import re
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint._src import asyncio_utils

from scalerl_jax.learner.manifest import Folder
from scalerl_jax.parallel import multihost
from scalerl_jax.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayCopy:
    """A state on the host, on its way to the files."""

    futures: list[Any]  # of orbax

    def write(self) -> None:
        """Return once this process's part is in the files."""
        for future in self.futures:
            future.result()


class ArrayFiles:
    """Writes and reads the arrays of a state, with shardings, in a directory."""

    def __init__(self) -> None:
        """Open orbax's handler; its threads run until `close`."""
        for library in ("absl", "asyncio"):  # used by orbax
            logging.getLogger(library).addFilter(_is_no_echo)
        # OCDBT packs the arrays into a few files; weights do not compress.
        self._handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True, use_compression=False
        )

    def copy(self, directory: Folder, state: PyTree) -> ArrayCopy:
        """Copy a state off the devices and begin to write it.

        On CPU devices the copy is a view, which keeps its buffers from being donated.
        """
        futures = asyncio_utils.run_sync(
            self._handler.async_save(
                epath.Path(directory), args=ocp.args.PyTreeSave(state)
            )
        )
        return ArrayCopy(futures=futures or [])

    def finalize(self, directory: Folder) -> None:
        """Join what several processes wrote, in one of them."""
        self._handler.finalize(epath.Path(directory))

    def load(
        self, directory: Folder, abstract: PyTree, *, partial: bool = False
    ) -> PyTree:
        """Arrays as `abstract` describes them; `partial`: it leaves some out."""
        target = jax.tree.map(_placed, abstract)
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        return self._handler.restore(
            epath.Path(directory),
            args=ocp.args.PyTreeRestore(
                target, restore_args=restore_args, partial_restore=partial
            ),
        )

    def close(self) -> None:
        """Stop the threads that write."""
        self._handler.close()


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Return whether a record is no log, array by array, of what `write` raises."""
    echoes = "_SignalingThread|async_serialize|in OCDBT database"
    return not re.search(echoes, record.getMessage())


def _placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def describe(tree: PyTree) -> dict[str, list[Any]]:
    """Dtype and shape of every array by its name, as JSON values."""
    return {name: _shape(leaf) for name, leaf in _named_leaves(tree).items()}


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in leaves
    }


def check_processes(state: PyTree) -> None:
    """Refuse arrays that belong to one of several processes."""
    count = multihost.process_count()
    for name, leaf in _named_leaves(state).items():
        if count > 1 and leaf.is_fully_addressable:
            raise ValueError(
                f"{name} is on the devices of one process, which a checkpoint of "
                f"{count} cannot hold; put it on a mesh of all of them"
            )


def check_shapes(path: Folder, arrays: dict[str, list[Any]], wanted: PyTree) -> None:
    """Refuse a state of other arrays, naming the first that differ."""
    here = describe(wanted)
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


def _shape(leaf: jax.Array | jax.ShapeDtypeStruct) -> list[Any]:
    return [str(leaf.dtype), list(leaf.shape)]


def _text(shape: list[Any] | None) -> str:
    return "absent" if shape is None else f"{shape[0]}{shape[1]}"
