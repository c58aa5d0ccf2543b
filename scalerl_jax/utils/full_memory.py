"""Ways out of a device's full memory: the settings that a program needs it for."""

import operator
import re
from typing import Any

# Settings that each needs its memory for; they are shown with their values.
_WAYS = {
    "the train step": (
        "lower batch.rows_per_microbatch, batch.row_tokens, model.head_chunk_tokens or "
        "model.head_chunk_vocab, set model.remat to 'attention' or 'full', or cut the "
        "state into more shards by mesh.fsdp"
    ),
    "publishing params": (
        "cut the state into more shards by mesh.fsdp, lower sampler.cache_tokens (0 is "
        "every slot at its full length), give the sampler devices of its own by "
        "generators.devices, or set model.sampler_dtype to 'bfloat16'"
    ),
    "the sampler": (
        "lower sampler.cache_tokens (0 is every slot at its full length), "
        "sampler.slots or sampler.prefill_tokens, give the sampler more devices of its "
        "own by generators.devices, or set model.sampler_dtype to 'bfloat16'"
    ),
}


def ways_out(program: str, config: Any, error: Exception) -> str:
    """Return in words which settings of `config` take less of the memory."""
    ways = re.sub(
        r"\b[a-z]+\.[a-z_]+",
        lambda name: f"{name[0]} = {operator.attrgetter(name[0])(config)!r}",
        _WAYS[program],
    )
    reason = " ".join(str(error).split())
    return (
        f"the devices have not enough memory for {program}: {ways}; `scalerl "
        f"preflight` with the same --config says beforehand what fits "
        f"(XLA: {reason[:300]})"
    )
