"""A warm start from a Config: its settings as those of a learner, and its sequences."""

import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from scalerl_jax.batching.answers import answered, pack_answers
from scalerl_jax.batching.packing import TrainSequence, pack
from scalerl_jax.config import (
    Config,
    CriticConfig,
    GeneratorsConfig,
    ObjectiveConfig,
    TeacherConfig,
    naming,
    validate,
)
from scalerl_jax.data.answers import Answer, Writer, Written, read_answers
from scalerl_jax.data.chat import read_chat_template
from scalerl_jax.data.questions import CHAT, check_place
from scalerl_jax.data.records import Tally
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.formats.reading import is_remote, local_file
from scalerl_jax.run.directory import TRAIN_ROLLOUTS_FILE
from scalerl_jax.run.rollouts import chosen, read_rollouts
from scalerl_jax.types import PackedBatch
from scalerl_jax.wiring.learning import make_architecture
from scalerl_jax.wiring.loading import run_settings
from scalerl_jax.wiring.sampling import make_tokenizer
from scalerl_jax.wiring.teacher import ids_digest

_ORDER = 5  # tag of this random draw; `batching.window` and `data` use other numbers
_LEAST_BROKEN, _BROKEN_SHARE = 10, 0.01  # rows that are left out, and no more
_log = logging.getLogger(__name__)


def supervised(config: Config, *, num_steps: int) -> Config:
    """Return the settings of a learner that makes supervised steps, on all devices.

    Its loss is minus a token's log-probability: REINFORCE with advantages of 1.  What a
    mixture's router needs is kept, and all else that speaks of rollouts is not.

    Raises:
        ValueError: the learning rate's schedule does not fit this many steps, or a
            profiler's trace is asked for.
    """
    if steps := config.tracking.profile_steps:
        raise ValueError(
            f"tracking.profile_steps = {steps} is of scalerl train, and a warm start "
            f"writes no profiler's trace; leave it out"
        )
    settings, own = config.warmstart, config.objective
    _check_cosine(config, num_steps)
    rounded = config.optimizer.stochastic_rounding
    made = dataclasses.replace(
        config,
        objective=ObjectiveConfig(
            loss="reinforce",
            expert_balance=own.expert_balance,
            expert_bias_rate=own.expert_bias_rate,
        ),
        teacher=TeacherConfig(),
        critic=CriticConfig(),
        batch=dataclasses.replace(
            config.batch,
            group_size=max(2, config.batch.group_size),
            shared_tokens=0,
            own_tokens=0,
        ),
        train=dataclasses.replace(config.train, num_steps=num_steps),
        sampler=dataclasses.replace(
            config.sampler, temperature=1.0, slots=config.sampler.slots or 1
        ),
        optimizer=dataclasses.replace(
            config.optimizer,
            learning_rate=settings.learning_rate,
            warmup_steps=settings.warmup_steps,
            base_rollouts=0,
            # Beside factors it is for a critic, which a warm start does not have.
            stochastic_rounding=rounded and not config.model.lora.rank,
        ),
        generators=GeneratorsConfig(
            placement="shared",
            start_timeout_s=config.generators.start_timeout_s,
            losses=config.generators.losses,
        ),
    )
    validate(made)
    return made


def _check_cosine(config: Config, num_steps: int) -> None:
    """Refuse a cosine that ends within the warm-up, by the names of a warm start."""
    if config.optimizer.schedule != "cosine":
        return
    warmup_steps = config.warmstart.warmup_steps
    end, where = config.optimizer.decay_steps, "optimizer.decay_steps = "
    if not end:
        end, where = num_steps, "the steps that warmstart.rows give, "
    if end <= warmup_steps:
        raise ValueError(
            f"warmstart.warmup_steps = {warmup_steps} must be below {where}{end}, "
            f"where the cosine of optimizer.schedule ends; lower the first"
        )


