"""The split that is chosen, against every one that can be tried by hand."""

import dataclasses
import functools
import itertools
import math

import jax
import pytest

from scalerl_jax import config as config_lib
from scalerl_jax.machines.chips import CHIPS, MEMORY_FRACTION
from scalerl_jax.machines.partition import split_slice
from scalerl_jax.machines.slices import parse_slice
from scalerl_jax.model.architecture import sampler_mesh
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.planning import memory
from scalerl_jax.planning.chooser import (
    OneProcess,
    Slices,
    _with_policies,
    candidates,
    choose,
    is_open,
    opened,
)
from scalerl_jax.planning.forecast import forecast, optimizer_step_seconds
from scalerl_jax.planning.lengths import Lengths, assumed_lengths
from scalerl_jax.planning.rates import EXPECTED, decode_seconds, learner_seconds
from scalerl_jax.planning.work import scoring
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.lowering import decode_state
from scalerl_jax.wiring.devices import fit_devices

ARCH = ARCHITECTURES["llama3.1-8b"]


def config_of(**changes):
    """An 8B run in bfloat16 with all open, and settings like mesh__fsdp."""
    config = config_lib.defaults()
    config.model.architecture = "llama3.1-8b"
    config.model.compute_dtype = config.model.sampler_dtype = "bfloat16"
    found = opened(config_lib.resolve(config))
    for name, value in changes.items():
        section, field = name.split("__")
        part = dataclasses.replace(getattr(found, section), **{field: value})
        found = dataclasses.replace(found, **{section: part})
    return found


@functools.cache  # a search takes seconds
def chosen(name, **changes):
    slice = parse_slice(name)
    room = Slices((slice,))
    return choose(config_of(**changes), ARCH, CHIPS[slice.generation], room)


# Of 10 slots, beside a learner of 8: for `numbers`.
TWO_REPLICAS = dict(
    fsdp=8, remat="full", slots=10, cache_tokens=100_000, count=2, devices=4
)


def numbers(config, **given):
    """The config with these numbers, by hand and without the chooser."""
    mesh = dataclasses.replace(config.mesh, data=1, fsdp=given["fsdp"])
    return dataclasses.replace(
        config,
        mesh=mesh,
        batch=dataclasses.replace(config.batch, rows_per_microbatch=given["fsdp"]),
        model=dataclasses.replace(
            config.model,
            remat=given["remat"],
            head_chunk_vocab=given.get("head_chunk_vocab", 16_384),
        ),
        sampler=dataclasses.replace(
            config.sampler, slots=given["slots"], cache_tokens=given["cache_tokens"]
        ),
        generators=dataclasses.replace(
            config.generators,
            count=given["count"],
            devices=given["devices"],
            placement="apart",
        ),
    )


