"""Build the prompts of a Config: template, generated tasks, order, verifiers."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from scalerl_jax.config import PACKAGES, Config
from scalerl_jax.data import tasks
from scalerl_jax.data.chat import chat_renderer, read_chat_template
from scalerl_jax.data.curriculum import make_streams
from scalerl_jax.data.mixture import Levels, MixtureStream, Stream
from scalerl_jax.data.observations import (
    ChatFraming,
    ObservationWriter,
    PlainFraming,
)
from scalerl_jax.data.prompts import JoinedPrompts, PromptStream, build_prompts
from scalerl_jax.data.questions import (
    CHAT,
    Question,
    Renderer,
    plain_renderer,
)
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.environments import packages, sandbox
from scalerl_jax.environments.own_file import TOOLS, read_own
from scalerl_jax.environments.pool import VerifierPool, verifier_of
from scalerl_jax.environments.run_verifiers import (
    check_own,
    make_pool,
    named_verifiers,
)
from scalerl_jax.environments.tools import find_tool, schemas
from scalerl_jax.environments.verdict import OwnReward
from scalerl_jax.run.progress import Progress
from scalerl_jax.types import Prompt
from scalerl_jax.wiring.data_sets import DataSets, file_of_tasks, split_of

AUTO = "auto"  # a value of data.answer_after
Prompts = Sequence[Prompt]


def make_render(config: Config) -> Renderer:
    """Return the renderer of prompts: data.template, or a chat template."""
    data = config.data
    if data.template != CHAT:
        return plain_renderer(data.template)

    tools = None
    if config.environment == TOOLS:
        documents = config.episode.documents
        tools = schemas([find_tool(name, documents) for name in config.episode.tools])
    source = data.tokenizer or config.model.checkpoint
    return chat_renderer(data, source, tools=tools)


def answer_after(config: Config) -> str:
    """Return the text after which the answer begins; "": the whole completion is it.

    It is data.answer_after; "auto" stands for the tag that ends the thinking, if the
    prompt opens one or is written by the chat template of a family that thinks.
    """
    after = config.data.answer_after
    return make_render(config).end_of_thinking if after == AUTO else after


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedPrompts:
    """The training and evaluation prompts of a run, and how they were chosen."""

    train: JoinedPrompts  # one part for each task that has prompts
    held_out: tuple[Prompt, ...]
    examples: tuple[Prompt, ...]  # a training prompt for every verifier in use
    report: dict[str, dict[str, Any]]  # counts of "training" and "evaluation", by task


def evaluation_set(
    config: Config, tokenizer: Tokenizer, name: str
) -> tuple[Prompt, ...]:
    """Return all prompts of a data set, or eval.num_prompts of a generated task.

    Raises:
        ValueError: there is no such set, or it has no prompts.
    """
    maker = _Maker(config, tokenizer)
    return maker.prompts(maker.evaluation_questions(name))


def count_trained(
    run: Config, config: Config, name: str, prompts: Prompts, *, size: int
) -> int:
    """Return how many prompts of an evaluation set a run may have been trained on.

    The run's generated questions are drawn again and compared.  Of a data set, all may
    be training prompts if the run trains on the same split, but for those held out,
    which need not be among those asked.

    Args:
        run: the settings of the run.
        config: those with which the set was opened.
        name: of the set.
        prompts: those of the set that are asked.
        size: number of prompts of the whole set.
    """
    shares = tasks.equal_shares(run.data.tasks, run.eval.num_prompts)
    if tasks.is_generated(name):
        render = make_render(config)
        trained = {render(question) for question in _generated_training(run)}
        return sum(prompt.text in trained for prompt in prompts)
    own = split_of(config, name, otherwise="test")
    for task, share in shares.items():
        if not tasks.is_generated(task):
            if split_of(run, task, otherwise="train") == own:
                others = size - (0 if run.eval.sets else share)
                return min(len(prompts), max(0, others))
    return 0


def _generated_training(run: Config) -> list[Question]:
    """Return the training questions of a run's generated tasks."""
    shares = tasks.equal_shares(run.data.tasks, run.eval.num_prompts)
    named = [{name: run.eval.num_prompts} for name in run.eval.sets] or [shares]
    held_out = {
        question.text
        for each in named
        for question in tasks.draw_questions(_generated(each), used=set())
    }
    shares = tasks.equal_shares(run.data.tasks, run.data.train_prompts)
    return tasks.draw_questions(_generated(shares), seed=run.seed, used=held_out)


