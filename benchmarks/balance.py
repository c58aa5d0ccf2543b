"""Answer the questions of docs/balance.md with the simulator, and draw its pictures.

    make simulate
    python benchmarks/balance.py --only=split,modes

An 8B policy with ScaleRL's batch (48 prompts x 16) on v5p:4x4x4, 64 chips: replicas of
4 chips with 128 slots and a cache of a million tokens; the other chips learn.  Rates
are expected ones, the closed forms of `planning.rates`; nothing was run on a TPU.
"""

import argparse
import dataclasses
import itertools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

from scalerl_jax import config as config_lib
from scalerl_jax.machines.chips import CHIPS
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.simulate.lengths import SimulatedLengths
from scalerl_jax.simulate.rates import closed_rates
from scalerl_jax.simulate.run import Simulation
from scalerl_jax.simulate.scenario import Failures, Scenario, scenario_of

matplotlib.use("Agg")
from matplotlib import pyplot  # after the backend is chosen

ROOT = Path(__file__).parents[1]
CHIPS_IN_ALL, REPLICA_CHIPS, SLOTS, CACHE = 64, 4, 128, 1_000_000
HOUR_S = 3600.0
ARCH = "llama3.1-8b"
BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#c9541a", "#2e8b57", "#6b6b6b"


def config_of(limit: int) -> config_lib.Config:
    """Return 8b.py with completions of up to `limit` tokens."""
    settings = runpy.run_path(str(ROOT / "configs" / "8b.py"))["get_config"]()
    settings.sampler.max_completion_tokens = limit
    settings.sampler.slots = SLOTS
    settings.model.remat = "full"
    settings.model.head_chunk_vocab = 16_384
    settings.batch.row_tokens = max(16_384, limit + 2048)
    return config_lib.resolve(settings)


def simulate(
    replicas: int,
    *,
    mean: float = 8000.0,
    limit: int = 14_336,
    tail: float = 4.0,
    steps: int = 80,
    shared: bool = False,
    **fields: Any,
) -> dict[str, float]:
    """Return figures of a run; `shared` chips do both in turn."""
    config = config_of(limit)
    generating = replicas * REPLICA_CHIPS
    said = dict(
        num_steps=steps,
        replicas=replicas,
        cache_tokens=CACHE,
        prompt_tokens=200,
        eval_every=0,
        checkpoint_every=50,
        replica_devices=REPLICA_CHIPS,
        learner_devices=CHIPS_IN_ALL if shared else CHIPS_IN_ALL - generating,
    )
    base = dataclasses.asdict(scenario_of(config)) | said | fields
    base["failures"] = fields.get("failures", Failures())
    scenario = Scenario(**base)
    lengths = SimulatedLengths(mean_tokens=mean, tail=tail, limit=limit)
    rates = closed_rates(config, ARCHITECTURES[ARCH], CHIPS["v5p"], scenario, lengths)
    figures = Simulation(scenario, rates, lengths).run().figures()
    return figures | {
        "chip_hours": CHIPS_IN_ALL * figures["step_s"] / HOUR_S,
        "replicas": replicas,
    }


def best(counts: Any, **how: Any) -> dict[str, float]:
    """Return the figures of the number of replicas with the least chip-hours."""
    return min((simulate(each, **how) for each in counts), key=cost)


def cost(figures: dict[str, float]) -> float:
    """Return chip-hours a step."""
    return figures["chip_hours"]


def say(*cells: Any, rule: bool = False) -> None:
    """Print a row of a table, with a rule below a heading."""
    texts = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"| {' | '.join(texts)} |")
    if rule:
        print("|" + "---|" * len(cells))
    sys.stdout.flush()


