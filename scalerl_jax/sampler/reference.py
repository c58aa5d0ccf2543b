"""A slow reference sampler for reading and tests: no cache, no slots, one at a time.

For the same params and request it draws the same tokens as `engine`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from scalerl_jax.model.transformer import head_logits, head_weights, hidden_states
from scalerl_jax.sampler.decoding import EngineSettings
from scalerl_jax.sampler.requests import Completion, Request
from scalerl_jax.sampler.sampling import Draw, SamplingRows, draw_tokens
from scalerl_jax.types import PyTree


def sample_completion(
    params: PyTree,
    settings: EngineSettings,
    request: Request,
    sample: int,
    *,
    version: int = 0,
) -> Completion:
    """Sample number `sample` of a request, by a whole forward pass for every token."""
    samples = request.samples
    key, limit = samples.keys[sample], int(samples.thinking_limits[sample])
    longest = settings.max_completion_tokens
    if samples.max_tokens is not None:
        longest = int(samples.max_tokens[sample])
    distribution = SamplingRows.of(request.sampling, 1)
    tokens, mask, logprobs, full = [], [], [], []
    to_force: list[int] = []
    marker = settings.end_of_thinking
    while len(tokens) < longest:
        known = [*request.tokens.tolist(), *tokens]
        logits = next_token_logits(params, settings, known)
        if len(tokens) == limit:
            ended = marker is not None and marker.state(tokens) == marker.ended
            to_force = [] if ended else list(settings.phrase)
        forced = bool(to_force)
        if forced:
            token, logprob, full_logprob = to_force.pop(0), 0.0, 0.0
        else:
            draw = _draw(logits[None], distribution, key[None], len(tokens))
            token, logprob, full_logprob = (
                each.item() for each in (draw.tokens, draw.logprobs, draw.full_logprobs)
            )
        tokens.append(token)
        mask.append(not forced)
        logprobs.append(logprob)
        full.append(full_logprob)
        if token in settings.eos_ids and not forced:
            break
    return Completion(
        request_id=request.request_id,
        sample=sample,
        tokens=np.array(tokens, np.int32),
        mask=np.array(mask),
        logprobs=np.array(logprobs, np.float32),
        full_logprobs=np.array(full, np.float32),
        top_tokens=np.zeros((len(tokens), 0), np.int32),
        top_logprobs=np.zeros((len(tokens), 0), np.float32),
        versions=np.full(len(tokens), version, np.int32),
        cut_off=tokens[-1] not in settings.eos_ids or not mask[-1],
        interrupted=not all(mask),
    )


@jax.jit
def _draw(logits: Array, sampling: SamplingRows, keys: Array, index: Array) -> Draw:
    return draw_tokens(logits, sampling, keys=keys, index=jnp.asarray(index)[None])


def next_token_logits(
    params: PyTree, settings: EngineSettings, tokens: list[int]
) -> Float[Array, " V"]:
    """Return the logits [V] of the token after `tokens`."""
    # All inputs are padded to one length, so that the pass compiles once.
    padded = np.zeros(settings.max_tokens, np.int32)
    padded[: len(tokens)] = tokens
    return _next_token_logits(params, settings, padded, len(tokens))


@functools.partial(jax.jit, static_argnums=1)
def _next_token_logits(
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
    return head_logits(
        hidden[0, length - 1],
        head_weights(params),
        float32_head=settings.float32_head,
    )
