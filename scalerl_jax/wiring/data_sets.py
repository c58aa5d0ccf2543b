"""Open the data sets of a Config, and choose and count their prompts.

Held-out prompts are the same for every seed; training prompts are all others, or drawn
by the seed.
"""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_jax.config import PACKAGES, Config, naming
from scalerl_jax.data import catalog, preparing, tasks
from scalerl_jax.data.questions import Question, Renderer, take
from scalerl_jax.data.records import QuestionSource
from scalerl_jax.data.splits import (
    HELD_OUT,
    TRAIN,
    LazyPrompts,
    Overlap,
    SelectedQuestions,
    Sieve,
    Wording,
    draw_order,
)
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.environments import packages
from scalerl_jax.formats.reading import is_remote
from scalerl_jax.run.progress import Progress
from scalerl_jax.types import Prompt

_log = logging.getLogger(__name__)

# Held-out prompts do not depend on a run's seed; see `data.tasks`.
_HELD_OUT_SEED = 0


class DataSets:
    """Data sets of a run, each split opened once; their counts go to `report`.

    Evaluation sets must be read first and training sets last, since prompts of the
    former are left out of the latter.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        render: Renderer,
        progress: Progress,
        report: dict[str, dict[str, Any]],
    ) -> None:
        """Store the arguments; open nothing yet."""
        self._config, self._tokenizer, self._render = config, tokenizer, render
        self._max_tokens = config.sampler.max_prompt_tokens
        self._report = report
        self._sieve = Sieve(
            count_tokens=self._count_tokens,
            max_tokens=self._max_tokens,
            progress=progress,
        )
        self._held_out = dataclasses.replace(self._sieve, seen=set())
        self._training: Sieve | None = None
        self._sources: dict[tuple[str, str], tuple[QuestionSource, Wording]] = {}
        self._wordings: dict[str, Wording] = {}  # of the last opened split, by set
        self._taken: dict[str, np.ndarray] = {}  # indices held out, by task

    def whole(self, name: str) -> list[Question]:
        """Return all questions of an evaluation set."""
        self.check_name(name, "eval.sets")
        source = self._open(name, "test", setting="eval.sets")
        order = np.arange(len(source))
        chosen = self._choose("evaluation", name, source, self._sieve, order)
        return _questions(source, chosen, name)

    def hold_out(self, name: str, share: int) -> list[Question]:
        """Hold out and return `share` questions of a training set, for evaluation."""
        source = self._open(name, "train", setting="data.tasks")
        order = draw_order(len(source), seed=_HELD_OUT_SEED, purpose=HELD_OUT)
        chosen = self._choose("evaluation", name, source, self._held_out, order, share)
        if len(chosen.places) < share:
            raise ValueError(
                f"eval.num_prompts = {self._config.eval.num_prompts} asks for {share} "
                f"prompts of {name!r}, which gives {len(chosen.places)} of "
                f"{len(source)} questions{_dropped(chosen)}; lower it, or set "
                f"eval.sets"
            )
        self._taken[name] = chosen.places
        return _questions(source, chosen, name)

    def training(
        self, name: str, share: int, held_out: Sequence[Question]
    ) -> tuple[LazyPrompts, list[Prompt]]:
        """Return `share` training prompts of a set, and one example of each verifier.

        A `share` of 0 means all.  Held-out questions (the same for all data sets) and
        similar ones are left out.
        """
        config = self._config
        if self._training is None:  # once all evaluation sets are open
            asked = [
                self._wordings.get(question.task, Wording()).read(
                    question.compared, question.system
                )
                for question in held_out
            ]
            overlap = Overlap(asked, ngram=config.data.overlap_ngram)
            self._training = dataclasses.replace(
                self._sieve, seen=set(), overlap=overlap
            )
        source = self._open(name, "train", setting="data.tasks")
        taken = self._taken.get(name, np.array([], np.int64))
        order, wanted = np.arange(len(source)), None
        if config.data.train_prompts:
            order = draw_order(len(source), seed=config.seed, purpose=TRAIN)
            wanted = share
        order = order[~np.isin(order, taken)]
        chosen = self._choose("training", name, source, self._training, order, wanted)
        if len(chosen.places) < (wanted or 1):
            raise ValueError(
                f"data.train_prompts = {config.data.train_prompts} asks for "
                f"{wanted or 'all'} prompts of {name!r}, which has "
                f"{len(chosen.places)} to train on: {len(source)} questions, "
                f"{len(taken)} of them held out for eval.num_prompts = "
                f"{config.eval.num_prompts}{_dropped(chosen)}; lower one of the two, "
                f"or set data.train_prompts = 0 for all"
            )
        prompts = LazyPrompts(
            source,
            chosen.places,
            task=name,
            encode=self._tokenizer.encode,
            render=self._render,
        )
        ids = np.searchsorted(chosen.places, chosen.examples).tolist()
        return prompts, [prompts[prompt_id] for prompt_id in ids]

    def _choose(
        self,
        kind: str,
        name: str,
        source: QuestionSource,
        sieve: Sieve,
        order: np.ndarray,
        count: int | None = None,
    ) -> SelectedQuestions:
        """Select `count` questions (or all) of a set in an order; report the counts."""
        wording = self._wordings[name]
        chosen = sieve.select(source, order, count=count, wording=wording)
        self._check(name, chosen)
        self._report[kind][name] = {
            "split": source.report.split,
            "questions": len(source),
            "prepared": dataclasses.asdict(source.report),
            **chosen.counts(),
        }
        _log.info(
            "%s: %d prompts for %s, of %d looked at%s",
            name,
            len(chosen.places),
            kind,
            chosen.looked_at,
            _dropped(chosen),
        )
        return chosen

    def _open(self, name: str, split: str, *, setting: str) -> QuestionSource:
        """Open the split that the name gives, else `split`, else the set's first."""
        directory = self._config.data.directory or preparing.DEFAULT_DIRECTORY
        base, chosen = split_of(self._config, name, otherwise=split)
        if (base, chosen) not in self._sources:
            with naming(f"{setting} holds {name!r}"):
                source = preparing.open_dataset(base, split=chosen, directory=directory)
            self._sources[base, chosen] = source, Wording.of(source)
            _log.info("%s, %s: %s", base, chosen, source.report.summary())
        source, self._wordings[name] = self._sources[base, chosen]
        return source

    def _count_tokens(self, questions: list[Question]) -> list[int]:
        """Return the number of tokens of each prompt, or a bound if it is short.

        The bound is the number of characters: tokenising takes most of a pass's time,
        and no token is shorter than an ASCII character.  Other characters may be
        several tokens, as bytes or after normalisation: their prompts are tokenised.
        """
        texts = [self._render(question) for question in questions]
        unsure = [
            text for text in texts if not text.isascii() or len(text) > self._max_tokens
        ]
        exact = dict(zip(unsure, self._tokenizer.count_tokens(unsure), strict=True))
        return [exact.get(text, len(text)) for text in texts]

    def _check(self, name: str, chosen: SelectedQuestions) -> None:
        """Refuse a selection that drops most of a data set: a setting is wrong."""
        over_long = chosen.dropped.get("over_long", 0)
        if 2 * over_long > chosen.looked_at:
            raise ValueError(
                f"{over_long} of {chosen.looked_at} prompts of {name!r} have more than "
                f"sampler.max_prompt_tokens = {self._max_tokens} tokens, the longest "
                f"{chosen.longest}; raise the limit or leave {name!r} out"
            )
        shared = chosen.dropped.get("shares_ngram", 0)
        if 2 * shared > chosen.looked_at:
            raise ValueError(
                f"{shared} of {chosen.looked_at} prompts of {name!r} share "
                f"data.overlap_ngram = {self._config.data.overlap_ngram} words in a "
                f"row with an evaluation prompt: most of the wording is the same in "
                f"all prompts; raise it, or set it to 0 to drop only equal prompts"
            )

    @staticmethod
    def check_name(name: str, setting: str) -> None:
        """Refuse an unknown data set, or a split that the data set does not have."""
        if name.startswith(PACKAGES):
            return  # checked with the package, before any prompt is read
        if is_remote(name) and catalog.is_own_file(name):
            return  # checked when the file is read from the bucket
        base, split = catalog.split_of(name)
        try:
            splits = catalog.find(base).splits
        except ValueError as error:
            raise ValueError(
                f"{setting} holds {name!r}; choose from the tasks "
                f"{sorted(tasks.TASKS)}, any of reasoning_gym (gym:NAME), the "
                f"data sets {sorted(catalog.DATA_SETS)}, or name a file: "
                f"{catalog.OWN_FILES} ({error})"
            ) from error
        if split and split not in splits:
            raise ValueError(
                f"{setting} holds {name!r}, and {base!r} has only the splits {splits}"
            )


