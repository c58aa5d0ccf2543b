"""The parts of the memory of a small config, against arrays on eight CPU devices."""

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import small_run
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax import config as config_lib
from scalerl_jax.learner.step import init_state
from scalerl_jax.model.architecture import param_shardings, sampler_mesh
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.transformer import (
    abstract_params,
    hidden_states,
    init_params,
)
from scalerl_jax.model.weights import load_params
from scalerl_jax.planning.chooser import OneProcess
from scalerl_jax.planning.memory import logits_tile, saved_activations
from scalerl_jax.preflight import check, memory
from scalerl_jax.preflight.command import most_that_fit
from scalerl_jax.preflight.fitting import Fitted
from scalerl_jax.preflight.hlo import Compiled, HeadMatmuls, compile_program
from scalerl_jax.preflight.programs import AssumedTokenizer, Parts
from scalerl_jax.sampler.lowering import decode_state
from scalerl_jax.wiring.devices import make_meshes
from scalerl_jax.wiring.learning import (
    abstract_state,
    make_adamw,
    make_architecture,
    start_frozen,
)
from scalerl_jax.wiring.sampling import make_engine
from scalerl_jax.wiring.teacher import abstract_teacher


def small(**mesh):
    config = config_lib.defaults()
    config.model.architecture = "tiny"
    config.sampler.max_prompt_tokens = 64
    config.sampler.max_completion_tokens = 192
    config.sampler.slots = 8
    config.interruption.enabled = False
    config.batch.row_tokens = 512
    config.mesh.update(mesh)
    return config_lib.resolve(config)


def on_device_0(tree):
    """Bytes of the arrays' shards on the first device."""
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == jax.devices()[0]
    )


@pytest.fixture(scope="module")
def learner():
    config = small(fsdp=4, tensor=2)
    arch = make_architecture(config)
    mesh, _ = make_meshes(config, arch, jax.devices())
    layout = abstract_state(config, arch, mesh)
    params = jax.jit(
        functools.partial(init_params, arch, dtype=jax.numpy.float32),
        out_shardings=param_shardings(arch, mesh),
    )(jax.random.key(0))
    state = jax.jit(
        functools.partial(init_state, optimizer=make_adamw(config)),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, layout),
    )(params)
    return config, arch, layout, state


def test_params_and_optimizer_are_as_large_as_the_arrays(learner):
    config, arch, layout, state = learner
    parts = memory.learner_parts(config, arch, layout, 0)
    assert parts["params"] == on_device_0(state.params)
    others = (state.opt_state, state.policy_version)
    assert parts["optimizer"] == on_device_0(others)
    assert parts["gradients so far"] == on_device_0(state.params)  # float32 both


def test_the_cache_is_as_large_as_its_arrays():
    config = small(tensor=2)
    arch = make_architecture(config)
    _, (mesh,) = make_meshes(config, arch, jax.devices()[:2])
    engine = make_engine(config, arch, AssumedTokenizer(), mesh)
    state = engine.init_decode_state()
    assert memory.device_bytes(decode_state(engine)) == on_device_0(state)


@pytest.mark.parametrize("versions", [1, 2])
def test_the_base_of_a_replica_in_its_own_process_is_as_large_as_its_arrays(versions):
    config = small(fsdp=4, tensor=2)
    lora = dataclasses.replace(config.model.lora, rank=2)
    generators = dataclasses.replace(
        config.generators, versions=versions, placement="apart"
    )
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, lora=lora),
        generators=generators,
    )
    arch = make_architecture(config)
    mesh = sampler_mesh(arch, jax.devices()[:2])
    parts: Any = SimpleNamespace(
        config=config,
        arch=arch,
        sampler_mesh=mesh,
        engine=make_engine(config, arch, AssumedTokenizer(), mesh),
        fitted=Fitted(config=config, room=OneProcess(8)),
    )
    base = on_device_0(start_frozen(config, arch, mesh))
    assert base > 0
    # Two versions are of one process, whose replicas get all params.
    expected = base if versions == 1 else None
    assert memory._sampler_parts(parts).get("frozen params") == expected


@pytest.mark.parametrize("placement", ["apart", "shared"])
def test_the_teacher_counts_wherever_the_learners_devices_work(placement):
    config = small(fsdp=4)
    path = small_run.make_config().model.checkpoint
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, compute_dtype="bfloat16"),
        teacher=dataclasses.replace(config.teacher, checkpoint=path),
        generators=dataclasses.replace(
            config.generators, placement=placement, devices=2
        ),
    )
    arch = make_architecture(config)
    mesh, (sampling, *_) = make_meshes(config, arch, jax.devices())
    arrays = load_params(
        path,
        read_architecture(path),
        dtype=jax.numpy.bfloat16,
        shardings=param_shardings(read_architecture(path), mesh),
    )
    parts: Any = SimpleNamespace(
        config=config,
        arch=arch,
        state=abstract_state(config, arch, mesh),
        engine=make_engine(config, arch, AssumedTokenizer(), sampling),
        fitted=Fitted(config=config, room=OneProcess(8)),
        learner_mesh=mesh,
        teacher=abstract_teacher(config, mesh),
        reserved={},
    )
    found = {
        name: memory.program_memory(name, Compiled(program=None), parts).get("teacher")
        for name in ("start", "accumulate", "update", "decode")
    }
    found["publish"] = memory.publish_memory(parts).get("teacher")
    own = on_device_0(arrays)
    assert found.pop("decode") == (own if placement == "shared" else None)
    assert set(found.values()) == {own} and own > 0


