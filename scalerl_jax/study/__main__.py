"""Many runs of one base, compared: a study is a file in `configs/studies`.

    scalerl study run NAME        # starts missing runs, resumes those that were stopped
    scalerl study stop NAME       # after --launch: saves the runs, removes the machines
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
from scalerl_jax.launch.job import read_file
from scalerl_jax.machines import ray_access
from scalerl_jax.process.ending import FAILURE, INTERRUPTED, Parser, answer
from scalerl_jax.process.preemption import PREEMPTED, Preemption
from scalerl_jax.process.printing import to_stderr, to_stdout
from scalerl_jax.run.directory import lock_directory
from scalerl_jax.run.progress import Progress
from scalerl_jax.run.writing import write_json
from scalerl_jax.scaling import text
from scalerl_jax.study.design import Study, interleaved, read_study
from scalerl_jax.study.export import export
from scalerl_jax.study.launched import (
    JOB_FILE,
    Launched,
    begun_runs,
    read_launched,
)
from scalerl_jax.study.report import describe, find, write_report
from scalerl_jax.study.runs import (
    LOG_FILE,
    RELEASED_FILE,
    Runner,
    State,
    changed_arms,
    command,
    look,
    next_record,
    unnamed,
    write_record,
)

_MOST_JOBS = 64


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; return the exit status."""
    flags = _parser().parse_args(argv)
    for name in ("root", "out"):
        require_local(getattr(flags, name) or "", flag=f"--{name}=")
    study = read_study(flags.study)
    root = flags.root or Path("runs") / "studies" / Path(flags.study).stem
    root = root.expanduser()
    if flags.command == "run":
        return _run(study, root, flags)
    if flags.command == "stop":
        return _stop(study, root)
    to_stderr(text.warned(changed_arms(study, root)))
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
        to_stderr(text.warned(findings.notes))
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


def _run(study: Study, root: Path, flags: argparse.Namespace) -> int:
    if not 1 <= flags.jobs <= _MOST_JOBS:
        raise ValueError(f"--jobs={flags.jobs}: 1 to {_MOST_JOBS} runs side by side")
    if flags.launch and flags.ray:
        raise ValueError(
            f"--ray={flags.ray} with --launch={flags.launch}: a job's `place` says "
            f"whether its hosts are a Ray cluster; leave --ray out"
        )
    launched = None
    if flags.launch:
        title = Path(flags.study).stem
        launched = read_launched(flags.launch, study, title=title, root=root)
        launched.check_names()
    options = _elsewhere(flags, launched)
    record, warnings = next_record(study, root, launched and launched.record)
    to_stderr(text.warned(warnings))
    if launched:
        _ask(launched, _states(study, root), unasked=flags.yes)
    with (
        lock_directory(root, flag="--root"),
        Preemption() as preemption,
        Progress() as progress,
    ):
        write_record(root, record)
        if launched:
            launched.keep()
        runner = Runner(
            study, root, progress, jobs=flags.jobs, prune=flags.prune, **options
        )
        try:
            failed = runner.run(lambda: preemption.requested)
        finally:
            if launched:
                _tell_machines(_states(study, root), flags.study, root)
    to_stdout(status_text(study, root))
    if preemption.requested:
        to_stdout("stopped; the same command resumes it\n")
        return INTERRUPTED if preemption.interrupted else PREEMPTED
    if failed or runner.left:
        said = [f"{len(failed)} runs failed: {', '.join(failed)}"] if failed else []
        said += [f"{name}: {left}" for name, left in runner.left.items()]
        to_stderr("".join(f"error: {line}\n" for line in said))
        return FAILURE
    if runner.cut:  # by signals that the study itself did not get
        to_stderr(
            f"interrupted: {len(runner.cut)} of {len(interleaved(study))} runs "
            f"({', '.join(runner.cut)}); the same command resumes them\n"
        )
        return PREEMPTED
    return 0


def _ask(launched: Launched, states: Sequence[State], *, unasked: bool) -> None:
    """Check what machines are needed for, print their price, and ask for confirmation.

    Raises:
        ValueError: a check fails, or the answer is no.
    """
    missing = [state.planned for state in states if not state.finished]
    launched.check_place(missing)
    to_stderr("".join(f"{line}\n" for line in launched.price(missing)))
    if missing and launched.record["place"] != "local" and not unasked:
        estimate.confirm()


def _tell_machines(states: Sequence[State], name: str, root: Path) -> None:
    """Print which runs may have machines now that the command ends."""
    on = [
        state.planned.name
        for state in states
        if (state.folder / LOG_FILE).exists()
        and not (state.folder / RELEASED_FILE).exists()
    ]
    if on:
        to_stdout(
            f"{len(on)} runs keep their machines and go on without this command "
            f"({', '.join(on)}); to save them and remove the machines:  scalerl study "
            f"stop {name} --root={root}\n"
        )


def _elsewhere(flags: argparse.Namespace, launched: Launched | None) -> dict[str, Any]:
    """Return the runner's options for runs that are not this machine's processes.

    Raises:
        ValueError: the cluster cannot be used.
    """
    if launched:
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


def _stop(study: Study, root: Path) -> int:
    """Save all runs that are on machines of their own, and remove these.

    Also those of arms and seeds that the study no longer has.
    """
    runs = begun_runs(root)
    if not runs or not (root / JOB_FILE).exists():
        raise ValueError(
            f"--root={root} has no run on machines of its own: give the --root of the "
            f"`study run` with --launch; runs of this machine end with that command"
        )
    launched = Launched(read_file(str(root / JOB_FILE)), JOB_FILE, study, root)
    left = []
    with lock_directory(root, flag="--root"):
        for planned in runs:
            said = launched.release(planned)
            left += [said] if said else []
            if not said:
                write_json(root / planned.name / RELEASED_FILE, {})
            to_stdout(f"{planned.name}: {said or 'no machines are left'}\n")
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
