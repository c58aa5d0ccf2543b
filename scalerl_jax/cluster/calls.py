"""Calls of another process: an answer, the process's own error, or its loss."""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from scalerl_jax.process.ending import first_line

_log = logging.getLogger(__name__)


class RoleLost(Exception):  # what happened to it, in one line
    """A process is gone, or its answer is."""


def own_error(error: BaseException) -> BaseException | None:
    """Return the error that a process's own code has raised; None: Ray lost something.

    Every other error of Ray is a loss: a process or a host that is gone, an object that
    was there, a memory or a disk that is full.
    """
    if not isinstance(error, RayError):
        return error
    if not isinstance(error, RayTaskError):
        return None
    cause = cause_of(error)
    if type(cause) is RayError:  # instead of an exception that cannot be pickled
        return RuntimeError(first_line(cause))
    # Any other one is Ray's: an argument of the call was lost, for example.
    return None if isinstance(cause, RayError) else cause


def cause_of(error: BaseException) -> BaseException:
    """Return the error raised in another process, without Ray's wrapper around it."""
    return error.cause if isinstance(error, RayTaskError) else error


def why_lost(error: BaseException) -> str:
    """Return in one line why there is no answer."""
    cause = cause_of(error)
    said, kind = first_line(cause), type(cause).__name__
    return said if said.startswith(kind) else f"{kind}: {said}"


@contextlib.contextmanager
def calling(name: str) -> Iterator[None]:
    """Distinguish an error that a process raised from its loss, in calls of the block.

    Raises:
        RoleLost: the process is lost; begins with the name and has the cause.
        Exception: what the process itself raised, without Ray's words around it.
    """
    try:
        yield
    except RayError as error:
        own = own_error(error)
        if own is None:
            raise RoleLost(f"{name}: {why_lost(error)}") from error
        raise own from None


def end_all(actors: Iterable[Any]) -> None:
    """End processes at once; log those that are out of reach."""
    for actor in actors:
        try:
            ray.kill(actor)
        except RayError as error:
            _log.info("a process cannot be told to end: %s", why_lost(error))
