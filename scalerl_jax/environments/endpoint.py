"""A judge behind an endpoint of OpenAI's form, for a user's reward functions.

    judge = Judge(url="http://127.0.0.1:8000/v1", model="m", template="{prompt} ...")

    async def score(prompt, completion, reference):
        return await judge(prompt=prompt, completion=completion, reference=reference)

A failed call raises JudgeError, and the completion then counts as unjudged: a failure
of the judge never becomes a reward.  `scalerl serve` is such an endpoint.
"""

import asyncio
import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scalerl_jax.environments.verdict import Done
from scalerl_jax.formats.bounded import read_text
from scalerl_jax.formats.http_json import SCHEMES, AskError, ask, pause_s

_MOST_BYTES = 2**22  # of a reply
_SHOWN = 120  # characters of a reply in an error
# The loop's own are as few as the cores, and a call that waits for one loses its time.
# Each takes address space, of which a process has reward.memory_mib.
_THREADS = ThreadPoolExecutor(256, thread_name_prefix="judge")  # started when needed
_BARE = r"\d+(?:\.\d+)?"
# A number that ends the reply, as "7.5", "**7**.", "7/10" or "7 out of 10".
_SCORE = (
    rf"(?<![A-Za-z\d./])(?<!\d,)(-?{_BARE})"
    rf"(?:[\s*_`]*(?:/|\bof\b|\bout of\b)[\s*_`]*(?P<best>{_BARE}))?[\s*_.`]*$"
)
# "3 points out of 10", "3 on a scale from 0 to 10", "7-8": the last number is no score.
_NO_SCORE_BEHIND = re.compile(
    r"(?:\b(?:out|max|maximum|scale)\s+of|\d[\s*_`]*(?:\bto\b|[-–—]))[\s*_`]*\Z", re.I
)
_LOOKED_AT = 40  # characters before a score
_TOLD_APART = ("completion", "criterion")  # values by which questions differ


class JudgeError(RuntimeError):
    """The judge gave no score."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judge:
    """A model that is asked for a score between 0 and `best`, which becomes 0 to 1."""

    url: str  # up to /v1
    model: str
    template: str  # "{prompt}", "{completion}", "{reference}" and others are filled in
    # The first group of its last match is the score, "best" of what, if it says so.
    pattern: str = _SCORE
    best: float = 1.0
    key: str = ""  # name of the variable that has the key; also in reward.variables
    timeout_s: float = 30.0  # of one try; all of them are within reward.timeout_s
    retries: int = 3
    temperature: float = 0.0
    max_tokens: int = 256
    cache: str = ""  # a directory of answers by content; empty: none are kept

    def __post_init__(self) -> None:
        """Refuse a URL of anything but HTTP."""
        if not self.url.startswith(SCHEMES):
            raise ValueError(
                f"Judge(url={self.url!r}) must begin with http:// or https://"
            )

    async def __call__(self, **values: Any) -> float:
        """Return the score of a completion.

        Raises:
            JudgeError: there is no answer, or no score in it.
        """
        said = (await self._answer(self._filled(values))).strip()
        found = [*re.finditer(self.pattern, said)]
        if not found:
            raise JudgeError(
                f"the judge's answer {said[-_SHOWN:]!r} has no match of "
                f"{self.pattern!r}"
            )
        written, most = found[-1][1], found[-1].groupdict().get("best")
        start = found[-1].start(1)
        if _NO_SCORE_BEHIND.search(said[max(0, start - _LOOKED_AT) : start]):
            raise JudgeError(
                f"the judge's answer {said[-_SHOWN:]!r} ends with a scale or a range, "
                f"and not with a score"
            )
        try:
            score = float(written) / self.best
        except (ValueError, TypeError) as error:
            raise JudgeError(f"the judge's score {written!r} is no number") from error
        if most is not None and float(most) != self.best:
            raise JudgeError(
                f"the judge's score is {written} of {most}, and not of {self.best:g}"
            )
        if not 0.0 <= score <= 1.0:
            raise JudgeError(f"the judge's score {written} is not in 0..{self.best:g}")
        return score

    def _filled(self, values: Mapping[str, Any]) -> str:
        """Return the template with its places filled, none of them within a value.

        Raises:
            ValueError: it does not show what is judged, or by what.
        """
        for name in _TOLD_APART:
            if name in values and f"{{{name}}}" not in self.template:
                raise ValueError(
                    f"Judge(template={self.template[:_SHOWN]!r}) has no {{{name}}}, so "
                    f"that each {name} gets the same score"
                )
        shown = {
            f"{{{name}}}": value
            if isinstance(value, str)
            else json.dumps(value, ensure_ascii=False)
            for name, value in values.items()
        }
        if not shown:
            return self.template
        places = "|".join(map(re.escape, shown))  # not str.format: texts have braces
        return re.sub(places, lambda place: shown[place[0]], self.template)

    async def _answer(self, text: str) -> str:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        asked = json.dumps([self.url, body], sort_keys=True).encode()
        kept = Path(self.cache, hashlib.sha256(asked).hexdigest())
        if self.cache and kept.exists():
            return read_text(kept, most=_MOST_BYTES)
        said = await self._persistently(body)
        if self.cache:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
                file.write(said.encode())
            os.replace(file.name, kept)  # never half of it
        return said

    async def _persistently(self, body: dict[str, Any]) -> str:
        """Ask until there is an answer, or `retries` are used up."""
        for tries in range(1, self.retries + 2):
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(_THREADS, self._ask, body)
            except AskError as error:
                if not error.passing:
                    raise JudgeError(f"the judge at {self.url} {error}") from error
                if tries > self.retries:
                    raise JudgeError(
                        f"the judge at {self.url} failed {tries} times: {error}"
                    ) from error
                wait_s = pause_s(tries, error)
            await asyncio.sleep(wait_s)
        raise AssertionError("the last failure is raised")

    def _ask(self, body: dict[str, Any]) -> str:
        if self.key and self.key not in os.environ:
            raise JudgeError(
                f"{self.key} is not in the environment of this process; name it in "
                f"reward.variables"
            )
        answer = ask(
            f"{self.url.rstrip('/')}/chat/completions",
            body,
            key=self.key,
            timeout_s=self.timeout_s,
            most=_MOST_BYTES,
        )
        try:
            choice = answer["choices"][0]
            said, ended = choice["message"]["content"], choice.get("finish_reason")
        except (LookupError, TypeError, AttributeError) as error:
            raise JudgeError(
                f"the judge at {self.url} answered what is no completion: "
                f"{str(answer)[:_SHOWN]!r}"
            ) from error
        if not isinstance(said, str):
            raise JudgeError(f"the judge at {self.url} answered with no text")
        if ended == "length":
            raise JudgeError(
                f"the judge's answer was cut at max_tokens={self.max_tokens}, before "
                f"its score: {said[-_SHOWN:]!r}"
            )
        return said


async def rubric(judge: Judge, criteria: Mapping[str, float], **values: Any) -> Done:
    """Return the weighted mean of a judge's scores, asked for each criterion apart.

    The judge's template has a "{criterion}"; `criteria` are their texts and weights.
    Each score is a part of the reward.
    """
    scores = await asyncio.gather(
        *(judge(criterion=criterion, **values) for criterion in criteria)
    )
    found = dict(zip(criteria, scores, strict=True))
    total = sum(criteria[name] * score for name, score in found.items())
    return Done(total / sum(criteria.values()), found)
