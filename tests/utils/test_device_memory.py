"""XLA without memory: one message, with the settings that the program depends on."""

import jax
import jax.numpy as jnp
import pytest

from scalerl_jax.config import Config, to_json
from scalerl_jax.utils.device_memory import explained
from scalerl_jax.utils.run_directory import flatten

SETTINGS = flatten(to_json(Config()))


def too_much():
    """A program that asks for 256 TB."""
    return jax.jit(lambda x: jnp.cumsum(jnp.full(1 << 46, 1.0) * x))(2.0)


@pytest.mark.parametrize(
    "program, words",
    [
        (
            "the train step",
            "batch.rows_per_microbatch = 8, batch.row_tokens = 16384, "
            "model.head_chunk_tokens = 1024 or model.head_chunk_vocab = 16384, "
            "set model.remat = 'none' to 'attention' or 'full', or cut the state into "
            "more shards by mesh.fsdp = 1;",
        ),
        ("publishing params", "by mesh.fsdp = 1, lower sampler.cache_tokens = 0 ("),
        ("the sampler", "lower sampler.cache_tokens = 0 (0 is every slot"),
    ],
)
def test_a_full_memory_names_the_settings_and_their_values(program, words):
    with pytest.raises(RuntimeError) as failure, explained(program, SETTINGS):
        jax.block_until_ready(too_much())
    message = str(failure.value)
    assert message.startswith(f"the devices have not enough memory for {program}: ")
    assert words in message
    assert "`python -m scalerl_jax.preflight`" in message
    assert "Out of memory allocating 281474976710656 bytes" in message
    assert isinstance(failure.value.__cause__, jax.errors.JaxRuntimeError)


def test_the_innermost_program_is_the_one_that_is_named():
    with (
        pytest.raises(RuntimeError, match="memory for the train step"),
        explained("the sampler", SETTINGS),
        explained("the train step", SETTINGS),
    ):
        jax.block_until_ready(too_much())


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("INTERNAL: broken"), ValueError("no memory")]
)
def test_other_errors_pass_as_they_are(error):
    with pytest.raises(type(error)) as failure, explained("the sampler", SETTINGS):
        raise error
    assert failure.value is error
