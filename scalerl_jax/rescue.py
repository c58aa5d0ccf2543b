"""The end of a run that fails: what it has is saved first, if it is whole."""

import logging
from collections.abc import Callable

from scalerl_jax.learner.checkpoint import UnsavedError
from scalerl_jax.run_state import RunState
from scalerl_jax.utils.ending import is_explained

_log = logging.getLogger(__name__)


def rescued(
    run: RunState, error: Exception, save: Callable[[], None]
) -> Exception | None:
    """Save the state of a run whose sampler is stopped; return what to raise.

    A failure between two windows is not the learner's own: the state is whole then, and
    the result says whether it is saved.  None: the state is not whole.  `save` returns
    once the newest version is on disk.
    """
    if run.queue.taken:
        _finish_save(run)
        return None
    text, saved = str(error), _save_at_last(run.version, save)
    if not is_explained(error):
        _log.error(saved, exc_info=error)
        sampling = error is run.queue.failure
        where = "the sampling thread" if sampling else "the loop"
        text = f"{where} failed with {type(error).__name__}: {error}"
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    return kind(f"{text}; {saved}")


def _save_at_last(version: int, save: Callable[[], None]) -> str:
    """Try to save the state; return a sentence that says whether it was saved."""
    try:
        save()
    except Exception as error:  # noqa: BLE001  the run ends with what was before it
        return f"the state of step {version} cannot be saved: {error}"
    return f"the state of step {version} is saved, and the same --workdir goes on"


def _finish_save(run: RunState) -> None:
    """Wait for the save under way; the run ends with the failure that came before."""
    try:
        run.learner.checkpointer.wait()
    except UnsavedError as error:
        _log.error("%s", error)
