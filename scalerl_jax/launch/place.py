"""What every place can do; `keep` and the commands know no more of one."""

import dataclasses
from typing import Literal, Protocol

from scalerl_jax.launch.outcome import Outcome

# absent: there is nothing.  partial: some machines are there, and others must be asked
# for.  coming: it was asked for.  up: it can run something.
# broken: it will not come back, and must be removed.  going: it is being removed.
State = Literal["absent", "partial", "coming", "up", "broken", "going"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines of a job, as their place says just now."""

    state: State
    said: str  # the place's own word: ACTIVE, SUSPENDED
    created: str = ""  # ISO 8601
    wrong: str = ""  # machines of this name that another job has made


class Place(Protocol):
    """Machines for one job."""

    def check(self) -> None:
        """Refuse, before anything is made, what this place cannot give."""
        ...

    def machines(self) -> Machines:
        """Return what is there."""
        ...

    def create(self) -> None:
        """Ask for the machines."""
        ...

    def replace(self) -> list[str]:
        """Remove what is broken; return a line for each thing that stays."""
        ...

    def remove(self) -> list[str]:
        """Remove all there is; return a line for each thing that stays."""
        ...

    def start(self) -> str:
        """Start the run's supervisor where it does not run; return what was done."""
        ...

    def end(self) -> None:
        """Ask the run to save itself and to end, and wait as long as that may take."""
        ...

    def outcome(self) -> Outcome | None:
        """Return how the run stands; None: it never was started."""
        ...

    def last_step(self) -> str:
        """Return when the run last wrote a step, ISO 8601; empty: never."""
        ...

    def logs(self, lines: int) -> str:
        """Return the last lines of every host, each with the host's name."""
        ...

    def fetch(self, target: str) -> None:
        """Bring the run's files here, all but checkpoints."""
        ...