def load_prompts(
    config: Config, tokenizer: Tokenizer, progress: Progress | None = None
) -> LoadedPrompts:
    """Return the training prompts and the held-out ones; no text is in both.

    The held-out prompts are those of eval.sets, or drawn from data.tasks in equal
    parts, the same for every seed.  A data set's training prompts are all, or drawn by
    the seed, without duplicates and overlaps with an evaluation prompt; they are read
    again on use.

    Raises:
        ValueError: names the setting that cannot be met, and the reason.
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
    """A maker of the prompts of one Config, which counts them."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, progress: Progress | None = None
    ) -> None:
        """Read the template that the Config names."""
        self._config, self._tokenizer = config, tokenizer
        self._render = make_render(config)
        self._progress = progress or Progress()
        self.examples: list[Prompt] = []
        self.report: dict[str, dict[str, Any]] = {"training": {}, "evaluation": {}}

    @functools.cached_property
    def _data_sets(self) -> DataSets:
        # Runs on generated tasks alone open no data sets.
        return DataSets(
            self._config, self._tokenizer, self._render, self._progress, self.report
        )

    def prompts(self, questions: Sequence[Question]) -> tuple[Prompt, ...]:
        """Return the prompts of questions; one that is too long is refused."""
        return build_prompts(
            questions,
            encode=self._tokenizer.encode,
            render=self._render,
            max_prompt_tokens=self._config.sampler.max_prompt_tokens,
        )

    def check_tasks(self, shares: dict[str, int]) -> None:
        """Check, before anything is read, that all tasks exist and get prompts."""
        data = self._config.data
        for setting, names in (
            ("data.tasks", shares),
            ("eval.sets", self._config.eval.sets),
        ):
            for name in names:
                if tasks.is_generated(name):
                    tasks.check_task(name)
                else:
                    self._data_sets.check_name(name, setting)
        generated = [name for name in shares if tasks.is_generated(name)]
        if generated and not data.train_prompts:
            raise ValueError(
                f"data.train_prompts = 0 takes all prompts, and task {generated[0]!r} "
                f"generates any number of them; give a number"
            )
        apart = data.task_weights or data.next_task_at
        if apart and data.train_prompts and not all(shares.values()):
            raise ValueError(
                f"data.train_prompts = {data.train_prompts} leaves none for some of "
                f"data.tasks = {data.tasks}, which data.task_weights or "
                f"data.next_task_at keeps apart; raise it"
            )

    def evaluation_questions(self, name: str) -> list[Question]:
        """Return all questions of a set, or eval.num_prompts of a generated task."""
        if not tasks.is_generated(name):
            return self._data_sets.whole(name)
        count = self._config.eval.num_prompts
        self.report["evaluation"][name] = {"kept": count}
        return tasks.draw_questions({name: count}, used=set())

    def hold_out(self) -> list[Question]:
        """Hold out and return questions of data.tasks, in equal parts."""
        shares = tasks.equal_shares(
            self._config.data.tasks, self._config.eval.num_prompts
        )
        made = tasks.draw_questions(_generated(shares), used=set())
        questions: list[Question] = []
        for name, share in shares.items():
            if tasks.is_generated(name):
                questions += [each for each in made if each.task == name]
                self.report["evaluation"][name] = {"kept": share}
            else:
                questions += self._data_sets.hold_out(name, share)
        return questions

    def training_parts(
        self, shares: dict[str, int], held_out: list[Question]
    ) -> list[Sequence[Prompt]]:
        """Return the prompts of each task without held-out or similar ones."""
        made = tasks.draw_questions(
            _generated(shares),
            seed=self._config.seed,
            used={question.text for question in held_out},
        )
        parts: list[Sequence[Prompt]] = []
        for name, share in shares.items():
            if self._config.data.train_prompts and not share:
                continue
            if tasks.is_generated(name):
                parts.append(self.prompts([each for each in made if each.task == name]))
                self.examples.append(parts[-1][0])
                self.report["training"][name] = {"kept": share}
            else:
                part, examples = self._data_sets.training(name, share, held_out)
                parts.append(part)
                self.examples += examples
        return parts


