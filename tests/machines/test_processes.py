"""Which environment each process of a job gets, by hand."""

import importlib.util
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.machines.partition import Box, box_sizes, split_slice
from scalerl_jax.machines.processes import deal, processes
from scalerl_jax.machines.slices import make_slice, parse_slice


def addresses_of(slice):
    return [f"10.0.0.{worker}" for worker in range(slice.num_hosts)]


def dealt(text, **asked):
    """Return the hosts and a reading of a role's own environment."""
    slice = parse_slice(text)
    hosts = deal(slice, split_slice(slice, **asked), addresses=addresses_of(slice))
    return [
        {
            f"{role.name} {role.number}.{role.rank}": role.process.own_environment()
            for role in host.roles
        }
        for host in hosts
    ]


def environment(*, bounds, chips, visible, hosts, port, rank, shared=False):
    found = {
        "TPU_PROCESS_BOUNDS": bounds,
        "TPU_HOST_BOUNDS": bounds,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": chips,
        "TPU_CHIPS_PER_HOST_BOUNDS": chips,
        "TPU_VISIBLE_CHIPS": visible,
        "TPU_PROCESS_ADDRESSES": ",".join(f"10.0.0.{n}:{port}" for n in hosts),
        "TPU_PROCESS_PORT": str(port),
        "CLOUD_TPU_TASK_ID": str(rank),
        "TPU_WORKER_ID": str(rank),
        "TPU_WORKER_HOSTNAMES": ",".join(f"10.0.0.{n}" for n in hosts),
        "TPU_TOPOLOGY_WRAP": "false,false,false",
        "TPU_TOPOLOGY_ALT": "false",
    }
    return found | ({"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"} if shared else {})


def test_three_roles_share_the_host_of_a_v5p():
    [host] = dealt("v5p:2x2x1", learner_chips=2, generators=2, generator_chips=1)
    alone = {"bounds": "1,1,1", "hosts": [0], "rank": 0, "shared": True}
    assert host == {
        "learner 0.0": environment(chips="1,2,1", visible="0,1", port=8471, **alone),
        "replica 0.0": environment(chips="1,1,1", visible="2", port=8473, **alone),
        "replica 1.0": environment(chips="1,1,1", visible="3", port=8474, **alone),
    }


def test_eight_hosts_of_a_cube_learn_and_eight_generate():
    """The learner has x = 0 and 1: each worker of an even number, in their order."""
    hosts = dealt("v5p:4x4x4", learner_chips=32, generators=8, generator_chips=4)
    learners = list(range(0, 16, 2))
    whole = {"chips": "2,2,1", "visible": "0,1,2,3", "port": 8471}
    for rank, worker in enumerate(learners):
        assert hosts[worker] == {
            f"learner 0.{rank}": environment(
                bounds="1,2,4", hosts=learners, rank=rank, **whole
            )
        }
    for number, worker in enumerate(range(1, 16, 2)):
        assert hosts[worker] == {
            f"replica {number}.0": environment(
                bounds="1,1,1", hosts=[worker], rank=0, **whole
            )
        }


def test_two_roles_share_the_eight_chips_of_a_v6e():
    [host] = dealt("v6e:2x4", learner_chips=4, generators=2, generator_chips=2)
    alone = {"bounds": "1,1,1", "hosts": [0], "rank": 0, "shared": True}
    assert host == {
        "learner 0.0": environment(
            chips="2,2,1", visible="0,1,2,3", port=8471, **alone
        ),
        "replica 0.0": environment(chips="1,2,1", visible="4,5", port=8475, **alone),
        "replica 1.0": environment(chips="1,2,1", visible="6,7", port=8477, **alone),
    }


def test_two_hosts_of_a_v6e_learn_and_two_are_one_replica():
    hosts = dealt("v6e:4x4", learner_chips=8, generators=1, generator_chips=8)
    whole = {"chips": "2,2,1", "visible": "0,1,2,3", "port": 8471}
    column = {"bounds": "1,2,1", **whole}
    assert hosts == [
        {"learner 0.0": environment(hosts=[0, 2], rank=0, **column)},
        {"replica 0.0": environment(hosts=[1, 3], rank=0, **column)},
        {"learner 0.1": environment(hosts=[0, 2], rank=1, **column)},
        {"replica 0.1": environment(hosts=[1, 3], rank=1, **column)},
    ]


def test_workers_that_stand_elsewhere_get_the_box_of_their_place():
    """Pods 1 and 3 stand at the left, where pods 0 and 2 would be expected."""
    slice = make_slice("v6e", (4, 4, 1), order=(1, 0, 3, 2))
    split = split_slice(slice, learner_chips=8, generators=2, generator_chips=4)
    hosts = deal(slice, split, addresses=["a", "b", "c", "d"])
    assert [[(role.name, role.rank) for role in host.roles] for host in hosts] == [
        [("replica", 0)],
        [("learner", 0)],
        [("replica", 0)],
        [("learner", 1)],
    ]
    assert hosts[1].roles[0].process.addresses == ("b", "d")
    assert [host.head for host in hosts] == [True, False, False, False]


