"""Host-side records of the sampler: requests, samples in progress, completions.

No array here is on a device.

The file is above 400 lines: what a sample begins with is written beside its record.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scalerl_jax.data.detokenizer import Detokenizer, TextStream
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.sampler.attention import Chunk
from scalerl_jax.sampler.decoding import EngineSettings
from scalerl_jax.sampler.sampling import Sampling

# A function that gets new tokens of one sample: (sample, tokens [n], logprobs [n]).
Listener = Callable[[int, np.ndarray, np.ndarray], None]


class StopWatch:
    """A search for stop strings in one completion, token by token.

    A completion continues the text of its prompt: a space between the two is its own.
    """

    def __init__(self, stops: Sequence[str], detokenizer: Detokenizer) -> None:
        """Start before the first token."""
        self._stops = stops
        self._text = TextStream(detokenizer, begun=True)
        self._before = ""  # the end of the text, in which a stop string may start
        self._reach = max(map(len, stops)) - 1

    def end(self, tokens: np.ndarray) -> int | None:
        """Return how many of these tokens complete a stop string; None: none does."""
        for count, token in enumerate(tokens.tolist(), 1):
            text = self._before + self._text.add(token)
            if any(stop in text for stop in self._stops):
                return count
            self._before = text[max(0, len(text) - self._reach) :]
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """The settings of each sample of one prompt."""

    keys: np.ndarray  # uint32 [G, 2], see `sampling.sample_keys`
    thinking_limits: np.ndarray  # tokens before the interruption, int32 [G]
    max_tokens: np.ndarray | None = None  # int32 [G]; None: the engine's limit
    # Given tokens with which each completion starts, int32 [n].
    openings: tuple[np.ndarray, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to complete once per sample."""

    request_id: int
    tokens: np.ndarray  # int32 [P]
    samples: Samples
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()  # a completion ends with the token that completes any
    listener: Listener | None = None  # called in `Sampler.step`; must not raise

    @property
    def num_samples(self) -> int:
        """Number of requested completions."""
        return len(self.samples.keys)

    def check(self, *, vocabulary: int, longest: int, most: int, spelled: bool) -> None:
        """Refuse a request that an engine of these limits cannot serve.

        Raises:
            ValueError: the prompt is empty, longer than `longest` or has ids outside
                of the vocabulary; a limit is not within `most` tokens; an array does
                not have one value per sample; or a stop string is not usable.
        """
        if not 0 < len(self.tokens) <= longest:
            raise ValueError(
                f"a prompt of {len(self.tokens)} tokens; sampler.max_prompt_tokens "
                f"= {longest} is the limit, and 1 the least"
            )
        if not (0 <= self.tokens.min() and self.tokens.max() < vocabulary):
            raise ValueError(
                f"a prompt with ids from {self.tokens.min()} to {self.tokens.max()}; "
                f"the model has 0 to {vocabulary - 1}: use the tokenizer of its "
                f"checkpoint"
            )
        lengths = {
            len(each)
            for each in (
                self.samples.keys,
                self.samples.thinking_limits,
                self.samples.max_tokens,
                self.samples.openings,
            )
            if each is not None
        }
        if lengths != {self.num_samples} or not self.num_samples:
            raise ValueError(
                f"samples with {sorted(lengths)} values; each needs a key, a thinking "
                f"limit and, if given, a limit of tokens and an opening, and there "
                f"must be at least one"
            )
        wanted = self.samples.max_tokens
        if wanted is not None and not (0 < wanted.min() and wanted.max() <= most):
            raise ValueError(
                f"max_tokens = {wanted.tolist()}; each must be from 1 to "
                f"sampler.max_completion_tokens = {most}"
            )
        if self.stop and not (spelled and all(self.stop)):
            raise ValueError(
                f"stop = {list(self.stop)}; a stop string must not be empty, and "
                f"the sampler must have a detokenizer"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished sample of a request."""

    request_id: int
    sample: int
    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T], False on forced tokens
    logprobs: np.ndarray  # float32 [T], nats, of the distribution sampled from
    full_logprobs: np.ndarray  # float32 [T], nats, before top-k, top-p, min-p, argmax
    top_tokens: np.ndarray  # int32 [T, top_logprobs], the likeliest tokens
    top_logprobs: np.ndarray  # float32 [T, top_logprobs], as full_logprobs
    versions: np.ndarray  # int32 [T]
    cut_off: bool  # ended at the length limit
    interrupted: bool
    stopped: bool = False  # ended by a stop string
    failure: str = ""  # why the sample failed; empty: it did not
    experts: np.ndarray | None = None  # in the format of `types.Rollout`


@dataclasses.dataclass(kw_only=True)
class SamplerStats:
    """Counts since the sampler was made, and its current use of the cache."""

    calls: int = 0  # calls of `generate`
    chunks: int = 0  # prefill chunks
    prefilled_tokens: int = 0
    prefix_hit_tokens: int = 0  # of prompts and earlier turns, found in the cache
    prefill_context: int = 0  # sum of tokens attended to in prefill and recomputation
    prefixes_dropped: int = 0  # because the version changed, or pages ran out
    suspended: int = 0  # sequences that gave up their pages for a while
    recomputed_tokens: int = 0  # cached again under new params
    failed: int = 0
    generated_tokens: int = 0
    generated_context: int = 0  # sum of tokens attended to by generated tokens
    wasted_tokens: int = 0  # generated, but not part of a completion
    pages_in_use: int = 0
    peak_pages: int = 0
    tokens_held: int = 0  # by the sequences in slots; each counts a shared prompt
    peak_tokens_held: int = 0

    def note_prefill(self, chunk: Chunk, *, again: bool = False) -> None:
        """Count the tokens of a chunk; each attends to itself and all before it."""
        count = int(chunk.query_starts[-1])
        if again:
            self.recomputed_tokens += count
        else:
            self.chunks += 1
            self.prefilled_tokens += count
        self.prefill_context += int(chunk.positions[:count].sum()) + count

    def note_generated(self, sample: "Sample", count: int) -> None:
        """Count `count` new tokens of a sample; call this before they are added."""
        known = len(sample.request.tokens) + sample.num_tokens
        self.generated_tokens += count
        self.generated_context += count * known + count * (count - 1) // 2

    def flops(self, arch: Architecture) -> float:
        """Return the model FLOPs of all passes; prefill passes are without a head.

        The part of the last layer that a prefill skips (after keys and values) counts.
        """
        cached = self.prefilled_tokens + self.recomputed_tokens
        return sum(
            count * arch.flops_per_token(context / count, head=head)
            for count, context, head in (
                (cached, self.prefill_context, False),
                (self.generated_tokens, self.generated_context, True),
            )
            if count
        )

    def metrics(self) -> dict[str, int]:
        """Return the counts by metric name."""
        return {f"sampler/{name}": value for name, value in vars(self).items()}


@dataclasses.dataclass(eq=False, kw_only=True)
class Sample:
    """One completion in progress; compared by identity."""

    request: Request
    number: int
    limit: int  # tokens of the completion
    pages: list[int] = dataclasses.field(default_factory=list)
    # One entry per call: the per-token fields of `Completion`.
    pieces: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)
    num_tokens: int = 0  # of the completion, in results that the host has read
    in_flight: int = 0  # most tokens that calls not yet read may add
    row: Any = None  # a suspended sample's `SlotRows` row
    cached_version: int | None = None  # of all its keys and values
    turn: Completion | None = None  # a resumed sample's completion so far
    begun: int = 0  # tokens of the completion that existed when it was queued
    stops: StopWatch | None = None  # set if the request has stop strings
    # Experts of the prefix from which the sample started; see `Prefix`.
    prompt_experts: list[tuple[Any, slice]] | None = None

    @property
    def goes_on(self) -> bool:
        """Return whether the sample can be active after the calls not yet read."""
        return self.num_tokens + self.in_flight < self.limit

    @property
    def thinking_limit(self) -> int:
        """Return the place of its interruption, as `Samples.thinking_limits` has it.

        A place among tokens that are not sampled moves to the first one behind them.
        """
        limit = int(self.request.samples.thinking_limits[self.number])
        drawn = 0 if self.turn is None else len(self.turn.tokens)
        return self.begun if drawn <= limit < self.begun else limit

    def tokens(self) -> np.ndarray:
        """Return prompt and completion so far, int32."""
        pieces = [piece["tokens"] for piece in self.pieces]
        return np.concatenate([self.request.tokens, *pieces]).astype(np.int32)

    def failure(self, version: int) -> str:
        """Return the message for logits that are not finite at the next token."""
        return (
            f"the logits after token {self.num_tokens} of the completion are not "
            f"finite at policy version {version}; check the params"
        )

    def completion(
        self, *, cut_off: bool = False, stopped: bool = False, failure: str = ""
    ) -> Completion:
        """Return the finished sample."""
        # The tokens it started with have no experts: those are in the prefix's.
        arrays = {
            name: np.concatenate(
                [piece[name] for piece in self.pieces if name in piece]
            )
            for name in self.pieces[-1]
        }
        own = self.pieces[1:] if self.begun else self.pieces
        if self.begun and self.turn is None:  # an opening has the first draw's version
            first = arrays["versions"][self.begun : self.begun + 1]
            arrays["versions"][: self.begun] = first if len(first) else 0
        interrupted = not all(piece["mask"].all() for piece in own)
        interrupted |= self.turn is not None and self.turn.interrupted
        if "experts" in arrays:  # of all tokens, with the prompt's first
            cached = [np.asarray(chunk)[at] for chunk, at in self.prompt_experts or ()]
            if self.turn is not None and self.turn.experts is not None:
                first = self.turn.experts  # chosen when these tokens were new
                cached = [first, np.concatenate(cached)[len(first) :]]
            arrays["experts"] = np.concatenate([*cached, arrays["experts"]])
        return Completion(
            request_id=self.request.request_id,
            sample=self.number,
            cut_off=cut_off,
            interrupted=interrupted,
            stopped=stopped,
            failure=failure,
            **arrays,
        )


def begin_samples(
    request: Request, settings: EngineSettings, detokenizer: Detokenizer | None
) -> list[Sample]:
    """Return the samples of a new request, without sampled tokens.

    Raises:
        ValueError: the settings do not allow the request, or it has stop strings and
            there is no `detokenizer`.
    """
    request.check(
        vocabulary=settings.arch.vocab_size,
        longest=settings.max_prompt_tokens,
        most=settings.max_completion_tokens,
        spelled=detokenizer is not None,
    )
    limits = request.samples.max_tokens
    if limits is None:
        limits = np.full(request.num_samples, settings.max_completion_tokens)
    samples = [
        Sample(request=request, number=number, limit=limit)
        for number, limit in enumerate(limits.tolist())
    ]
    for sample, opening in zip(samples, request.samples.openings or (), strict=False):
        if len(opening):
            _begin_with(sample, None, opening, settings)
    if request.stop:
        assert detokenizer is not None, "`Request.check` requires it"
        for sample in samples:
            sample.stops = StopWatch(request.stop, detokenizer)
    return samples


def resume_sample(
    request: Request,
    turn: Completion,
    appended: np.ndarray,
    settings: EngineSettings,
    detokenizer: Detokenizer | None,
) -> Sample:
    """Return the sample of a completion that continues after appended tokens.

    Raises:
        ValueError: the settings do not allow the request, an appended id is not in the
            vocabulary, or no token is left to sample.
    """
    again = dataclasses.replace(
        request, samples=dataclasses.replace(request.samples, openings=None)
    )
    sample = begin_samples(again, settings, detokenizer)[turn.sample]
    sample.request, sample.turn = request, turn
    _begin_with(sample, turn, appended, settings)
    return sample


def _begin_with(
    sample: Sample,
    turn: Completion | None,
    appended: np.ndarray,
    settings: EngineSettings,
) -> None:
    """Add the completion so far and given tokens to a new sample.

    Raises:
        ValueError: an id is not in the vocabulary, or no token is left to sample.
    """
    written = 0 if turn is None else len(turn.tokens)
    known, vocabulary = written + len(appended), settings.arch.vocab_size
    if known >= sample.limit:
        raise ValueError(
            f"{written} tokens and {len(appended)} appended ones leave none "
            f"to sample; the completion may have {sample.limit}"
        )
    if len(appended) and not (0 <= appended.min() and appended.max() < vocabulary):
        raise ValueError(
            f"appended ids from {appended.min()} to {appended.max()}; the model has "
            f"0 to {vocabulary - 1}"
        )
    zeros = np.zeros(len(appended), np.float32)
    top = np.zeros((len(appended), settings.top_logprobs))
    piece = dict(
        tokens=appended.astype(np.int32),
        mask=np.zeros(len(appended), bool),
        logprobs=zeros,
        full_logprobs=zeros,
        top_tokens=top.astype(np.int32),
        top_logprobs=top.astype(np.float32),
        versions=np.zeros(len(appended), np.int32),
    )
    if turn is not None:
        piece["versions"] += turn.versions[-1]
        piece = {
            name: np.concatenate([getattr(turn, name), array])
            for name, array in piece.items()
        }
    sample.pieces.append(piece)
    sample.num_tokens = sample.begun = known


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthBudget:
    """Stages of the completion limit, up to the limit for which a sampler is built."""

    stages: Sequence[tuple[int, int]]  # (first optimizer step, tokens), growing
    max_completion_tokens: int

    def limit(self, step: int) -> int:
        """Return the limit, in tokens, of a completion that starts after `step` steps.

        It is the limit of the last stage with  first step <= step;  without stages it
        is always the sampler's.
        """
        begun = [tokens for first, tokens in self.stages if first <= step]
        return begun[-1] if begun else self.max_completion_tokens

    def thinking(self, tokens: int, *, limit: int) -> int:
        """Return the interruption length under a smaller limit.

            floor(tokens * limit / max_completion_tokens)

        so that thinking and answer keep their shares.
        """
        return tokens * limit // self.max_completion_tokens

    def cut(self, samples: Samples, *, step: int) -> Samples:
        """Return the samples with the limit of a step, without a new program."""
        limit = self.limit(step)
        if limit == self.max_completion_tokens:
            return samples
        thinking = [
            self.thinking(int(each), limit=limit) for each in samples.thinking_limits
        ]
        return dataclasses.replace(
            samples,
            thinking_limits=np.array(thinking, np.int32),
            max_tokens=np.full(len(thinking), limit, np.int32),
        )
