"""The loop: every arrow of the method is one line of `_steps`.

Read this first.  `wiring` makes the parts of a run; this file only calls them.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl_jax.config import Config, to_json
from scalerl_jax.contract import State
from scalerl_jax.controller.monitor import RunMonitor
from scalerl_jax.controller.run_state import RunState
from scalerl_jax.learner.checkpoint import UnsavedError
from scalerl_jax.parallel.xla import explained
from scalerl_jax.process.ending import is_explained
from scalerl_jax.process.preemption import Preemption
from scalerl_jax.run import lost_work
from scalerl_jax.run.directory import end_kept
from scalerl_jax.run.ledger import kept_on_disk
from scalerl_jax.run.metrics import MetricsWriter
from scalerl_jax.run.record import flatten

if TYPE_CHECKING:
    from scalerl_jax.scaling.live import LiveFit

_log = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 600.0  # for the sampler's current step


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The end of a run: its last version, and why it stopped."""

    policy_version: int
    preempted: bool
    interrupted: bool  # by Ctrl-C, not by SIGTERM
    stop_reason: str | None = None  # why scaling.stop ended the run early


def train(config: Config, run: RunState, directory: Path) -> RunOutcome:
    """Train until `train.num_steps` optimizer steps, or a SIGTERM or Ctrl-C.

    The run resumes from the newest good checkpoint of `directory`; compute spent after
    that checkpoint is charged (run/lost_work.py).  Checkpoints are written in the
    background.  The whole state is saved before `train` returns, and before it raises
    an error that is not the learner's own.

    A window of several steps (batch.epochs above 1, or queue.mode = "batched") is
    finished before anything is saved: a checkpoint or signal inside it waits for its
    end.  An evaluation that a signal interrupts is made after the resumption, or
    skipped if it was due inside a window.  With `eval.concurrent` training continues
    during an evaluation, up to the next evaluation or the next checkpoint of another
    version; an interrupted one is then made later only if the run ends at its version.
    """
    num_steps, preemption = config.train.num_steps, Preemption()
    with (
        explained("the sampler", config),
        _live_fit(config, run, directory) as live,
        contextlib.ExitStack() as opened,
    ):
        opened.enter_context(end_kept(directory, lambda: live.stop_reason))
        step = _resume(run, directory)
        writer = MetricsWriter(
            directory,
            after=step,
            settings=flatten(to_json(config)),
            wandb_project=config.tracking.wandb_project,
            train_rollouts=config.tracking.train_rollouts,
        )
        opened.enter_context(writer)
        opened.enter_context(kept_on_disk(run.ledger, directory))
        opened.enter_context(run.progress.bar("starting"))
        state, version = run.state, run.version
        monitor = RunMonitor(config, run, writer, preemption, live.evaluated)
        opened.callback(monitor.close)
        published = monitor.publish(state, version, activity="startup")
        monitor.require_no_mismatch(state, published, version)
        beside = run.evaluations.beside
        if monitor.lacks_evaluation(version) and not beside:
            monitor.evaluate(state, published, version)
            monitor.require_verdicts()
        opened.enter_context(run.progress.bar("step", total=num_steps, done=version))
        with preemption:
            run.generators.start()
            if monitor.lacks_evaluation(version) and beside:
                monitor.evaluate(state, published, version)
            del published, state  # else they stay in memory beside later versions
            with _rescued(run), explained("the sampler", config):
                version = _steps(config, run, monitor, preemption=preemption, live=live)
                if monitor.lacks_evaluation(version):
                    monitor.require_verdicts()
        lacking = preemption.requested and monitor.lacks_evaluation(version)
        unfinished = version < num_steps or lacking
        return RunOutcome(
            policy_version=version,
            preempted=unfinished and live.stop_reason is None,
            interrupted=preemption.interrupted,
            stop_reason=live.stop_reason,
        )


class _NoFit(contextlib.ExitStack):
    """The live fit of a run without scaling.live: it does nothing and never stops."""

    stop_reason: str | None = None

    def evaluated(self) -> None:
        """Do nothing."""


def _live_fit(config: Config, run: RunState, directory: Path) -> "LiveFit | _NoFit":
    """Return the live fit; `scaling` is imported only with `scaling.live`."""
    if not config.scaling.live:
        return _NoFit()
    from scalerl_jax.scaling.live import LiveFit  # SciPy and Matplotlib

    return LiveFit(config.scaling, directory, note=run.progress.note)


