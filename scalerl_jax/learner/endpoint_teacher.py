"""A teacher behind an endpoint of OpenAI's form: log-probabilities of prompts.

    POST URL/completions   {"model", "prompt": [ids], "max_tokens": 0, "echo": true,
                            "logprobs": 1}
    choices[0].logprobs.token_logprobs: null of the first token, nats of the others

`scalerl serve` and vLLM answer so.  Tokens go as ids, and every sequence of a batch is
one request.
"""

import concurrent.futures
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from scalerl_jax.config import TeacherConfig
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.formats.http_json import SCHEMES, AskError, ask_persistently
from scalerl_jax.learner.step import TrainState
from scalerl_jax.types import PackedBatch

_MOST_BYTES = 2**27  # of a reply: a kilobyte per token of a long sequence
_PROBED_IDS, _PROBED_ADDED = 512, 300  # tokens whose texts are tokenised there
_ROUNDED = 1e-3  # nats; a log-probability is above 0 by rounding alone
_NEVER = -9999.0  # nats: vLLM gives this number for -inf, which JSON lacks


def _nats(value: Any) -> float:
    """Return a log-probability of an answer; NaN for anything else."""
    number = type(value) in (int, float) and _NEVER < value <= _ROUNDED
    return value if number else math.nan


class PackedSequence(NamedTuple):
    """A whole sequence of a batch, and where its predictions are."""

    tokens: Int[np.ndarray, " n"]
    places: Int[np.ndarray, " k"]  # of the predicted tokens, from 1, in `tokens`
    where: Int[np.ndarray, " k"]  # of their predictions in the batch, laid end to end


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndpointTeacher:
    """Asks a server for the log-probability of every token of a sequence."""

    url: str  # up to /v1
    model: str
    key: str  # name of the variable that has the key
    timeout_s: float
    retries: int
    concurrent: int

    def __call__(
        self, state: TrainState | None, batch: PackedBatch
    ) -> Float[np.ndarray, "M R S"]:
        """Return the teacher's log-probability of every target of a batch, in nats.

        Raises:
            RuntimeError: the server failed on a sequence, again and again.
        """
        del state  # the teacher is another policy
        sequences = list(unpacked(batch))
        found = np.zeros(np.asarray(batch.targets).size, np.float32)
        pool = concurrent.futures.ThreadPoolExecutor(self.concurrent)
        try:
            scored = pool.map(self.logprobs, (each.tokens for each in sequences))
            for each, logprobs in zip(sequences, scored, strict=True):
                found[each.where] = logprobs[each.places - 1]
        finally:
            pool.shutdown(cancel_futures=True)
        return found.reshape(np.asarray(batch.targets).shape)

    def logprobs(self, tokens: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n-1"]:
        """Return the log-probability of each token but the first, in nats.

        Raises:
            RuntimeError: the server failed, or its answer has no such numbers.
        """
        body = {
            "model": self.model,
            "prompt": tokens.tolist(),
            "max_tokens": 0,
            "echo": True,
            "logprobs": 1,
        }
        try:
            answer = self._ask("/completions", body)
            none, *values = answer["choices"][0]["logprobs"]["token_logprobs"]
        except (LookupError, TypeError, ValueError) as error:
            raise RuntimeError(
                f"{self._named}: the answer has no choices[0].logprobs.token_logprobs, "
                f"which echo = true asks for ({error!r})"
            ) from error
        found = np.array([_nats(each) for each in values], np.float32)
        given = np.isfinite(found)
        if none is not None or len(values) != len(tokens) - 1 or not given.all():
            first = "null" if none is None else "not null"
            raise RuntimeError(
                f"{self._named}: of {len(tokens)} tokens the answer has {first} for "
                f"the first and {int(given.sum())} log-probabilities above {_NEVER:g} "
                f"nats, and up to 0, for the others; it must be null, and one for each"
            )
        return found

    def check(self, tokenizer: Tokenizer) -> None:
        """Refuse a server without log-probabilities of prompts, or of other tokens.

        Tokenizers are compared by the ids of a text: every added token, and others
        evenly over the vocabulary.

        Raises:
            ValueError: says what it lacks.
        """
        probe = probe_of(tokenizer)
        own = tokenizer.encode(probe)
        try:
            theirs = self._tokenize(probe)
            if own not in (theirs, theirs[1:]):  # it may begin with a token of its own
                raise RuntimeError(
                    f"{self._named} has another tokenizer than the policy: of a text "
                    f"of {len(own)} tokens it makes {len(theirs)}, other ones; choose "
                    f"a teacher of the policy's family"
                )
            self.logprobs(np.array(own[:8], np.int32))
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def _tokenize(self, text: str) -> list[int]:
        try:
            body = {"model": self.model, "prompt": text}
            tokens = self._ask("/tokenize", body, root=True)["tokens"]
            if not isinstance(tokens, list):
                raise TypeError("its tokens are no list")
        except (LookupError, TypeError) as error:
            raise RuntimeError(
                f"{self._named} does not say how it tokenises a text: {error!r}"
            ) from error
        return tokens

    def _ask(self, path: str, body: Any = None, *, root: bool = False) -> Any:
        base = self.url.rstrip("/")
        try:
            return ask_persistently(
                f"{base.removesuffix('/v1') if root else base}{path}",
                body,
                retries=self.retries,
                key=self.key,
                timeout_s=self.timeout_s,
                most=_MOST_BYTES,
            )
        except AskError as error:
            raise RuntimeError(f"{self._named}: {path} {error}") from error

    @property
    def _named(self) -> str:
        return f"teacher.endpoint = {self.url!r}"


def make_endpoint(config: TeacherConfig) -> EndpointTeacher:
    """Return the teacher at teacher.endpoint; its model is the first, if none is named.

    Raises:
        ValueError: it does not say which models it has.
    """
    assert config.endpoint.startswith(SCHEMES), "checked with the other settings"
    made = EndpointTeacher(
        url=config.endpoint,
        model=config.model,
        key=config.key_variable,
        timeout_s=config.timeout_s,
        retries=config.retries,
        concurrent=config.concurrent,
    )
    if made.model:
        return made
    try:
        model = made._ask("/models")["data"][0]["id"]
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"{made._named} lists no model; name one in teacher.model"
        ) from error
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    return dataclasses.replace(made, model=str(model))