def split_of(config: Config, name: str, *, otherwise: str) -> tuple[str, str]:
    """Return the data set and the split that a name stands for.

    It is the name's own split, else `otherwise`, else the set's first.
    """
    base, named = catalog.split_of(name)
    if name.startswith(PACKAGES):
        base, named = f"jsonl:{file_of_tasks(config, name)}", ""
    splits = catalog.find(base).splits
    return base, named or (otherwise if otherwise in splits else splits[0])


def file_of_tasks(config: Config, name: str) -> Path:
    """Return the file of the prompts of a package's tasks, env:PACKAGE.

    Raises:
        ValueError: the package cannot be used.
    """
    directory = config.data.directory or preparing.DEFAULT_DIRECTORY
    if is_remote(directory):
        directory = preparing.DEFAULT_DIRECTORY  # as for all local files
    return packages.tasks_file(name, Path(directory), config.reward.variables)


def _dropped(chosen: SelectedQuestions) -> str:
    """Return the counts of the dropped questions, for a message."""
    counts = [f"{count} {reason}" for reason, count in chosen.dropped.items()]
    return f" ({', '.join(counts)} dropped)" if counts else ""


def _questions(
    source: QuestionSource, chosen: SelectedQuestions, name: str
) -> list[Question]:
    questions = take(source, chosen.places.tolist())
    return [dataclasses.replace(each, task=name) for each in questions]
