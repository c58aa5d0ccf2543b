"""The other processes of a cluster: a rank of the learner, a replica, its followers.

Ray makes an actor of each class.  A rank's calls are made one after the other, the same
on every rank; those of a replica as they come.

One file above 400 lines: all of them begin alike, and a replica leads its followers.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import ray
from ray.exceptions import RayError

from scalerl_jax import wiring
from scalerl_jax.cluster.batch_parts import BatchParts, HeldBatches, arrays_of
from scalerl_jax.cluster.calls import calling, why_lost
from scalerl_jax.cluster.object_store import ObjectStoreChannel
from scalerl_jax.cluster.placement import forget_others
from scalerl_jax.cluster.session import versions
from scalerl_jax.config import Config
from scalerl_jax.contract import Instructions, ReplicaReport
from scalerl_jax.environments.verdict import OwnReward
from scalerl_jax.formats import remote
from scalerl_jax.formats.reading import is_remote
from scalerl_jax.learner.publish import make_snapshot
from scalerl_jax.model.architecture import batch_sharding
from scalerl_jax.objective.assembly import make_pack
from scalerl_jax.objective.terms import needs_of, with_scores
from scalerl_jax.parallel import rendezvous
from scalerl_jax.parallel.coordinator import HeldPort
from scalerl_jax.parallel.mesh import AXES, make_mesh
from scalerl_jax.parallel.multihost import Box, own_box
from scalerl_jax.parallel.signed_lines import new_secret
from scalerl_jax.parallel.xla import exact_products, is_broken_off, keep_programs
from scalerl_jax.planning.memory import publishes_part
from scalerl_jax.process.ending import first_line
from scalerl_jax.run.files import WEIGHTS_FOLDER
from scalerl_jax.run.progress import Progress
from scalerl_jax.sampler.lockstep import EngineCall
from scalerl_jax.types import Group, PackedBatch, Prompt, Scores
from scalerl_jax.weights.bucket_channel import make_channel
from scalerl_jax.weights.manifest import Manifest
from scalerl_jax.weights.sending import Sender
from scalerl_jax.weights.shards import own_shards
from scalerl_jax.wiring.replicas import make_follower, make_remote_replica

# What a rank does beside its calls, which it makes one by one.
LEARNER_GROUPS = {"weights": 1, "watch": 1}
# What a follower does beside the calls of its engine, which it makes one by one.
FOLLOWER_GROUPS = {"params": 1, "watch": 1}
_PARAMS_TIMEOUT_S = 900.0  # a fetch gives up after 600


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleProcessInfo:
    """A process of the run, as it reports itself to the controller."""

    host: str
    pid: int
    chip: str
    strangers: int = 0  # connections of none of the role's processes, as it met them

    def __str__(self) -> str:
        """Return it for people."""
        told = f", {self.strangers} strangers came" if self.strangers else ""
        return f"{self.host} (process {self.pid}{told})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the processes of a role meet, and what they must know there."""

    coordinator: str  # HOST:PORT of the first
    secret: str = dataclasses.field(repr=False)


