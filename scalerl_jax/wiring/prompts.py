"""Prompts of a Config: from tasks, data sets or both; and the verifiers they name."""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.data import tasks
from scalerl_jax.data.prompts import JoinedPrompts, LazyPrompts, build_prompts
from scalerl_jax.data.questions import Question, take
from scalerl_jax.data.splits import (
    HELD_OUT,
    TRAIN,
    Overlap,
    Selection,
    Sieve,
    Wording,
    draw_order,
)
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.rewards.named import check_programs, make_pool, named_verifiers
from scalerl_jax.rewards.verifier import VerifierPool, verifier_of
from scalerl_jax.types import Prompt
from scalerl_jax.utils.hub import is_remote
from scalerl_jax.utils.progress import Progress
from scalerl_jax.wiring.tables import naming
from scalerl_jax.wiring.thinking import make_render

if TYPE_CHECKING:
    from scalerl_jax.data.records import QuestionSource

_log = logging.getLogger(__name__)


# Held-out prompts do not depend on a run's seed; see `data.tasks`.
_HELD_OUT_SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedPrompts:
    """Prompts that a run trains on and is judged on, and how they were chosen."""

    train: JoinedPrompts  # a part per task that has any
    held_out: tuple[Prompt, ...]
    examples: tuple[Prompt, ...]  # to train on, of every verifier that is needed
    report: dict[str, dict[str, Any]]  # of "training" and "evaluation", by task


def evaluation_set(
    config: Config, tokenizer: Tokenizer, name: str
) -> tuple[Prompt, ...]:
    """Return all prompts of a data set, or eval.num_prompts of a generated task.

    Raises:
        ValueError: there is no such set, or it gives no prompts.
    """
    maker = _Maker(config, tokenizer)
    return maker.prompts(maker.evaluation_questions(name))


def load_prompts(
    config: Config, tokenizer: Tokenizer, progress: Progress | None = None
) -> LoadedPrompts:
    """Return the prompts to train on and those held out, no text in both.

    Those held out are the sets of eval.sets, or drawn from data.tasks themselves in
    equal parts, the same for every seed.  Those of data sets to train on are all, or
    drawn by the seed, less what is in them twice or overlaps with an evaluation
    prompt; they are read again when they are needed.

    Raises:
        ValueError: names the setting that cannot be met, and by what.
    """
    maker = _Maker(config, tokenizer, progress)
    shares = tasks.equal_shares(config.data.tasks, config.data.train_prompts)
    maker.check_tasks(shares)
    named = [maker.evaluation_questions(name) for name in config.eval.sets]
    held_out = list(itertools.chain(*named)) if named else maker.hold_out()
    train = JoinedPrompts(maker.training_parts(shares, held_out))
    if len(train) < config.batch.num_prompts:
        raise ValueError(
            f"batch.num_prompts = {config.batch.num_prompts} is more than the "
            f"{len(train)} prompts of data.tasks = {config.data.tasks}; lower it"
        )
    return LoadedPrompts(
        train=train,
        held_out=maker.prompts(held_out),
        examples=tuple(maker.examples),
        report=maker.report,
    )


