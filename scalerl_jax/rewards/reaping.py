"""Processes that nobody else waits for: sandboxes whose verifier has ended."""

import ctypes
import sys

import psutil

_SET_CHILD_SUBREAPER = 36  # of prctl, in linux/prctl.h


def adopt() -> None:
    """Make this process the parent of what it started and whose own parent ends.

    A zombie is reaped by its parent, and by the machine's first process perhaps never.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(*, wait_s: float = 0.0) -> None:
    """Reap adopted sandboxes that have ended; wait so long for those that have not."""
    orphans = [each for each in psutil.Process().children() if each.name() == "bwrap"]
    psutil.wait_procs(orphans, timeout=wait_s)
