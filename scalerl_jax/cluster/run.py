"""A run whose controller is this process, without devices of its own.

The loop, the books and the files are those of any run; learner and generators are
actors of a Ray cluster behind the same contract.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import ray
from ray.exceptions import RayError

from scalerl_jax import wiring
from scalerl_jax.cluster.actors import (
    FOLLOWER_GROUPS,
    GeneratorReplica,
    ReplicaFollower,
    RoleProcessInfo,
    arrange,
)
from scalerl_jax.cluster.calls import calling, cause_of, end_all, why_lost
from scalerl_jax.cluster.fit_slices import fit_slices
from scalerl_jax.cluster.kept_batches import KeptBatches
from scalerl_jax.cluster.learner_processes import LearnerProcesses
from scalerl_jax.cluster.placement import slices_of
from scalerl_jax.cluster.session import Cluster, check_process, connected
from scalerl_jax.config import Config
from scalerl_jax.contract import Instructions, Link, ReplicaReport
from scalerl_jax.controller.run_state import RunState
from scalerl_jax.environments.verdict import OwnReward
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.objective.assembly import make_assembler
from scalerl_jax.process.background import repeated
from scalerl_jax.run.directory import STATUS_FILE, RunDirectory
from scalerl_jax.run.files import WEIGHTS_FOLDER
from scalerl_jax.run.progress import Progress
from scalerl_jax.run.work_log import RemoteLedger
from scalerl_jax.run.writing import write_json
from scalerl_jax.train import RunOutcome, train
from scalerl_jax.types import Prompt
from scalerl_jax.weights.bucket_channel import remove_channel
from scalerl_jax.wiring.devices import generator_pools, ledger_pools
from scalerl_jax.wiring.replicas import make_fleet

_LAST_STATUS_S = 10.0  # that the last one may take to be written


def run_on_ray(
    config: Config,
    address: str,
    *,
    timeout_s: float,
    open_directory: Callable[[Config], RunDirectory],
) -> RunOutcome | None:
    """Train with this process as the controller of a Ray cluster; it needs no device.

    With the address "slice" one host is the controller; on the other hosts the function
    returns None when the run is over.

    Args:
        config: the run's, which the devices of the cluster complete.
        address: of the cluster, as --ray takes it.
        timeout_s: the wait for the cluster.
        open_directory: opens the run's, for the completed config.
    """
    arch = wiring.make_architecture(config)
    with controlled(address, timeout_s=timeout_s) as cluster:
        if cluster is None:
            return None
        config, cluster = fit_cluster(config, arch, cluster)
        with open_directory(config) as directory, Progress() as progress:
            parts = make_cluster_run(config, directory, cluster, progress=progress)
            try:
                return train(config, parts, directory.path)
            finally:
                parts.close()


@contextlib.contextmanager
def controlled(address: str, *, timeout_s: float) -> Iterator[Cluster | None]:
    """Make this process, without devices, the controller of a cluster during the block.

    None: the cluster of a slice, which another host controls, has ended.
    """
    jax.config.update("jax_platforms", "cpu")
    try:
        with connected(address, timeout_s=timeout_s) as cluster:
            yield cluster
    except RayError as error:  # of no role's call: the cluster itself does not answer
        raise RuntimeError(f"--ray={address} is lost: {why_lost(error)}") from error


def _refuse_settings(config: Config) -> None:
    """Refuse settings that several processes cannot keep."""
    if config.generators.placement == "shared":
        raise ValueError(
            "generators.placement = 'shared' needs the learner's own process; leave "
            "it at 'auto' with --ray"
        )


def fit_cluster(
    config: Config, arch: Architecture, cluster: Cluster
) -> tuple[Config, Cluster]:
    """Return the config with numbers for all that is left to the devices.

    Where a CPU stands for a device there are as many as are asked for.  On TPUs the
    cluster that is returned also says which host has which role.

    Raises:
        ValueError: the cluster has too few devices, or they do not fall evenly.
    """
    _refuse_settings(config)
    generators = dataclasses.replace(config.generators, placement="apart")
    if cluster.kind == "tpu":
        config = dataclasses.replace(config, generators=generators)
        config, seats = fit_slices(config, arch, slices_of(cluster.hosts()))
        return config, dataclasses.replace(cluster, seats=seats)
    have = cluster.devices()
    mesh = dataclasses.replace(config.mesh, tensor=config.mesh.tensor or 1)
    generators = dataclasses.replace(
        generators,
        devices=generators.devices or mesh.tensor,
        count=generators.count or (0 if have else 1),
    )
    if have is None:
        data, slices = mesh.data or mesh.slices, mesh.slices
        fsdp = mesh.fsdp or max(mesh.processes // slices, 1)
        mesh = dataclasses.replace(mesh, data=data, fsdp=fsdp)
        have = mesh.num_devices + generators.count * generators.devices
    config = dataclasses.replace(config, mesh=mesh, generators=generators)
    config = wiring.fit_devices(config, arch, have)
    mesh, generators = config.mesh, config.generators
    learner = mesh.num_devices
    check_even(config)
    if generators.devices % generators.processes:
        raise ValueError(
            f"generators.processes = {generators.processes} does not divide "
            f"generators.devices = {generators.devices}; make them a multiple"
        )
    if learner + generators.count * generators.devices > have:
        raise ValueError(
            f"the learner's {learner} devices and generators.count = "
            f"{generators.count} x generators.devices = {generators.devices} are more "
            f"than the {have} of the cluster at {cluster.address}; lower one of them"
        )
    return config, cluster


def check_even(config: Config) -> None:
    """Refuse learner processes among which its devices cannot be divided evenly."""
    mesh = config.mesh
    if mesh.num_devices % mesh.processes:
        raise ValueError(
            f"mesh.processes = {mesh.processes} does not divide the {mesh.num_devices} "
            f"devices of the learner (mesh.data * mesh.fsdp * mesh.context * "
            f"mesh.tensor); make them a multiple"
        )


class RayLink:
    """The way to a replica in other processes."""

    replaceable = True

    def __init__(
        self, actors: Sequence[Any], places: Sequence[RoleProcessInfo]
    ) -> None:
        """Reach the first of these actors, which leads the others."""
        self._actor, *self._others = actors
        self.where = ", ".join(map(str, places))

    def exchange(
        self, instructions: Instructions, wait_s: float
    ) -> Future[ReplicaReport]:
        """Call the actor; it is not called again if the answer is lost."""
        answer: Future[ReplicaReport] = Future()

        def end(given: Future[ReplicaReport]) -> None:
            error = given.exception()
            if error is None:
                answer.set_result(given.result())
            else:  # what the replica has raised, without Ray's words around it
                answer.set_exception(cause_of(error))

        try:
            call = self._actor.exchange.remote(instructions, wait_s)
        except RayError as error:  # it cannot even be called
            answer.set_exception(error)
        else:
            call.future().add_done_callback(end)
        return answer

    def close(self) -> None:
        """End the processes at once."""
        end_all((self._actor, *self._others))


@dataclasses.dataclass(kw_only=True)
class Replicas:
    """Starts replicas, one for a number, each time it is asked."""

    config: Config
    directory: str
    cluster: Cluster
    held_out: list[Prompt]
    own: OwnReward | None
    _began: bool = False
    _coming: dict[int, Future[Link]] = dataclasses.field(default_factory=dict)

    def begin(self) -> None:
        """Start all of them, once: those that `connect` will be asked for first."""
        if not self._began:
            self._began = True
            numbers = range(self.config.generators.count)
            self._coming = {number: self._launch(number) for number in numbers}

    def connect(self, number: int) -> Future[Link]:
        """Return the replica of a number to come: one that was begun, or another."""
        return self._coming.pop(number, None) or self._launch(number)

    def _launch(self, number: int) -> Future[Link]:
        future: Future[Link] = Future()

        def start() -> None:
            try:
                future.set_result(self._start(number))
            except BaseException as error:  # noqa: BLE001  raised in who asked
                future.set_exception(error)

        threading.Thread(target=start, name=f"replica {number}", daemon=True).start()
        return future

    def _start(self, number: int) -> RayLink:
        """Return a replica that has started.

        Raises:
            RoleLost: one of its processes is gone again.
            TimeoutError: one found no place, or does not come up.
        """
        limit_s, actors = self.config.generators.start_timeout_s, []
        try:
            with calling(f"replica {number}"):
                actors = self._actors(number)
                for actor in actors:
                    check_process(
                        actor,
                        f"replica {number}",
                        self.directory,
                        limit_s=limit_s,
                        setting="generators.count",
                    )
                first, *others = actors
                meeting = arrange(actors)
                coming = [
                    first.start.remote(
                        self.held_out, self.own, meeting, others, limit_s
                    ),
                    *(
                        actor.start.options(concurrency_group="params").remote(
                            meeting, rank, limit_s
                        )
                        for rank, actor in enumerate(others, 1)
                    ),
                ]
                return RayLink(actors, _all(coming, limit_s))
        except BaseException:
            end_all(actors)
            raise

    def _actors(self, number: int) -> list[Any]:
        """Return the processes of a replica, the one that leads first."""
        processes = self.config.generators.processes
        each = self.config.generators.devices // processes
        make: Any = ray.remote
        first = make(max_concurrency=4)(GeneratorReplica)
        other = make(concurrency_groups=FOLLOWER_GROUPS)(ReplicaFollower)
        return [
            (other if rank else first)
            .options(
                **self.cluster.options(each, role="replica", number=number, rank=rank)
            )
            .remote(self.config, self.directory)
            for rank in range(processes)
        ]


def _all(calls: list[Any], limit_s: float) -> list[Any]:
    """Wait for all calls and return their results; raise the first error at once."""
    deadline, waiting = time.monotonic() + limit_s, list(calls)
    while waiting:
        left = max(deadline - time.monotonic(), 0.0)
        done, waiting = ray.wait(waiting, timeout=left)
        if not done:
            raise TimeoutError(f"not ready in generators.start_timeout_s = {limit_s:g}")
        ray.get(done)  # raises what one has raised
    return ray.get(calls)


def kept_up_to_date(
    directory: Path, rows: Callable[[], list[dict[str, Any]]]
) -> contextlib.AbstractContextManager[None]:
    """Write `rows`, how every process stands, every second while the block runs.

    And at its end; `scalerl status` reads the file.
    """

    def write(last: bool) -> None:
        said = {"at": time.time(), "state": "ended" if last else "running"}
        write_json(directory / STATUS_FILE, said | {"roles": rows()})

    return repeated(write, name="status", every_s=1.0, last_s=_LAST_STATUS_S)


def make_ledger(config: Config, *, chip: str) -> RemoteLedger:
    """Return a ledger of the run's chips, of this kind if `mesh.chip` names none."""
    return RemoteLedger(
        pools=ledger_pools(config, chip),
        chip=config.mesh.chip or chip,
        remote=generator_pools(config),
    )


