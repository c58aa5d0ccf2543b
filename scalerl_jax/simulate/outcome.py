"""Results of a simulated run: chip-hours, idle shares, staleness, losses, a picture."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from scalerl_jax.run.writing import replacing
from scalerl_jax.simulate.replica import SimulatedGroup, SimulatedReplica
from scalerl_jax.simulate.scenario import Scenario

_S_PER_HOUR = 3600.0
# Columns of `SimulationNotes`, which has a row per optimizer step.
_LEVELS = ("buffered", "sampled", "running")
_ACTIVITIES = ("waiting", "assemble", "train", "publish", "checkpoint", "eval", "down")
BLUE, ORANGE, GREY, GREEN = "#1f5fa8", "#c9541a", "#b0b0b0", "#2e8b57"
_LEARNER = ("train", "publish", "assemble", "checkpoint", "eval", "waiting", "down")
_COLOURS = (BLUE, GREEN, "#8a4fbf", "#b8860b", ORANGE, "#e4e4e4", "#c0182b")


@dataclasses.dataclass(frozen=True)
class SimulationOutcome:
    """Records of a simulated run, from which `figures` computes its results."""

    scenario: Scenario
    columns: dict[str, np.ndarray]  # a value per step; seconds and tokens accumulate
    staleness: dict[tuple[int, int, int], int]  # groups by (step, in flight, queued)
    counts: dict[str, int]

    def figures(self, *, first_step: int | None = None) -> dict[str, float]:
        """Return means from `first_step` on; None skips the first tenth of the steps.

        They are over whole windows, since a batched one begins with all its sampling.
        Chip-hours and step_s include evaluations, except those before the first step.

        Raises:
            ValueError: the run has no whole window from there on.
        """
        scenario, columns = self.scenario, self.columns
        first, last = self._whole_windows(first_step)
        spent = {name: values[last] - values[first] for name, values in columns.items()}
        count, time_s = last - first, spent["time_s"]
        replicas_s = scenario.replicas * time_s
        pairs = [
            (flight, queued, groups)
            for (step, flight, queued), groups in self.staleness.items()
            if first < step <= last
        ]
        groups = sum(number for *_, number in pairs)
        flight = sum(each * number for each, _, number in pairs) / groups
        queued = sum(each * number for _, each, number in pairs) / groups
        eval_s = spent["learner/eval"]
        busy_s = spent["busy_s"]
        return {
            "step_s": time_s / count,
            "chip_hours_per_step": scenario.chips * time_s / count / _S_PER_HOUR,
            "eval_share": eval_s / time_s,
            # Shares of the time without evaluations, as in the ledger.
            "learner_idle": spent["learner/waiting"] / (time_s - eval_s),
            "generators_idle": 1
            - (busy_s + spent["down_s"]) / (replicas_s - spent["eval_s"]),
            "generators_down": spent["down_s"] / replicas_s,
            # Of the time in which they decode; 0 if there is none.
            "slots_in_use": spent["slot_s"] / (busy_s * scenario.slots or 1.0),
            "busy_share": (
                scenario.learner_devices * spent["learner/train"]
                + scenario.replica_devices * busy_s
            )
            / (scenario.devices * time_s),
            "controller_busy": spent["controller_s"] / time_s,
            "tokens_per_s": spent["generated"] / time_s,
            "staleness": flight + queued,
            "staleness_in_flight": flight,
            "staleness_queued": queued,
            "staleness_max": max(one + two for one, two, _ in pairs),
            **{
                f"groups_{name}": float(columns[name][first + 1 : last + 1].mean())
                for name in _LEVELS
            },
        }

    def _whole_windows(self, first_step: int | None) -> tuple[int, int]:
        """Return the rows at the end of a window between which means are computed."""
        steps, window = len(self.columns["time_s"]), self.scenario.steps_per_window
        skipped = (steps - 1) // 10 if first_step is None else first_step
        # Row n is written after step n + 1.
        before = min(-(-(skipped + 1) // window), steps // window - 1)
        if before < 1:
            raise ValueError(
                f"{steps} steps have no two windows of {window} steps (queue.mode, "
                f"queue.max_staleness, batch.epochs); simulate {2 * window} or more"
            )
        return before * window - 1, steps // window * window - 1

    def histogram(self) -> dict[tuple[int, int], int]:
        """Return trained groups by (staleness in flight, queued), of all steps."""
        found: collections.Counter[tuple[int, int]] = collections.Counter()
        for (_, flight, queued), number in self.staleness.items():
            found[flight, queued] += number
        return dict(found)


class SimulationNotes:
    """Recorder of a simulation in progress."""

    def __init__(self, scenario: Scenario) -> None:
        """Start with empty records."""
        self._scenario = scenario
        self._rows: list[dict[str, float]] = []
        self._staleness: collections.Counter[tuple[int, int, int]] = (
            collections.Counter()
        )
        self.lost_replicas = self.lost_learners = self.reissued = 0
        self.lost_tokens = self.useless_tokens = 0
        self.trained = self.refilled = 0  # groups

    def used(self, version: int, batch: Iterable[SimulatedGroup]) -> None:
        """Record the staleness of a batch that is trained on at `version`."""
        for group in batch:
            flight = group.finished_version - group.oldest_version
            queued = version - group.finished_version
            self._staleness[version, flight, queued] += 1
            self.trained += 1

    def waste(self, groups: Iterable[SimulatedGroup]) -> None:
        """Record groups without a gradient that were refilled."""
        for group in groups:
            self.refilled += 1
            self.useless_tokens += group.total

    def step(
        self,
        now_s: float,
        replicas: Sequence[SimulatedReplica],
        *,
        spent: dict[str, float],
        levels: dict[str, int],
    ) -> None:
        """Append a row after an optimizer step.

        Args:
            now_s: time of the simulation, in seconds.
            replicas: all replicas, whose counters are read.
            spent: the learner's seconds by activity so far, and the controller's.
            levels: numbers of groups by state.
        """
        # Seconds of each since its last event, which its counters lack.
        since = [(each, max(0.0, now_s - each.time_s)) for each in replicas]
        working = [(each, part) for each, part in since if each.up and not each.paused]
        self._rows.append(
            {
                "time_s": now_s,
                "busy_s": sum(each.busy_s for each in replicas)
                + sum(part for each, part in working if each.running),
                "slot_s": sum(each.slot_s for each in replicas)
                + sum(part * each.running for each, part in working),
                "eval_s": sum(each.eval_s for each in replicas)
                + sum(part for each, part in since if each.paused),
                "down_s": sum(each.down_s for each in replicas)
                + sum(part for each, part in since if not each.up),
                "generated": sum(each.generated for each in replicas),
                "trained": self.trained,
                "controller_s": spent.get("controller", 0.0),
                **levels,
                **{f"learner/{name}": spent.get(name, 0.0) for name in _ACTIVITIES},
            }
        )

    def outcome(
        self, events: int, replicas: Sequence[SimulatedReplica]
    ) -> SimulationOutcome:
        """Return the outcome of a finished run that took `events` events."""
        return SimulationOutcome(
            scenario=self._scenario,
            columns={
                name: np.array([row[name] for row in self._rows])
                for name in self._rows[0]
            },
            staleness=dict(self._staleness),
            counts={
                "events": events,
                "trained_groups": self.trained,
                "refilled_groups": self.refilled,
                "useless_tokens": self.useless_tokens,
                "lost_replicas": self.lost_replicas,
                "lost_learners": self.lost_learners,
                "reissued_groups": self.reissued,
                "lost_tokens": self.lost_tokens,
                "suspended": sum(each.suspended for each in replicas),
            },
        )


def draw(outcome: SimulationOutcome, path: Path) -> None:
    """Write a picture of a run; the suffix of `path` gives its format.

    Raises:
        ValueError: Matplotlib does not support the format.
        OSError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (shares, ages, steps) = pyplot.subplots(1, 3, figsize=(13, 3.8))
    columns, scenario = outcome.columns, outcome.scenario
    spent = {name: values[-1] - values[0] for name, values in columns.items()}
    time_s = spent["time_s"]
    left = 0.0
    for name, colour in zip(_LEARNER, _COLOURS, strict=True):
        share = spent[f"learner/{name}"] / time_s
        shares.barh("learner", share, left=left, color=colour, label=name)
        left += share
    total = time_s * scenario.replicas
    used = spent["slot_s"] / scenario.slots / total
    empty = spent["busy_s"] / total - used
    others = (
        (used, GREY, "slots in use"),
        (empty, "#d9d3c5", "slots empty beside them"),
        (spent["eval_s"] / total, ORANGE, None),
        (spent["down_s"] / total, "#c0182b", None),
    )
    left = 0.0
    for share, colour, label in others:
        shares.barh("generators", share, left=left, color=colour, label=label)
        left += share
    shares.set(xlim=(0, 1), title="shares of the time from step 1 on")
    shares.legend(fontsize=7, ncol=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    found = outcome.histogram()
    most = max(max(flight, queued) for flight, queued in found) + 1
    both = np.zeros((2, most))
    for (flight, queued), number in found.items():
        both[0, flight] += number
        both[1, queued] += number
    both /= both.sum(axis=1, keepdims=True)
    places = np.arange(most)
    ages.bar(places - 0.2, both[0], 0.4, color=BLUE, label="in flight")
    ages.bar(places + 0.2, both[1], 0.4, color=ORANGE, label="queued")
    ages.set(xlabel="staleness (optimizer steps)", title="share of the groups")
    ages.xaxis.get_major_locator().set_params(integer=True)
    ages.legend()
    seconds = np.diff(columns["time_s"])
    steps.plot(np.arange(2, len(seconds) + 2), seconds, color=BLUE, linewidth=0.8)
    steps.set(xlabel="optimizer step", title="seconds of a step", ylim=(0, None))
    figure.tight_layout()
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=130)
    pyplot.close(figure)