def name_rows(given: ml_collections.ConfigDict, names: Sequence[str]) -> None:
    """Set warmstart.rows to what a command line names, by whole paths.

    Raises:
        ValueError: there are none, or both a config and the command line name some.
    """
    settings: Any = given.warmstart
    own = tuple(settings.rows)
    if names and own:
        raise ValueError(
            f"warmstart.rows = {own} are named already, and {tuple(names)} beside "
            f"them; leave one of the two out"
        )
    if not (found := tuple(names) or own):
        raise ValueError(
            "there are no rows to learn from: name files of chats or of prompts and "
            "completions, or the directory of a run"
        )
    settings.rows = tuple(
        name if is_remote(name) else os.path.abspath(os.path.expanduser(name))
        for name in found
    )


def load_sequences(
    config: Config, tokenizer: Tokenizer, *, positions: int = 0
) -> list[TrainSequence]:
    """Return what the rows of warmstart.rows have to teach, in their order.

    What is longer than batch.row_tokens is left out, or than `positions` (0: no limit).

    Raises:
        ValueError: a file cannot be read, is of another tokenizer, has too many broken
            rows, or nothing is left.
    """
    found: list[TrainSequence] = []
    left_out, broken, without = Tally(), Tally(), Tally()
    rows, row_tokens = 0, config.batch.row_tokens
    longest = min(row_tokens, positions or row_tokens) + 1
    for name in config.warmstart.rows:
        with naming("warmstart.rows"):
            for row in _answers(name, config, tokenizer, left_out, broken):
                reasons = [_why_not(each, longest) for each in row.sequences]
                found += [
                    answered(each.tokens, each.mask)
                    for each, reason in zip(row.sequences, reasons, strict=True)
                    if not reason
                ]
                if all(reasons):
                    left_out.add(reasons[0], name)
                    continue
                rows += 1
                for reason in filter(None, [*row.left_out, *reasons]):
                    without.add(reason, name)
    for what, tally in (
        ("rows are left out", left_out),
        ("rows are left out", broken),
        ("answers are left out of rows that are learned", without),
    ):
        for reason, each in tally.items():
            _log.warning(
                "warning: %d %s: %s (first: %s)",
                *(each["count"], what, reason, each["first"]),
            )
    _check_rows(config, rows, left_out, broken)
    tokens = sum(int(each.mask.sum()) for each in found)
    _log.info(
        "%d rows with %d tokens to learn, in %d sequences", rows, tokens, len(found)
    )
    return found


def _why_not(answer: Answer, longest: int) -> str:
    """Return why a sequence cannot be learned; "" if it can."""
    if len(answer.tokens) > longest:
        return f"it has more than {longest} tokens"
    if answer.mask[0] or not answer.mask.any():
        return "it has no prompt before an answer"
    return ""


def _check_rows(config: Config, rows: int, left_out: Tally, broken: Tally) -> None:
    """Refuse rows of which too many are broken, or that leave nothing."""
    names = f"warmstart.rows = {config.warmstart.rows}"
    limit = max(_LEAST_BROKEN, int(_BROKEN_SHARE * (rows + broken.total)))
    if broken.total > limit:
        reason, first = next(iter(broken.items()))
        raise ValueError(
            f"{names}: {broken.total} rows are broken, more than {limit}; the first is "
            f"{first['first']}: {reason}"
        )
    if not rows:
        reasons = {**left_out, **broken} or {"there are no rows": None}
        raise ValueError(
            f"{names} leave nothing to learn from: {'; '.join(reasons)}; name others"
        )


def _answers(
    name: str, config: Config, tokenizer: Tokenizer, left_out: Tally, broken: Tally
) -> Iterator[Written]:
    """Yield the answers of each row of a file or of a run."""
    if not is_remote(name) and Path(name).is_dir():
        for each in _of_run(Path(name), config, tokenizer):
            yield Written([each])
        return
    path = Path(local_file(name)) if is_remote(name) else Path(name)
    if not path.is_file():
        raise ValueError(f"{name}: there is no such file; name one")
    write = make_answer_writer(config, tokenizer)
    yield from read_answers(path, write, left_out=left_out, broken=broken)