@pytest.mark.parametrize(
    "name",
    [
        "v6e:8x8",
        pytest.param("v5e:16x16", marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", marks=pytest.mark.slow),
        pytest.param("v5p:2x4x4", marks=pytest.mark.slow),
    ],
)
def test_no_split_tried_by_hand_has_a_shorter_step(name):
    slice = parse_slice(name)
    chip, best = CHIPS[slice.generation], chosen(name).forecast
    config = config_of()
    lengths, tried = assumed_lengths(config), 0
    for learner, devices in itertools.product((8, 16, 32, 64, 128), (1, 2, 4)):
        try:
            split = split_slice(slice, learner_chips=learner, generator_chips=devices)
        except ValueError:
            continue
        for remat, vocabulary, slots, held in itertools.product(
            ("dots", "attention", "full"),
            (16_384, ARCH.vocab_size),
            (12, 16, 48, 200),
            (6_000, 7_000, 12_000),
        ):
            by_hand = numbers(
                config,
                fsdp=learner,
                remat=remat,
                head_chunk_vocab=vocabulary,
                slots=slots,
                cache_tokens=slots * held,
                count=len(split.replicas),
                devices=devices,
            )
            usable = memory.usable_bytes(chip)
            if (
                memory.learner_bytes(by_hand, ARCH) > usable
                or memory.sampler_bytes(by_hand, ARCH) > usable
            ):
                continue
            found = forecast(by_hand, ARCH, chip, lengths, devices=slice.num_chips)
            tried += 1
            # Slots come in steps: a number between two of them is not tried.
            assert best.step_seconds <= 1.02 * found.step_seconds
    assert tried > 5


@pytest.mark.parametrize(
    "name",
    ["v5p:4x4x4", "v6e:8x8", pytest.param("v5e:16x16", marks=pytest.mark.slow)],
)
def test_a_pod_works_most_of_the_time_and_no_chip_is_left_over(name):
    found = chosen(name).forecast
    assert found.busy_share >= 0.75
    assert found.devices_at_work == found.devices


def test_what_is_chosen_can_be_cut_from_the_slice_and_fits():
    found = chosen("v6e:8x8").config
    mesh, generators = found.mesh, found.generators
    split = split_slice(
        parse_slice("v6e:8x8"),
        learner_chips=mesh.data * mesh.fsdp,
        generators=generators.count,
        generator_chips=generators.devices,
    )
    assert len(split.replicas) == generators.count
    assert not is_open(found)
    usable = memory.usable_bytes(CHIPS["v6e"])
    assert memory.learner_bytes(found, ARCH) <= usable
    assert memory.sampler_bytes(found, ARCH) <= usable


@pytest.mark.parametrize(
    "concurrent, own, versions, kv_dtype, vector",
    [
        ("off", 2, 2, "model", 128 * 2),
        ("on", 2, 3, "model", 128 * 2),
        ("on", 1, 2, "model", 128 * 2),
        ("off", 1, 1, "int8", 128 + 4),  # with a float32 scale
    ],
)
def test_a_cache_fills_what_the_versions_of_the_params_leave(
    concurrent, own, versions, kv_dtype, vector
):
    found = config_of(
        eval__concurrent=concurrent,
        generators__versions=own,
        sampler__page_size=64,
        sampler__kv_dtype=kv_dtype,
    )
    usable, token = 30 * 2**30, 2 * 32 * 8 * vector  # keys and values of 32 layers
    tokens = memory.largest_cache(found, ARCH, chips=2, usable=usable)
    params = versions * 8_030_261_248 * 2
    left = 2 * (usable - 0.6 * 2**30) / 1.04 - params
    assert 0 <= left - tokens * token < 64 * token


@pytest.mark.parametrize(
    "changes, frozen",
    [
        ({"lora": config_lib.LoraConfig(rank=8)}, 8_030_261_248),
        ({"frozen": ("embedding", "head")}, 2 * 128_256 * 4096),
    ],
)
def test_a_replica_in_its_own_process_has_the_frozen_params_too(changes, frozen):
    model = dataclasses.replace(config_of().model, param_dtype="bfloat16", **changes)
    found = config_of(
        generators__versions=2, generators__devices=2, sampler__cache_tokens=4096
    )
    found = dataclasses.replace(found, model=model)
    beside, alone = (
        memory.sampler_bytes(found, ARCH, own_process=own) for own in (True, False)
    )
    assert beside - alone == pytest.approx(1.04 * frozen * 2 / 2)
    tokens = [
        memory.largest_cache(
            found, ARCH, chips=2, usable=60 * 2**30, own_process=own_process
        )
        for own_process in (True, False)
    ]
    token = 2 * 32 * 8 * 128 * 2  # keys and values of 32 layers
    assert tokens[1] - tokens[0] == pytest.approx(frozen * 2 / token, abs=256)
    # Several processes are sent all params, and hold no others.
    several = dataclasses.replace(found.generators, processes=2)
    several = dataclasses.replace(found, generators=several)
    assert memory.sampler_bytes(several, ARCH, own_process=True) == alone


@pytest.mark.parametrize("slots, cache_tokens", [(64, 0), (48, 200_000)])
def test_layers_with_windows_count_as_much_as_the_engine_holds(slots, cache_tokens):
    arch = ARCHITECTURES["gemma3-1b"]  # of 26 layers 22 see 512 tokens
    found = config_of(
        sampler__slots=slots,
        sampler__cache_tokens=cache_tokens,
        model__sampler_dtype="bfloat16",
        mesh__tensor=1,
        generators__devices=1,
    )
    settings = memory._cache_settings(found, arch)
    mesh = sampler_mesh(arch, jax.devices()[:1])
    engine = Engine(dataclasses.replace(settings, eos_ids=(1,)), mesh=mesh)
    pages = jax.tree.leaves(decode_state(engine).pages)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in pages)
    assert memory.cache_bytes(found, arch) == held
    whole = memory.cache_tokens(found) * memory.kv_bytes(found, arch)
    assert held < 0.25 * whole
    usable = 12 * 2**30
    tokens = memory.largest_cache(found, arch, chips=1, usable=usable)
    sampler = dataclasses.replace(found.sampler, cache_tokens=tokens)
    filled = dataclasses.replace(found, sampler=sampler)
    assert 0.85 * usable < memory.sampler_bytes(filled, arch) <= usable


