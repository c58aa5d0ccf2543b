"""The loop's bookkeeping (`RunMonitor`) of the parts of a run (`RunState`).

The file is above 400 lines: it has all counts, waits, warnings and display lines of a
step, the watch on failing verifiers, and the schedule of evaluations.
"""

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from scalerl_jax.batching.assembly import Batch
from scalerl_jax.batching.group_metrics import group_histograms, group_metrics
from scalerl_jax.batching.window import Pass, Window, open_window
from scalerl_jax.config import Config
from scalerl_jax.contract import Publication, State
from scalerl_jax.controller.evaluations import EvaluationPoint, MadeEvaluation
from scalerl_jax.controller.run_state import RunState
from scalerl_jax.environments.pool import NoVerifierError
from scalerl_jax.environments.verdict import lacks_verdict
from scalerl_jax.generation.evaluation import Abandoned
from scalerl_jax.parallel.xla import explained
from scalerl_jax.process.preemption import Preemption
from scalerl_jax.run.metrics import MetricsWriter
from scalerl_jax.run.rollouts import rollout_rows
from scalerl_jax.run.tracking import StepProfile
from scalerl_jax.types import Group, rollouts_of

_BATCHES = 10  # batches over which the share of unjudged rollouts is computed
_POLL_S = 1.0  # between two checks for SIGTERM while waiting for groups
_COLLECT_S = 0.05  # between two checks for the end of an evaluation
_NO_WAITS = {"time/wait_s": 0.0, "time/annotate_s": 0.0}  # since the row before


class UnjudgedWatch:
    """A count of rollouts without a verdict; `reason` tells why the run must stop.

    Leaving out a few is harmless.  Many mean that a verifier is broken, and training
    sees only the rollouts on which it does not fail.
    """

    def __init__(self, *, max_share: float, num_prompts: int, group_size: int) -> None:
        """Start at 0; a batch has `num_prompts` groups of `group_size` rollouts."""
        self._max_share = max_share
        self._recent: collections.deque[tuple[int, str]] = collections.deque(
            maxlen=_BATCHES * num_prompts
        )
        self._most = max_share * _BATCHES * num_prompts * group_size  # rollouts
        self.reason: str | None = None  # None: the run may continue

    def add(self, groups: Sequence[Group]) -> None:
        """Count training groups when they are taken from the queue."""
        for group in groups:
            failed = sum(
                lacks_verdict(rollout.status, judged=rollout.judged)
                for rollout in group.rollouts
            )
            self._recent.append((failed, group.detail))
        failed = sum(count for count, _ in self._recent)
        if failed > self._most:
            self._stop(
                f"verifiers failed on {failed} rollouts of the last {_BATCHES} batches",
                (detail for count, detail in self._recent if count),
            )

    def evaluated(
        self, share: float, details: Iterable[str], *, no_figure: bool
    ) -> None:
        """Record the unjudged share of an evaluation's samples, and the reasons.

        `no_figure`: there is no verdict at all, and so no pass rate.
        """
        if share > self._max_share or no_figure:
            self._stop(
                f"verifiers failed on {share:.0%} of the samples of an evaluation",
                details,
            )

    def _stop(self, what: str, details: Iterable[str]) -> None:
        often = collections.Counter(filter(None, details)).most_common(1)
        why = f", most often with: {often[0][0]}" if often else ""
        self.reason = (
            f"{what}, more than reward.max_unjudged_share = {self._max_share}{why}. "
            f"Fix that, or raise the limit, and start again with the same --workdir"
        )