def make_answer_writer(config: Config, tokenizer: Tokenizer) -> Writer:
    """Make what turns rows into token ids, in the form of the run's prompts."""
    data, chat = config.data, None
    if data.template == CHAT:
        chat = read_chat_template(data.tokenizer or config.model.checkpoint)
        check_place("data.user_template", data.user_template)
    else:
        check_place("data.template", data.template, f", or be {CHAT!r}")
    return Writer(data, tokenizer, chat)


def _of_run(directory: Path, config: Config, tokenizer: Tokenizer) -> Iterator[Answer]:
    """Yield the rollouts of a run that are worth learning, with their own ids."""
    run, file = run_settings(directory), directory / TRAIN_ROLLOUTS_FILE
    if run is None or not file.is_file():
        raise ValueError(
            f"{directory} is no directory of a run with {TRAIN_ROLLOUTS_FILE}, which "
            f"tracking.train_rollouts = True keeps"
        )
    theirs = make_tokenizer(run, make_architecture(run))
    if (own := ids_digest(tokenizer)) != (other := ids_digest(theirs)):
        raise ValueError(
            f"the run in {directory} has token ids of another tokenizer (digest "
            f"{other}) than the policy ({own}); start from a model of its family"
        )
    settings = config.warmstart
    rollouts = chosen(
        read_rollouts(file), choice=settings.choose, per_prompt=settings.per_prompt
    )
    for each in rollouts:
        prompt = np.zeros(len(each.prompt_tokens), bool)
        yield Answer(
            np.concatenate([each.prompt_tokens, each.completion_tokens]),
            np.concatenate([prompt, each.completion_mask]),
        )


class RowOrder:
    """The order of rows over all epochs, each of them shuffled, cut into steps."""

    def __init__(
        self, num_rows: int, *, epochs: int, batch_rows: int, seed: int
    ) -> None:
        """Draw it; the last step may have fewer rows."""
        draws = [
            np.random.Generator(np.random.PCG64([seed, _ORDER, epoch]))
            for epoch in range(epochs)
        ]
        self._order = np.concatenate([draw.permutation(num_rows) for draw in draws])
        self._batch_rows, self._num_rows = batch_rows, num_rows

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps."""
        return -(-len(self._order) // self._batch_rows)

    def rows(self, step: int) -> list[int]:
        """Return the rows of a step, from 0."""
        start = step * self._batch_rows
        return self._order[start : start + self._batch_rows].tolist()

    def epoch(self, step: int) -> float:
        """Return the passes that are done before a step."""
        return step * self._batch_rows / self._num_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerRows:
    """The learned rows, and the steps that use them."""

    config: Config
    sequences: Sequence[TrainSequence]
    order: RowOrder

    def of_step(self, step: int) -> list[TrainSequence]:
        """Return the rows of a step, from 0."""
        return [self.sequences[row] for row in self.order.rows(step)]

    def packed(self, step: int) -> PackedBatch:
        """Return the batch of a step, the same each time."""
        batch = self.config.batch
        return pack_answers(
            self.of_step(step),
            functools.partial(
                pack,
                row_tokens=batch.row_tokens,
                rows_per_microbatch=batch.rows_per_microbatch,
                row_segments=batch.packed_segments,
                short_rows=self.config.short_rows,
            ),
        )


def digest_of_sequences(sequences: Sequence[TrainSequence]) -> str:
    """Return a digest of the token ids to learn and their order."""
    digest = hashlib.sha256()
    for each in sequences:
        digest.update(np.array([len(each.tokens), each.prompt_length]).tobytes())
        digest.update(each.tokens.astype(np.int32).tobytes())
        digest.update(each.mask.tobytes())
    return digest.hexdigest()