def split() -> None:
    """Print and draw chip-hours a step against the generators' part of the pod."""
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8))
    say(
        "mean tokens",
        "replicas",
        "chips that generate : learn",
        "s a step",
        "chip-hours a step",
        "learner idle",
        "generators idle",
        "slots in use",
        "staleness",
        rule=True,
    )
    for mean, limit, colour in ((8000, 14_336, BLUE), (16_000, 30_720, ORANGE)):
        rows = [
            simulate(count, mean=float(mean), limit=limit) for count in range(2, 16)
        ]
        least = min(rows, key=cost)
        for row in rows:
            if (
                row["replicas"] in (2, 6, 15)
                or abs(row["replicas"] - least["replicas"]) < 2
            ):
                tell(mean, row, mark="**" if row is least else "")
        chips = [REPLICA_CHIPS * row["replicas"] for row in rows]
        label = f"mean {mean:,} tokens"
        axes[0].plot(
            chips, [cost(row) for row in rows], "o-", color=colour, label=label
        )
        axes[1].plot(
            chips,
            [row["learner_idle"] for row in rows],
            "o-",
            color=colour,
            label=f"learner, {mean:,}",
        )
        axes[1].plot(
            chips,
            [row["generators_idle"] for row in rows],
            "s--",
            color=colour,
            label=f"generators, {mean:,}",
        )
    axes[0].set(
        xlabel="chips of 64 that generate", ylabel="chip-hours a step", ylim=(0, None)
    )
    axes[1].set(xlabel="chips of 64 that generate", ylabel="idle share", ylim=(0, 1))
    for each in axes:
        each.legend(fontsize=8)
        each.grid(alpha=0.3)
    save(figure, "balance-split.png")


def tell(mean: int, row: dict[str, float], *, mark: str = "") -> None:
    """Print a row of the table of splits."""
    generating = int(REPLICA_CHIPS * row["replicas"])
    say(
        f"{mean:,}",
        f"{mark}{row['replicas']}{mark}",
        f"{generating} : {CHIPS_IN_ALL - generating}",
        row["step_s"],
        f"{mark}{cost(row):.3g}{mark}",
        row["learner_idle"],
        row["generators_idle"],
        row["slots_in_use"],
        row["staleness"],
    )


MODES: dict[str, dict[str, Any]] = {
    "PipelineRL-8": dict(max_staleness=8),
    "PipelineRL-1": dict(max_staleness=1),
    "batched-8": dict(max_staleness=8, mode="batched", steps=96),
    "synchronous": dict(max_staleness=0),
    "synchronous, shared chips": dict(max_staleness=0, shared=True),
    "batched-8, shared chips": dict(
        max_staleness=8, mode="batched", shared=True, steps=96
    ),
}


def modes() -> None:
    """Print and draw the ways to overlap sampling and training, each at its best."""
    say(
        "mode",
        "mean tokens",
        "tail",
        "replicas",
        "s a step",
        "chip-hours a step",
        "of PipelineRL-8",
        "staleness",
        rule=True,
    )
    figure, axes = pyplot.subplots(figsize=(7.5, 3.6))
    cases = ((8000.0, 4.0, 14_336), (4000.0, 10.0, 30_720))
    for place, (mean, tail, limit) in enumerate(cases):
        first = 0.0
        for at, (name, how) in enumerate(MODES.items()):
            counts = [16] if how.get("shared") else range(5, 14)
            row = best(counts, mean=mean, tail=tail, limit=limit, **how)
            first = first or cost(row)
            say(
                name,
                int(mean),
                tail,
                row["replicas"],
                row["step_s"],
                cost(row),
                f"{cost(row) / first:.2f}x",
                row["staleness"],
            )
            axes.barh(
                at + 0.38 * place,
                cost(row) / first,
                0.36,
                color=(BLUE, ORANGE)[place],
                label=f"mean {mean:,.0f}, p99 = {tail:g} x median" if not at else None,
            )
    axes.set_yticks([at + 0.19 for at in range(len(MODES))], list(MODES))
    axes.invert_yaxis()
    axes.set(xlabel="chip-hours a step, PipelineRL-8 = 1")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, axis="x")
    save(figure, "balance-modes.png")