class RunMonitor:
    """The loop's bookkeeping: waits, counts, warnings, files and the display."""

    def __init__(
        self,
        config: Config,
        run: RunState,
        writer: MetricsWriter,
        preemption: Preemption,
        evaluated: Callable[[], None],
    ) -> None:
        """Take the counts of a run that starts or resumes.

        `evaluated` is called after an evaluation has been written to evals.jsonl.
        """
        self._config = config
        self._run = run
        self._writer = writer
        self._progress = run.progress
        self._profile = None
        if steps := config.tracking.profile_steps:
            self._profile = StepProfile(steps, writer.tensorboard)
        self._skipped = 0  # steps in all
        self._dead = 0  # dead experts at the last step
        self._answered = True  # False once the user is warned that no answer is found
        self._skipped_in_row = 0
        # The batches of the window, by `id`, to which a step has been applied; whether
        # the last step was the first of its batch.
        self._applied: set[int] = set()
        self._first_applied = False
        self._pass_rate = float("nan")
        self._last_s = time.monotonic()
        report = run.ledger.report()  # not all 0 in a resumed run
        self._last_tokens = report["compute/generated_tokens"]
        self._times = {"time/train_s": 0.0} | _NO_WAITS
        self._mismatch: dict[str, float] = {}  # as last measured
        self._compared = -1  # the version that was compared at the start
        self._stopped = lambda: preemption.requested
        self._evaluations = run.evaluations
        self._evaluated = evaluated
        self._unjudged = UnjudgedWatch(
            max_share=config.reward.max_unjudged_share,
            num_prompts=config.batch.num_prompts,
            group_size=config.batch.group_size,
        )

    @property
    def must_stop(self) -> bool:
        """Return whether verifiers fail too often for the run to continue."""
        return self._unjudged.reason is not None

    def sync(self) -> None:
        """Put all rows on the disk, before the checkpoint that comes after them."""
        with self._run.activity("checkpoint"):
            self._writer.sync()

    def close(self) -> None:
        """End a profiler trace whose last step the run has not reached."""
        if self._profile:
            self._profile.close()

    def require_verdicts(self) -> None:
        """Raise an error, which ends the run, if verifiers fail too often.

        Raises:
            RuntimeError: verifiers fail too often; the message has the most frequent
                failure.
        """
        if self._unjudged.reason is not None:
            raise RuntimeError(self._unjudged.reason)

    def require_no_mismatch(
        self, state: State, publication: Publication, version: int
    ) -> None:
        """Refuse to train if the sampler is not the policy; compile the engine."""
        run = self._run
        with run.activity("startup"), self._progress.bar("compiling the sampler"):
            sampled = run.generators.sample(publication)
            mismatch = run.mismatch.require(state, sampled)
        self._mismatch, self._compared = mismatch.metrics(), version
        self._progress.note(str(mismatch))

    def publish(
        self, state: State, version: int, *, activity: str = "publish"
    ) -> Publication:
        """Send a copy of the params; if that fails, generators keep the older ones.

        The copy is pinned if it is evaluated beside the run.
        """
        run = self._run
        pinned = self._evaluations.beside and self.lacks_evaluation(version)
        if pinned:  # it replaces the copy pinned for the last evaluation
            self.await_evaluation()
        with run.activity(activity), explained("publishing params", self._config):
            publication = run.learner.publish(state, pinned=pinned)
            run.generators.publish(publication, policy_version=version)
        return publication

    def take(self, version: int) -> list[Group] | None:
        """Return the next window's groups; None if SIGTERM came during the wait."""
        if self._profile:
            self._profile.reached(version)
        started = time.monotonic()
        limit = self._config.queue.batch_timeout_s
        while not self._stopped():
            left = limit - (time.monotonic() - started)
            try:
                groups = self._run.queue.take(version, min(_POLL_S, max(left, 0.0)))
            except TimeoutError as timeout:
                if left > _POLL_S:
                    continue
                hang = self._run.generators.hang()
                raise TimeoutError(
                    f"no batch within queue.batch_timeout_s = {limit}: "
                    f"{f'{hang}; ' if hang else ''}{timeout}"
                ) from timeout
            self._times["time/wait_s"] += time.monotonic() - started
            # Counted here, so that the time of a verdict does not matter.
            for group in groups:
                passed = sum(rollout.passed for rollout in group.rollouts)
                self._run.stream.record(
                    group.prompt.prompt_id, passed=passed, total=group.num_judged
                )
            self._unjudged.add(groups)
            return groups
        return None

    def open(self, groups: list[Group], state: State, version: int) -> Window:
        """Return the window of the groups: batches ready for their steps."""
        run, batch = self._run, self._config.batch
        self._applied = set()
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
                f"{batch.max_refills}); the step uses those"
            )
        started = time.monotonic()
        with run.activity("train"), explained("the train step", self._config):
            scores = run.learner.annotate(state, window.packed())
            window = window.completed(scores, run.assemble.complete)
            if run.trace:
                for text in run.trace(window, state):
                    self._progress.note(text)
        self._times["time/annotate_s"] += time.monotonic() - started
        for each in window.batches:
            tokens, context = each.row_tokens, each.mean_context
            # An endpoint gets every sequence whole.
            asked = each.sequence_tokens if self._config.teacher.endpoint else 0
            run.ledger.count(
                train_flops=run.flops.annotation(tokens, context),
                teacher_flops=run.flops.teaching(tokens, context),
                asked_teacher_tokens=asked,
            )
        return window

    def step(
        self, state: State, each: Pass, assembled: Batch
    ) -> tuple[State, dict[str, float] | None]:
        """Make one optimizer step; metrics are None if no step was made."""
        run = self._run
        if each.epoch == 0:
            run.ledger.count(wasted_tokens=each.batch.wasted_tokens)
        if assembled.packed is None:
            self._skip(_without_gradient(each.batch.groups))
            return state, None
        started = time.monotonic()
        with run.activity("train"), explained("the train step", self._config):
            state, metrics, fault = run.learner.step(state, assembled.packed, assembled)
        self._times["time/train_s"] = time.monotonic() - started
        run.ledger.count(
            train_tokens=0 if fault else assembled.train_tokens,
            train_flops=run.flops.step(assembled.row_tokens, assembled.mean_context),
        )
        if fault:
            last = each.epoch == self._config.batch.epochs - 1
            if last and id(each.batch) not in self._applied:
                run.ledger.count(wasted_tokens=each.batch.carried_tokens)
            self._skip(fault)
            return state, None
        self._first_applied = id(each.batch) not in self._applied
        self._applied.add(id(each.batch))
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
                f"If all prompts are too easy or too hard, choose another data.tasks; "
                f"if numbers are not finite, lower optimizer.learning_rate"
            )

    def log(
        self,
        step: int,
        each: Pass,
        assembled: Batch,
        metrics: dict[str, float],
    ) -> None:
        """Write an evaluation that has ended, then the step's row; display the step."""
        self._collect()
        run, now = self._run, time.monotonic()
        elapsed_s, self._last_s = now - self._last_s, now
        report = run.ledger.report()
        made = report["compute/generated_tokens"] - self._last_tokens
        self._last_tokens = report["compute/generated_tokens"]
        groups = [*each.batch.groups, *each.batch.refilled]
        row: dict[str, Any] = metrics | group_metrics(groups, learner_version=step - 1)
        row |= assembled.expert_load
        if not metrics["mismatch/tokens"] or self._config.sampler.filters:
            # Use the mismatch of the last evaluation: this batch has no token of the
            # learner's own version, or the sampler's filters lower its ratios.
            row |= self._mismatch
        row |= {
            "train/tokens": assembled.train_tokens,
            "train/epoch": each.epoch,
            "train/learning_rate": float(run.learning_rates(step - 1)),
            "group/generated": len(groups),
            "group/with_variance": each.batch.num_useful,
            # The limit of the newest completions in the batch.
            "completion/limit_tokens": run.length_limit(
                max(group.oldest_version for group in groups)
            ),
            "train/skipped_steps": self._skipped,
            **run.stream.figures,
            "queue/buffered": run.queue.buffered,
            "queue/running": run.queue.running,
            "queue/dropped": sum(run.queue.dropped.values()),
            "queue/bad_groups": run.orders.refused,
            "verifier/restarts": run.verifier_restarts(),
            "time/step_s": elapsed_s,
            "throughput/generated_tokens_per_s": made / max(elapsed_s, 1e-9),
            "throughput/trained_tokens_per_s": assembled.row_tokens
            / max(self._times["time/train_s"], 1e-9),
        }
        row |= {**self._times, **report}
        self._times |= _NO_WAITS  # the window's further steps have not waited
        row |= {**run.generators.metrics, **run.learner.metrics}
        shares = run.ledger.idle_shares()
        row |= {f"idle/{pool}_share": share for pool, share in shares.items()}
        if self._profile:
            self._profile.reached(step)
        histograms = group_histograms(groups, learner_version=step - 1)
        self._writer.write_step(step, row, histograms)
        if self._first_applied:
            rows = rollout_rows(each.batch.groups, step=step)
            self._writer.write_train_rollouts(rows)
        self._warn(row)
        self._show(step, row)
        filters = self._config.sampler.filters
        if self._evaluations.beside and metrics["mismatch/tokens"] and not filters:
            self._mismatch = {name: metrics[name] for name in self._mismatch}

    def _show(self, step: int, row: dict[str, Any]) -> None:
        """Display the step's line; a narrow display cuts off its last values first."""
        # The pass rate is unknown between a resumption and the next evaluation.
        rate = "-" if math.isnan(self._pass_rate) else f"{self._pass_rate:.3f}"
        speed = row["throughput/generated_tokens_per_s"]
        facts = {
            "reward": f"{row['reward/mean']:.2f}",
            "pass rate": rate,
            "length": f"{row['completion/mean_tokens']:.0f}",
            "staleness": f"{row['staleness/mean']:.1f}",
        }
        # A sampler that made no token in the whole step was idle.
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
        self._warn_of_no_answers(row["verifier/no_answer_share"], "the batch")
        dead = row.get("experts/dead", 0)
        if dead and dead != self._dead:
            objective = self._config.objective
            way = "objective.expert_bias_rate or objective.expert_balance would balance"
            if objective.expert_bias_rate or objective.expert_balance:
                way = "a larger objective.expert_bias_rate or expert_balance evens out"
            self._progress.note(
                f"warning: {dead:.0f} experts, of all layers, took no token of this "
                f"batch (experts/dead in metrics.jsonl); {way} the load"
            )
        self._dead = dead

    def _warn_of_no_answers(self, share: float, where: str) -> None:
        """Warn once, with the way out, if not a single completion holds an answer."""
        if self._answered and share == 1.0:
            self._answered = False
            self._progress.note(
                f"warning: no completion of {where} holds an answer: "
                f"{self._run.why_no_answers()}"
            )

    def lacks_evaluation(self, version: int) -> bool:
        """Return whether an evaluation is due at this version and not yet started."""
        last = version == self._config.train.num_steps
        due = last or version % self._config.eval.every == 0
        begun = self._evaluations.under_way == version
        return due and not begun and not self._writer.has_eval(version)

    def evaluate(self, state: State, publication: Publication, version: int) -> None:
        """Make the evaluation at this version, or start it beside the run.

        An evaluation beside the run starts after the last one has ended.  It is never
        written if the run stops meanwhile or loses its verifiers.
        """
        point = EvaluationPoint(
            version=version,
            publication=publication,
            report=self._run.ledger.report(),
            compared=version == self._compared,
        )
        self.await_evaluation()
        with self._given_up(version):
            made = self._evaluations.begin(point, state, stopped=self._stopped)
            if made is not None:
                self._write_evaluation(made)

    def await_evaluation(self, *, before: int | None = None) -> None:
        """Wait for the evaluation under way, if its version is below `before`.

        The wait is not counted as training time.
        """
        self._collect()
        version = self._evaluations.under_way
        if version is not None and (before is None or version < before):
            with self._run.activity("eval"):
                # Bounded, since the generators have time limits.
                while self._evaluations.under_way is not None:
                    time.sleep(_COLLECT_S)
                    self._collect()

    def _collect(self) -> None:
        """Write the evaluation under way, if it has ended."""
        version = self._evaluations.under_way
        if version is not None:
            with self._given_up(version):
                made = self._evaluations.collect()
                if made is not None:
                    self._write_evaluation(made)

    @contextlib.contextmanager
    def _given_up(self, version: int) -> Iterator[None]:
        """Report an evaluation that was abandoned or had no verdicts; do not raise."""
        try:
            yield
        except Abandoned:
            why = ", since the run was told to stop" if self._stopped() else ""
            self._progress.note(f"the evaluation at step {version} is abandoned{why}")
        except NoVerifierError as failure:
            self._unjudged.reason = f"an evaluation had no verdicts: {failure}"

    def _write_evaluation(self, made: MadeEvaluation) -> None:
        version, report = made.point.version, made.point.report
        result = made.result
        if made.mismatch is not None:
            self._mismatch = made.mismatch
        no_figure = math.isnan(result.pass_rate)
        self._unjudged.evaluated(
            result.unjudged_share, result.details, no_figure=no_figure
        )
        row = {
            "step": version,
            "policy_version": version,
            "compute_chip_hours": report["compute/charged_chip_hours"],
        }
        row |= {
            name: report[f"compute/{name}"]
            for name in ("train_tokens", "generated_tokens", "train_flops")
        }
        row |= result.figures() | self._mismatch
        if not no_figure:
            self._writer.write_eval(row)
            self._evaluated()
        self._writer.write_rollouts(
            {"step": version, **each} for each in result.rollouts
        )
        self._pass_rate = result.pass_rate
        error = result.pass_rate_se
        self._progress.note(
            f"evaluation at step {version}: pass rate {result.pass_rate:.3f} "
            + ("" if math.isnan(error) else f"+- {error:.3f} ")
            + "after "
            f"{row['compute_chip_hours']:.4f} chip-hours"
            + (f", {result.unjudged_share:.1%} unjudged" if result.details else "")
        )
        self._warn_of_no_answers(result.no_answer_share, "the evaluation")


def _without_gradient(groups: Sequence[Group]) -> str:
    """Return the message for a batch of which no rollout is trained on."""
    rollouts = rollouts_of(groups)
    equal = sum(not group.has_reward_variance for group in groups)
    cut_off = sum(rollout.cut_off for rollout in rollouts)
    unanswered = sum(rollout.status == "no_answer" for rollout in rollouts)
    unjudged = sum(not rollout.judged for rollout in rollouts)
    return (
        f"no rollout of the batch is trained on: {equal} of {len(groups)} groups have "
        f"zero variance (fewer do with a larger batch.group_size or other data.tasks), "
        f"{cut_off} of {len(rollouts)} rollouts are cut off, {unanswered} without an "
        f"answer and {unjudged} unjudged"
    )