def test_every_chosen_cache_holds_a_sequence_of_no_whole_pages_and_a_page():
    config = config_of(
        sampler__max_prompt_tokens=64, sampler__max_completion_tokens=36
    )  # of four pages of 32 tokens
    room, lengths = OneProcess(8), assumed_lengths(config)
    found = [
        each.sampler for each in candidates(config, ARCH, CHIPS["v5p"], room, lengths)
    ]
    assert min(each.slots for each in found) == 1
    assert min(each.cache_tokens for each in found) == (4 + 1) * 32


def test_what_is_set_is_kept():
    found = chosen(
        "v5p:4x4x4",
        generators__devices=2,
        sampler__slots=64,
        sampler__cache_tokens=300_000,
        model__remat="full",
    ).config
    assert found.generators.devices == 2
    assert (found.sampler.slots, found.sampler.cache_tokens) == (64, 300_000)
    assert found.model.remat == "full"
    again = chosen("v5p:4x4x4", mesh__fsdp=16, mesh__data=2).config
    assert (again.mesh.fsdp, again.mesh.data) == (16, 2)


@pytest.mark.slow
def test_one_version_is_held_where_that_makes_the_step_shorter():
    """A v5e has 16 GiB: 8B in two versions leaves no room for many slots."""
    open_, two = chosen("v5e:16x16"), chosen("v5e:16x16", generators__versions=2)
    assert open_.config.generators.versions == 1
    assert open_.forecast.step_seconds < two.forecast.step_seconds
    assert open_.config.sampler.slots > two.config.sampler.slots
    beside = chosen("v5e:16x16", eval__concurrent="on").config
    assert beside.generators.versions == 1  # and the evaluated one
    alone = choose(config_of(), ARCH, CHIPS["v5p"], OneProcess(8)).config
    assert alone.generators.versions == 2


def test_evaluations_are_beside_the_run_if_generators_have_time_to_spare():
    """With the split that is best for evaluations in the loop."""
    for name, beside in (("v6e:8x8", False), ("v5p:4x4x8", True)):
        asked = dict(eval__concurrent="auto", mesh__fsdp=64 if beside else 16)
        found = chosen(name, **asked)
        off = chosen(name, **(asked | {"eval__concurrent": "off"}))
        assert found.config.eval.beside == beside, name
        assert found.config.generators.devices == off.config.generators.devices
        hours, apart = (each.forecast.chip_hours(each.config) for each in (found, off))
        assert hours < apart if beside else hours == apart


def test_a_replica_that_holds_one_version_stands_still_meanwhile():
    """16 GB at 16 GB/s: a second a step, in which nothing is sampled."""
    one, two = (
        forecast(
            numbers(
                config_of(generators__versions=versions),
                **TWO_REPLICAS,
            ),
            ARCH,
            CHIPS["v5p"],
            even(100),
            devices=20,
        ).generate_seconds
        for versions in (1, 2)
    )
    assert one - two == pytest.approx(2 * ARCH.num_params / 16e9)