def arrange(actors: Sequence[Any]) -> Meeting | None:
    """Reserve a port on the first process of a role, where its others shall meet it.

    Return None for a role of one process.  The secret is new for each start, and goes
    the way of Ray's calls.
    """
    if len(actors) == 1:
        return None
    at: Any = ray.get(actors[0].address.remote())
    return Meeting(coordinator=at, secret=new_secret())


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone.

    Ray's own check takes a parent that adopts orphans for the one that was lost.
    """
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


class RoleProcess:
    """The first steps of every process of a run, and questions that it answers."""

    def __init__(self, config: Config, directory: str) -> None:
        """Take the run's fitted settings, and the directory that all see."""
        forget_others(os.environ)  # before JAX looks for devices
        # SIGTERM is passed on to the controller, which decides when to end.  Ray makes
        # actors in the main thread, the only one that may take a signal.
        self._leaving = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        logging.getLogger("scalerl_jax").setLevel(logging.WARNING)
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        self._config = config
        self._directory = directory
        self._held: HeldPort | None = None
        self._strangers = 0

    def _leave(self) -> None:
        """Note that this process is to end soon."""
        self._leaving.set()

    def address(self) -> str:
        """Return HOST:PORT at which this process may be met, if it is the first.

        It is in the network of Ray's nodes, and kept until JAX listens there.
        """
        self._held = HeldPort(ray.util.get_node_ip_address())
        return self._held.address

    def _meet(
        self, meeting: Meeting | None, rank: int, count: int, timeout_s: float
    ) -> None:
        """Meet the other processes of a role, if there are any; before JAX is asked."""
        keep_programs(self._config.compile_cache)
        # JAX would take SIGTERM for itself; here it goes to the controller.
        jax.config.update("jax_enable_preemption_service", False)
        if meeting is not None:
            self._strangers = rendezvous.initialize(
                rendezvous.ProcessPlace(
                    coordinator=meeting.coordinator,
                    num_processes=count,
                    process_id=rank,
                ),
                secret=meeting.secret,
                held=self._held,
                timeout_s=timeout_s,
            )
        exact_products(self._config.model.compute_dtype)

    def _devices(self) -> list[Any]:
        """Return the devices of this process's replica."""
        return jax.devices()[: self._config.generators.devices]

    def _here(self) -> RoleProcessInfo:
        return RoleProcessInfo(
            host=socket.gethostname(),
            pid=os.getpid(),
            chip=jax.devices()[0].device_kind,
            strangers=self._strangers,
        )

    def versions(self) -> dict[str, str]:
        """Return the versions and the code digest that all processes must share."""
        return versions()

    def _make_channel(self, owner: str | None = None) -> ObjectStoreChannel:
        """Return the way of published params; `owner` is who puts them."""
        directory = make_channel(f"{self._directory}/{WEIGHTS_FOLDER}", owner=owner)
        stored = self._config.generators.channel == "objects"
        return ObjectStoreChannel(directory, capacity=None if stored else 0)

    def sees(self, file: str) -> bool:
        """Return whether a file of the run's directory is there for this process.

        Raises:
            ValueError: the directory is in a bucket that cannot be used.
        """
        if not is_remote(self._directory):
            return Path(self._directory, file).exists()
        path = remote.open_path(self._directory, setting="--workdir=", in_run=True)
        return remote.read(path / file) is not None


