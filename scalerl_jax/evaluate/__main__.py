"""Evaluate a checkpoint:

    scalerl evaluate --config=configs/tiny.py --checkpoint=runs/x \\
        --sets=chain_sum,spell_backward --samples=16

or make a page of existing rollouts:

    scalerl evaluate --rollouts=runs/x/rollouts.jsonl --out=rollouts.html

Exit status: 0 done, 1 a failure on the way, 2 a mistake in a setting or a flag, 130
interrupted; what was finished is kept then.
"""

import dataclasses
import datetime
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from scalerl_jax.config import Config, to_json
from scalerl_jax.data.tasks import equal_shares, is_generated
from scalerl_jax.evaluate.metrics import PromptOutcome, figures, table
from scalerl_jax.evaluate.policy import (
    Described,
    Flag,
    Options,
    Policy,
    describe,
    open_policy,
    run_command,
    spread,
)
from scalerl_jax.evaluate.results import (
    Results,
    open_results,
    read_rows,
    row_of,
    write_page,
)
from scalerl_jax.formats.paths import inside
from scalerl_jax.formats.reading import require_local
from scalerl_jax.process.ending import INTERRUPTED
from scalerl_jax.process.printing import log_to_stderr, to_stdout
from scalerl_jax.run.record import git_revision, versions
from scalerl_jax.types import Prompt
from scalerl_jax.wiring.prompts import (
    check_environment,
    check_verifiers,
    count_trained,
    evaluation_set,
)
from scalerl_jax.wiring.thinking import why_no_answers

_OVERALL = "overall"
_FLAGS: tuple[Flag, ...] = (
    (
        "string",
        "out",
        "Output path, which must not exist; default: a directory in evaluations/, or "
        "for --rollouts a page with their name, in the working directory.",
    ),
    ("list", "sets", "Data sets and tasks; without it, eval.sets, else data.tasks."),
    ("integer", "seed", "Sampling seed; default: the config's."),
    ("boolean", "json", "One JSON object on stdout: the summary that is in --out."),
    (
        "string",
        "rollouts",
        "A samples.jsonl, or the rollouts.jsonl of a run: only make its page, --out.",
    ),
)
_log = logging.getLogger("scalerl_jax.evaluate")  # not "__main__"

Sets = Mapping[str, Sequence[Prompt]]


def run(argv: Sequence[str]) -> int:
    """Do what the flags ask for, and return the exit status."""
    return run_command(argv, _FLAGS, _evaluate, about=__doc__, view=_view)


def _view(values: flags.FlagValues) -> int:
    """Make a page of existing rollouts, and return the exit status."""
    rollouts = Path(str(values["rollouts"].value))
    require_local(values["out"].value or "", flag="--out=")
    out = Path(str(values["out"].value or rollouts.with_suffix(".html").name))
    if out.exists():
        raise ValueError(f"--out={out} already exists; name another")
    try:
        count = write_page(
            out, read_rows(rollouts), title=str(rollouts), note="Rollouts to read"
        )
    except OSError as error:
        raise ValueError(f"--out={out} cannot be written: {error}") from error
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{rollouts} holds no rollouts: {error!r}") from error
    to_stdout(f"{count} prompts in {out}\n")
    return 0