def _steps(
    config: Config,
    run: RunState,
    monitor: RunMonitor,
    *,
    preemption: Preemption,
    live: "LiveFit | _NoFit",
) -> int:
    """Run the loop window by window; return the last version, which is saved."""
    queue, num_steps = run.queue, config.train.num_steps
    state, version = run.state, run.version
    while version < num_steps and not (preemption.reached(version) or live.stop_reason):
        run.learner.checkpointer.check()
        groups = monitor.take(version)
        if groups is None:
            break
        window = monitor.open(groups, state, version)
        for each in window.passes(epochs=config.batch.epochs, seed=config.seed):
            assembled = window.at(version, each.batch)
            state, metrics = monitor.step(state, each, assembled)
            run.state = state  # the step has donated the previous state
            if metrics is None:
                queue.skipped(last=each.last)
                continue
            version += 1
            run.version = version
            last = version == num_steps
            due = monitor.lacks_evaluation(version)
            queue.hold(due and not run.evaluations.beside)
            queue.applied(last=each.last or last)
            # `step` donates `state`: the sampler gets a copy of its params.
            published = monitor.publish(state, version)

            monitor.log(version, each, assembled, metrics)
            if due:
                monitor.evaluate(state, published, version)
                queue.hold(False)
            if last:
                break
            preemption.reached(version)  # must be called for every step
        last = version == num_steps
        due = run.learner.checkpointer.due(version, since=window.version)
        if last or due or monitor.must_stop:
            # After a resumption from this checkpoint no older version can be evaluated.
            monitor.await_evaluation(before=version)
            monitor.sync()
            save(run, state, version)
        if not last or monitor.lacks_evaluation(version):
            monitor.require_verdicts()
    monitor.sync()
    ensure_saved(run, state, version)
    monitor.await_evaluation()
    return version


@contextlib.contextmanager
def _rescued(run: RunState) -> Iterator[None]:
    """Stop the sampler at the end; after an error save, unless the learner failed."""
    try:
        yield
    except UnsavedError:
        raise
    except Exception as error:
        _stop(run)
        told = rescued(run, error, lambda: ensure_saved(run, run.state, run.version))
        if told is None:
            raise
        raise told from error
    finally:
        _stop(run)


def _stop(run: RunState) -> None:
    """Close the queue to the generators, and wait for their last step."""
    run.queue.close()
    run.generators.stop(_STOP_TIMEOUT_S)


def ensure_saved(run: RunState, state: State, version: int) -> None:
    """Return once the checkpoint of a version is on disk.

    A save that is lost with a process of the learner is made again, and a damaged one
    does not count.
    """

    def saved() -> bool:
        with run.activity("checkpoint"):  # good() waits for the last save
            return version in run.learner.checkpointer.good()

    while not saved():
        save(run, state, version)


def save(run: RunState, state: State, version: int) -> None:
    """Save everything; return once the state is copied.  The sampler continues.

    The time that the loop waits, also for the previous save, is counted as
    `checkpoint`.
    """
    with run.activity("checkpoint"):
        books, groups = run.orders.snapshot(run.generators.in_flight())
        books |= {
            "ledger": run.ledger.state(),
            "assembler": run.assemble.state(),
        }
        run.learner.save(version, state, host=books, groups=groups)


def _resume(run: RunState, directory: Path) -> int:
    """Restore state, prompts and books from the newest checkpoint, if any.

    Compute spent after that checkpoint is added to the ledger, as far as it is on file.
    Return the last step that counts; -1 for a new run.
    """
    restored = run.learner.restore()
    lost_work.resume(run.ledger, directory, restored and restored.host)
    if restored is None:
        return -1
    run.state, run.version = restored.state, restored.step
    run.assemble.restore(restored.host["assembler"])
    wasted = run.orders.restore(restored.host, restored.groups, version=restored.step)
    run.ledger.count(wasted_tokens=wasted)
    _log.info("resumed after step %d", restored.step)
    return restored.step


def rescued(
    run: RunState, error: Exception, save: Callable[[], None]
) -> Exception | None:
    """Save the state of a run whose sampler is stopped; return the error to raise.

    A failure between two windows is not the learner's own: the state is then complete,
    and the error's text says whether it was saved.  Return None if the state is not
    complete.  Params whose logits are not finite are not saved.  `save` returns once
    the newest version is on disk.
    """
    if isinstance(error, FloatingPointError):
        _finish_save(run)
        return RuntimeError(
            f"{error}; the state of step {run.version} is therefore not saved: the "
            f"same --workdir resumes from the previous checkpoint, best with a lower "
            f"optimizer.learning_rate"
        )
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
    except Exception as error:  # noqa: BLE001  the run ends with the earlier error
        return f"the state of step {version} cannot be saved: {error}"
    return f"the state of step {version} is saved; the same --workdir resumes from it"


def _finish_save(run: RunState) -> None:
    """Wait for the save under way, logging its failure; an earlier one ends the run."""
    try:
        run.learner.checkpointer.wait()
    except UnsavedError as error:
        _log.error("%s", error)
