"""A picture of a simulated run: who waits, and how old the groups are."""

from pathlib import Path

import numpy as np

from scalerl_jax.simulate.outcome import Outcome

BLUE, ORANGE, GREY, GREEN = "#1f5fa8", "#c9541a", "#b0b0b0", "#2e8b57"
_LEARNER = ("train", "publish", "assemble", "checkpoint", "eval", "waiting", "down")
_COLOURS = (BLUE, GREEN, "#8a4fbf", "#b8860b", ORANGE, "#e4e4e4", "#c0182b")


def draw(outcome: Outcome, path: Path) -> None:
    """Write the picture of a run; the format is that of the name.

    Raises:
        ValueError: Matplotlib knows no such format.
        OSError: it cannot be written.
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
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