def _generated(shares: dict[str, int]) -> dict[str, int]:
    """Return the shares of the generated tasks."""
    return {name: share for name, share in shares.items() if tasks.is_generated(name)}


def make_stream(config: Config, prompts: JoinedPrompts) -> Stream:
    """Return the stream of training prompts, in the order of data.order."""
    data = config.data
    retire_at = data.max_history_pass_rate if data.no_positive_resampling else None
    levels = None
    if data.next_task_at:
        levels = Levels(pass_rate=data.next_task_at, num_prompts=data.next_task_prompts)
    parts = prompts.parts if data.task_weights or levels else (prompts,)
    settings = {"seed": config.seed, "max_pass_rate": retire_at}
    if data.order == "shuffled":
        streams = [PromptStream(part, **settings) for part in parts]
    else:
        streams = make_streams(parts, prompts, data, **settings)
    if not data.task_weights and levels is None:
        return streams[0]

    weights = data.task_weights or (1.0,) * len(streams)
    return MixtureStream(streams, weights=weights, levels=levels)


def make_verifier(
    config: Config,
    opened: contextlib.ExitStack,
    *,
    own: OwnReward | None,
    count: int = 0,
) -> VerifierPool:
    """Return a pool of verifier processes, which `opened` closes.

    Args:
        config: of the run.
        opened: the stack that closes the pool.
        own: the result of `check_environment`.
        count: number of processes; 0: the config's.

    Raises:
        ValueError: this machine lacks an environment variable that `own` needs.
    """
    pool = make_pool(config.reward, unnamed="reasoning_gym", count=count, own=own)
    opened.callback(pool.close)
    return pool


def check_verifiers(config: Config, prompts: Iterable[Prompt]) -> None:
    """Check, before a run, that every verifier that a prompt names can work.

    Raises:
        ValueError: the verifier is unknown, or reward.code_packages is missing.
        SandboxError: there are programs to judge, and no sandbox for them.
    """
    if config.environment:
        return  # `check_environment` has checked it
    known = named_verifiers(config.reward)
    if "code" in {verifier_of(prompt.reference, known) for prompt in prompts}:
        sandbox.check(config.reward.code_packages)


def check_environment(config: Config) -> OwnReward | None:
    """Check, before expensive work, that a user's reward functions exist.

    Return the environment that judges all prompts; None: each prompt's own verifier
    judges it.

    Raises:
        ValueError: the file or a function is missing, the file raises when it is
            imported, or the package cannot be used.
    """
    if not config.environment:
        return None
    if config.environment.startswith(PACKAGES):
        named = (config.environment, *config.data.tasks, *config.eval.sets)
        names = tuple(dict.fromkeys(named))
        return packages.own_of(
            names,
            config.reward,
            end_of_thinking=answer_after(config),
            episode=config.episode,
            by_turns=any(play.by_turns for play in _plays(config, names)),
        )
    own = _read_own(config)
    return own._replace(by_turns=check_own(own, config.reward))


def _plays(config: Config, names: Sequence[str]) -> list[packages.Play]:
    """Return how the tasks of packages are played, which are imported and looked at."""
    return [packages.play_of(file_of_tasks(config, name)) for name in names]


def _read_own(config: Config) -> OwnReward:
    return read_own(
        config.environment,
        config.reward,
        episode=config.episode,
        answer_after=answer_after(config),
    )


def make_writer(config: Config, tokenizer: Tokenizer) -> ObservationWriter:
    """Return the writer of the text between two turns.

    Raises:
        ValueError: the tokenizer or the chat template does not support several turns.
    """
    if config.data.template != CHAT:
        framing = PlainFraming(config.episode.between, config.data.template)
        return ObservationWriter(tokenizer, framing)
    chat = read_chat_template(config.data.tokenizer or config.model.checkpoint)
    framing = ChatFraming(chat, {"enable_thinking": config.data.enable_thinking})
    # Refuses a template that does not support several turns.
    with_tools = config.environment == TOOLS
    if config.environment.startswith(PACKAGES):
        with_tools = any(play.with_tools for play in _plays(config, config.data.tasks))
    framing.turn("tool" if with_tools else "user")
    return ObservationWriter(tokenizer, framing)
