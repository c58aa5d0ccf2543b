"""The learner as several processes: one call to all of them, and their replacement.

A rank that is lost takes the others with it, for their next collective has no end.  All
are started again; the state comes from the last complete checkpoint, and the batches
since then, which are kept, are trained on again: the same version comes back, bit for
bit, and nothing that was generated is thrown away.  A thread waits for the end of any
rank, for the loop may be waiting for replicas, and they for params of the ranks.

One file above 400 lines: every call may find the processes lost, and replaces it.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from jaxtyping import Float
from ray.exceptions import RayError

from scalerl_jax.cluster.actors import (
    LEARNER_GROUPS,
    LearnerRank,
    RoleProcessInfo,
    arrange,
)
from scalerl_jax.cluster.batch_parts import SentBatches
from scalerl_jax.cluster.calls import (
    RoleLost,
    calling,
    end_all,
    own_error,
    why_lost,
)
from scalerl_jax.cluster.kept_batches import Kept
from scalerl_jax.cluster.session import Cluster, check_process
from scalerl_jax.config import Config
from scalerl_jax.contract import MadeOf, Restored
from scalerl_jax.learner.checkpoint import Checkpointer
from scalerl_jax.learner.forward import read_forward
from scalerl_jax.objective.terms import needs_of
from scalerl_jax.parallel.xla import is_broken_off
from scalerl_jax.process.ending import first_line
from scalerl_jax.types import Group, PackedBatch, Scores
from scalerl_jax.weights.manifest import Manifest, PublishReport, merge

_log = logging.getLogger(__name__)
_SILENCE_S = 1800.0  # compiling is part of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsOf:
    """A version, as it goes to replicas: manifests that say where its bytes are."""

    policy_version: int
    # As the processes that are there now have published it, in full or as deltas; None:
    # its objects ended with their processes, and others come.
    manifest: Callable[[], Manifest | None]
    # The same version by itself, for who holds no base; None: it comes.
    whole: Callable[[], Manifest | None]

    def for_replica(self, number: int, held_version: int) -> Manifest | None:
        """Return the manifest for a replica that holds the version `held_version`.

        A replica without the base of the deltas gets the params in full; None: these
        are not ready yet.
        """
        del number
        manifest = self.manifest()
        if manifest is None:
            return None
        base = manifest.base_version
        if base is None or held_version in (self.policy_version, base):
            return manifest
        return self.whole()


class RemoteCheckpoints:
    """The checkpoints that ranks write, as the loop asks for them."""

    def __init__(self, files: Checkpointer, learners: "LearnerProcesses") -> None:
        """Read the names in the directory; ask the ranks how far they are."""
        self._files = files
        self._learners = learners

    def due(self, step: int, *, since: int) -> bool:
        """Return whether a checkpoint is due after any step from `since` + 1 to `step`.

        It is once a rank has got a SIGTERM, before its machine is taken away, and
        early where the batches since the last one take too much memory.
        """
        early = self._learners.leaving or self._learners.kept_too_much()
        return early or self._files.due(step, since=since)

    def good(self) -> list[int]:
        """Return the steps of the checkpoints on disk, oldest first.

        Those that a rank has found damaged are left out.
        """
        damaged = set().union(*self._learners.call("await_save"))
        return [step for step in self._files.steps() if step not in damaged]

    def complete(self) -> list[int]:
        """Return the steps of the checkpoints that are complete by now."""
        return self._files.steps()

    def check(self) -> None:
        """Raise the error of a save that has failed."""
        self._learners.call("check_save")

    def wait(self) -> None:
        """Return when every checkpoint is on disk."""
        self._learners.call("await_save")


class LearnerProcesses:
    """The learner over ranks; the loop's state is the version that they have."""

    def __init__(
        self,
        config: Config,
        directory: str,
        *,
        cluster: Cluster,
        files: Checkpointer,
        kept: Kept,
        note: Callable[[str], None],
        before_save: Callable[[], None],
        placed: Callable[[], None] = lambda: None,
        fail: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Start the ranks, which load and compile after `placed` was called.

        `fail` ends the loop's waits with an error, which its next call here meets too.
        """
        self._config = config
        self._directory = directory
        self._cluster = cluster
        self._note = note
        self._before_save = before_save
        self._placed = placed
        self._fail = fail
        # Held from a call to what is noted of it: else another thread that replaces
        # lost ranks would bring them to where they were before the call.
        self._lock = threading.RLock()
        self._ranks: list[Any] = []
        self._up = False  # they have started, and are where they were
        self.places: list[RoleProcessInfo] = []
        self._kept = kept
        self._warned = False  # that checkpoints come early
        self._sent = SentBatches()
        self._whole: dict[int, Manifest] = {}
        # Of the newest version, and of the one that is pinned, where they are now.
        self._manifests: dict[int, Manifest] = {}
        self._published = self._pinned = -1  # versions
        self._asking: threading.Thread | None = None
        self.version = 0  # of the state, for people
        self.restarts = 0
        self.leaving = False  # a rank has got a SIGTERM, and nothing is saved since
        self._renew = False  # that is saved: all ranks are to start again
        self.reports: list[PublishReport] = []
        self.checkpointer = RemoteCheckpoints(files, self)
        with self._lock:
            try:
                self._start()
            except RoleLost as loss:
                text = f"the learner cannot start: {first_line(loss)}"
                raise RuntimeError(text) from loss
            self._up = True

    # The methods of `LocalLearner`.

    def step(
        self, state: int, batch: PackedBatch, made_of: MadeOf
    ) -> tuple[int, dict[str, float], str]:
        """Make an optimizer step on every rank."""
        with self._lock:
            answers = self.call("step", each=lambda: self._parts(batch))
            metrics, fault, _ = answers[0]
            self._kept.add(batch, made_of, version=state)
        self.version = state + (not fault)
        told = [number for number, (*_, leaving) in enumerate(answers) if leaving]
        if told and not self.leaving:
            self.leaving = True
            self._note(
                f"warning: rank {told[0]} on {self._where(told[0])} of the learner got "
                f"a SIGTERM; the state is saved, and all ranks start again"
            )
        return self.version, metrics, fault

    def annotate(self, state: int, batches: list[PackedBatch]) -> list[Scores]:
        """Return the scores of a window's batches that the objective reads."""
        self._sent.begin()
        if not needs_of(self._config).of_params:
            return [{} for _ in batches]
        # All that a maker of scores reads; an endpoint goes by the ids.
        read = [
            dataclasses.replace(read_forward(batch), sequence_ids=batch.sequence_ids)
            for batch in batches
        ]

        def parts() -> list[tuple]:
            of_ranks = zip(*map(self._sent.parts, read), strict=True)
            return [([*of_rank],) for of_rank in of_ranks]

        with self._lock:
            scores = self.call("annotate", each=parts)[0]
            for batch, found in zip(read, scores, strict=True):
                self._sent.made(batch, found)
        return scores

    def score(self, state: int, batch: PackedBatch) -> Float[np.ndarray, "M R S"]:
        """Return the log-probability of every target of a batch, in nats."""
        return self.call("score", batch)[0]

    def examine(self, state: int, batch: PackedBatch) -> dict[str, float]:
        """Return a batch's metrics and the norm of its gradient; no step is made."""
        return self.call("examine", batch)[0]

    def publish(self, state: int, *, pinned: bool = False) -> WeightsOf:
        """Publish the shards of every rank; return the manifest for the replicas.

        Restarted processes send it again, and the `pinned` version when they pass it:
        after a pinned version no checkpoint is begun until no replica needs it.
        """
        with self._lock:
            parts = self.call("publish", state, pinned)
            manifest = merge([part for part, _ in parts])
            self.reports = [report for _, report in parts]
            self._pinned = state if pinned else self._pinned
            self._published = state
            self._manifests[state] = manifest
            for version in self._manifests.keys() - {self._published, self._pinned}:
                del self._manifests[version]
        return WeightsOf(
            policy_version=state,
            manifest=lambda: self._reachable(self._manifests.get(state, manifest)),
            whole=lambda: self._publish_again(state),
        )

    def _reachable(self, manifest: Manifest) -> Manifest | None:
        """Return a manifest; None: its objects have ended with lost ranks."""
        return manifest if self._up or not manifest.handles else None

    def _restore_published(self, version: int) -> None:
        """Publish what lost ranks had published, where others come by there."""
        if version in self._manifests:
            parts = self._ask("publish", version, version == self._pinned)
            self._manifests[version] = merge([part for part, _ in parts])

    def _publish_again(self, version: int) -> Manifest | None:
        """Return a version in full, once the ranks have published it so."""
        if version in self._whole:
            return self._whole[version]
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(
                target=self._ask_again, name="whole weights", daemon=True
            )
            self._asking.start()
        return None

    def _ask_again(self) -> None:
        """Publish the last version of the ranks in full, beside what they do."""
        ranks = self._ranks
        try:
            calls = [
                rank.publish_again.options(concurrency_group="weights").remote()
                for rank in ranks
            ]
            manifest = merge(ray.get(calls, timeout=_SILENCE_S))
        except (RayError, ValueError) as error:
            own = own_error(error) if isinstance(error, RayError) else None
            if own is not None:  # a full disk, for example; as in `publish`
                self._fail(own)
            _log.info("no params in full for a newcomer as yet: %s", why_lost(error))
            time.sleep(1.0)
            return
        if ranks is self._ranks:  # else what they published is lost with them
            self._whole = {manifest.policy_version: manifest}

    def save(
        self, step: int, state: int, *, host: dict[str, Any], groups: Sequence[Group]
    ) -> None:
        """Make every rank copy its shards, and write them while the run goes on."""
        self._before_save()
        with self._lock:
            self._kept.saved(step)
            others = [(step, {}, ())] * (self._config.mesh.processes - 1)
            self.call("save", each=lambda: [(step, host, groups), *others])
            # The one before is complete: this one has waited for that.  If one of this
            # step is there already, it may be a damaged one that is written again.
            complete = self.checkpointer.complete()
            self._kept.forget([other for other in complete if other != step])
            if self.leaving:
                self.call("await_save")
                self.leaving, self._renew = False, True

    def restore(self) -> Restored | None:
        """Restore every rank from the newest good checkpoint; None: there is none."""
        with self._lock:
            found = self.call("restore")[0]
            if found is None:
                return None
            step, host, groups = found
            self._kept.saved(step)
        self.version = step
        return Restored(step=step, state=step, host=host, groups=groups)

    @property
    def metrics(self) -> dict[str, float]:
        """Return restarts and bytes of batches so far, and the last publication's."""
        found: dict[str, float] = {
            "learner/restarts": self.restarts,
            "learner/batch_bytes": self._sent.num_bytes,
            "learner/kept_bytes": self._kept.num_bytes,
        }
        if reports := self.reports:
            shares = [report.changed_share or 0.0 for report in reports]
            sizes = [report.full_bytes for report in reports]
            found |= {
                "publish/bytes": sum(report.num_bytes for report in reports),
                "publish/seconds": max(report.seconds for report in reports),
                "publish/changed_share": float(np.average(shares, weights=sizes)),
            }
        return found

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each rank: where it is and what it has."""
        return [
            {
                "role": f"learner {number}",
                "where": str(place),
                "version": self.version,
                "lost": self.restarts,
            }
            for number, place in enumerate(list(self.places))
        ]

    # The ranks.

    def call(
        self,
        method: str,
        *arguments: Any,
        each: Callable[[], Sequence[tuple]] | None = None,
    ) -> list[Any]:
        """Return every rank's answer; lost processes are replaced, and asked again.

        They get the same arguments, or what `each` returns for them, which is asked
        again for those that come in their place.

        Raises:
            RuntimeError: it is lost again and again.
            Exception: what the method raised in a rank.
        """
        with self._lock:
            cause, limit = RoleLost(), self._config.generators.losses
            # A run that ends needs no other ranks; of those that are gone none writes.
            ends = method in ("await_save", "check_save")
            if ends and not self._up:
                return []
            renew = self._renew and not ends
            self.restarts += renew
            for attempt in range(limit + 1):
                try:
                    if attempt or renew or not self._up:
                        self._replace(for_restore=method == "restore")
                    return self._ask(method, *arguments, each=each and each())
                except RoleLost as loss:
                    self._up = False
                    self.restarts += 1
                    self._note(
                        f"warning: the learner is lost ({loss}); all its "
                        f"{len(self._ranks)} processes start again"
                    )
                    cause = loss
            raise RuntimeError(
                f"the learner was lost {limit + 1} times in a row, more than "
                f"generators.losses = {limit}; the last time: {cause}"
            )

    def close(self) -> None:
        """End all ranks."""
        self._up = False
        end_all(self._ranks)
        self._ranks = []

    def _ask(
        self, method: str, *arguments: Any, each: Sequence[tuple] | None = None
    ) -> list[Any]:
        """Return every rank's answer.

        Raises:
            RoleLost: a rank is gone, or none answers.
            Exception: what the method raised in a rank.
        """
        with calling("all ranks"):
            shared = tuple(ray.put(argument) for argument in arguments)
            calls = {}
            for number, rank in enumerate(self._ranks):
                given = shared if each is None else each[number]
                calls[getattr(rank, method).remote(*given)] = number
            waiting, answers = list(calls), {}
            # The first to end tells: behind a rank that is lost the others may hang.
            while waiting:
                done, waiting = ray.wait(waiting, timeout=_SILENCE_S)
                if not done:
                    raise RoleLost(f"no answer to {method} for {_SILENCE_S:g} s")
                for call in done:
                    answers[calls[call]] = self._answer(call, calls[call])
            return [answers[number] for number in sorted(answers)]

    def _answer(self, call: Any, number: int) -> Any:
        """Return what a rank has answered.

        Raises:
            RoleLost: it is gone, or another one is.
            Exception: what the method raised.
        """
        name = f"rank {number} on {self._where(number)}"
        try:
            with calling(name):
                return ray.get(call)
        except Exception as error:
            # A collective, whose other end is gone.
            if is_broken_off(error) and len(self._ranks) > 1:
                raise RoleLost(f"{name}: {first_line(error)}") from error
            raise

    def _where(self, number: int) -> str:
        return str(self.places[number]) if number < len(self.places) else "its host"

    def _start(self) -> None:
        """Start every rank, and have them meet.

        Raises:
            RoleLost: one is gone again.
            TimeoutError: one found no place.
        """
        count = self._config.mesh.processes
        devices = self._config.mesh.num_devices // count
        timeout_s = self._config.generators.start_timeout_s
        make: Any = ray.remote
        actor = make(concurrency_groups=LEARNER_GROUPS)(LearnerRank)
        with calling("all ranks"):
            self._ranks = [
                actor.options(
                    **self._cluster.options(devices, role="learner", number=rank)
                ).remote(self._config, self._directory, rank=rank, num_ranks=count)
                for rank in range(count)
            ]
        for number, rank in enumerate(self._ranks):
            check_process(
                rank,
                f"rank {number} of the learner",
                self._directory,
                limit_s=timeout_s,
                setting="mesh.processes",
            )
        self._placed()
        with calling("rank 0"):
            meeting = arrange(self._ranks)
        self.places = self._ask("start", meeting, timeout_s)
        self._sent.meet(self._ask("reads"))
        threading.Thread(
            target=self._watch, args=(self._ranks,), name="learner", daemon=True
        ).start()

    def _watch(self, ranks: list[Any]) -> None:
        """Wait for the end of one of these ranks, and see to it."""
        try:
            ray.wait(
                [
                    rank.watch.options(concurrency_group="watch").remote()
                    for rank in ranks
                ]
            )
        except RayError as error:
            _log.info("ranks are not watched any more: %s", why_lost(error))
        self._replace_ended(ranks)

    def _replace_ended(self, ranks: list[Any]) -> None:
        """Replace these ranks if one is lost, and no call has met that yet."""
        with self._lock:
            if ranks is not self._ranks or not self._up:
                return  # a call has met it, or the run is over
            try:
                self.call("versions")
            except BaseException as error:  # noqa: BLE001  raised again in the loop
                self._fail(error)

    def _replace(self, *, for_restore: bool) -> None:
        """Start all ranks again, and bring them to where they were.

        `for_restore`: the call to be repeated does that by itself.  A run that resumes
        has kept no batches yet.
        """
        began = time.monotonic()
        self.close()
        self._whole = {}
        self.leaving = self._renew = False
        try:
            self._start()
        except TimeoutError as error:  # a host is not back yet
            raise RoleLost(str(error)) from error
        after = "at the newest checkpoint"
        if not for_restore:
            step, again = self._train_again()
            after = f"from step {step} and {again} batches that were kept"
        self._up = True
        self._note(
            f"the learner is back after {time.monotonic() - began:.0f} s, {after}"
        )

    def _train_again(self) -> tuple[int, int]:
        """Restore the newest checkpoint, and train on what was kept since then.

        Return the step of the checkpoint and the number of batches.
        """
        found = self._ask("restore")[0]
        version = step = 0 if found is None else found[0]
        if not self._kept.has_all_since(step):
            raise RuntimeError(
                f"the checkpoint of step {step} is older than the batches that were "
                f"kept; start again with the same --workdir"
            )
        self._restore_published(step)
        again = 0
        for batch in self._kept.since(step):
            again += 1
            self._sent.begin()
            _, fault, _ = self._ask("step", each=self._parts(batch))[0]
            if not fault:
                version += 1
                self._restore_published(version)
        return step, again

    def _parts(self, batch: PackedBatch) -> list[tuple]:
        """Return for each rank what it is to be sent of a batch for a step."""
        return [(parts,) for parts in self._sent.parts(batch)]

    def kept_too_much(self) -> bool:
        """Return whether the batches that are kept ask for a checkpoint."""
        if not self._kept.full:
            return False
        if not self._warned:
            self._warned = True
            self._note(
                f"warning: half of generators.kept_gib = "
                f"{self._config.generators.kept_gib:g} is taken by batches since the "
                f"last checkpoint, so that this one and others come before "
                f"checkpoint.every = {self._config.checkpoint.every}"
            )
        return True
