"""The slow sampler to read and to test against: no cache, no slots, one at a time.

For the same params, prompt and sample it gives the tokens that `engine` gives.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from scalerl_jax.model.transformer import head_logits, head_weights, hidden_states
from scalerl_jax.sampler.engine import EngineSettings, Samples
from scalerl_jax.sampler.sampling import draw_token, token_logprobs
from scalerl_jax.sampler.scheduler import Completion
from scalerl_jax.types import PyTree


def sample_completion(
    params: PyTree,
    settings: EngineSettings,
    prompt: np.ndarray,
    samples: Samples,
    sample: int,
    *,
    version: int = 0,
) -> Completion:
    """Sample number `sample` of a prompt, by a whole forward pass for every token."""
    key = samples.keys[sample]
    limit = int(samples.thinking_limits[sample])
    tokens, mask, logprobs = [], [], []
    to_force: list[int] = []
    thinking = bool(settings.phrase)
    while len(tokens) < settings.max_completion_tokens:
        distribution = next_token_logprobs(params, settings, [*prompt, *tokens])
        if thinking and len(tokens) == limit:
            to_force = list(settings.phrase)
        forced = bool(to_force)
        if forced:
            token, logprob = to_force.pop(0), 0.0
        else:
            token = int(draw_token(distribution, key, jnp.int32(len(tokens))))
            logprob = float(distribution[token])
        tokens.append(token)
        mask.append(not forced)
        logprobs.append(logprob)
        end = list(settings.end_of_thinking)
        if end and tokens[-len(end) :] == end:
            thinking = False
        if token in settings.eos_ids and not forced:
            break
    return Completion(
        request_id=0,
        sample=sample,
        tokens=np.array(tokens, np.int32),
        mask=np.array(mask),
        logprobs=np.array(logprobs, np.float32),
        versions=np.full(len(tokens), version, np.int32),
        cut_off=tokens[-1] not in settings.eos_ids or not mask[-1],
        interrupted=not all(mask),
    )


def next_token_logprobs(
    params: PyTree, settings: EngineSettings, tokens: list[int]
) -> Float[Array, " V"]:
    """Log-probabilities of what follows `tokens`, in nats."""
    # One padded length for all, so that the pass compiles once.
    padded = np.zeros(settings.cache_length, np.int32)
    padded[: len(tokens)] = tokens
    return _next_token_logprobs(params, settings, padded, len(tokens))


@functools.partial(jax.jit, static_argnums=1)
def _next_token_logprobs(
    params: PyTree, settings: EngineSettings, padded: Array, length: Array
) -> Array:
    places = jnp.arange(padded.shape[0])[None]
    hidden, _ = hidden_states(
        params,
        settings.arch,
        padded[None],
        positions=places,
        segment_ids=(places < length).astype(jnp.int32),
        dtype=settings.dtype,
    )
    logits = head_logits(
        hidden[0, length - 1],
        head_weights(params),
        float32_head=settings.float32_head,
    )
    return token_logprobs(
        logits,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
    )
