"""A program that does not fit the device's memory, said with the settings to change."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax

Program = Literal["the train step", "publishing params", "the sampler"]
# What each needs its memory for; settings are shown with their values.
_WAYS: dict[Program, str] = {
    "the train step": (
        "lower batch.rows_per_microbatch, batch.row_tokens, model.head_chunk_tokens or "
        "model.head_chunk_vocab, set model.remat to 'attention' or 'full', or cut the "
        "state into more shards by mesh.fsdp"
    ),
    "publishing params": (
        "cut the state into more shards by mesh.fsdp, lower sampler.cache_tokens (0 is "
        "every slot at its full length), give the sampler devices of its own by "
        "mesh.sampler_devices, or set model.sampler_dtype to 'bfloat16'"
    ),
    "the sampler": (
        "lower sampler.cache_tokens (0 is every slot at its full length), "
        "sampler.slots or sampler.prefill_tokens, give the sampler more devices of its "
        "own by mesh.sampler_devices, or set model.sampler_dtype to 'bfloat16'"
    ),
}


@contextlib.contextmanager
def explained(program: Program, settings: Mapping[str, Any]) -> Iterator[None]:
    """Say what to change if the device's memory is too small for what runs inside.

    Args:
        program: what it is.
        settings: those of the run, by dotted name.

    Raises:
        RuntimeError: XLA found no memory, when it compiled or when it ran.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_full(error):
            raise
        ways = re.sub(
            r"\b[a-z]+\.[a-z_]+",
            lambda name: _with_value(name[0], settings),
            _WAYS[program],
        )
        reason = " ".join(str(error).split())
        raise RuntimeError(
            f"the devices have not enough memory for {program}: {ways}; `python -m "
            f"scalerl_jax.preflight` with the same --config says beforehand what fits "
            f"(XLA: {reason[:300]})"
        ) from error


def is_full(error: Exception) -> bool:
    """Whether XLA says that there is no memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def _with_value(name: str, settings: Mapping[str, Any]) -> str:
    return f"{name} = {settings[name]!r}"