def losses() -> None:
    """Print the cost of losing machines."""
    say(
        "lost",
        "every, hours",
        "s until back",
        "replicas",
        "chip-hours a step",
        "more by",
        "replicas away",
        rule=True,
    )
    whole = {count: simulate(count, steps=200) for count in (8, 9, 10)}
    for count, row in whole.items():
        say("nothing", "", "", count, cost(row), "", "")
    cases = [(4.0, 180.0), (1.0, 60.0), (1.0, 180.0), (1.0, 600.0)]
    for (hours, start_s), count in [(case, 8) for case in cases] + [
        ((1.0, 180.0), 9),
        ((1.0, 180.0), 10),
    ]:
        failures = Failures(replica_mtbf_s=hours * HOUR_S, replica_start_s=start_s)
        row = simulate(count, steps=200, failures=failures)
        more = cost(row) / cost(whole[count]) - 1
        say(
            "each replica",
            hours,
            start_s,
            count,
            cost(row),
            f"{more:.1%}",
            f"{row['generators_down']:.1%}",
        )
    for hours, every in ((4.0, 50), (4.0, 5), (1.0, 5)):
        failures = Failures(learner_mtbf_s=hours * HOUR_S)
        row = simulate(9, steps=400, failures=failures, checkpoint_every=every)
        more = cost(row) / cost(whole[9]) - 1
        say(
            f"the learner; checkpoint.every = {every}",
            hours,
            failures.learner_start_s,
            9,
            cost(row),
            f"{more:.1%}",
            "",
        )


def tails() -> None:
    """Print the cost of long tails, at the same mean."""
    say(
        "p99 over median",
        "mode",
        "chip-hours a step",
        "of the shortest tail",
        "slots in use",
        "staleness in flight",
        "queued",
        rule=True,
    )
    names = ("PipelineRL-8", "batched-8", "synchronous")
    first: dict[str, float] = {}
    for tail in (2.0, 4.0, 10.0):
        for name in names:
            row = simulate(
                10,
                mean=4000.0,
                limit=61_440,
                tail=tail,
                **({"steps": 80} | MODES[name]),
            )
            first.setdefault(name, cost(row))
            say(
                tail,
                name,
                cost(row),
                f"{cost(row) / first[name]:.2f}x",
                row["slots_in_use"],
                row["staleness_in_flight"],
                row["staleness_queued"],
            )


def evaluations() -> None:
    """Print the cost of evaluations."""
    columns = ("every", "completions", "share of the time", "chip-hours a step")
    say(*columns, "and beside the run", rule=True)
    none = simulate(10, steps=200)
    say("never", 0, 0.0, cost(none), cost(none))
    for every, completions in (
        (200, 16_000),
        (100, 16_000),
        (25, 16_000),
        (100, 4_000),
    ):
        asked = dict(eval_every=every, eval_completions=completions)
        row = simulate(10, steps=401, **asked)
        beside = simulate(10, steps=401, eval_beside=True, **asked)
        share = f"{row['eval_share']:.1%}"
        say(every, completions, share, cost(row), cost(beside))


def waiting() -> None:
    """Print the effect of the number of finished groups that may wait."""
    say(
        "replicas",
        "queue.max_waiting",
        "slots in use",
        "learner idle",
        "generators idle",
        "chip-hours a step",
        "staleness",
        rule=True,
    )
    for replicas, count in itertools.product((6, 8, 10), (1, 2)):
        row = simulate(replicas, max_waiting=count)
        say(
            replicas,
            count,
            row["slots_in_use"],
            row["learner_idle"],
            row["generators_idle"],
            cost(row),
            row["staleness"],
        )


def save(figure: Any, name: str) -> None:
    """Write a picture into docs/."""
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / name, dpi=110)
    pyplot.close(figure)
    print(f"\npicture: docs/{name}")


PARTS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (split, modes, losses, tails, evaluations, waiting)
}


def main() -> None:
    """Print the requested answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS))
    for name in parser.parse_args().only.split(","):
        print(f"\n{name}\n")
        PARTS[name]()


if __name__ == "__main__":
    main()
