"""Rows of `scalerl judge` with the verifiers' answers: one verdict, or turns.

An environment of several turns gets the turns that a row has written down, one after
the other.  Behind the last one there is no room for another, as at a run's limits.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from scalerl_jax.environments.pool import VerifierPool
from scalerl_jax.environments.verdict import Kind, More, Opening, Said, Step, Verdict


class RowToJudge(NamedTuple):
    """A completion or the turns of an episode, the place in the file, the reference."""

    place: str
    turns: tuple[str, ...]  # of the policy; a completion is one
    reference: dict[str, Any]
    prompt: str = ""


@dataclasses.dataclass(eq=False)
class JudgedRow:
    """A row with what the verifiers have answered so far."""

    row: RowToJudge
    kind: Kind
    number: int  # of the row
    verdict: Verdict | None = None  # None: it has not ended
    opened: Opening | None = None  # None: not asked yet
    said: list[tuple[str, More]] = dataclasses.field(default_factory=list)

    def submit(
        self, pool: VerifierPool, answer_of: Callable[[str], str | None]
    ) -> None:
        """Submit the answer in the completion, or the next turn, with this as key."""
        row, taken, step = self.row, len(self.said), None
        if self.kind.by_turns:
            begins = self.kind.opens and self.opened is None
            cut = taken == len(row.turns)
            step = Step(
                self.number,
                tuple(self.said),
                cut=cut,
                begins=begins,
                opened=self.opened or Opening(),
            )
            text = "" if begins or cut else row.turns[taken]
        else:
            text = row.turns[0]
        answers = [answer_of(text)]
        pool.submit(self, "any", answers, row.reference, prompt=row.prompt, step=step)

    def take(self, said: Said) -> bool:
        """Take an answer; return whether the row has ended."""
        if isinstance(said, Verdict):
            self.verdict = said
        elif isinstance(said, Opening):
            self.opened = said
        else:
            self.said.append((self.row.turns[len(self.said)], said))
        return self.verdict is not None

    @property
    def ending(self) -> Verdict:
        """Return the verdict of a row that has ended."""
        assert self.verdict is not None, "`take` has said so"
        return self.verdict

    @property
    def unread(self) -> int:
        """Return the number of written turns behind the end of the episode."""
        unopened = self.kind.opens and self.opened is None
        return max(0, len(self.row.turns) - len(self.said) - (not unopened))

    def shown(self) -> str:
        """Return the verdict as a line of text, behind lines of the turns' answers."""
        status, detail, reward, parts = self.ending
        rewards = {**({} if reward is None else {"reward": reward}), **parts}
        numbers = [f"{name} {_number(each)}" for name, each in rewards.items()]
        left = f"{self.unread} of {len(self.row.turns)} turns not read"
        words = [self.row.place, status, *numbers, left if self.unread else "", detail]
        heard = [
            f"{self.row.place}, {f'after turn {turn}' if turn else 'at first'}, "
            f"{_message(more)}\n"
            for turn, more in self._heard()
        ]
        return "".join(heard) + "  ".join(filter(None, words))

    def values(self) -> dict[str, Any]:
        """Return the verdict as JSON values, with reward and parts if there are any."""
        values: dict[str, Any] = {
            "place": self.row.place,
            "status": self.ending.status,
            "detail": self.ending.detail,
        }
        if self.ending.reward is not None or self.ending.parts:
            parts = dict(self.ending.parts)
            values |= {"reward": self.ending.reward, "parts": parts}
        if self.kind.by_turns:
            values["unread_turns"] = self.unread
            values["said"] = [
                {"after_turn": turn, **each._asdict()} for turn, each in self._heard()
            ]
        return values

    def _heard(self) -> list[tuple[int, More]]:
        """Return the environment's messages, and the number of turns before each."""
        opened = [(0, each) for each in (self.opened or Opening()).messages]
        return opened + [(turn, more) for turn, (_, more) in enumerate(self.said, 1)]


def _number(value: float | None) -> str:
    return "unjudged" if value is None else f"{value:g}"


def _message(said: More) -> str:
    """Return a message on one line."""
    if said.tokens is not None:
        text = f"tokens {list(said.tokens)}"
    else:
        text = f"{said.role}: {json.dumps(said.text, ensure_ascii=False)}"
    return text if said.reward is None else f"{text}  reward {said.reward:g}"