def test_the_rest_of_a_number_that_does_not_divide_the_width_is_replicas():
    """7 x 8: a learner of 56 of 64 devices; 4096 has no divisor of 7."""
    changes = dict(
        generators__count=1,
        generators__devices=8,
        generators__placement="apart",
        sampler__slots=64,  # else all numbers are tried, for every learner
        sampler__cache_tokens=300_000,
    )
    room = OneProcess(64)
    found = choose(config_of(**changes), ARCH, CHIPS["v5p"], room).config
    assert (found.mesh.data, found.mesh.fsdp) == (7, 8)


def test_slices_of_their_own_take_the_replicas():
    slices = (parse_slice("v5e:8x8"), parse_slice("v5e:16x16"))
    found = choose(config_of(), ARCH, CHIPS["v5e"], Slices(slices))
    assert found.forecast.devices_at_work == 64 + 256
    learner = found.config.mesh.data * found.config.mesh.fsdp
    generators = found.config.generators
    assert learner + generators.devices * generators.count == 64 + 256


def test_a_learner_over_slices_has_as_many_chips_of_each_and_leaves_the_rest():
    """Of v5e:8x8 there are two, beside a slice that is not like them."""
    kinds = [parse_slice(text) for text in ("v5e:8x8", "v5e:16x16", "v5e:8x8")]
    room = Slices(tuple(kinds), of_learner=2)
    assert room.learner_sizes() == tuple(2 * size for size in room.sizes())
    # Two boxes of 32 in the two: 32 chips are left of each.
    assert room.replicas(64, 8) == 4 + 32 + 4
    assert room.replicas(256, 8) == 0  # of 16x16 there is one
    found = choose(config_of(mesh__slices=2), ARCH, CHIPS["v5e"], room)
    assert found.config.mesh.data % 2 == 0
    assert found.forecast.dcn_seconds == pytest.approx(
        4 * ARCH.num_params / found.config.mesh.fsdp / 3.125e9
    )


def test_what_no_device_holds_is_refused_with_what_to_set():
    with pytest.raises(ValueError, match="no split of 4 v5e devices") as error:
        chosen("v5e:2x2")
    assert "take more devices" in str(error.value)


@pytest.mark.parametrize(
    "settings, reason",
    [
        (dict(mesh__fsdp=28), "no learner has mesh.fsdp = 28; it has 1, 2, 4, 8, 16"),
        (dict(mesh__fsdp=64), "no learner of 64 devices leaves room for replicas; a"),
        (dict(generators__devices=3), "replicas with generators.devices = 3; a repli"),
        (
            dict(mesh__fsdp=32, generators__count=9, generators__devices=4),
            "replicas with generators.count = 9, generators.devices = 4; a replica has",
        ),
        (dict(sampler__cache_tokens=9), "sampler.cache_tokens = 9 must hold the longe"),
        (dict(sampler__cache_tokens=10**8), "lower sampler.cache_tokens = 100000000"),
    ],
)
def test_numbers_that_no_split_has_are_named(settings, reason):
    """The devices' memory is no reason if learner or replicas cannot be so large."""
    with pytest.raises(ValueError, match="no split of 64 v5p devices") as error:
        chosen("v5p:4x4x4", **settings)
    assert reason in str(error.value)
    assert ("GiB" in str(error.value)) == ("lower" in reason)


def test_devices_of_one_process_may_take_turns():
    """8B on 4 chips: apart, learner and replicas of 2 would wait for each other."""
    found = choose(config_of(), ARCH, CHIPS["v5p"], OneProcess(4))
    assert found.config.generators.placement == "shared"
    seconds = found.forecast
    # Float32 is read and bfloat16 written in the memory of four v5p: no network.
    copied = ARCH.num_params * (4 + 2) / 4 / 2765e9
    assert seconds.publish_seconds == pytest.approx(copied)
    both = seconds.train_seconds + seconds.generate_seconds
    assert seconds.step_seconds == pytest.approx(both + copied)
    assert seconds.busy_share == pytest.approx(both / (both + copied))


