"""A user's environments: an instance for each episode, in a verifier process.

    class Game:
        def begin(self, prompt: str, reference: Any) -> str | None: ...
        def step(self, completion: str) -> More | Done | float: ...

Its turns determine an instance.  If its process is lost, another instance gets the
same turns again, and must return the same.  No JAX here.
"""

import asyncio
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from scalerl_jax.environments.own import (
    BadObservation,
    Calls,
    OwnFile,
    Rewards,
    judged_by,
    number,
    read_result,
    read_verdict,
    takes,
    takes_in_order,
    told,
)
from scalerl_jax.environments.verdict import (
    Environment,
    GroupAnswers,
    Kind,
    More,
    Opening,
    Said,
    ScoreFunction,
    Setup,
    Step,
    Verdict,
    Verifier,
)

_ANSWER = "More, Done or a number"
_MOST = 2000  # instances in a process; older ones are of abandoned episodes
_MOST_MESSAGES = 100  # before the first turn
_MOST_CHARACTERS = 100  # of a token, on average over an observation
Verify = Callable[[str], Verdict]  # a completion's text -> its prompt's own verdict
Send = Callable[[int, int, Said], None]  # share, place, answer
Judge = Callable[[ScoreFunction, str, str, dict[str, Any], float], Verdict]


class Environments:
    """The instances of a user's environment in this process, by episode."""

    def __init__(
        self,
        make: Callable[..., Any],
        file: OwnFile,
        setup: Setup,
        verify: "OwnVerify",
        goes_on: Callable[[], None],
    ) -> None:
        """Make an instance, to check it.

        `goes_on` is called after each turn that an instance is given again.

        Raises:
            ValueError: it cannot be made, or lacks a method.
        """
        assert setup.own is not None, "it is named there"
        self._make, self._file, self._own = make, file, setup.own
        self._passed_at, self._verify = setup.passed_at, verify
        self._goes_on = goes_on
        self._call = Calls(file, setup.own, timeout_s=setup.timeout_s)
        self._runner = asyncio.Runner()
        self._instances: dict[Any, tuple[Environment, int]] = {}  # and turns taken
        try:
            made = self._new(lambda completion: Verdict("no_answer"))
        except BaseException as error:  # whatever a program does
            raise ValueError(file.said(error)) from error
        for name, given in (
            ("begin", ("prompt", "reference")),
            ("step", ("completion",)),
        ):
            method = getattr(made, name, None)
            if not (callable(method) and takes_in_order(method, *given)):
                raise ValueError(
                    f"{setup.own.file} has {setup.own.functions[0]}(), which makes a "
                    f"{type(made).__name__}; an environment has begin(prompt, "
                    f"reference) and step(completion)"
                )
        said = getattr(made.begin, "__annotations__", {}).get("return", Opening)
        self.kind = Kind(by_turns=True, opens=said not in (None, "None"))

    def judge(self, works: Sequence[GroupAnswers], send: Send) -> None:
        """Answer turns; those of plain environments one after the other."""
        self._runner.run(self._all(works, send))

    async def _all(self, works: Sequence[GroupAnswers], send: Send) -> None:
        async def one(number: int, work: GroupAnswers) -> None:
            ((place, text),) = work.answers
            send(number, place, await self._answer(work, text))

        async with asyncio.TaskGroup() as group:
            for number, work in enumerate(works):
                group.create_task(one(number, work))

    async def _answer(self, work: GroupAnswers, text: str) -> Said:
        """Return the environment's answer to a turn, or its opening messages."""
        step = work.step
        assert step is not None, "an environment is given turns alone"
        if step.begins:
            return await self._open(work)
        environment, taken = self._instances.pop(step.episode, (None, 0))
        if step.refused:
            if environment:
                await self._close(environment)
            return step.refused
        if environment and taken != len(step.turns):  # of another episode
            await self._close(environment)
            environment = None
        if environment is None:
            made = await self._again(work)
            if isinstance(made, Verdict):
                return made
            environment = made
        said: Any = More("")
        if not step.cut:
            said = await self._call(self._read, environment.step, text)
        if isinstance(said, More) and (step.last or step.cut):
            said = await self._cut(environment)
        if isinstance(said, More):
            await self._keep(step.episode, environment, len(step.turns) + 1)
        else:
            await self._close(environment)
        return said

    async def _open(self, work: GroupAnswers) -> Verdict | Opening:
        """Begin an episode; return its environment's messages before the first turn."""
        assert work.step is not None, "the caller has looked"
        begun = await self._begin(work)
        if isinstance(begun, Verdict):
            return begun
        made, opening = begun
        await self._keep(work.step.episode, made, 0)
        return opening

    async def _begin(self, work: GroupAnswers) -> tuple[Environment, Opening] | Verdict:
        verify = functools.partial(self._verify, work.task, work.reference)
        made = await self._call(lambda made: made, self._new, verify)
        if isinstance(made, Verdict):
            return made
        opening = await self._call(
            self._read_opening, made.begin, work.prompt, told(work.reference)
        )
        if isinstance(opening, Verdict):
            await self._close(made)
            return opening
        return made, opening

    async def _again(self, work: GroupAnswers) -> Environment | Verdict:
        """Return an environment that has got the turns so far."""
        assert work.step is not None, "the caller has looked"
        begun = await self._begin(work)
        if isinstance(begun, Verdict):
            return begun
        made, opening = begun
        refused = await self._replay(made, opening, work.step)
        if refused:
            await self._close(made)
        return refused or made

    async def _replay(
        self, made: Environment, opening: Opening, step: Step
    ) -> Verdict | None:
        """Give an environment the turns of a step; return a verdict if it differs."""
        otherwise = Verdict(
            "verifier_error",
            f"{self._own.file}: its process ended, and another one was given the "
            f"same turns and answered otherwise",
        )
        if opening != step.opened:
            return otherwise
        self._goes_on()
        for completion, observation in step.turns:
            said = await self._call(self._read, made.step, completion)
            if said == observation:
                self._goes_on()  # each turn has a time limit of its own
                continue
            return said if isinstance(said, Verdict) and said.detail else otherwise
        return None

    async def _cut(self, environment: Environment) -> Verdict | More:
        cut = getattr(environment, "cut", None)
        if cut is None:
            return Verdict(
                "no_end",
                f"{self._own.file}: the environment did not end within "
                f"episode.max_turns and the length limit, and has no cut() that would "
                f"say what the episode is worth",
            )
        said = await self._call(self._read, cut)
        if isinstance(said, More):
            return Verdict("bad_reward", f"{self._own.file}: cut() returned More")
        return said

    def _new(self, verify: Verify) -> Any:
        given = {**self._own.given, "verify": verify}
        known = inspect.signature(self._make).parameters
        return self._make(**{name: given[name] for name in known if name in given})

    def _read(self, found: Any) -> Verdict | More:
        most = self._own.max_magnitude
        if isinstance(found, Verdict):
            return read_verdict(found, max_magnitude=most)
        if not isinstance(found, More):
            done = read_result(found, max_magnitude=most, form=_ANSWER)
            return judged_by(done.reward, self._passed_at)._replace(parts=done.parts)
        return self._read_more(found)

    def _read_more(self, found: More) -> More:
        reward = found.reward
        if reward is not None:
            reward = number(reward, self._own.max_magnitude)
        if found.tokens is not None:
            return More(found.text, found.role, reward, self._read_tokens(found))
        text = found.text
        if not isinstance(text, str) or not isinstance(found.role, str):
            raise BadObservation(
                f"the observation is of type {type(text).__name__} with a role of type "
                f"{type(found.role).__name__}, and both must be texts"
            )
        most = _MOST_CHARACTERS * self._own.max_observation_tokens
        if len(text) > most:
            raise BadObservation(
                f"the observation has {len(text):,} characters; {most:,} are the most "
                f"that episode.max_observation_tokens can hold"
            )
        # Text that UTF-8 cannot encode, such as half a surrogate pair, is escaped.
        text = text.encode("utf-8", "replace").decode()
        return More(text, found.role, reward)

    def _read_tokens(self, found: More) -> tuple[int, ...]:
        """Return the token ids of an observation; `Turns` compares them with others."""
        given, most = found.tokens, self._own.max_observation_tokens
        if found.text != "":
            raise BadObservation(
                "the observation has both a text and tokens; give one of them"
            )
        try:
            assert given is not None, "the caller has looked"
            if len(given) > most:
                raise BadObservation(
                    f"the observation has {len(given):,} tokens; "
                    f"episode.max_observation_tokens = {most} is the limit"
                )
            tokens = tuple(map(operator.index, given))
        except TypeError as error:
            raise BadObservation(
                f"the observation's tokens are no sequence of token ids: {error}"
            ) from error
        if not tokens:
            raise BadObservation(
                "the observation's tokens are none, and the next turn begins behind "
                "them; give the tokens with which it begins"
            )
        return tokens

    def _read_opening(self, found: Any) -> Opening:
        """Return an episode's opening from what `begin` returned."""
        if found is None:
            return Opening()
        several = isinstance(found, list | tuple) and not isinstance(found, More)
        if not self.kind.opens:
            raise BadObservation(
                "begin says by its annotation that it returns None, and returned "
                f"a {type(found).__name__}; leave the annotation out"
            )
        if several and len(found) > _MOST_MESSAGES:
            raise BadObservation(
                f"begin returned {len(found)} messages; {_MOST_MESSAGES} are the most"
            )
        messages: list[More] = []
        for each in found if several else [found]:
            if isinstance(each, str):
                messages.append(self._read_more(More(each)))
            elif isinstance(each, More):
                messages.append(self._read_more(each))
            else:
                raise BadObservation(
                    f"begin returned a {type(each).__name__}; the policy reads a text, "
                    f"a More, or a list of these, behind the prompt"
                )
        if len({each.tokens is None for each in messages}) > 1:
            raise BadObservation(
                "begin returned texts and tokens together, and a text would be framed "
                "with what stands around all messages; give one or the other"
            )
        return Opening(tuple(messages))

    async def _keep(self, episode: Any, environment: Environment, taken: int) -> None:
        self._instances[episode] = environment, taken
        while len(self._instances) > _MOST:
            oldest, _ = self._instances.pop(next(iter(self._instances)))
            await self._close(oldest)

    async def _close(self, environment: Environment) -> None:
        close = getattr(environment, "close", None)
        if close is not None:  # a failure is ignored: the episode is already judged
            await self._call(lambda _: None, close)