def test_a_job_on_the_whole_slice_keeps_what_is_said_of_the_slice():
    slice = parse_slice("v5p:2x2x2")
    inherited = {"TPU_TOPOLOGY": "2x2x2", "TPU_TOPOLOGY_WRAP": "true,true,true"}
    box = Box(corner=(0, 0, 0), shape=slice.topology)
    job = processes(slice, box, addresses=["10.0.0.0", "10.0.0.1"])
    for rank, process in enumerate(job):
        told = environment(
            bounds="1,1,2",
            chips="2,2,1",
            visible="0,1,2,3",
            hosts=[0, 1],
            port=8471,
            rank=rank,
        )
        del told["TPU_TOPOLOGY_ALT"]
        assert process.environment(inherited) == told | inherited


def test_what_an_environment_said_of_other_jobs_is_not_handed_on():
    slice = parse_slice("v6e:2x4")
    box = split_slice(slice, learner_chips=4).learner
    [process] = processes(slice, box, addresses=["a"])
    inherited = {
        "HOME": "/root",
        "TPU_NAME": "mine",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_COORDINATOR_ADDRESS": "elsewhere",
        "TPU_TOPOLOGY": "2x4",
        "TPU_VISIBLE_DEVICES": "7",
        "TPU_VISIBLE_DEVICE_PATHS": "/dev/vfio/7",
        "TPU_WORKER_ID": "3",
        "JAX_COORDINATOR_ADDRESS": "elsewhere:1",
    }
    found = process.environment(inherited)
    assert found == {"HOME": "/root", "TPU_NAME": "mine"} | process.own_environment()
    assert inherited["TPU_WORKER_ID"] == "3", "what was given is not changed"


def test_an_address_of_ipv6_is_told_from_its_port():
    slice = parse_slice("v6e:2x2")
    box = split_slice(slice, learner_chips=1).learner
    [process] = processes(slice, box, addresses=["fd00::1"])
    assert process.own_environment()["TPU_PROCESS_ADDRESSES"] == "[fd00::1]:8471"
    assert process.coordinator == "[fd00::1]:8490"


def test_addresses_that_are_not_those_of_the_slice_are_refused():
    slice = parse_slice("v6e:4x4")
    with pytest.raises(ValueError, match="3 addresses for the 4 hosts of v6e:4x4"):
        deal(slice, split_slice(slice), addresses=["a", "b", "c"])


@given(
    text=st.sampled_from(["v5p:2x2x1", "v5p:2x2x4", "v6e:2x4", "v6e:4x8", "v5e:4x4"]),
    learner=st.integers(0, 4),
    generator=st.integers(0, 3),
)
def test_no_two_processes_of_a_host_have_a_chip_or_a_port_in_common(
    text, learner, generator
):
    slice = parse_slice(text)
    sizes = box_sizes(slice)
    most = slice.num_chips // 2
    asked = [min(sizes[min(n, len(sizes) - 1)], most) for n in (learner, generator)]
    split = split_slice(slice, learner_chips=asked[0], generator_chips=asked[1])
    hosts = deal(slice, split, addresses=addresses_of(slice))
    for host in hosts:
        chips = [chip for role in host.roles for chip in role.process.visible]
        assert len(chips) == len(set(chips)) and set(chips) <= set(
            range(slice.chips_per_host)
        )
        for port in ("port", "coordinator"):
            ports = [getattr(role.process, port) for role in host.roles]
            assert len(ports) == len(set(ports))
        for role in host.roles:
            process = role.process
            assert process.addresses[process.rank] == host.address
    for name, number in {(r.name, r.number) for h in hosts for r in h.roles}:
        job = [
            role.process
            for host in hosts
            for role in host.roles
            if (role.name, role.number) == (name, number)
        ]
        x, y, z = job[0].processes
        assert sorted(process.rank for process in job) == list(range(x * y * z))
        assert len({process.coordinator for process in job}) == 1


def test_jax_names_the_variables_alike():
    """JAX starts processes for its own tests in this way."""
    found = importlib.util.find_spec("jax")
    assert found and found.origin
    source = Path(found.origin).parent / "_src" / "test_multiprocess.py"
    named = set(re.findall(r'env\["(\w*TPU_\w+)"\]', source.read_text()))
    assert len(named) > 5
    [host] = dealt("v5p:2x2x1", learner_chips=2)
    assert named <= set(host["learner 0.0"])