def even(tokens):
    return Lengths(prompt=0.0, completions=(tokens,), source="by hand")


def test_all_of_the_vocabulary_is_in_a_tile_where_it_fits():
    """A tile of 1,024 tokens, the head's weights in float32, and no logits again."""
    vocabulary = ARCH.vocab_size
    roomy = chosen("v5p:4x4x4").config
    assert roomy.model.head_chunk_vocab == vocabulary and roomy.model.remat == "dots"
    sliced, whole = (
        numbers(config_of(), **TWO_REPLICAS, head_chunk_vocab=each)
        for each in (16_384, vocabulary)
    )
    more = memory.learner_bytes(whole, ARCH) - memory.learner_bytes(sliced, ARCH)
    slab = vocabulary // 8  # the largest part of 128,256 below 16,384 is an eighth
    assert more == (vocabulary - slab) * (1024 + 4096) * 4
    # Just too little memory for it, at the leanest remat policy.
    small = dataclasses.replace(
        CHIPS["v5p"],
        hbm_bytes=(memory.learner_bytes(whole, ARCH) - 2**20) / 0.92,
    )
    asked = numbers(config_of(), **TWO_REPLICAS, head_chunk_vocab=0)
    room = OneProcess(16)
    found = choose(asked, ARCH, small, room).config
    assert found.model.head_chunk_vocab == 16_384
    roomier = dataclasses.replace(small, hbm_bytes=small.hbm_bytes + 2**22)
    found = choose(asked, ARCH, roomier, room).config
    assert found.model.head_chunk_vocab == vocabulary
    # A loss of whole sequences needs the logits again in any case.
    sequences = dataclasses.replace(
        whole, objective=dataclasses.replace(whole.objective, loss="gspo")
    )
    cispo, gspo = (
        forecast(each, ARCH, CHIPS["v5p"], even(100), devices=20).train_seconds
        for each in (whole, sequences)
    )
    again = forecast(sliced, ARCH, CHIPS["v5p"], even(100), devices=20).train_seconds
    assert cispo < gspo == again


def test_what_the_learner_keeps_is_tried_in_the_order_of_its_seconds():
    """With a large vocabulary the logits are more than a layer's products."""
    wide = dataclasses.replace(ARCHITECTURES["tiny"], vocab_size=262_144)
    open_one = TWO_REPLICAS | {"remat": "auto", "head_chunk_vocab": 0}
    tried = _with_policies(numbers(config_of(), **open_one), wide, CHIPS["v6e"])
    seconds = [
        forecast(each, wide, CHIPS["v6e"], even(100), devices=20).train_seconds
        for each in tried
    ]
    assert len(seconds) == 6 and seconds == sorted(seconds)
    found = [(each.model.remat, each.model.head_chunk_vocab) for each in tried]
    assert found.index(("full", 262_144)) < found.index(("dots", 16_384))
    # A loss of whole sequences makes the logits again in any case.
    gspo = numbers(config_of(objective__loss="gspo"), **open_one)
    tried = _with_policies(gspo, wide, CHIPS["v6e"])
    assert {each.model.head_chunk_vocab for each in tried} == {16_384}


def test_the_vocabulary_alone_opens_no_config():
    config = numbers(config_of(eval__concurrent="off"), **TWO_REPLICAS)
    mesh = dataclasses.replace(config.mesh, tensor=1)
    generators = dataclasses.replace(config.generators, versions=2)
    model = dataclasses.replace(config.model, head_chunk_vocab=0)
    config = dataclasses.replace(config, mesh=mesh, generators=generators, model=model)
    assert not is_open(config)
    for kind in ("TPU v6 lite", "NVIDIA H100", "cpu"):
        found = fit_devices(config, ARCH, 16, kind=kind)
        assert found.model.head_chunk_vocab == 16_384


