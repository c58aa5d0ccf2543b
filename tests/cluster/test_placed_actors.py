"""Actors of a run on a cluster whose nodes say that they are hosts of a slice."""

import os
import time

import pytest
import small_run
from small_slices import config_of

from scalerl_jax.machines.slices import parse_slice
from scalerl_jax.model.sizes import ARCHITECTURES

ray = pytest.importorskip("ray")
SLICE = parse_slice("v6e:4x4")
HEAD = {f"TPU-{SLICE.type}-head": 1}
_LIMIT_S = 120


def add_host(cluster, worker):
    return cluster.add_node(
        wait=False,  # for half a minute, which a busy machine may pass
        num_cpus=4,
        resources={"TPU": 4, "pod": 1} | (HEAD if worker == 0 else {}),
        labels={
            "ray.io/tpu-slice-name": "pod",
            "ray.io/tpu-worker-id": str(worker),
            "ray.io/tpu-topology": "4x4",
            "ray.io/tpu-pod-type": SLICE.type,
        },
        env_vars={
            "TPU_NAME": "pod",
            "TPU_WORKER_ID": str(worker),
            "TPU_ACCELERATOR_TYPE": SLICE.type,
            "TPU_TOPOLOGY": "4x4",
            "MEGASCALE_NUM_SLICES": "2",
        },
    )


@pytest.fixture(scope="module")
def pod():
    """A slice of four hosts, and a head without chips."""
    from ray.cluster_utils import Cluster

    from scalerl_jax.cluster import session

    cluster = Cluster(head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        hosts = [add_host(cluster, worker) for worker in range(SLICE.num_hosts)]
        cluster.wait_for_nodes(_LIMIT_S)
        yield cluster, hosts, session.connect(cluster.address)
    finally:
        session.disconnect()
        cluster.shutdown()


def start(connected, role, number):
    """An actor in a seat, which says where it is and what it was told."""

    class Reporter:  # a local class needs no module in the actor's process
        def __init__(self):
            from scalerl_jax.cluster.placement import forget_others

            forget_others(os.environ)

        def report(self):
            import ray

            return ray.get_runtime_context().get_node_labels(), dict(os.environ)

    options = connected.options(0, role=role, number=number)
    return ray.remote(Reporter).options(**options).remote()


@pytest.mark.slow
def test_each_role_runs_on_its_host_with_its_environment(pod):
    from scalerl_jax.cluster.run import fit_cluster

    cluster, hosts, connected = pod
    assert connected.kind == "tpu"
    config = config_of(mesh__fsdp=8, generators__count=3, generators__devices=2)
    config, connected = fit_cluster(config, ARCHITECTURES["tiny"], connected)
    assert config.mesh.processes == 2
    # Workers 0 and 2 are 2x4 chips; worker 1 is shared.
    expected = {
        ("learner", 0): ("0", "1,2,1", "2,2,1", "0,1,2,3"),
        ("learner", 1): ("2", "1,2,1", "2,2,1", "0,1,2,3"),
        ("replica", 0): ("1", "1,1,1", "1,2,1", "0,1"),
        ("replica", 1): ("1", "1,1,1", "1,2,1", "2,3"),
        ("replica", 2): ("3", "1,1,1", "1,2,1", "0,1"),
    }
    actors = {role: start(connected, *role) for role in expected}
    for role, (worker, processes, chips, visible) in expected.items():
        labels, environment = ray.get(actors[role].report.remote(), timeout=_LIMIT_S)
        assert labels["ray.io/tpu-worker-id"] == worker
        rank = role[1] if role[0] == "learner" else 0
        own = {
            "TPU_PROCESS_BOUNDS": processes,
            "TPU_HOST_BOUNDS": processes,
            "TPU_CHIPS_PER_PROCESS_BOUNDS": chips,
            "TPU_CHIPS_PER_HOST_BOUNDS": chips,
            "TPU_VISIBLE_CHIPS": visible,
            "TPU_WORKER_ID": str(rank),
            "CLOUD_TPU_TASK_ID": str(rank),
            "JAX_PLATFORMS": "tpu,cpu",
        }
        assert own.items() <= environment.items()
        assert not {"TPU_TOPOLOGY", "MEGASCALE_NUM_SLICES"} & environment.keys()

    # The host of replica 2 is lost, and comes back later under its number.
    cluster.remove_node(hosts[3], allow_graceful=False)
    deadline = time.monotonic() + _LIMIT_S
    while not loss_of(actors["replica", 2].report.remote()):
        assert time.monotonic() < deadline, "its process outlives its host"
        time.sleep(0.1)
    waiting = start(connected, "replica", 2)
    call = waiting.report.remote()
    ready, _ = ray.wait([call], timeout=3)
    # It may have been promised the node whose loss was not known yet.
    assert not ready or loss_of(call)
    host = add_host(cluster, 3)
    while loss := loss_of(call):
        assert time.monotonic() < deadline, loss
        waiting = start(connected, "replica", 2)
        call = waiting.report.remote()
    labels, environment = ray.get(call)
    assert labels["ray.io/node-id"] == host.node_id
    assert labels["ray.io/tpu-worker-id"] == "3"
    assert environment["TPU_VISIBLE_CHIPS"] == "0,1"


@pytest.mark.slow
def test_a_role_that_the_memory_monitor_kills_is_lost(pod):
    """The node's threshold is 1 %, so that its monitor kills whatever runs there."""
    from scalerl_jax.cluster.calls import RoleLost, calling

    class Role:
        def wait(self):
            time.sleep(_LIMIT_S)

    told = {"RAY_memory_usage_threshold": "0.01"}
    told |= {"RAY_memory_monitor_refresh_ms": "100"}
    cluster, *_ = pod
    node = cluster.add_node(
        wait=False, num_cpus=1, resources={"starved": 1}, env_vars=told
    )
    role = ray.remote(Role).options(resources={"starved": 1}).remote()
    with pytest.raises(RoleLost, match="replica 1: OutOfMemoryError"):
        with calling("replica 1"):
            ray.get(role.wait.remote(), timeout=_LIMIT_S)
    cluster.remove_node(node)


@pytest.mark.slow
def test_a_rank_that_has_just_started_again_is_waited_for_by_who_wants_params(pod):
    """It is asked beside its start, and has nothing to offer yet."""
    from scalerl_jax.cluster.actors import LearnerRank

    rank = ray.remote(concurrency_groups={"weights": 1})(LearnerRank)
    rank = rank.options(num_cpus=1).remote(
        small_run.make_config(), "nowhere", rank=0, num_ranks=1
    )
    ray.get(rank.versions.remote(), timeout=_LIMIT_S)
    call = rank.publish_again.options(concurrency_group="weights").remote()
    # It had ended at once, with an AttributeError.
    assert ray.wait([call], timeout=2) == ([], [call])
    ray.kill(rank)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(call, timeout=_LIMIT_S)


def loss_of(call):
    try:
        ray.get(call, timeout=_LIMIT_S)
    except ray.exceptions.RayActorError as error:
        return error
    return None
