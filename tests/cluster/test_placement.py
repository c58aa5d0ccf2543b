"""Seats on TPU slices, from what Ray would say of their hosts."""

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_slices import config_of, nodes_of

from scalerl_jax.cluster.fit_slices import fit_learner_slices, fit_slices
from scalerl_jax.cluster.placement import (
    DROPPED,
    forget_others,
    hosts_of,
    place,
    slices_of,
)
from scalerl_jax.machines.partition import split_slice
from scalerl_jax.machines.processes import deal
from scalerl_jax.machines.slices import GENERATIONS, make_slice, parse_slice
from scalerl_jax.model.sizes import ARCHITECTURES

HEAD = {
    "NodeID": "head",
    "Alive": True,
    "NodeManagerAddress": "10.9.9.9",
    "Resources": {"CPU": 8.0},
    "Labels": {"ray.io/node-id": "head"},
}
ONE = [  # slice, chips of the learner, replicas, chips of each
    ("v5p:4x4x4", 32, 8, 4),
    ("v6e:4x4", 8, 4, 2),
    ("v6e:4x4", 4, 1, 8),
    ("v5p:4x4x4", 16, 3, 16),
]


def placed(nodes, learner, generators, each, **changes):
    asked = {
        "learner_chips": [learner],
        "open_learner": False,
        "generators": generators,
        "generator_chips": each,
    }
    return place(slices_of(hosts_of(nodes)), **(asked | changes))


@pytest.mark.parametrize("text, learner, generators, each", ONE)
def test_each_role_of_one_slice_sits_where_the_slice_is_dealt(
    text, learner, generators, each
):
    seats = placed([HEAD, *reversed(nodes_of(text, "pod"))], learner, generators, each)
    slice = parse_slice(text)
    split = split_slice(
        slice, learner_chips=learner, generators=generators, generator_chips=each
    )
    addresses = [f"10.0.0.{worker}" for worker in range(slice.num_hosts)]
    dealt = {
        (role.name, role.number, role.rank): (host.worker, role.process)
        for host in deal(slice, split, addresses=addresses)
        for role in host.roles
    }
    jobs = [("learner", 0, seats.ranks())]
    jobs += [("replica", number, seats.replica(number)) for number in range(generators)]
    found = {
        (name, number, rank): seat
        for name, number, job in jobs
        for rank, seat in enumerate(job)
    }
    assert found.keys() == dealt.keys()
    for role, (worker, process) in dealt.items():
        seat = found[role]
        assert seat.process == process
        assert seat.labels == {
            "ray.io/tpu-slice-name": "pod",
            "ray.io/tpu-worker-id": str(worker),
        }


def test_an_actor_asks_for_its_host_its_chips_and_its_environment():
    seats = placed(nodes_of("v6e:4x4", "pod"), 8, 4, 2)
    assert [seat.labels["ray.io/tpu-worker-id"] for seat in seats.ranks()] == ["0", "2"]
    (seat,) = seats.replica(1)
    options = seat.options()
    variables = options["runtime_env"]["env_vars"]
    assert options["resources"] == {"TPU": 2}
    assert options["label_selector"]["ray.io/tpu-worker-id"] == "1"
    assert variables["TPU_VISIBLE_CHIPS"] == "2,3"
    assert variables["TPU_PROCESS_ADDRESSES"] == "10.0.0.1:8473"
    assert variables["JAX_PLATFORMS"] == "tpu,cpu"
    assert "TPU_TOPOLOGY" in variables[DROPPED].split(",")


def test_an_actor_drops_what_it_inherits_of_another_job():
    (seat,) = placed(nodes_of("v6e:4x4", "pod"), 8, 4, 2).replica(0)
    told = seat.options()["runtime_env"]["env_vars"]
    inherited = {
        "PATH": "/bin",
        "TPU_TOPOLOGY": "4x4",
        "TPU_VISIBLE_DEVICES": "0,1,2,3",
        "MEGASCALE_NUM_SLICES": "2",
        "JAX_PROCESS_ID": "3",
        "TPU_WORKER_ID": "1",
    }
    environment = inherited | told
    forget_others(environment)
    assert environment == {"PATH": "/bin"} | {
        name: value for name, value in told.items() if name != DROPPED
    }
    plain = dict(inherited)
    forget_others(plain)
    assert plain == inherited, "an actor without a seat keeps all"