def test_short_rows_take_their_share_of_a_microbatch():
    config = config_of(batch__num_prompts=6)  # 96 completions of 99 predictions: a row
    asked = numbers(config, **TWO_REPLICAS)
    batch = dataclasses.replace(asked.batch, short_rows=True)
    whole, short = (
        forecast(each, ARCH, CHIPS["v5p"], even(100), devices=20).train_seconds
        for each in (asked, dataclasses.replace(asked, batch=batch))
    )
    assert whole / 4 < short < whole / 3  # the update is made in any case


def test_the_seconds_of_a_step_by_hand():
    """Two replicas of 10 slots: 768 completions of 100 tokens take 3,840 steps."""
    config = numbers(
        config_of(sampler__max_prompt_tokens=32),
        **TWO_REPLICAS,
    )
    chip, lengths = CHIPS["v5p"], even(100)
    found = forecast(config, ARCH, chip, lengths, devices=20)
    step = decode_seconds(ARCH, chip, slots=10, mean_context=50.0, chips=4)
    assert found.generate_seconds == pytest.approx(3_840 * step)
    # 768 completions of 99 predictions: 6 rows of 128, one microbatch.  Of 32 blocks
    # the first 25 begin with one of them, 24 in the middle of it; the rest is padding.
    assert found.train_seconds == pytest.approx(
        optimizer_step_seconds(
            *(config, ARCH, chip),
            microbatches=1,
            rows=8,
            chips=8,
            attention_share=(1 + 24 * 2 + 7) / (32 * 33 / 2),
            reached=EXPECTED,
        )
    )
    assert found.step_seconds == max(found.generate_seconds, found.train_seconds)
    work = found.generate_seconds * 8 + found.train_seconds * 8
    assert found.busy_share == pytest.approx(work / (20 * found.step_seconds))
    assert found.chip_hours_per_step == pytest.approx(20 * found.step_seconds / 3600)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_batched_window_waits_for_its_longest_rollout_once(epochs):
    """k = 8: of eight steps one wait; in turn, each batch waits."""
    lengths = dataclasses.replace(even(1), completions=(1,) * 99_999 + (100_000,))
    turns, batched = (
        forecast(
            numbers(config_of(batch__epochs=epochs, **changes), **TWO_REPLICAS),
            *(ARCH, CHIPS["v5p"], lengths),
            devices=20,
        )
        for changes in (
            dict(queue__max_staleness=epochs - 1),
            dict(queue__max_staleness=8, queue__mode="batched"),
        )
    )
    assert batched.generate_seconds * 8 / epochs == pytest.approx(
        turns.generate_seconds
    )
    both = batched.generate_seconds + batched.train_seconds
    assert batched.step_seconds == pytest.approx(both + batched.publish_seconds / 8)


@pytest.mark.parametrize("epochs", [1, 2, 4])
def test_the_longest_rollout_bounds_optimizer_steps_however_many_a_batch_has(epochs):
    config = numbers(config_of(batch__epochs=epochs), **TWO_REPLICAS)
    lengths = dataclasses.replace(even(1), completions=(1,) * 99_999 + (100_000,))
    found = forecast(config, ARCH, CHIPS["v5p"], lengths, devices=20)
    assert found.step_seconds > max(found.generate_seconds, found.train_seconds)
    alone = forecast(
        numbers(config_of(), **TWO_REPLICAS), ARCH, CHIPS["v5p"], lengths, devices=20
    )
    assert found.step_seconds == pytest.approx(alone.step_seconds)


@pytest.mark.parametrize(
    "steps, every, count", [(100, 100, 2), (150, 100, 3), (50, 100, 2), (12, 5, 4)]
)
def test_a_run_is_evaluated_before_its_first_step_and_after_its_last(
    steps, every, count
):
    config = config_of(
        train__num_steps=steps, eval__every=every, eval__concurrent="off"
    )
    made = numbers(config, **TWO_REPLICAS)
    found = forecast(made, ARCH, CHIPS["v5p"], even(100), devices=20)
    assert 3600 * found.evaluation_hours(made) == pytest.approx(
        count * found.evaluation_seconds
    )


