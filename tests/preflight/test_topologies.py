"""Topologies as they are written; rooflines by hand."""

import dataclasses

import pytest

from scalerl_jax.machines.chips import CHIPS, MEMORY_FRACTION
from scalerl_jax.planning.work import Work
from scalerl_jax.preflight import gpus
from scalerl_jax.preflight.collectives import Traffic
from scalerl_jax.preflight.topologies import (
    check_compiler,
    link_share,
    parse_topology,
    part_of,
    roofline,
)


@pytest.mark.parametrize(
    "text, shape, slices, devices",
    [
        pytest.param("v5p:4x4x4", (4, 4, 4), 1, 64, id="a cube"),
        pytest.param("v5e:16x16", (16, 16), 1, 256, id="a square"),
        pytest.param("2*v5e:16x16", (16, 16), 2, 512, id="two slices"),
        pytest.param("tpu7x:2x2x1", (2, 2, 1), 1, 8, id="two devices on a chip"),
        pytest.param("h100:8", (8,), 1, 8, id="a host of GPUs"),
    ],
)
def test_a_topology_is_read(text, shape, slices, devices):
    topology = parse_topology(text)
    assert (topology.shape, topology.slices) == (shape, slices)
    assert topology.num_devices == devices
    assert topology.name == text


@pytest.mark.parametrize(
    "text, said",
    [
        pytest.param("v3:4x4", "v5p:AxBxC", id="a chip that is not known"),
        pytest.param("v5p", "v5p:AxBxC", id="no sides"),
        pytest.param("v5p:4x4", "3D torus", id="two sides of a 3D torus"),
        pytest.param("v5e:2x2x1", "2D torus", id="three sides of a 2D torus"),
        pytest.param("v5e:0x4", "above 0", id="a side of no chips"),
        pytest.param("0*v5e:4x4", "above 0", id="no slice"),
        pytest.param("v5e:32x8", "at most 256 chips, 16x16", id="a side too long"),
        pytest.param("v5p:32x32x32", "at most 8960 chips", id="too many chips"),
        pytest.param("h100:9", "h100:N, with N from 1 to 8", id="two hosts of GPUs"),
        pytest.param("a100:2x2", "a100:N, with N from 1 to 8", id="a torus of GPUs"),
        pytest.param("2*h200:8", "h200:N, with N from 1 to 8", id="slices of GPUs"),
        pytest.param(f"v5p:{'9' * 5000}x1x1", "v5p:AxBxC", id="5,000 digits"),
        pytest.param(f"{'9' * 5000}*v5p-8", "v5p:AxBxC", id="slices of 5,000 digits"),
    ],
)
def test_a_wrong_topology_is_answered_with_the_way_out(text, said):
    with pytest.raises(ValueError, match="--topology=") as error:
        parse_topology(text)
    assert said in str(error.value)


def test_unknown_chips_are_answered_with_all_known_ones():
    with pytest.raises(ValueError, match="v4:AxBxC") as error:
        parse_topology("mi300:8")
    assert all(name in str(error.value) for name in CHIPS)


@pytest.mark.parametrize(
    "whole, devices, shape",
    [
        pytest.param("v5e:8x8", 32, (4, 8), id="half"),
        pytest.param("v5e:8x8", 8, (2, 4), id="a host"),
        pytest.param("v6e:16x16", 128, (8, 16), id="half of a pod"),
        pytest.param("v5e:4x8", 1, (1, 1), id="one"),
        pytest.param("2*v5e:8x8", 64, (4, 8), id="half of each slice"),
    ],
)
def test_a_part_of_a_slice_is_the_most_compact_rectangle(whole, devices, shape):
    assert part_of(parse_topology(whole), devices, setting="mesh.fsdp").shape == shape


@pytest.mark.parametrize("devices", [17, 22])
def test_a_number_that_is_no_rectangle_is_refused(devices):
    with pytest.raises(ValueError, match=f"mesh.fsdp = {devices} devices are no rect"):
        part_of(parse_topology("v5e:8x8"), devices, setting="mesh.fsdp")


def test_without_a_gpus_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(gpus, "is_installed", lambda: False)
    with pytest.raises(ValueError, match=r'h100:1: .* pip install -e ".\[cuda\]"'):
        check_compiler(parse_topology("h100:1"))


