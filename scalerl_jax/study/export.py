"""A study as data: every evaluation of every run, as Parquet and CSV with a data card.

The data are what others need to fit curves or to test a fitter: `scalerl fit FOLDER`
reads them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl_jax.formats.reading import read_json
from scalerl_jax.run.directory import EVALS_FILE
from scalerl_jax.run.record import with_defaults
from scalerl_jax.run.writing import replace_file
from scalerl_jax.scaling.load import PROMPTS_COLUMN
from scalerl_jax.scaling.records import TOKENS_X
from scalerl_jax.scaling.resumed import settle
from scalerl_jax.scaling.run_settings import NOT_RECIPE
from scalerl_jax.scaling.tables import LEDGER_NAME, STUDY_CURVES, read_table
from scalerl_jax.study.design import Study, interleaved
from scalerl_jax.study.report import Row, to_csv
from scalerl_jax.study.runs import STUDY_FILE, look, read_record

MOST_BYTES = 20 * 2**20  # of one study's files
_UNITS = {
    "arm": "settings that differ from the base, by name (`settings.json`)",
    "seed": "of the run; runs of one seed saw the same prompts and random keys",
    "chip": "what the run was on; `compute_` columns count its time",
    "step": "optimizer steps before the evaluation",
    "generated_tokens": "sampled by then, evaluations left out",
    "train_tokens": "trained on by then",
    "train_flops": "of the model, by then",
    "compute_chip_hours": "charged by then: all but start-up and evaluations",
    "compute_chip_seconds": "the same in seconds",
    "pass_rate": "mean over the evaluation's prompts, in [0, 1]",
    "pass_rate_se": "its standard error, the choice of prompts in it",
    "num_prompts": "of the evaluation, the same for all runs",
    "prompts_per_step": "of training",
    "rollouts_per_prompt": "of training: the size of a group",
    "model_size": "params of the policy",
    "samples_per_prompt": "of the evaluation",
    PROMPTS_COLUMN: "pass rate of each prompt, in one order (Parquet only)",
}


def export(study: Study, root: Path, out: Path, *, title: str) -> list[Path]:
    """Write a study's curves, runs, settings and a card into `out`.

    Raises:
        ValueError: no run has an evaluation yet, or the files would be too large.
    """
    curves, runs = _read(study, root, _sizes(root))
    if not curves:
        raise ValueError(
            f"{root}: no run has an evaluation yet; scalerl study run makes them"
        )
    settings = _settings(read_record(root))
    plain = [{n: v for n, v in row.items() if n != PROMPTS_COLUMN} for row in curves]
    parquet, csv = STUDY_CURVES
    files = {
        parquet: _to_parquet(curves),
        csv: to_csv(plain),
        "runs.parquet": _to_parquet(runs),
        "runs.csv": to_csv(runs),
        "settings.json": (json.dumps(settings, indent=1) + "\n").encode(),
        "README.md": _card(study, curves, runs, settings, title).encode(),
    }
    if (size := sum(map(len, files.values()))) > MOST_BYTES:
        raise ValueError(
            f"{out}: the files would have {size / 2**20:.1f} MiB, and "
            f"{MOST_BYTES / 2**20:.0f} are the most; evaluate on fewer prompts, or "
            f"less often"
        )
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        replace_file(out / name, content)
    return [out / name for name in files]


def _sizes(root: Path) -> dict[str, Row]:
    """Return, by arm, the constants of a run that laws over several runs read."""
    began = read_record(root).get("arms", {})
    arms = {arm: with_defaults(settings) for arm, settings in began.items()}
    sizes: dict[str, Row] = {
        arm: {
            "prompts_per_step": settings["batch.num_prompts"],
            "rollouts_per_prompt": settings["batch.group_size"],
        }
        for arm, settings in arms.items()
    }
    models = {arm: settings["model.checkpoint"] for arm, settings in arms.items()}
    if len(set(models.values())) > 1:
        # Here: it brings JAX, which the other studies do without.
        from scalerl_jax.model.hugging_face import read_architecture

        for arm, checkpoint in models.items():
            sizes[arm]["model_size"] = read_architecture(checkpoint).num_params
    return sizes


def _read(
    study: Study, root: Path, sizes: Mapping[str, Row]
) -> tuple[list[Row], list[Row]]:
    """Return the rows of all evaluations and of all runs that have some."""
    curves: list[Row] = []
    runs: list[Row] = []
    for planned in sorted(interleaved(study), key=lambda run: (run.arm, run.seed)):
        state = look(study, root, planned)
        if not state.evaluation:
            continue
        ledger = read_json(state.folder / LEDGER_NAME)
        own = {"arm": planned.arm, "seed": planned.seed, "chip": ledger.get("chip")}
        if planned.arm not in sizes:
            raise ValueError(
                f"{root / STUDY_FILE} has no settings of arm {planned.arm}, which has "
                f"runs; put it back, or begin the study again with another --root"
            )
        more = sizes[planned.arm]
        curves += [own | row | more for row in _evaluations(state.folder)]
        seconds = {f"{n}_chip_s": s for n, s in ledger.get("chip_s", {}).items()}
        done = {"finished": state.finished, "last_step": state.evaluation["step"]}
        runs.append(own | done | seconds | ledger.get("counts", {}))
    return curves, runs


def _evaluations(folder: Path) -> Iterator[Row]:
    """Yield a run's evaluations; one that a resumed run repeated counts once."""
    rows = [row for _, row in read_table(folder / EVALS_FILE).rows]
    for place in settle([float(row["step"]) for row in rows]).order:
        row = rows[place]
        found = {
            name: value
            for name, value in row.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        found["compute_chip_seconds"] = 3600.0 * row["compute_chip_hours"]
        if isinstance(row.get(PROMPTS_COLUMN), list):
            found[PROMPTS_COLUMN] = row[PROMPTS_COLUMN]
        yield found


def _to_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a table as Parquet; missing cells are null, and a column has one type."""
    import pyarrow  # here: a heavy library that the other commands do without
    import pyarrow.parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    for name, values in columns.items():
        if any(isinstance(value, float) for value in values):
            columns[name] = [None if v is None else float(v) for v in values]
    arrays = {
        name: pyarrow.array(
            values,
            type=pyarrow.list_(pyarrow.float32()) if name == PROMPTS_COLUMN else None,
        )
        for name, values in columns.items()
    }
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(arrays), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _in_package(value: Any) -> Any:
    """Return a path of the package from its name on; other values unchanged."""
    if isinstance(value, str) and Path(value).is_absolute():
        _, found, rest = value.rpartition("/scalerl_jax/")
        return f"scalerl_jax/{rest}" if found else value
    return value


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that all arms share, each arm's own, and the code's versions.

    Settings that are not part of a recipe (paths, logging) are left out, and a file of
    the package is named without the folder that it was installed in.
    """
    arms = {
        arm: {
            n: _in_package(v)
            for n, v in of.items()
            if n.split(".")[0] not in NOT_RECIPE
        }
        for arm, of in record["arms"].items()
    }
    first = next(iter(arms.values()))
    shared = {
        name: value
        for name, value in first.items()
        if all(name in of and of[name] == value for of in arms.values())
    }
    own = {
        a: {n: v for n, v in of.items() if n not in shared} for a, of in arms.items()
    }
    kept = ("base", "axis", "seeds", "budget", "git_revision", "code", "versions")
    return {
        **{name: record.get(name) for name in kept},
        "arms": own,
        "settings": shared,
    }


def _commands(study: Study, runs: Sequence[Row], title: str) -> tuple[str, str]:
    """Return the commands that fit and compare the curves as the study's report does.

    Runs are paired only if every arm has the same seeds, two or more.
    """
    seeds: dict[str, set[int]] = {}
    for run in runs:
        seeds.setdefault(run["arm"], set()).add(run["seed"])
    first, *others = seeds.values()
    paired = len(first) > 1 and all(each == first for each in others)
    usual = study.axis == TOKENS_X
    x = "" if usual else f" --x {study.axis}"
    return (
        f"scalerl fit studies/{title}" + (f"        # x: {TOKENS_X}" if usual else x),
        f"scalerl compare studies/{title}{' --paired' if paired else ''}{x}",
    )


def _card(
    study: Study,
    curves: Sequence[Row],
    runs: Sequence[Row],
    settings: Mapping[str, Any],
    title: str,
) -> str:
    """Return the data card: the data, how they were made, and their columns."""
    finished = sum(run["finished"] for run in runs)
    chips = ", ".join(sorted({str(run["chip"]) for run in runs}))
    names = dict.fromkeys(name for row in curves for name in row)
    columns = [f"| `{n}` | {_UNITS.get(n, 'as the run wrote it')} |" for n in names]
    arms = [
        f"| `{arm}` | {', '.join(f'{n} = {v!r}' for n, v in of.items()) or 'nothing'} |"
        for arm, of in settings["arms"].items()
    ]
    budget = ", ".join(f"{n} = {v:g}" for n, v in settings["budget"].items())
    return "\n".join(
        [
            f"# Scaling curves of the study `{title}`",
            "",
            f"{len(curves)} evaluations of {len(runs)} runs ({finished} finished) of "
            f"reinforcement learning of a language model: pass rates on fixed "
            f"prompts against compute. Made by `scalerl study run {title}` and "
            f"`scalerl study export {title}`; everything is measured, nothing is "
            f"fitted, smoothed or left out.",
            "",
            "```sh",
            *_commands(study, runs, title),
            "```",
            "",
            f"Base `{study.base}`; seeds {', '.join(map(str, study.seeds))}; budget of "
            f"a run: {budget}; chip: {chips}. The pass rate of one run has the luck of "
            f"its seed: compare arms over seeds. Hours of a CPU are wall time, which "
            f"other work on the machine stretches; tokens and FLOPs do not move.",
            "",
            "| arm | differs in |",
            "|---|---|",
            *arms,
            "",
            "| column of `curves.parquet`, `curves.csv` | |",
            "|---|---|",
            *columns,
            "",
            "`runs.parquet`, `runs.csv`: one row per run, seconds of the chip by what "
            "they were spent on, and counts. `settings.json`: all settings, and the "
            "versions and digests of the code. The licence is that of the repository.",
            "",
        ]
    )
