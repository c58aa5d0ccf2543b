"""The loop's bookkeeping: waits, counts, warnings, files and the display."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from scalerl_jax.batching.assembly import Assembled, group_histograms, group_metrics
from scalerl_jax.batching.window import Pass, Window, open_window
from scalerl_jax.config import Config, to_json
from scalerl_jax.contract import Publication, State
from scalerl_jax.coordination.agreement import Agreement
from scalerl_jax.coordination.unjudged import UnjudgedWatch
from scalerl_jax.evaluate.evaluation import Evaluation
from scalerl_jax.generation.listed import Abandoned, never
from scalerl_jax.rewards.verifier import NoVerifierError
from scalerl_jax.run_state import RunState
from scalerl_jax.types import Group
from scalerl_jax.utils.metrics import MetricsWriter, StepProfile
from scalerl_jax.utils.preemption import Preemption
from scalerl_jax.utils.run_directory import flatten
from scalerl_jax.utils.xla import explained

_POLL_S = 1.0  # between two looks for SIGTERM while waiting for groups


class RunMonitor:
    """The loop's bookkeeping: waits, counts, warnings, files and the display."""

    def __init__(self, config: Config, run: RunState, writer: MetricsWriter) -> None:
        """Begin at the start of a run, or of its resumption."""
        self._config = config
        self._settings = flatten(to_json(config))
        self._run = run
        self._writer = writer
        self._progress = run.progress
        self._profile = StepProfile(config.tracking.profile_steps, writer.tensorboard)
        self._skipped = 0  # steps in all
        self._skipped_in_row = 0
        self._pass_rate = float("nan")
        self._last_s = time.monotonic()
        report = run.ledger.report()  # of a resumed run it is not 0
        self._last_tokens = report["compute/generated_tokens"]
        self._times: dict[str, float] = {}
        self._mismatch: dict[str, float] = {}  # as last measured
        self._unjudged = UnjudgedWatch(
            max_share=config.reward.max_unjudged_share,
            num_prompts=config.batch.num_prompts,
            group_size=config.batch.group_size,
        )

    @property
    def must_stop(self) -> bool:
        """Return whether verifiers fail too often for the run to go on."""
        return self._unjudged.reason is not None

    def close(self) -> None:
        """End a trace that the run does not reach the last step of."""
        self._profile.close()

    def require_verdicts(self) -> None:
        """Refuse to go on where verifiers fail too often; save the state first.

        Raises:
            RuntimeError: with what they say.
        """
        if self._unjudged.reason is not None:
            raise RuntimeError(self._unjudged.reason)

    def require_agreement(self, state: State, publication: Publication) -> None:
        """Refuse to train on a sampler that is not the policy; compiles the engine."""
        run = self._run
        with (
            run.ledger.activity("startup", pool=run.learner_pool),
            self._progress.bar("compiling the sampler"),
        ):
            sampled = run.generators.sample(publication)
            agreement = run.agreement.require(state, sampled)
        self._mismatch = agreement.metrics()
        self._progress.note(
            f"sampler and learner differ by {agreement.mean_abs:.1e} nats on average, "
            f"{agreement.max_abs:.1e} at most, over {agreement.tokens} tokens"
        )

    def publish(
        self, state: State, version: int, *, activity: str = "publish"
    ) -> Publication:
        """Send a copy of the params; on a failure generators keep what they have."""
        run = self._run
        with (
            run.ledger.activity(activity, pool=run.learner_pool),
            explained("publishing params", self._settings),
        ):
            publication = run.learner.publish(state)
            run.generators.publish(publication, policy_version=version)
        return publication

    def take(self, version: int, preemption: Preemption) -> list[Group] | None:
        """The groups of the next window; None if SIGTERM came while waiting for it."""
        self._profile.reached(version)
        started = time.monotonic()
        limit = self._config.queue.batch_timeout_s
        while not preemption.requested:
            left = limit - (time.monotonic() - started)
            try:
                groups = self._run.queue.take(version, min(_POLL_S, max(left, 0.0)))
            except TimeoutError as timeout:
                if left > _POLL_S:
                    continue
                raise TimeoutError(
                    f"no batch within queue.batch_timeout_s = {limit}: {timeout}"
                ) from timeout
            self._times["time/wait_s"] = time.monotonic() - started
            # Here and not when a verdict comes: its moment must not matter.
            for group in groups:
                passed = sum(rollout.passed for rollout in group.rollouts)
                self._run.stream.record(
                    group.prompt.prompt_id, passed=passed, total=group.num_judged
                )
            self._unjudged.add(groups)
            return groups
        return None

    def open(self, groups: list[Group], state: State, version: int) -> Window:
        """The batches of what was taken, ready for their steps."""
        run, batch = self._run, self._config.batch
        window = open_window(
            groups,
            num_prompts=batch.num_prompts,
            num_batches=run.queue.taken // batch.num_prompts,
            version=version,
            assemble=run.assemble,
        )
        useful = sum(group.has_reward_variance for group in groups)
        if batch.dynamic_sampling and useful < run.queue.taken:
            self._progress.note(
                f"warning: {useful} of {run.queue.taken} groups have reward "
                f"variance, after {len(groups)} were generated (batch.max_refills = "
                f"{batch.max_refills}); the step goes with those"
            )
        started = time.monotonic()
        with (
            run.ledger.activity("train", pool=run.learner_pool),
            explained("the train step", self._settings),
        ):
            window = window.annotated(run.learner.annotate(state, window.packed()))
            if run.trace:
                for step, each in enumerate(window.batches, start=version + 1):
                    for text in run.trace(
                        each.groups,
                        each.assembled.sequences,
                        state,
                        version=version,
                        step=step,
                    ):
                        self._progress.note(text)
        self._times["time/annotate_s"] = time.monotonic() - started
        for each in window.batches:
            assembled = each.assembled
            flops = run.flops.annotation(assembled.row_tokens, assembled.mean_context)
            run.ledger.count(train_flops=flops)
        return window

    def step(
        self, state: State, each: Pass, assembled: Assembled
    ) -> tuple[State, dict[str, float] | None]:
        """One optimizer step; no metrics if there was none to take."""
        ledger = self._run.ledger
        if each.epoch == 0:
            ledger.waste_tokens(each.batch.wasted_tokens)
        if assembled.batch is None:
            self._skip(_without_gradient(each.batch.groups))
            return state, None
        started = time.monotonic()
        with (
            ledger.activity("train", pool=self._run.learner_pool),
            explained("the train step", self._settings),
        ):
            state, metrics, fault = self._run.learner.step(state, assembled.batch)
        self._times["time/train_s"] = time.monotonic() - started
        ledger.count(
            train_tokens=assembled.train_tokens,
            train_flops=self._run.flops.step(
                assembled.row_tokens, assembled.mean_context
            ),
        )
        if fault:
            self._skip(
                f"loss {metrics['loss']} or gradient norm {metrics['grad_norm']} is "
                f"not finite; {fault}"
            )
            return state, None
        self._skipped_in_row = 0
        return state, metrics

    def _skip(self, reason: str) -> None:
        self._skipped += 1
        self._skipped_in_row += 1
        limit = self._config.train.max_skipped_steps
        self._progress.note(f"warning: optimizer step skipped: {reason}")
        if self._skipped_in_row >= limit:
            raise RuntimeError(
                f"{self._skipped_in_row} optimizer steps in a row were skipped, the "
                f"limit train.max_skipped_steps = {limit}; the last because {reason}. "
                f"Prompts that are all too easy or too hard want another data.tasks; "
                f"numbers that are not finite want a lower optimizer.learning_rate"
            )

    def log(
        self,
        step: int,
        each: Pass,
        assembled: Assembled,
        metrics: dict[str, float],
    ) -> None:
        """One row of metrics.jsonl, and the display."""
        run, now = self._run, time.monotonic()
        elapsed_s, self._last_s = now - self._last_s, now
        report = run.ledger.report()
        made = report["compute/generated_tokens"] - self._last_tokens
        self._last_tokens = report["compute/generated_tokens"]
        groups = [*each.batch.groups, *each.batch.refilled]
        row: dict[str, Any] = metrics | group_metrics(groups, learner_version=step - 1)
        if not metrics["mismatch/tokens"] or self._config.sampler.filters:
            # No token of the learner's own version, or ratios that filters lower: that
            # of the last evaluation.
            row |= self._mismatch
        row |= {
            "train/tokens": assembled.train_tokens,
            "train/epoch": each.epoch,
            "train/learning_rate": float(run.learning_rates(step - 1)),
            "group/generated": len(groups),
            "group/with_variance": each.batch.num_useful,
            # Of the newest of its completions.
            "completion/limit_tokens": run.length_limit(
                max(group.oldest_version for group in groups)
            ),
            "train/skipped_steps": self._skipped,
            "data/retired_prompts": run.stream.num_retired,
            "queue/buffered": run.queue.buffered,
            "queue/running": run.queue.running,
            "queue/dropped": sum(run.queue.dropped.values()),
            "verifier/restarts": run.verifier_restarts(),
            "time/step_s": elapsed_s,
            "throughput/generated_tokens_per_s": made / max(elapsed_s, 1e-9),
            "throughput/trained_tokens_per_s": assembled.row_tokens
            / max(self._times["time/train_s"], 1e-9),
        }
        row |= self._times | report | run.generators.metrics | run.learner.metrics
        shares = run.ledger.idle_shares()
        row |= {f"idle/{pool}_share": share for pool, share in shares.items()}
        self._profile.reached(step)
        histograms = group_histograms(groups, learner_version=step - 1)
        self._writer.write_step(step, row, histograms)
        self._warn(row)
        self._show(step, row)

    def _show(self, step: int, row: dict[str, Any]) -> None:
        """The line of the display; what comes last is cut off first."""
        # Unknown between a resumption and the next evaluation.
        rate = "-" if math.isnan(self._pass_rate) else f"{self._pass_rate:.3f}"
        speed = row["throughput/generated_tokens_per_s"]
        facts = {
            "reward": f"{row['reward/mean']:.2f}",
            "pass rate": rate,
            "length": f"{row['completion/mean_tokens']:.0f}",
            "staleness": f"{row['staleness/mean']:.1f}",
        }
        # Without a new token in the whole step it had nothing to do.
        facts |= (
            {"tokens/s": f"{speed:.0f}"}
            if speed
            else {"sampler": "waiting for the learner"}
        )
        facts |= {
            "train pass rate": f"{row['pass_rate/mean']:.3f}",
            "staleness in flight": f"{row['staleness/in_flight_mean']:.1f}",
            "queued": f"{row['staleness/queued_mean']:.1f}",
            "max": f"{row['staleness/max']}",
        }
        self._progress.show(facts, done=step)

    def _warn(self, row: dict[str, Any]) -> None:
        limit = self._config.train.cut_off_warning_share
        if row["completion/cut_off_share"] > limit:
            self._progress.note(
                f"warning: {row['completion/cut_off_share']:.0%} of the completions "
                f"were cut off at the length limit (train.cut_off_warning_share = "
                f"{limit:.0%}); in ScaleRL's runs this came before a collapse"
            )

    def lacks_evaluation(self, version: int) -> bool:
        """Return whether one is due at this version, and is not on file."""
        last = version == self._config.train.num_steps
        due = last or version % self._config.eval.every == 0
        return due and not self._writer.has_eval(version)

    def evaluate(
        self,
        state: State,
        publication: Publication,
        version: int,
        *,
        stopped: Callable[[], bool] = never,
    ) -> bool:
        """Pass rate and mismatch at this version, into the files and the display.

        False if it was `stopped`, or has no verifiers: it is not on file then.
        """
        run = self._run
        try:
            report = run.ledger.report()
            with run.ledger.activity("eval", pool=run.learner_pool):
                result, sampled = run.generators.evaluate(
                    publication, policy_version=version, stopped=stopped
                )
                agreement = run.agreement(state, sampled)
        except Abandoned:
            self._progress.note(
                f"the evaluation at step {version} is given up for SIGTERM"
            )
            return False
        except NoVerifierError as failure:
            self._unjudged.reason = f"an evaluation had no verdicts: {failure}"
            return False
        self._write_evaluation(version, report, result, agreement)
        return True

    def _write_evaluation(
        self,
        version: int,
        report: dict[str, float],
        result: Evaluation,
        agreement: Agreement,
    ) -> None:
        self._mismatch = agreement.metrics()
        no_figure = math.isnan(result.pass_rate)
        self._unjudged.evaluated(
            result.unjudged_share, result.details, no_figure=no_figure
        )
        row = {
            "step": version,
            "policy_version": version,
            "compute_chip_hours": report["compute/charged_chip_hours"],
            "train_tokens": report["compute/train_tokens"],
            "generated_tokens": report["compute/generated_tokens"],
            "train_flops": report["compute/train_flops"],
            "pass_rate": result.pass_rate,
            "pass_rate_se": result.pass_rate_se,
            "num_prompts": result.num_prompts,
            "samples_per_prompt": result.samples_per_prompt,
            "prompt_pass_rates": result.prompt_pass_rates,
            "cut_off_share": result.cut_off_share,
            "interrupted_share": result.interrupted_share,
            "unjudged_share": result.unjudged_share,
            "unjudged_prompts": result.unjudged_prompts,
            "mean_completion_tokens": result.mean_completion_tokens,
            **self._mismatch,
        }
        row |= {
            f"pass_rate/{task}": rate for task, rate in result.pass_rate_by_task.items()
        }
        if not no_figure:
            self._writer.write_eval(row)
        self._writer.write_rollouts(
            {"step": version, **each} for each in result.rollouts
        )
        self._pass_rate = result.pass_rate
        self._progress.note(
            f"evaluation at step {version}: pass rate {result.pass_rate:.3f} "
            f"+- {result.pass_rate_se:.3f} after "
            f"{row['compute_chip_hours']:.4f} chip-hours"
            + (f", {result.unjudged_share:.1%} unjudged" if result.details else "")
        )


def _without_gradient(groups: Sequence[Group]) -> str:
    """Why no rollout of a batch is trained on."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    equal = sum(not group.has_reward_variance for group in groups)
    cut_off = sum(rollout.cut_off for rollout in rollouts)
    unjudged = sum(not rollout.judged for rollout in rollouts)
    return (
        f"no rollout of the batch is trained on: {equal} of {len(groups)} groups have "
        f"zero variance (fewer do with a larger batch.group_size or other data.tasks), "
        f"{cut_off} of {len(rollouts)} rollouts are cut off and {unjudged} unjudged"
    )