def test_a_learner_over_slices_has_an_equal_box_of_each_and_is_told_which():
    """Two like v6e:4x4 and a smaller one between them, of which it has none."""
    nodes = nodes_of("v6e:4x4", "a") + nodes_of("v6e:2x4", "b", subnet=1)
    nodes += nodes_of("v6e:4x4", "c", subnet=2)
    seats = placed(nodes, 16, 0, 4, learner_slices=2)
    ranks = [seat.process for seat in seats.ranks()]
    addresses = ["10.0.0.0", "10.0.0.2", "10.0.2.0", "10.0.2.2"]  # of hosts of 4 chips
    assert [each.addresses[each.rank] for each in ranks] == addresses
    told = [seat.options()["runtime_env"]["env_vars"] for seat in seats.ranks()]
    assert [each["MEGASCALE_SLICE_ID"] for each in told] == ["0", "0", "1", "1"]
    for each in told:
        assert each["MEGASCALE_NUM_SLICES"] == "2"
        assert each["MEGASCALE_COORDINATOR_ADDRESS"] == "10.0.0.0:8081"
        assert each["TPU_PROCESS_BOUNDS"] == "1,2,1"  # those of its own slice alone
    assert [each["TPU_WORKER_ID"] for each in told] == ["0", "1", "0", "1"]
    # What is left: all of b, and half of a and of c.
    used = {(part.at, part.box.corner) for part in seats.replicas}
    assert len(used) == len(seats.replicas) == 2 + 2 + 2
    assert not any(
        "MEGASCALE_SLICE_ID" in s.process.own_environment() for s in seats.replica(0)
    )
    inherited = {"MEGASCALE_SLICE_ID": "7", "MEGASCALE_TRANSPORT_TYPE": "grpc"}
    environment = inherited | told[2]
    forget_others(environment)
    assert environment["MEGASCALE_SLICE_ID"] == "1"
    assert environment["MEGASCALE_TRANSPORT_TYPE"] == "grpc"


def test_slices_of_a_learner_that_are_not_there_or_differ_are_refused():
    pair = nodes_of("v6e:4x4", "a") + nodes_of("v6e:2x4", "b", subnet=1)
    with pytest.raises(ValueError, match=r"mesh\.slices = 3, and the cluster has 2: a"):
        placed(pair, 12, 0, 4, learner_slices=3)
    with pytest.raises(ValueError, match=r"on mesh\.slices = 2 .* do not fit a"):
        placed(pair, 16, 0, 4, learner_slices=2)
    alike = nodes_of("v6e:4x4", "a") + nodes_of("v6e:4x4", "b", subnet=1)
    with pytest.raises(ValueError, match=r"64 chips .* more than the 32 of as many"):
        placed(alike, 64, 0, 4, learner_slices=2)


def test_with_open_settings_each_slice_has_as_many_of_the_learners_chips():
    config = config_of(mesh__data=0, mesh__slices=2, generators__count=0)
    nodes = nodes_of("v6e:4x4", "a") + nodes_of("v6e:4x4", "b", subnet=1)
    fitted, seats = fit_slices(
        config, ARCHITECTURES["tiny"], slices_of(hosts_of(nodes))
    )
    boxes = [part.box for part in seats.learner]
    assert [part.at for part in seats.learner] == [0, 1] and boxes[0] == boxes[1]
    assert fitted.mesh.data % 2 == 0 and fitted.mesh.processes == len(seats.ranks())
    assert fitted.mesh.num_devices == seats.learner_chips == 2 * boxes[0].num_chips


def test_a_learner_on_a_whole_slice_keeps_what_is_said_of_the_slice():
    nodes = nodes_of("v6e:4x4", "a") + nodes_of("v6e:1x1", "b", chips=1)
    seats = placed(nodes, 16, 1, 1)
    variables = seats.ranks()[0].options()["runtime_env"]["env_vars"]
    assert "TPU_TOPOLOGY" not in variables[DROPPED].split(",")
    assert len(seats.ranks()) == 4


def test_a_host_that_came_back_is_met_at_its_new_address():
    nodes = nodes_of("v6e:4x4", "pod")
    seats = placed(nodes, 8, 4, 2)
    gone, *others = nodes
    back = gone | {"NodeID": "new", "NodeManagerAddress": "10.0.0.99"}
    seats = seats.refreshed(hosts_of([*others, back]))
    assert [seat.process.addresses[0] for seat in seats.ranks()] == ["10.0.0.99"] * 2
    away = seats.refreshed(hosts_of(others))
    assert away.ranks() == seats.ranks(), "a host that is away keeps its last address"