def test_programs_of_short_rows_have_their_own_tokens_and_take_the_last_call():
    absent: Any = dict.fromkeys(field.name for field in dataclasses.fields(Parts))
    parts = Parts(**absent | {"config": small(fsdp=4)})
    name, short = check._with_rows_of("critic_accumulate_128", parts)
    assert (name, short.config.batch.row_tokens) == ("critic_accumulate", 128)
    assert check._with_rows_of("critic_update", parts) == ("critic_update", parts)
    names = ("accumulate", "accumulate_128", "update")
    assert [check._calls(each, parts) for each in names] == [48, 0, 1]


@pytest.mark.parametrize(
    "name, high, float32",
    [
        pytest.param("accumulate", 2, True, id="gradients may be of 16 bits"),
        pytest.param("accumulate_128", 2, True, id="of short rows too"),
        pytest.param("decode", 1, False, id="logits may not"),
        pytest.param("decode", 0, True, id="all of 24 bits"),
    ],
)
def test_a_head_is_float32_if_its_logits_are(name, high, float32):
    head = HeadMatmuls(highest=1, high=high, lower=0)
    assert check.head_is_float32(name, head) == float32
    assert check.below_float32(name, head) == (0 if float32 else high)


@pytest.mark.parametrize(
    "remat, values",
    [
        # hidden 128, 4 heads of 32, 2 kv heads, ffn 384; 4 normalisers of 4 bytes
        pytest.param("full", 4 * 128, id="full: the layer's input"),
        pytest.param("attention", 4 * (128 + 128) + 16, id="attention: what it found"),
        pytest.param(
            "dots",
            4 * (128 + 128 + 128 + 2 * 64 + 128 + 2 * 384) + 16,
            id="dots: every product but the last",
        ),
    ],
)
def test_saved_activations_by_hand(remat, values):
    config = small(fsdp=4)
    model = dataclasses.replace(config.model, remat=remat)
    config = dataclasses.replace(config, model=model)
    arch = make_architecture(config)
    # 8 rows of 512 tokens over 4 shards, 4 layers
    assert saved_activations(config, arch) == 4 * 2 * 512 * values


@pytest.mark.parametrize("remat", ["full", "attention", "dots"])
def test_saved_activations_are_what_the_backward_pass_holds(remat):
    """Stacks of all layers' values for each token, between the two passes."""
    config = small(fsdp=4)
    model = dataclasses.replace(config.model, remat=remat)
    config = dataclasses.replace(config, model=model)
    arch = make_architecture(config)

    def backward(params, tokens):
        def sums(params):
            hidden, _ = hidden_states(
                params,
                arch,
                tokens,
                positions=tokens,
                segment_ids=tokens,
                dtype=jax.numpy.float32,
                remat=remat,
            )
            return hidden.sum()

        return jax.vjp(sums, params)[1]

    params = abstract_params(arch, dtype=jax.numpy.float32)
    tokens = jax.ShapeDtypeStruct((2, 512), jax.numpy.int32)
    held = jax.tree.leaves(jax.eval_shape(backward, params, tokens))
    stacks = [leaf for leaf in held if leaf.shape[:2] == (4, 2) and 512 in leaf.shape]
    assert saved_activations(config, arch) == sum(
        leaf.size * leaf.dtype.itemsize for leaf in stacks
    )


def test_the_heads_tile_is_cut_as_the_learner_cuts_it():
    config = small(fsdp=4, tensor=2)
    model = dataclasses.replace(
        config.model, head_chunk_tokens=100, head_chunk_vocab=50
    )
    config = dataclasses.replace(config, model=model)
    found = logits_tile(config, make_architecture(config))
    # 1,024 tokens of a device in chunks of 64; 64 of 128 entries in slabs of 32
    assert found == {"logits tile": 64 * 32 * 4, "slab of the head": 32 * 128 * 4}


def test_what_a_program_keeps_counts_a_donated_array_once():
    shapes = (jax.ShapeDtypeStruct((64,), jax.numpy.float32),) * 2
    program = jax.jit(lambda one, other: one + other, donate_argnums=0).lower(*shapes)
    found = compile_program("add", program)
    # Two arrays; their sum takes the place of the first.
    assert found.kept == 2 * 64 * 4
    assert found.program is not None and not found.too_large


@pytest.mark.parametrize(
    "row_tokens, packing, rows, microbatches",
    [
        # 768 rollouts of 255 predictions
        pytest.param(256, True, 8, 96, id="one in a row"),
        pytest.param(512, True, 8, 48, id="two in a row"),
        pytest.param(512, False, 8, 96, id="without packing"),
        pytest.param(512, True, 80, 5, id="the last one partly filled"),
    ],
)
def test_microbatches_of_a_step_of_the_longest_rollouts(
    row_tokens, packing, rows, microbatches
):
    config = small()
    batch = dataclasses.replace(
        config.batch, row_tokens=row_tokens, packing=packing, rows_per_microbatch=rows
    )
    assert (
        check.count_microbatches(dataclasses.replace(config, batch=batch))
        == microbatches
    )


@given(
    most=st.integers(0, 3000),
    known=st.integers(0, 3000),
    guess=st.integers(0, 3000),
)
def test_the_most_that_fits_is_found_in_few_tries(most, known, guess):
    asked = []

    def fits(number):
        asked.append(number)
        return number <= most

    if known <= most:
        found = most_that_fit(fits, fitting=known, guess=guess)
    else:
        found = most_that_fit(fits, fitting=0, failing=known)
    assert found == most
    assert len(set(asked)) == len(asked) and 0 not in asked
    away = abs(most - max(guess, known)) if known <= most else known
    assert len(asked) <= 3 * math.log2(max(away, guess) + 2) + 2