def probe_of(tokenizer: Tokenizer) -> str:
    """Return a text in which every added token and many others stand."""
    backend = tokenizer.backend
    added = list(backend.get_added_tokens_decoder())[:_PROBED_ADDED]
    step = math.ceil(tokenizer.vocab_size / _PROBED_IDS)
    texts = (
        tokenizer.decode_all([each]) for each in range(0, tokenizer.vocab_size, step)
    )
    spread = [text for text in texts if "\N{REPLACEMENT CHARACTER}" not in text]
    return "".join([*spread, *(tokenizer.decode_all([each]) for each in added)])


def unpacked(batch: PackedBatch) -> Iterator[PackedSequence]:
    """Yield the whole sequences of a batch [M, ...], which share prompts or not."""
    tokens, segments = _rows(batch)
    row, place, where = _predictions(batch)
    targets = np.asarray(batch.targets).reshape(-1)
    keys = np.stack([row, segments[row, place]])
    order = np.lexsort((place, keys[1], keys[0]))
    starts = np.flatnonzero(np.diff(keys[:, order], axis=1).any(axis=0)) + 1
    for members in np.split(order, starts) if len(order) else ():
        first = members[0]
        own = segments[row[first]] == segments[row[first], place[first]]
        start = int(own.argmax())
        last = targets[where[members[-1]]]  # its place predicts the end
        yield PackedSequence(
            tokens=np.append(tokens[row[first], own], last),
            places=place[members] - start + 1,
            where=where[members],
        )


def _rows(batch: PackedBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and segments of all rows [M * R, S] that attention reads."""
    segments = np.asarray(batch.segment_ids)
    tokens = np.asarray(batch.tokens)
    if batch.sharing is not None:
        microbatches, streams, _ = tokens.shape
        source = np.asarray(batch.sharing.source).reshape(microbatches, streams, -1)
        tokens = np.take_along_axis(tokens, source, axis=2)
    size = segments.shape[-1]
    return tokens.reshape(-1, size), segments.reshape(-1, size)


def _predictions(batch: PackedBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row, place in it and place in the batch of every prediction."""
    where = np.flatnonzero(np.asarray(batch.sequence_ids).reshape(-1))
    size = batch.segment_ids.shape[-1]
    if batch.sharing is None:
        return where // size, where % size, where
    _, streams, own = batch.sequence_ids.shape
    places = np.asarray(batch.sharing.place)[..., -own:].reshape(-1)[where]
    rows_of_stream = batch.segment_ids.shape[1] // streams
    return where // own * rows_of_stream + places // size, places % size, where