def _evaluate(options: Options) -> int:
    """Sample and judge every set, and return the exit status."""
    require_local(options.flags["out"].value or "", flag="--out=")
    config, count = options.config, options.flags["num_prompts"].value
    if count is not None:  # for each task; the size of a data set is fixed
        of_each = dataclasses.replace(config.eval, num_prompts=count)
        config = dataclasses.replace(config, eval=of_each)
    own = check_environment(config)
    described = describe(config, options.checkpoint)
    config = described.config
    names = tuple(options.flags["sets"].value or config.eval.sets or config.data.tasks)
    if len(set(names)) < len(names) or _OVERALL in names:
        raise ValueError(f"--sets={','.join(names)} must hold sets, each of them once")
    whole = {name: evaluation_set(config, described.tokenizer, name) for name in names}
    sets = {name: spread(prompts, count) for name, prompts in whole.items()}
    check_verifiers(config, [each for prompts in sets.values() for each in prompts])
    trained = _training_prompts(described, sets, whole)
    out = Path(options.flags["out"].value or _default_out(options.checkpoint, names))
    started, begun_s = datetime.datetime.now(datetime.UTC), time.monotonic()
    with open_results(out.absolute()) as results, open_policy(described, own) as policy:
        outcomes, complete = _sample(described, policy, sets, results)
        if not any(outcomes.values()):
            return INTERRUPTED
        everything = [each for group in outcomes.values() for each in group]
        if all(set(each.statuses) == {"no_answer"} for each in everything):
            why = why_no_answers(config)
            _log.warning("warning: no completion holds an answer: %s", why)
        found = {name: figures(each) for name, each in outcomes.items() if each}
        overall = figures(everything)
        summary = {
            "complete": complete,
            "checkpoint": policy.identity,
            "samples_per_prompt": config.eval.samples_per_prompt,
            "temperature": config.eval.temperature,
            "seed": config.seed,
            "training_prompts": trained,
            "sets": found,
            "overall": overall,
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - begun_s, 1),
            "versions": versions(),
            "git_revision": git_revision(),
            "config": to_json(config),
        }
        results.finish(summary, title=_title(policy), note=_note(summary))
    shown = found if len(found) == 1 else found | {_OVERALL: overall}
    if options.flags["json"].value:
        to_stdout(json.dumps(summary | {"out": str(out)}) + "\n")
    else:
        to_stdout(f"{_title(policy)}\n{_note(summary)}\n\n{table(shown)}\n{out}\n")
    return 0 if complete else INTERRUPTED


def _training_prompts(
    described: Described, sets: Sets, whole: Sets
) -> dict[str, int] | None:
    """Return how many prompts of each set may be training prompts, with a warning.

    `sets` are the prompts that are asked, of those in `whole`.  None: the run of the
    checkpoint is unknown.
    """
    if described.run is None:
        return None
    found = {
        name: count_trained(
            described.run, described.config, name, prompts, size=len(whole[name])
        )
        for name, prompts in sets.items()
    }
    for name, count in found.items():
        if count:
            _log.warning(
                "warning: %s of %d prompts of %s are training prompts of the run of "
                "the checkpoint: its pass rate is not that of held-out prompts%s",
                count if is_generated(name) else f"up to {count}",
                *(len(sets[name]), name, _way_out(described.run, name)),
            )
    return found


def _way_out(run: Config, name: str) -> str:
    """Return what to ask instead of a set with training prompts, for a warning."""
    shares = equal_shares(run.data.tasks, run.eval.num_prompts)
    if is_generated(name) and shares.get(name) and not run.eval.sets:
        return f"; --num_prompts={shares[name]} asks those that it held out"
    return "; name another set or split"


def _sample(
    described: Described, policy: Policy, sets: Sets, results: Results
) -> tuple[dict[str, list[PromptOutcome]], bool]:
    """Return the outcomes by set, and whether they are complete (no Ctrl-C)."""
    outcomes: dict[str, list[PromptOutcome]] = {name: [] for name in sets}
    first = 0
    try:
        with policy.metered(sum(map(len, sets.values()))) as meter:
            for name, prompts in sets.items():
                for group in policy.judged(prompts, meter):
                    row, votes = row_of(group, described, name=name)
                    results.add(first + group.place, row)
                    outcomes[name].append(PromptOutcome.of(group, votes))
                first += len(prompts)
    except KeyboardInterrupt:
        _log.warning("interrupted: what is done is kept, marked as incomplete")
        return outcomes, False
    return outcomes, True


def _default_out(checkpoint: str, names: Sequence[str]) -> Path:
    """Return evaluations/CHECKPOINT/SETS, in the working directory."""
    parts = [name.replace("/", "_").replace(":", "_") for name in names]
    place = f"{Path(checkpoint).absolute().name}/{'+'.join(parts)}"
    return inside(Path("evaluations"), place, follow_links=True)


def _title(policy: Policy) -> str:
    version = policy.policy_version
    return policy.identity["path"] + (f", version {version}" if version else "")


def _note(summary: Mapping[str, Any]) -> str:
    rate = summary["overall"]["mean"]["value"]
    text = (
        f"{summary['samples_per_prompt']} samples of each of "
        f"{summary['overall']['prompts']} prompts at temperature "
        f"{summary['temperature']:g}, seed {summary['seed']}; pass rate "
        f"{'unknown: nothing was judged' if rate is None else f'{rate:.3f}'}"
    )
    if summary["complete"]:
        return text
    return f"INTERRUPTED, and short completions finish first: {text}"


if __name__ == "__main__":
    log_to_stderr()
    sys.exit(run(sys.argv))