class LearnerRank(RoleProcess):
    """One process of the learner, which has its shards of the train state."""

    def __init__(
        self, config: Config, directory: str, *, rank: int, num_ranks: int
    ) -> None:
        """Take the place of a rank; nothing is loaded yet."""
        super().__init__(config, directory)
        self._rank = rank
        self._sending = threading.Lock()
        self._published = threading.Event()  # any version
        self._num_ranks = num_ranks
        self._batches = HeldBatches()
        self._sender: Sender | None = None  # until it publishes

    def start(self, meeting: Meeting | None, timeout_s: float) -> RoleProcessInfo:
        """Meet the other ranks, load the state, compile the step."""
        config = self._config
        self._meet(meeting, self._rank, self._num_ranks, timeout_s)
        arch = wiring.make_architecture(config)
        axes = {name: getattr(config.mesh, name) for name in AXES}
        mesh = make_mesh(jax.devices(), **axes)
        self._rows = batch_sharding(mesh)
        self._learner, self._state = wiring.make_local_learner(
            config,
            arch,
            mesh,
            to_sampler=None,  # `publish` sends its shards
            checkpointer=wiring.make_checkpointer(config, self._directory),
            progress=Progress(),
        )
        self._partly = publishes_part(config)
        self._snapshot = make_snapshot(
            arch,
            **wiring.weights_format(config),
            learner_mesh=mesh,
            trained=self._state.params if self._partly else None,
        )
        return self._here()

    def _make_sender(self) -> Sender:
        """Open the way of published params, which a warm start does not have."""
        self._channel = self._make_channel(owner=f"rank{self._rank}")
        return Sender(
            rank=self._rank,
            num_ranks=self._num_ranks,
            channel=self._channel,
            base_every=self._config.generators.base_every,
            frozen_digest=self._learner.base if self._partly else "",
        )

    def reads(self) -> dict[str, Box]:
        """Return what this rank's devices read of each array of a microbatch."""
        needs = needs_of(self._config)
        microbatch = make_pack(self._config, wiring.make_architecture(self._config))[1]
        arrays = arrays_of(with_scores(microbatch, needs))
        # A critic's batch is cut into parts by all of its rollouts.
        everywhere = ("mask", "sequence_ids") if needs.critic else ()
        return {
            name: tuple((0, size) for size in each.shape)
            if name in everywhere
            else own_box(each.shape, self._rows)
            for name, each in arrays.items()
        }

    def watch(self) -> None:
        """Never return: the call ends with this process."""
        threading.Event().wait()

    def step(self, parts: BatchParts) -> tuple[dict[str, float], str, bool]:
        """Make an optimizer step.

        Returns:
            Its metrics, why it was skipped, and whether this process got a SIGTERM.
        """
        batch = self._batches.take(parts)
        self._state, metrics, fault = self._learner.step(self._state, batch)
        return metrics, fault, self._leaving.is_set()

    def annotate(self, window: list[BatchParts]) -> list[Scores]:
        """Return the scores of a window's batches that the objective reads.

        All ranks have them then, and rank 0 alone tells them.
        """
        batches = [self._batches.take(parts) for parts in window]
        scores = self._learner.annotate(self._state, batches)
        self._batches.made(window, scores)
        return [] if self._rank else scores

    def score(self, batch: PackedBatch) -> Any:
        """Return the log-probability of every target of a batch, in nats, on rank 0."""
        found = self._learner.score(self._state, batch)
        return None if self._rank else found

    def examine(self, batch: PackedBatch) -> dict[str, float]:
        """Return a batch's metrics and the norm of its gradient."""
        return self._learner.examine(self._state, batch)

    def publish(self, policy_version: int, pinned: bool) -> tuple[Manifest, Any]:
        """Publish this rank's shards of the params; return a manifest and a report."""
        assert int(self._state.policy_version) == policy_version, policy_version
        state = self._state
        shards = own_shards(
            self._snapshot(state.params if self._partly else state.policy)
        )
        with self._sending:
            sender = self._sender = self._sender or self._make_sender()
            manifest = sender.send(shards, policy_version=policy_version, pinned=pinned)
            self._published.set()
            return self._with_handles(manifest), sender.report

    def publish_again(self) -> Manifest:
        """Publish the last version in full, for who has no other; beside a step.

        A rank that has just been started again has none before it gets there.
        """
        self._published.wait()
        with self._sending:
            assert self._sender is not None, "it has published"
            return self._with_handles(self._sender.send_again())

    def _with_handles(self, manifest: Manifest) -> Manifest:
        handles = self._channel.handles
        own = {name: handles[name] for name in manifest.objects if name in handles}
        return dataclasses.replace(manifest, handles=own)

    def save(self, step: int, host: dict[str, Any], groups: Sequence[Group]) -> None:
        """Begin to write a checkpoint; rank 0's part has the controller's books."""
        self._learner.save(step, self._state, host=host, groups=groups)

    def await_save(self) -> set[int]:
        """Return, when the checkpoint is written, the steps of damaged ones."""
        self._learner.checkpointer.wait()
        return self._learner.checkpointer.damaged()

    def check_save(self) -> None:
        """Raise the error of a save that has failed."""
        self._learner.checkpointer.check()

    def restore(self) -> tuple[int, dict[str, Any], tuple[Group, ...]] | None:
        """Go on from the newest good checkpoint, if there is one; return its books."""
        restored = self._learner.restore()
        if restored is None:
            return None
        self._state = restored.state
        if self._rank:
            return restored.step, {}, ()
        return restored.step, restored.host, restored.groups


class FollowerLost(Exception):  # what happened to it, in one line
    """A process without which the replica cannot go on."""


class RayFollowers:
    """The `generation.followers.Followers` of a replica's first process."""

    def __init__(self, actors: Sequence[Any], leave: Callable[[], None]) -> None:
        """Watch these; `leave` is called when one is to end soon."""
        self._actors = actors
        self._leave = leave
        self._lost: FollowerLost | None = None
        for number, actor in enumerate(actors, 1):
            threading.Thread(
                target=self._watch, args=(number, actor), daemon=True
            ).start()

    def tell(self, call: EngineCall) -> None:
        """Send each follower a call of the engine, to be made after those before it."""
        call = ray.put(call) if len(self._actors) > 1 else call  # type: ignore
        for actor in self._actors:
            actor.obey.remote(call)

    def ask(
        self, method: str, *arguments: Any, in_order: bool = False
    ) -> Callable[[], None]:
        """Call a method of each follower; return a function that waits for all of them.

        The returned function raises the error of a follower that failed.
        """
        group = {} if in_order else {"concurrency_group": "params"}
        answers = [
            getattr(actor, method).options(**group).remote(*arguments)
            for actor in self._actors
        ]

        def wait() -> None:
            with calling("one of its processes"):
                ray.get(answers, timeout=_PARAMS_TIMEOUT_S)

        return wait

    def check(self, report: ReplicaReport) -> None:
        """Refuse to go on without one of them, or with a program that lacked one.

        Raises:
            FollowerLost: says which, and why.
        """
        if self._lost is not None:
            raise self._lost
        for error in (report.failure, *(each.error for each in report.results)):
            if error is not None and is_broken_off(error):
                raise FollowerLost(f"one of its processes: {first_line(error)}")

    def _watch(self, number: int, actor: Any) -> None:
        """Wait for the end of one of them."""
        try:
            ray.get(actor.watch.options(concurrency_group="watch").remote())
        except RayError as error:
            self._lost = FollowerLost(f"its process {number}: {why_lost(error)}")
        else:
            self._leave()