@pytest.mark.parametrize(
    "changes, passes",
    [
        pytest.param(dict(kl_coefficient=0.1), 1, id="reference"),
        pytest.param(dict(kl_coefficient=0.1, anchor="recomputed"), 2, id="and anchor"),
    ],
)
@pytest.mark.parametrize("epochs", [1, 2])
def test_scores_of_a_window_take_a_forward_pass_each_before_its_steps(
    epochs, changes, passes
):
    plain = numbers(
        config_of(batch__epochs=epochs, objective__loss="clipped"), **TWO_REPLICAS
    )
    objective = dataclasses.replace(plain.objective, **changes)
    scored = dataclasses.replace(plain, objective=objective)
    common = dict(microbatches=3, rows=8, chips=8, attention_share=0.5)
    seconds, without = (
        optimizer_step_seconds(each, ARCH, CHIPS["v5p"], reached=EXPECTED, **common)
        for each in (scored, plain)
    )
    one = scoring(
        ARCH,
        rows=8,
        row_tokens=plain.batch.row_tokens,
        devices=8,
        tensor=1,
        float32_head=True,
        attention_share=0.5,
    )
    once = 3 * learner_seconds(CHIPS["v5p"], one, chips=8, reached=EXPECTED)
    assert seconds - without == pytest.approx(passes * once / epochs)
    assert 0.2 < once / without < 0.33  # of three, with the backward pass, or four
    steps = [
        forecast(each, ARCH, CHIPS["v5p"], even(100), devices=20).train_seconds
        for each in (scored, plain)
    ]
    assert steps[0] > 1.1 * steps[1]


def test_a_batch_in_turn_waits_for_its_longest():
    config = numbers(
        config_of(queue__max_staleness=0),
        fsdp=8,
        remat="full",
        slots=512,
        cache_tokens=4_000_000,
        count=8,
        devices=4,
    )
    lengths = dataclasses.replace(even(1000), completions=(1000,) * 99 + (10_000,))
    found = forecast(config, ARCH, CHIPS["v5p"], lengths, devices=40)
    alone = found.generate_seconds / 10_000  # seconds of a decode step
    assert 0.001 < alone < 0.05
    assert found.step_seconds == pytest.approx(
        found.generate_seconds + found.train_seconds + found.publish_seconds
    )


def test_a_cache_holds_sequences_at_their_mean_length():
    """Of tokens 1 to L a sequence holds L / 2 on average; long ones count for more."""
    lengths = dataclasses.replace(even(1), prompt=10.0, completions=(100, 300))
    held = 10 + (100**2 + 300**2) / 2 / (2 * 200)
    assert lengths.mean_context == pytest.approx(held)


def test_the_assumed_lengths_have_the_mean_and_the_spread_that_they_state():
    config = config_of(sampler__max_completion_tokens=10**6)
    lengths = assumed_lengths(config)
    assert lengths.longest <= 10**6
    mean = lengths.mean
    squares = sum(x**2 for x in lengths.completions) / len(lengths.completions)
    # The limit cuts the tail off: nearly.
    assert mean == pytest.approx(4 / 7 * 10**6, rel=0.1)
    assert 0.35 < math.sqrt(squares - mean**2) / mean < 0.7


@pytest.mark.parametrize("segments, fits", [(8, True), (128, False)])
def test_a_gpu_holds_what_its_attention_reserves(segments, fits, monkeypatch):
    """An 8B model by factors, on one H100; 128 segments a row would take 64 GiB."""
    monkeypatch.setenv(MEMORY_FRACTION, "0.92")
    config = config_lib.named("8b_lora")
    config.batch.row_segments = segments
    resolved = config_lib.resolve(config)
    kind = CHIPS["h100"].kind
    if not fits:
        with pytest.raises(
            ValueError, match="MEM_FRACTION = 0.92 .*row_segments = 128"
        ):
            fit_devices(resolved, ARCH, 1, kind=kind)
        return
    found = fit_devices(resolved, ARCH, 1, kind=kind)
    assert found.sampler.slots > 0 and found.generators.placement == "shared"
    assert memory.cudnn_bytes(found, ARCH) == 8 * 8 * 16_384 * 32 * 128