@pytest.mark.parametrize("given, share", [(None, 0.75), ("0.9", 0.9), ("1", 1.0)])
def test_programs_have_the_share_of_a_gpu_that_jax_allocates(given, share, monkeypatch):
    names = (MEMORY_FRACTION, "XLA_PYTHON_CLIENT_MEM_FRACTION")
    for name in names:
        for each in names:
            monkeypatch.delenv(each, raising=False)
        if given:
            monkeypatch.setenv(name, given)
        assert CHIPS["h100"].program_bytes == share * 84_942_979_072
    assert CHIPS["v5p"].program_bytes == 95 * 2**30


@pytest.mark.parametrize("given", ["0", "90", "-1", "nan", "half"])
def test_a_share_of_a_gpu_that_is_none_is_refused(given, monkeypatch):
    monkeypatch.setenv(MEMORY_FRACTION, given)
    with pytest.raises(ValueError, match=f"{MEMORY_FRACTION} = '{given}' must be"):
        _ = CHIPS["h100"].program_bytes


def test_the_figures_of_a_chip_are_those_of_its_data_sheet():
    v5e, tpu7x = CHIPS["v5e"], CHIPS["tpu7x"]
    # 197 TFLOPS, 16 GB at 819 GB/s, 400 GB/s of interconnect in both directions.
    assert (v5e.flops, v5e.hbm_bytes, v5e.hbm_bandwidth) == (197e12, 2**34, 819e9)
    assert 2 * v5e.ici_bandwidth == 400e9
    # 2307 TFLOPS and 192 GiB on a chip of two devices.
    assert tpu7x.devices_per_chip * tpu7x.flops == 2307e12
    assert tpu7x.devices_per_chip * tpu7x.hbm_bytes == 192 * 2**30


V5E = dataclasses.replace(
    CHIPS["v5e"], flops=100.0, hbm_bandwidth=10.0, ici_bandwidth=5.0
)


@pytest.mark.parametrize(
    "layers, moved, sent, seconds, bound_by",
    [
        pytest.param(8000.0, 40.0, 5.0, 20.0, "compute", id="compute"),
        pytest.param(400.0, 400.0, 5.0, 10.0, "hbm", id="memory"),
        pytest.param(400.0, 40.0, 35.0, 7.0, "ici", id="interconnect"),
    ],
)
def test_the_slowest_resource_is_the_roofline(layers, moved, sent, seconds, bound_by):
    """Of 4 devices of 100 FLOP/s, 10 byte/s of memory, 5 byte/s of links."""
    found = roofline(
        V5E,
        Work(layers=layers, bytes=moved),
        {"all-gather": Traffic(count=1, bytes=sent, sent_bytes=sent)},
        devices=4,
    )
    assert found.compute == layers / 4 / 100
    assert found.hbm == moved / 4 / 10
    assert found.ici == sent / 5
    assert (found.seconds, found.bound_by) == (seconds, bound_by)


def test_what_goes_between_slices_takes_the_hosts_network():
    far = {"all-reduce": Traffic(count=1, bytes=64.0, dcn_bytes=3.125e9)}
    found = roofline(CHIPS["v5e"], Work(), far, devices=4)  # 25 Gbit/s a chip
    assert (found.dcn, found.ici, found.bound_by) == (1.0, 0.0, "dcn")


@pytest.mark.parametrize(
    "box, share",
    [
        pytest.param("v5p:4x4x4", 1.0, id="a closed cube"),
        pytest.param("v5p:2x2x1", 1 / 3, id="a host: a link along two of three sides"),
        pytest.param("v5p:4x4x2", 5 / 6, id="two closed sides, and one of two chips"),
        pytest.param("v5e:16x16", 1.0, id="a whole pod is closed"),
        pytest.param("v5e:8x16", 0.75, id="half of one is, along a side"),
        pytest.param("v6e:8x8", 0.5, id="a smaller one is not"),
        pytest.param("v6e:1x1", 1.0, id="one chip waits for none"),
    ],
)
def test_rings_use_the_links_along_their_sides(box, share):
    assert link_share(parse_topology(box)) == pytest.approx(share)
    found = roofline(
        CHIPS["v5p"],
        Work(),
        {"all-reduce": Traffic(sent_bytes=600e9)},
        devices=4,
        links=share,
    )
    assert found.ici == pytest.approx(1 / share)