def test_of_several_slices_one_has_the_learner_and_the_others_replicas():
    nodes = nodes_of("v5p:2x2x2", "a") + nodes_of("v5p:4x4x4", "b", subnet=1)
    nodes += nodes_of("v5p:2x2x1", "c", subnet=2)
    seats = placed(nodes, 64, 3, 4)
    assert {seat.labels["ray.io/tpu-slice-name"] for seat in seats.ranks()} == {"b"}
    assert [seat.process.rank for seat in seats.ranks()] == list(range(16))
    told = [
        tuple(seats.replica(number)[0].labels.values()) for number in range(3)
    ]  # slice and worker
    assert told == [("a", "0"), ("a", "1"), ("c", "0")]
    # A learner of 8 takes the slice that it fills.
    seats = placed(nodes, 8, 0, 4)
    assert {seat.labels["ray.io/tpu-slice-name"] for seat in seats.ranks()} == {"a"}
    assert len(seats.replicas) == 16 + 1


def test_what_the_learner_leaves_of_its_slice_is_used_last():
    nodes = nodes_of("v6e:4x4", "a") + nodes_of("v6e:4x4", "b", subnet=1)
    seats = placed(nodes, 8, 6, 4)
    names = [seats.replica(at)[0].labels["ray.io/tpu-slice-name"] for at in range(6)]
    assert names == ["b"] * 4 + ["a"] * 2


def test_machines_of_one_host_need_no_names_of_their_own():
    nodes = nodes_of("v6e:2x4", "same", chips=8)
    twin = dict(nodes[0], NodeID="other", NodeManagerAddress="10.0.0.7")
    unnamed = dict(nodes[0], NodeID="third", NodeManagerAddress="10.0.0.8")
    unnamed["Labels"] = {"ray.io/tpu-pod-type": "v6e-8"}
    seats = placed([*nodes, twin, unnamed], 8, 2, 8)
    seen = [seats.ranks()[0], *seats.replica(0), *seats.replica(1)]
    assert {seat.labels["ray.io/node-id"] for seat in seen} == {
        "same-0",
        "other",
        "third",
    }


@given(data=st.data())
def test_no_chip_is_given_twice_and_ranks_count_from_zero(data):
    slices = data.draw(
        st.lists(
            st.sampled_from(["v5p:2x2x1", "v5p:2x2x2", "v5p:2x4x4", "v5p:4x4x4"]),
            min_size=1,
            max_size=3,
        )
    )
    nodes = [
        node
        for at, text in enumerate(slices)
        for node in nodes_of(text, f"s{at}", subnet=at)
    ]
    learner = data.draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
    each = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    count = data.draw(st.integers(0, 6))
    try:
        seats = placed(nodes, learner, count, each)
    except ValueError:
        sizes = [parse_slice(text).num_chips for text in slices]
        total, largest = sum(size for size in sizes if size >= each), max(sizes)
        # Boxes of powers of two lose nothing to their corners.
        assert learner > largest or learner + max(count, 1) * each > total
        return
    jobs = [seats.ranks(), *map(seats.replica, range(len(seats.replicas)))]
    held = [
        (*seat.labels.values(), chip)
        for seat in itertools.chain(*jobs)
        for chip in seat.process.visible
    ]
    assert len(held) == len(set(held)) == learner + len(seats.replicas) * each
    for job in jobs:
        assert [seat.process.rank for seat in job] == list(range(len(job)))
    assert len(seats.replicas) == count or not count


def without(nodes, *workers):
    return [node for at, node in enumerate(nodes) if at not in workers]


def renamed(node, **labels):
    names = {f"ray.io/tpu-{key.replace('_', '-')}": labels[key] for key in labels}
    return node | {"Labels": node["Labels"] | names}


POD = nodes_of("v6e:4x4", "pod")