class OwnVerify:
    """The verifiers that prompts name, for environments that use the prompt's own."""

    def __init__(
        self,
        setup: Setup,
        find: Callable[[Verifier], ScoreFunction],
        judge: Judge,
    ) -> None:
        """Import none yet."""
        self._setup, self._find, self._judge = setup, find, judge
        self._found: dict[str, ScoreFunction] = {}

    def preload(self) -> None:
        """Import the verifier of prompts that name none."""
        if self._setup.preload in self._setup.verifiers:
            self._score(self._setup.preload)

    def _score(self, name: str) -> ScoreFunction:
        if name not in self._found:
            self._found[name] = self._find(self._setup.verifiers[name])
        return self._found[name]

    def __call__(
        self, task: str, reference: dict[str, Any], completion: str
    ) -> Verdict:
        """Return the verdict of a prompt's own verifier on a completion."""
        own = self._setup.own
        if own and own.answer_after:
            _, found, completion = completion.rpartition(own.answer_after)
            if not found:
                return Verdict("no_answer")
        answer = completion.strip()
        name = reference.get("verifier", self._setup.preload)
        if name not in self._setup.verifiers:
            raise ValueError(
                f"the prompt has no verifier of its own, but {name!r}: give it an "
                f"'answer' or 'tests', or judge it by a function of yours"
            )
        return self._judge(
            self._score(name), task, answer, reference, self._setup.passed_at
        )


def _is_environment(make: Callable[..., Any]) -> bool:
    """Return whether it is a class of environments, whatever it may be made with."""
    return isinstance(make, type) and all(
        callable(getattr(make, name, None)) for name in ("begin", "step")
    )


def load_own(
    setup: Setup, verify: OwnVerify, goes_on: Callable[[], None]
) -> Rewards | Environments:
    """Execute a user's file: its reward functions, or its environment.

    `goes_on` is called after each of several calls whose answer is not sent yet.

    Raises:
        ValueError: the file raises, or has no such functions.
    """
    own = setup.own
    assert own is not None, "the caller has looked"
    file = OwnFile(own)
    if len(own.functions) == 1:
        make = file.find(own.functions[0])
        try:
            known = inspect.signature(make).parameters
        except ValueError:  # it has no known signature
            return Rewards(file, own, setup, goes_on)
        given = {**own.given, "verify": None}
        asked = {name: None for name in known if name in given}
        is_reward = takes(make, "", "", None) and not _is_environment(make)
        if takes(make, **asked) and not is_reward:
            if "verify" in asked:
                verify.preload()
            return Environments(make, file, setup, verify, goes_on)
    return Rewards(file, own, setup, goes_on)
