"""A judge behind an endpoint of OpenAI's form, for a user's reward functions.

    judge = Judge(url="http://127.0.0.1:8000/v1", model="m", template="{prompt} ...")

    async def score(prompt, completion, reference):
        return await judge(prompt=prompt, completion=completion, reference=reference)

A call that fails raises JudgeError, by which the completion is unjudged: no failure
of a judge is a reward.  `scalerl serve` is such an endpoint.
"""

import asyncio
import dataclasses
import hashlib
import http.client
import json
import os
import random
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl_jax.environments.verdict import Done
from scalerl_jax.formats.bounded import read_text
from scalerl_jax.formats.reading import parse_json

_MOST_BYTES = 2**22  # of a reply
_SHOWN = 120  # characters of a reply in an error
_AGAIN = frozenset((408, 409, 429, 500, 502, 503, 504))  # statuses that may pass
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # before a retry; doubled for each


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key is for the host that was named."""

    def redirect_request(
        self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any
    ) -> None:
        """Make no other request; the status is an error then."""


_OPENER = urllib.request.build_opener(_NoRedirect)


class JudgeError(RuntimeError):
    """The judge gave no score."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judge:
    """A model that is asked for a score between 0 and `best`, which becomes 0 to 1."""

    url: str  # up to /v1
    model: str
    template: str  # "{prompt}", "{completion}", "{reference}" and others are filled in
    pattern: str = r"(-?\d+(?:\.\d+)?)\s*$"  # its last match's first group is the score
    best: float = 1.0
    key: str = ""  # name of the variable that has the key; also in reward.variables
    timeout_s: float = 30.0  # of one try; all of them are within reward.timeout_s
    retries: int = 3
    temperature: float = 0.0
    max_tokens: int = 256
    cache: str = ""  # a directory of answers by content; empty: none are kept

    def __post_init__(self) -> None:
        """Refuse a URL of anything but HTTP."""
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"Judge(url={self.url!r}) must begin with http:// or https://"
            )

    async def __call__(self, **values: Any) -> float:
        """Return the score of a completion.

        Raises:
            JudgeError: there is no answer, or no score in it.
        """
        text = self.template
        for name, value in values.items():  # not str.format: texts have braces
            shown = value if isinstance(value, str) else json.dumps(value)
            text = text.replace(f"{{{name}}}", shown)
        said = await self._answer(text)
        found = re.findall(self.pattern, said.strip())
        if not found:
            raise JudgeError(
                f"the judge's answer {said[-_SHOWN:]!r} has no match of "
                f"{self.pattern!r}"
            )
        try:
            score = float(found[-1]) / self.best
        except ValueError as error:
            raise JudgeError(f"the judge's score {found[-1]!r} is no number") from error
        if not 0.0 <= score <= 1.0:
            raise JudgeError(
                f"the judge's score {found[-1]} is not in 0..{self.best:g}"
            )
        return score

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
        said = await self._persistently(json.dumps(body).encode())
        if self.cache:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
                file.write(said.encode())
            os.replace(file.name, kept)  # never half of it
        return said

    async def _persistently(self, body: bytes) -> str:
        """Ask until there is an answer, or `retries` are used up."""
        pause_s, left = _FIRST_PAUSE_S, self.retries
        while True:
            try:
                return await asyncio.to_thread(self._ask, body)
            except _Passing as error:
                if not left:
                    raise JudgeError(
                        f"the judge at {self.url} failed {self.retries + 1} times: "
                        f"{error}"
                    ) from error
                wait_s = max(pause_s, error.after_s) * random.uniform(1.0, 1.5)
            await asyncio.sleep(min(wait_s, _LONGEST_PAUSE_S))
            pause_s, left = 2 * pause_s, left - 1

    def _ask(self, body: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        if self.key:
            if self.key not in os.environ:
                raise JudgeError(
                    f"{self.key} is not in the environment of this process; name it "
                    f"in reward.variables"
                )
            headers["Authorization"] = f"Bearer {os.environ[self.key]}"
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/chat/completions", data=body, headers=headers
        )
        try:
            with _OPENER.open(request, timeout=self.timeout_s) as reply:
                content = reply.read(_MOST_BYTES)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in _AGAIN:
                after = error.headers.get("Retry-After", "")
                raise _Passing(
                    f"status {error.code}", float(after) if after.isdigit() else 0.0
                ) from error
            raise JudgeError(
                f"the judge at {self.url} answered with status {error.code}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(str(error) or type(error).__name__) from error
        try:
            said = parse_json(content)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            raise JudgeError(
                f"the judge at {self.url} answered what is no completion: "
                f"{content[:_SHOWN]!r}"
            ) from error
        if not isinstance(said, str):
            raise JudgeError(f"the judge at {self.url} answered with no text")
        return said


class _Passing(Exception):  # noqa: N818  a reason to ask again
    """A failure that may be over when the judge is asked again."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


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