@pytest.mark.parametrize(
    "nodes, words",
    [
        pytest.param(without(POD, 1, 3), "workers missing: 1, 3", id="hosts missing"),
        pytest.param([*POD, POD[2]], "workers twice: 2", id="a number twice"),
        pytest.param(
            [*POD[:3], renamed(POD[3], topology="2x4")],
            "worker 3 2x4",
            id="two slices under one name",
        ),
        pytest.param(
            [POD[0] | {"Labels": {}}], "no label ray.io/tpu-pod-type", id="no labels"
        ),
    ],
)
def test_a_slice_that_is_not_whole_is_refused(nodes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        slices_of(hosts_of(nodes))


def test_a_dead_node_is_not_counted():
    dead = POD[1] | {"NodeID": "dead", "Alive": False}
    (reached,) = slices_of(hosts_of([*POD, dead]))
    assert [host.worker for host in reached.hosts] == [0, 1, 2, 3]


def fitted(nodes, arch="tiny", **changes):
    slices = slices_of(hosts_of(nodes))
    return fit_slices(config_of(**changes), ARCHITECTURES[arch], slices)


@pytest.mark.parametrize(
    "changes, fsdp, processes, replicas",
    [
        pytest.param({"mesh__fsdp": 8, "generators__count": 3}, 8, 2, 3, id="given"),
        pytest.param({"generators__count": 0}, 8, 2, 8, id="half and half"),
        pytest.param({"generators__count": 4}, 8, 2, 4, id="what replicas leave"),
        pytest.param(
            {"mesh__fsdp": 2, "mesh__tensor": 2, "generators__count": 0},
            2,
            1,
            12,
            id="a host",
        ),
        pytest.param(
            {"mesh__fsdp": 4, "mesh__processes": 1}, 4, 1, 1, id="one, by name"
        ),
        pytest.param(
            {"mesh__fsdp": 8, "mesh__processes": 2}, 8, 2, 1, id="two, by name"
        ),
    ],
)
def test_what_a_config_leaves_open_is_decided(changes, fsdp, processes, replicas):
    config, seats = fitted(POD, **changes)
    assert (config.mesh.fsdp, config.mesh.processes) == (fsdp, processes)
    assert config.generators.count == replicas == len(seats.replicas)
    assert len(seats.ranks()) == processes
    learner = config.mesh.fsdp * config.mesh.tensor
    assert seats.learner_chips == learner


@pytest.mark.parametrize(
    "slices, changes, chips, processes",
    [
        pytest.param(["v6e:4x4"], {}, 16, 4, id="all of a slice"),
        pytest.param(["v6e:4x4"], {"mesh__fsdp": 8}, 8, 2, id="as many as asked for"),
        pytest.param(
            ["v6e:4x4"], {"mesh__data": 0, "model__remat": "auto"}, 16, 4, id="open"
        ),
        pytest.param(
            ["v6e:4x4", "v6e:4x4"],
            {"mesh__data": 2, "mesh__slices": 2},
            32,
            8,
            id="both slices",
        ),
    ],
)
def test_a_learner_without_replicas_may_have_all_chips(
    slices, changes, chips, processes
):
    nodes = [
        node
        for number, text in enumerate(slices)
        for node in nodes_of(text, f"pod{number}", subnet=number)
    ]
    config = config_of(**{"generators__count": 1} | changes)
    shared = dataclasses.replace(config.generators, placement="shared")
    config = dataclasses.replace(config, generators=shared)
    config, seats = fit_learner_slices(
        config, ARCHITECTURES["tiny"], slices_of(hosts_of(nodes))
    )
    assert seats.learner_chips == config.mesh.num_devices == chips
    assert len(seats.ranks()) == config.mesh.processes == processes
    assert seats.replicas == ()
    ledger = config.generators
    assert (ledger.placement, ledger.processes) == ("shared", 1)


def test_a_learner_without_replicas_that_does_not_fit_is_refused():
    config = config_of(mesh__fsdp=6, batch__rows_per_microbatch=6)
    with pytest.raises(ValueError, match="of 6 chips .* lower one of the two"):
        fit_learner_slices(
            config, ARCHITECTURES["tiny"], slices_of(hosts_of(nodes_of("v6e:4x4", "a")))
        )


def test_a_replica_of_two_hosts_has_a_process_on_each():
    config, seats = fitted(POD, "llama3.1-8b", mesh__fsdp=4, generators__devices=8)
    assert config.generators.processes == len(seats.replica(0)) == 2


@pytest.mark.parametrize(
    "changes, words",
    [
        pytest.param(
            {"mesh__fsdp": 8, "mesh__processes": 4},
            "mesh.processes = 4, ",
            id="processes",
        ),
        pytest.param(
            {"mesh__data": 4, "mesh__fsdp": 8},
            "on mesh.slices = 1 are more than the 16",
            id="a learner too large",
        ),
        pytest.param(
            {"mesh__fsdp": 4, "generators__devices": 8, "generators__processes": 4},
            "generators.processes = 4, ",
            id="processes of a replica",
        ),
        pytest.param(
            {"mesh__fsdp": 4, "generators__devices": 6},
            "generator_chips = 6",
            id="a replica of a host and a half",
        ),
        pytest.param(
            {"mesh__fsdp": 8, "generators__count": 9},
            "generators = generators.count",
            id="too many replicas",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        fitted(POD, **changes)


def test_every_slice_is_known_by_what_its_hosts_say():
    for kind in GENERATIONS.values():
        for shape in kind.shapes:
            slice = make_slice(kind.name, shape)
            if slice.num_hosts > 16:
                continue
            nodes = nodes_of(slice.name, "pod", chips=slice.chips_per_host)
            (reached,) = slices_of(hosts_of(nodes))
            assert reached.slice == slice
