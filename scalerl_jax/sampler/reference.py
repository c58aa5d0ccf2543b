"""A slow reference sampler for reading and tests: no cache, pages or calls ahead.

For the same params and requests it draws the same tokens as `scheduler.Scheduler`.  If
params change during a sample, that holds for kv_on_update = "recompute": without a
cache only the tokens depend on older params.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from scalerl_jax.data.detokenizer import Detokenizer
from scalerl_jax.model.architecture import Architecture, parameter_table
from scalerl_jax.model.attention import BlockwiseAttention
from scalerl_jax.model.transformer import head_logits, head_weights, hidden_states
from scalerl_jax.sampler.decoding import EngineSettings, likeliest
from scalerl_jax.sampler.engine import check_params
from scalerl_jax.sampler.protocol import check_version
from scalerl_jax.sampler.requests import (
    Completion,
    Request,
    Sample,
    SamplerStats,
    begin_samples,
    resume_sample,
)
from scalerl_jax.sampler.sampling import Draw, SamplingRows, draw_tokens
from scalerl_jax.sampler.stored import read_back
from scalerl_jax.types import PyTree

Piece = dict[str, np.ndarray]  # per-token fields of `Completion`, of one or no token


@dataclasses.dataclass(eq=False, kw_only=True)
class _Growing:
    sample: Sample
    to_force: list[int] = dataclasses.field(default_factory=list)  # rest of the phrase


class ReferenceSampler:
    """The `protocol.Sampler` that makes a whole forward pass for every token."""

    def __init__(
        self, settings: EngineSettings, *, detokenizer: Detokenizer | None = None
    ) -> None:
        """Start with every slot free; requests with stop strings need a `detokenizer`.

        Only limits, and settings that affect the drawn tokens, are used.
        """
        self._settings, self._detokenizer = settings, detokenizer
        self._line: list[_Growing] = []  # the first ones have the slots
        self._params: PyTree = None
        self._version: int | None = None
        self._stats = SamplerStats()

    @property
    def free_slots(self) -> int:
        """Number of slots without a sample, minus the waiting samples."""
        return self._settings.slots - len(self._line)

    @property
    def busy(self) -> bool:
        """Return whether any sample is left."""
        return bool(self._line)

    @property
    def stats(self) -> SamplerStats:
        """Counts so far; counts of prefills and pages stay 0."""
        return self._stats

    def load(self, params: PyTree, version: int) -> None:
        """Use params from the next step on; see `protocol.Sampler`."""
        stacked = check_params(params, self._settings)
        check_version(version, last=self._version)
        self._params = params if stacked else _stacked(params, self._settings.arch)
        self._version = version

    def submit(self, request: Request) -> None:
        """Queue a request; see `protocol.Sampler`."""
        samples = begin_samples(request, self._settings, self._detokenizer)
        self._line += [_Growing(sample=each) for each in samples]

    def resume(
        self, request: Request, turn: Completion, appended: Int[np.ndarray, " n"]
    ) -> None:
        """Queue a sample again, before new ones; see `protocol.Sampler`."""
        sample = resume_sample(
            request, turn, appended, self._settings, self._detokenizer
        )
        self._line.insert(self._settings.slots, _Growing(sample=sample))

    def cancel(self, request_id: int) -> int:
        """Drop a request; return the number of its tokens that are in no completion."""
        dropped = [
            each for each in self._line if each.sample.request.request_id == request_id
        ]
        self._line = [each for each in self._line if each not in dropped]
        lost = sum(each.sample.num_tokens - each.sample.begun for each in dropped)
        self._stats.wasted_tokens += lost
        return lost

    def step(self) -> list[Completion]:
        """Sample up to `tokens_per_call` tokens in every slot."""
        assert self._version is not None, "load params first"
        ended = []
        for growing in self._line[: self._settings.slots]:
            for _ in range(self._settings.tokens_per_call):
                completion = self._grow(growing, self._version)
                if completion is not None:
                    ended.append(completion)
                    self._line.remove(growing)
                    break
        return ended

    def close(self) -> None:
        """Drop all requests; see `protocol.Sampler`."""
        self._line = []

    def _grow(self, growing: _Growing, version: int) -> Completion | None:
        """Add a token to a sample; return its completion if that was the last token."""
        piece = next_token(growing, self._params, self._settings, version=version)
        self._stats.calls += 1
        self._stats.note_generated(growing.sample, len(piece["tokens"]))
        completion = extend(growing.sample, piece, self._settings, version=version)
        self._stats.failed += completion is not None and bool(completion.failure)
        return completion


def sample_completion(
    params: PyTree,
    settings: EngineSettings,
    request: Request,
    number: int,
    *,
    version: int = 0,
) -> Completion:
    """Return sample `number` of a request, without the other samples."""
    sample = begin_samples(request, settings, None)[number]
    growing, completion = _Growing(sample=sample), None
    while completion is None:
        piece = next_token(growing, params, settings, version=version)
        completion = extend(sample, piece, settings, version=version)
    return completion


def next_token(
    growing: _Growing, params: PyTree, settings: EngineSettings, *, version: int
) -> Piece:
    """Return the next token of a sample; no token if the logits are not finite."""
    sample, samples = growing.sample, growing.sample.request.samples
    known = sample.tokens().tolist()
    place = sample.num_tokens  # index in the completion
    if place == sample.thinking_limit:
        marker, written = settings.end_of_thinking, known[len(known) - place :]
        ended = marker is not None and marker.state(written) == marker.ended
        growing.to_force = [] if ended else list(settings.phrase)
    logits = next_token_logits(params, settings, known)[None]
    distribution = SamplingRows.of(sample.request.sampling, 1)
    draw = _draw(logits, distribution, samples.keys[sample.number][None], place)
    top_tokens, top_logprobs = likeliest(settings, logits, distribution)
    forced = bool(growing.to_force)
    tokens, logprobs, full = draw.tokens, draw.logprobs, draw.full_logprobs
    if forced:
        tokens, logprobs, full = [growing.to_force.pop(0)], [0.0], [0.0]
    piece = dict(
        tokens=np.asarray(tokens, np.int32),
        mask=np.array([not forced]),
        logprobs=np.asarray(logprobs, np.float32),
        full_logprobs=np.asarray(full, np.float32),
        top_tokens=np.asarray(top_tokens),
        top_logprobs=np.asarray(top_logprobs),
        versions=np.array([version], np.int32),
    )
    count = 0 if draw.failed.item() and not forced else 1
    return {name: array[:count] for name, array in piece.items()}


def extend(
    sample: Sample, piece: Piece, settings: EngineSettings, *, version: int
) -> Completion | None:
    """Add a token to a sample; return its completion if that was the last token."""
    sample.pieces.append(piece)
    if not len(piece["tokens"]):
        return sample.completion(failure=sample.failure(version))
    sample.num_tokens += 1
    if sample.request.listener is not None:
        sample.request.listener(sample.number, piece["tokens"], piece["logprobs"])
    eos = piece["tokens"].item() in settings.eos_ids and piece["mask"].item()
    if sample.stops is not None and sample.stops.end(piece["tokens"]):
        return sample.completion(stopped=True)
    if eos or sample.num_tokens >= sample.limit:
        return sample.completion(cut_off=not eos)
    return None


@jax.jit
def _draw(logits: Array, sampling: SamplingRows, keys: Array, index: Array) -> Draw:
    return draw_tokens(logits, sampling, keys=keys, index=jnp.asarray(index)[None])


def next_token_logits(
    params: PyTree, settings: EngineSettings, tokens: list[int]
) -> Float[Array, " V"]:
    """Return the logits [V] of the token after `tokens`."""
    # Inputs are padded to one length, so that the pass compiles only once.
    padded = np.zeros(settings.max_tokens, np.int32)
    padded[: len(tokens)] = tokens
    return _next_token_logits(params, settings, padded, len(tokens))


@functools.partial(jax.jit, static_argnums=1)
def _next_token_logits(
    params: PyTree, settings: EngineSettings, padded: Array, length: Array
) -> Array:
    places, attention = jnp.arange(padded.shape[0])[None], BlockwiseAttention()

    def attend(q: Array, k: Array, v: Array, seen: Array, **options: Any) -> Array:
        k, v = read_back(k, v, settings.cache_dtype)
        return attention(q, k, v, seen, **options)

    hidden, _ = hidden_states(
        params,
        settings.arch,
        padded[None],
        positions=places,
        segment_ids=(places < length).astype(jnp.int32),
        dtype=settings.dtype,
        attention=attend,
    )
    return head_logits(
        hidden[0, length - 1],
        head_weights(params),
        float32_head=settings.float32_head,
        cap=settings.arch.logit_cap,
    )


def _stacked(params: PyTree, arch: Architecture) -> PyTree:
    """Return params of separate layers in the stacked form of `hidden_states`."""
    layers = {
        name: jnp.stack([layer[name] for layer in params["layers"]]).reshape(spec.shape)
        for name, spec in parameter_table(arch)["layers"].items()
    }
    return params | {"layers": layers}
