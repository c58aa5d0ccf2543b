"""Many runs of one base, compared: a study is a file in `configs/studies`.

    scalerl study run NAME        # starts missing runs, resumes those that were stopped
    scalerl study status NAME
    scalerl study report NAME     # tables, pictures and a page in the study's folder
    scalerl study export NAME     # its curves as data, with a card, in studies/NAME

Exit status: 0 done, 1 a run failed, 2 a mistake in the study, 75 stopped by SIGTERM
(the study, or only some of its runs) and 130 by Ctrl-C: `run` then resumes it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from scalerl_jax.formats.reading import require_local
from scalerl_jax.process.ending import Parser, answer
from scalerl_jax.process.preemption import INTERRUPTED, PREEMPTED, Preemption
from scalerl_jax.process.printing import to_stderr, to_stdout
from scalerl_jax.run.directory import lock_directory
from scalerl_jax.run.progress import Progress
from scalerl_jax.scaling import text
from scalerl_jax.study.design import Study, interleaved, read_study
from scalerl_jax.study.export import export
from scalerl_jax.study.report import describe, find, write_report
from scalerl_jax.study.runs import Runner, State, keep_record, look, unnamed

_MOST_JOBS = 64


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; return the exit status."""
    flags = _parser().parse_args(argv)
    for name in ("root", "out"):
        require_local(getattr(flags, name) or "", flag=f"--{name}=")
    study = read_study(flags.study)
    root = flags.root or Path("runs") / "studies" / Path(flags.study).stem
    if flags.command == "run":
        return _run(study, root, flags)
    if flags.command == "status":
        if flags.json:
            facts = [_facts(study, each) for each in _states(study, root)]
            to_stdout(json.dumps(facts) + "\n")
        else:
            to_stdout(status_text(study, root))
        return 0
    to_stderr(text.warned(unnamed(study, root)))
    title = Path(flags.study).stem
    if flags.command == "export":
        out = flags.out or Path("studies") / title
        files = export(study, root, out, title=title)
    else:
        findings, out = find(study, root), flags.out or root / "report"
        files = write_report(study, findings, root, out, title=title)
        to_stdout(describe(study, findings))
    to_stdout("".join(f"wrote {file}\n" for file in files))
    return 0


def _parser() -> Parser:
    parser = Parser(
        "python -m scalerl_jax.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("run", "status", "report", "export"))
    parser.add_argument("study", help="a study of the package (smoke), or a path")
    parser.add_argument(
        "--root", type=Path, help="folder of the study (default: runs/studies/NAME)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs side by side on this machine"
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help="stop a run whose forecast cannot reach a finished run of its seed; "
        "without it, runs that were stopped for that resume",
    )
    parser.add_argument(
        "--json", action="store_true", help="for status: one JSON list on stdout"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the report (default: ROOT/report), or of what is exported "
        "(default: studies/NAME)",
    )
    return parser


def _run(study: Study, root: Path, flags: argparse.Namespace) -> int:
    if not 1 <= flags.jobs <= _MOST_JOBS:
        raise ValueError(f"--jobs={flags.jobs}: 1 to {_MOST_JOBS} runs side by side")
    to_stderr(text.warned(keep_record(study, root)))
    with (
        lock_directory(root, flag="--root"),
        Preemption() as preemption,
        Progress() as progress,
    ):
        runner = Runner(study, root, progress, jobs=flags.jobs, prune=flags.prune)
        failed = runner.run(lambda: preemption.requested)
    to_stdout(status_text(study, root))
    if preemption.requested:
        to_stdout(f"stopped; resume it with:  scalerl study run {flags.study}\n")
        return INTERRUPTED if preemption.interrupted else PREEMPTED
    if failed:
        to_stderr(f"error: {len(failed)} runs failed: {', '.join(failed)}\n")
        return 1
    states = _states(study, root)
    cut = [s.planned.name for s in states if not (s.finished or s.behind)]
    if cut:  # by signals that the study itself did not get
        to_stderr(
            f"interrupted: {len(cut)} of {len(states)} runs ({', '.join(cut)}); the "
            f"same command resumes them\n"
        )
        return PREEMPTED
    return 0


def _states(study: Study, root: Path) -> list[State]:
    return [look(study, root, planned) for planned in interleaved(study)]


def status_text(study: Study, root: Path) -> str:
    """Return a row for each run, and the number of finished ones."""
    states = _states(study, root)
    rows = [_row(study, state) for state in states]
    done = sum(state.finished for state in states)
    table = text.table(("run", "state", "step", "pass rate"), rows, words=True)
    return f"{table}{done} of {len(states)} runs finished\n"


def _facts(study: Study, state: State) -> dict[str, Any]:
    """Return what the status says of a run; its reason is empty unless it was ended."""
    word, reason = "not begun", ""
    if state.finished:
        word = "finished"
    elif state.behind:
        word, reason = "stopped", f"it cannot reach {state.behind}"
    elif state.failure:
        word, reason = "failed", state.failure
    elif state.step or state.evaluation:
        word = "begun"
    return {
        "run": state.planned.name,
        "state": word,
        "reason": reason,
        "step": state.step,
        "num_steps": study.steps,
        "pass_rate": state.evaluation.get("pass_rate"),
    }


def _row(study: Study, state: State) -> tuple[str, ...]:
    facts = _facts(study, state)
    rate = facts["pass_rate"]
    return (
        facts["run"],
        ": ".join(filter(None, (facts["state"], facts["reason"]))),
        f"{facts['step']}/{facts['num_steps']}",
        "-" if rate is None else f"{rate:.3f}",
    )


if __name__ == "__main__":
    sys.exit(answer(main))
