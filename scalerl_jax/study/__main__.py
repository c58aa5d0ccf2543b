"""Many runs of one base, compared: a study is a file in `configs/studies`.

    scalerl study run NAME        # starts missing runs, resumes those that were stopped
    scalerl study stop NAME       # with --launch: saves the runs, removes the machines
    scalerl study status NAME
    scalerl study report NAME     # tables, pictures and a page in the study's folder
    scalerl study export NAME     # its curves as data, with a card, in studies/NAME

Exit status: 0 done, 1 a run failed, 2 a mistake in the study, 75 stopped by SIGTERM
(the study, or only some of its runs) and 130 by Ctrl-C: `run` then resumes it.
"""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalerl_jax.formats.reading import require_local
from scalerl_jax.launch import estimate
from scalerl_jax.machines import ray_access
from scalerl_jax.process.ending import Parser, answer
from scalerl_jax.process.preemption import INTERRUPTED, PREEMPTED, Preemption
from scalerl_jax.process.printing import to_stderr, to_stdout
from scalerl_jax.run.directory import lock_directory
from scalerl_jax.run.progress import Progress
from scalerl_jax.scaling import text
from scalerl_jax.study.design import Study, interleaved, read_study
from scalerl_jax.study.export import export
from scalerl_jax.study.launched import Launched
from scalerl_jax.study.report import describe, find, write_report
from scalerl_jax.study.runs import (
    LOG_FILE,
    Runner,
    State,
    check_machines,
    command,
    keep_record,
    look,
    read_record,
    unnamed,
)

_MOST_JOBS = 64


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; return the exit status."""
    flags = _parser().parse_args(argv)
    for name in ("root", "out"):
        require_local(getattr(flags, name) or "", flag=f"--{name}=")
    study = read_study(flags.study)
    root = flags.root or Path("runs") / "studies" / Path(flags.study).stem
    if flags.command in ("run", "stop"):
        launched = None
        if flags.launch:
            title = Path(flags.study).stem
            launched = Launched(flags.launch, study, title=title, root=root)
        if flags.command == "stop":
            return _stop(launched, _states(study, root), root)
        return _run(study, root, flags, launched)
    read_record(root)  # is it one that this code can read?
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
    parser.add_argument(
        "command", choices=("run", "stop", "status", "report", "export")
    )
    parser.add_argument("study", help="a study of the package (smoke), or a path")
    parser.add_argument(
        "--root", type=Path, help="folder of the study (default: runs/studies/NAME)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs side by side (default 1)"
    )
    parser.add_argument(
        "--ray", default="", help="of each run: local, auto or HOST:PORT of a cluster"
    )
    parser.add_argument(
        "--ray_without_token", action="store_true", help="of each run, like --ray"
    )
    parser.add_argument(
        "--launch",
        default="",
        metavar="FILE",
        help="a job of `scalerl launch`: each run is on such machines of its own",
    )
    parser.add_argument(
        "--yes", action="store_true", help="make the machines of --launch unasked"
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


def _run(
    study: Study, root: Path, flags: argparse.Namespace, launched: Launched | None
) -> int:
    if not 1 <= flags.jobs <= _MOST_JOBS:
        raise ValueError(f"--jobs={flags.jobs}: 1 to {_MOST_JOBS} runs side by side")
    options = _elsewhere(flags, launched)
    machines = launched.record if launched else {}
    to_stderr(text.warned(keep_record(study, root, machines)))
    if launched:
        missing = [s.planned for s in _states(study, root) if not s.finished]
        to_stderr("".join(f"{line}\n" for line in launched.price(missing)))
        if missing and machines["place"] != "local" and not flags.yes:
            estimate.confirm()
    with (
        lock_directory(root, flag="--root"),
        Preemption() as preemption,
        Progress() as progress,
    ):
        runner = Runner(
            study, root, progress, jobs=flags.jobs, prune=flags.prune, **options
        )
        failed = runner.run(lambda: preemption.requested)
    to_stdout(status_text(study, root))
    if preemption.requested:
        if launched:
            to_stdout(
                f"runs that have begun keep their machines and go on without this "
                f"command; `scalerl study stop {flags.study} --launch={flags.launch}` "
                f"saves them and removes the machines\n"
            )
        to_stdout("stopped; the same command resumes it\n")
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


def _elsewhere(flags: argparse.Namespace, launched: Launched | None) -> dict[str, Any]:
    """Return the runner's options for runs that are not this machine's processes.

    Raises:
        ValueError: the cluster or the job cannot be used.
    """
    if launched and flags.ray:
        raise ValueError(
            f"--ray={flags.ray} with --launch={flags.launch}: a job's `place` says "
            f"whether its hosts are a Ray cluster; leave --ray out"
        )
    if launched:
        launched.check()
        return {
            "command": launched.command,
            "release": launched.release,
            "on_cores": False,
        }
    if not flags.ray:
        if flags.ray_without_token:
            raise ValueError("--ray_without_token is for --ray=auto or HOST:PORT")
        return {}
    if flags.ray == "slice":
        raise ValueError(
            "--ray=slice is a command on every host of a slice; start a cluster on the "
            "hosts with `ray start` and name its HOST:PORT, or use --launch"
        )
    more = [f"--ray={flags.ray}"]
    if flags.ray_without_token:
        more.append("--ray_without_token")
    with ray_access.prepared(flags.ray, without_token=flags.ray_without_token):
        pass  # is the token there?
    return {"command": functools.partial(command, more=more), "on_cores": False}


def _stop(launched: Launched | None, states: Sequence[State], root: Path) -> int:
    """Save all runs that are on machines of their own, and remove these."""
    if launched is None:
        raise ValueError(
            "study stop is for runs on machines of --launch=FILE; those of this "
            "machine end with `study run`, by Ctrl-C"
        )
    launched.check()
    check_machines(root, launched.record)
    left = []
    for state in states:
        if (state.folder / LOG_FILE).exists():
            said = launched.release(state.planned)
            left += [said] if said else []
            to_stdout(f"{state.planned.name}: {said or 'no machines are left'}\n")
    return 1 if left else 0


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