class GeneratorReplica(RoleProcess):
    """The process of a replica with its verifiers and its sampling thread.

    Of a replica of several it is the first, which leads the others.
    """

    def __init__(self, config: Config, directory: str) -> None:
        """Take the place of a replica; nothing is loaded yet."""
        self._followers: Any = None
        self._started = threading.Event()
        super().__init__(config, directory)

    def start(
        self,
        held_out: list[Prompt],
        own: OwnReward | None,
        meeting: Meeting | None,
        followers: Sequence[Any],
        timeout_s: float,
    ) -> RoleProcessInfo:
        """Meet the followers, make the engine, and begin to wait for params."""
        self._meet(meeting, 0, 1 + len(followers), timeout_s)
        if followers:
            self._followers = RayFollowers(followers, leave=self._leave)
        channel = self._make_channel()
        self._replica = make_remote_replica(
            self._config,
            wiring.make_architecture(self._config),
            self._devices(),
            held_out,
            own,
            channel,
            contextlib.ExitStack(),  # never closed: the process is killed
            reaching=channel.reaching,
            followers=self._followers,
        )
        self._started.set()
        return self._here()

    def exchange(self, instructions: Instructions, wait_s: float) -> ReplicaReport:
        """Take instructions, wait for news of the sampling thread, and report."""
        report = self._replica.exchange(instructions, wait_s)
        if self._followers is not None:
            self._followers.check(report)
        return report

    def _leave(self) -> None:
        """Report SIGTERM to the controller, which may be waiting for a report."""
        super()._leave()
        # A thread, since a handler that waits for a lock would stop the process.
        threading.Thread(target=self._tell, name="leaving", daemon=True).start()

    def _tell(self) -> None:
        self._started.wait()
        self._replica.leave()


class ReplicaFollower(RoleProcess):
    """A process of a replica that makes the calls of the first."""

    def __init__(self, config: Config, directory: str) -> None:
        """Take the place of a follower; nothing is loaded yet."""
        self._follower: Any = None
        self._broken: BaseException | None = None
        self._ready = threading.Event()
        super().__init__(config, directory)

    def start(self, meeting: Meeting, rank: int, timeout_s: float) -> RoleProcessInfo:
        """Meet the others, and make the engine."""
        generators = self._config.generators
        self._meet(meeting, rank, generators.processes, timeout_s)
        channel = self._make_channel()
        self._follower = make_follower(
            self._config,
            wiring.make_architecture(self._config),
            self._devices(),
            channel,
            reaching=channel.reaching,
        )
        self._ready.set()
        return self._here()

    def obey(self, call: EngineCall) -> None:
        """Make a call of the leader's engine."""
        self._ready.wait()
        self._or_broken(self._follower.obey, call)

    def fetch(self, manifest: Manifest, apart: bool) -> None:
        """Fetch a version to this host; if that fails nothing has changed."""
        self._follower.fetch(manifest, apart)

    def lay_out(self, number: int) -> None:
        """Put what was fetched on the devices."""
        self._or_broken(self._follower.lay_out, number)

    def watch(self) -> None:
        """Return when this process is to end soon.

        Raises:
            Exception: why it cannot follow any more.
        """
        self._leaving.wait()
        if self._broken is not None:
            raise self._broken

    def _or_broken(self, method: Callable[[Any], None], argument: Any) -> None:
        try:
            method(argument)
        except BaseException as error:
            self._broken = error
            self._leaving.set()
            raise