def make_cluster_run(
    config: Config,
    directory: RunDirectory,
    cluster: Cluster,
    *,
    progress: Progress,
) -> RunState:
    """Return every part of a run, its processes started.

    Raises:
        ValueError: a setting or a file that it names cannot be used.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as opened:
        path, bucket = directory.path, directory.bucket
        flush = bucket.flush if bucket else lambda: None
        flush()  # other processes look for the run's config.json
        books = wiring.make_books(config, path, progress)
        replicas = Replicas(
            config=config,
            directory=directory.url,
            cluster=cluster,
            held_out=list(books.parts.held_out),
            own=books.parts.own,
        )
        learners = LearnerProcesses(
            config,
            directory.url,
            cluster=cluster,
            files=wiring.make_checkpointer(config, path, bucket),
            kept=KeptBatches(
                make_assembler(config, books.arch),
                limit_bytes=config.generators.kept_gib * 2**30,
            ),
            before_save=flush,
            note=progress.note,
            placed=replicas.begin,  # they load and compile while the learner does
            fail=books.orders.fail,
        )
        # Several times the size of the weights, and unused once the ranks are gone.
        opened.callback(remove_channel, f"{directory.url}/{WEIGHTS_FOLDER}")
        opened.callback(learners.close)
        ledger = make_ledger(config, chip=learners.places[0].chip)
        ledger.start(startup_s=time.monotonic() - began)

        fleet = make_fleet(books.parts, books.orders, ledger, connect=replicas.connect)
        # Ends first: the others need the run's books no more.
        opened.enter_context(
            kept_up_to_date(path, lambda: learners.table() + fleet.table())
        )
        run = books.run(
            learner=learners,
            state=0,
            generators=fleet,
            ledger=ledger,
            verifier_restarts=lambda: fleet.verifier_restarts,
        )
        return dataclasses.replace(run, close=opened.pop_all().close)