class _Maker:
    """Makes the prompts of one Config, and keeps count."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, progress: Progress | None = None
    ) -> None:
        """Read the template that the Config asks for."""
        self._config, self._data = config, config.data
        self._tokenizer = tokenizer
        self._max_tokens = config.sampler.max_prompt_tokens
        self._render = make_render(config)
        self._sieve = Sieve(
            count_tokens=self._count_tokens,
            max_tokens=self._max_tokens,
            progress=progress or Progress(),
        )
        self._sources: dict[tuple[str, str], tuple[QuestionSource, Wording]] = {}
        self._wordings: dict[str, Wording] = {}  # of what was opened last, by its name
        self._taken: dict[str, np.ndarray] = {}  # places held out, by task
        self.examples: list[Prompt] = []
        self.report: dict[str, dict[str, Any]] = {"training": {}, "evaluation": {}}

    def prompts(self, questions: Sequence[Question]) -> tuple[Prompt, ...]:
        """Make prompts whose lengths have been seen to, or must not be too long."""
        return build_prompts(
            questions,
            encode=self._tokenizer.encode,
            render=self._render,
            max_prompt_tokens=self._max_tokens,
        )

    def check_tasks(self, shares: dict[str, int]) -> None:
        """Check, before anything is read, that tasks exist and have something to do."""
        data = self._data
        for setting, names in (
            ("data.tasks", shares),
            ("eval.sets", self._config.eval.sets),
        ):
            for name in names:
                _check_name(name, setting)
        generated = [name for name in shares if name in tasks.TASKS]
        if generated and not data.train_prompts:
            raise ValueError(
                f"data.train_prompts = 0 takes all that there are, and task "
                f"{generated[0]!r} makes as many as it is asked for; give a number"
            )
        if data.task_weights and data.train_prompts and not all(shares.values()):
            raise ValueError(
                f"data.train_prompts = {data.train_prompts} leaves none for some of "
                f"data.tasks = {data.tasks}, whose shares data.task_weights gives; "
                f"raise it"
            )

    def evaluation_questions(self, name: str) -> list[Question]:
        """Return the questions of a set: all, or so many of a generated task."""
        _check_name(name, "eval.sets")
        if name in tasks.TASKS:
            count = self._config.eval.num_prompts
            self.report["evaluation"][name] = {"kept": count}
            return tasks.draw_questions({name: count}, used=set())
        source = self._open(name, "test", setting="eval.sets")
        order = np.arange(len(source))
        chosen = self._choose("evaluation", name, source, self._sieve, order)
        return _questions(source, chosen, name)

    def hold_out(self) -> list[Question]:
        """Return questions of the tasks themselves, in equal parts, for evaluation."""
        count = self._config.eval.num_prompts
        shares = tasks.equal_shares(self._data.tasks, count)
        made = tasks.draw_questions(_generated(shares), used=set())
        sieve = dataclasses.replace(self._sieve, seen=set())
        questions: list[Question] = []
        for name, share in shares.items():
            if name in tasks.TASKS:
                questions += [each for each in made if each.task == name]
                self.report["evaluation"][name] = {"kept": share}
                continue
            source = self._open(name, "train", setting="data.tasks")
            order = draw_order(len(source), seed=_HELD_OUT_SEED, purpose=HELD_OUT)
            chosen = self._choose("evaluation", name, source, sieve, order, share)
            if len(chosen.places) < share:
                raise ValueError(
                    f"eval.num_prompts = {count} asks for {share} prompts of {name!r}, "
                    f"which gives {len(chosen.places)} of {len(source)} questions"
                    f"{_dropped(chosen)}; lower it, or name eval.sets"
                )
            self._taken[name] = chosen.places
            questions += _questions(source, chosen, name)
        return questions

    def training_parts(
        self, shares: dict[str, int], held_out: list[Question]
    ) -> list[Sequence[Prompt]]:
        """Return the prompts of each task, those held out and their like left out."""
        texts = {question.text for question in held_out}
        made = tasks.draw_questions(
            _generated(shares), seed=self._config.seed, used=texts
        )
        asked = [
            self._wordings.get(question.task, Wording()).read(question.text)
            for question in held_out
        ]
        overlap = Overlap(asked, ngram=self._data.overlap_ngram)
        sieve = dataclasses.replace(self._sieve, seen=set(), overlap=overlap)
        parts: list[Sequence[Prompt]] = []
        for name, share in shares.items():
            if self._data.train_prompts and not share:
                continue
            if name not in tasks.TASKS:
                parts.append(self._training_part(name, sieve, share))
            else:
                parts.append(self.prompts([each for each in made if each.task == name]))
                self.examples.append(parts[-1][0])
                self.report["training"][name] = {"kept": share}
        return parts

    def _training_part(self, name: str, sieve: Sieve, share: int) -> LazyPrompts:
        config, source = self._config, self._open(name, "train", setting="data.tasks")
        taken = self._taken.get(name, np.array([], np.int64))
        order, wanted = np.arange(len(source)), None
        if config.data.train_prompts:
            order = draw_order(len(source), seed=config.seed, purpose=TRAIN)
            wanted = share
        order = order[~np.isin(order, taken)]
        chosen = self._choose("training", name, source, sieve, order, wanted)
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
        self.examples += [prompts[prompt_id] for prompt_id in ids]
        return prompts

    def _choose(
        self,
        kind: str,
        name: str,
        source: "QuestionSource",
        sieve: Sieve,
        order: np.ndarray,
        count: int | None = None,
    ) -> Selection:
        """Select questions of a data set along an order, so many or all; report it."""
        wording = self._wordings[name]
        chosen = sieve.select(source, order, count=count, wording=wording)
        self._check(name, chosen)
        self.report[kind][name] = {
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

    def _open(self, name: str, split: str, *, setting: str) -> "QuestionSource":
        """Open a data set at the split of its name, else at `split` if it has that."""
        # Runs on generated tasks alone need nothing of data sets.
        from scalerl_jax.data import catalog, preparing

        base, named = catalog.split_of(name)
        splits = catalog.find(base).splits
        chosen = named or (split if split in splits else splits[0])
        if (base, chosen) not in self._sources:
            directory = self._data.directory or preparing.DEFAULT_DIRECTORY
            with naming(f"{setting} holds {name!r}"):
                source = preparing.open_dataset(base, split=chosen, directory=directory)
            self._sources[base, chosen] = source, Wording.of(source)
        source, self._wordings[name] = self._sources[base, chosen]
        return source

    def _count_tokens(self, questions: list[Question]) -> list[int]:
        """Tokens of their prompts; of a short one its characters, which are no fewer.

        Tokenising is most of a pass's time.  No token is less than an ASCII character;
        others may be several, as bytes or once they are normalised.
        """
        texts = [self._render(question) for question in questions]
        unsure = [
            text for text in texts if not text.isascii() or len(text) > self._max_tokens
        ]
        exact = dict(zip(unsure, self._tokenizer.count_tokens(unsure), strict=True))
        return [exact.get(text, len(text)) for text in texts]

    def _check(self, name: str, chosen: Selection) -> None:
        """Refuse what left most of a data set out: a setting is wrong, not the data."""
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
                f"data.overlap_ngram = {self._data.overlap_ngram} words in a row with "
                f"an evaluation prompt: most of its wording is always the same; raise "
                f"it, or set it to 0 for equal prompts alone"
            )


def _generated(shares: dict[str, int]) -> dict[str, int]:
    """The shares of tasks that are no data sets."""
    return {name: share for name, share in shares.items() if name in tasks.TASKS}


def _dropped(chosen: Selection) -> str:
    """The counts of what was left out, for a message."""
    counts = [f"{count} {reason}" for reason, count in chosen.dropped.items()]
    return f" ({', '.join(counts)} dropped)" if counts else ""


def _questions(
    source: "QuestionSource", chosen: Selection, name: str
) -> list[Question]:
    questions = take(source, chosen.places.tolist())
    return [dataclasses.replace(each, task=name) for each in questions]


def _check_name(name: str, setting: str) -> None:
    if name in tasks.TASKS:
        return
    from scalerl_jax.data import catalog

    if is_remote(name) and catalog.is_own_file(name):
        return  # the bucket is asked when the file is read
    base, split = catalog.split_of(name)
    try:
        splits = catalog.find(base).splits
    except ValueError as error:
        raise ValueError(
            f"{setting} holds {name!r}; choose from the tasks {sorted(tasks.TASKS)}, "
            f"the data sets {sorted(catalog.DATA_SETS)}, or name a file: jsonl:FILE or "
            f"parquet:FILE"
        ) from error
    if split and split not in splits:
        raise ValueError(
            f"{setting} holds {name!r}, and {base!r} has the splits {splits}"
        )


def make_verifier(config: Config, opened: contextlib.ExitStack) -> VerifierPool:
    """Make a pool of processes that judge, closed with `opened`."""
    pool = make_pool(config.reward, tasks.score)
    opened.callback(pool.close)
    return pool


def check_verifiers(config: Config, prompts: Iterable[Prompt]) -> None:
    """Check, before a run, that every verifier which a prompt names can work.

    Raises:
        ValueError: there is none of that name, or reward.code_packages is not there.
        SandboxError: there are programs to judge, and no sandbox for them.
    """
    known = named_verifiers(config.reward)
    if "code" in {verifier_of(prompt.reference, known) for prompt in prompts}:
        check_programs(config.reward)
