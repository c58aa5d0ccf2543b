"""The command line: flags in, figures on stdout, files in a directory."""

import dataclasses
import datetime
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from scalerl_jax.build.prompts import evaluation_set
from scalerl_jax.build.verifying import check_verifiers
from scalerl_jax.config import to_json
from scalerl_jax.evaluate.answers import final_answer, has_votes
from scalerl_jax.evaluate.figures import Outcome, figures, table
from scalerl_jax.evaluate.meter import metered
from scalerl_jax.evaluate.options import Options, parse, usage
from scalerl_jax.evaluate.policy import Described, Policy, describe, open_policy, spread
from scalerl_jax.evaluate.results import Results, row_of
from scalerl_jax.evaluate.viewer import read_rows, write_page
from scalerl_jax.types import Prompt
from scalerl_jax.utils.failures import tell
from scalerl_jax.utils.run_directory import git_revision, versions

_INTERRUPTED = 130  # exit status
_OVERALL = "overall"

_log = logging.getLogger(__name__)

Sets = Mapping[str, Sequence[Prompt]]


def run(argv: Sequence[str]) -> int:
    """Do what the flags ask for; the exit status."""
    try:
        options = parse(argv, define=_define)
        if isinstance(options, Options):
            return _evaluate(options)
        if options["help"].value:
            sys.stdout.write(usage(options))
        else:
            _view(options)
        return 0
    except (ValueError, RuntimeError, TimeoutError, FloatingPointError) as error:
        return tell(error)
    except KeyboardInterrupt:  # nothing is done yet
        return _INTERRUPTED


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "out",
        None,
        "What is written, and must not be there; without it, a directory in "
        "evaluations/, or for --rollouts a page of their name, where the command runs.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "sets",
        None,
        "Data sets and tasks, with commas; without it, eval.sets, else data.tasks.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "seed", None, "Of sampling; without it, the config's.", flag_values=values
    )
    flags.DEFINE_string(
        "rollouts",
        None,
        "A samples.jsonl, or the rollouts.jsonl of a run: only make its page, --out.",
        flag_values=values,
    )


def _view(values: flags.FlagValues) -> None:
    """A page of rollouts that are there already."""
    rollouts = Path(str(values["rollouts"].value))
    out = Path(str(values["out"].value or rollouts.with_suffix(".html").name))
    if out.exists():
        raise ValueError(f"--out={out} is there already; name another")
    partial = out.with_name(f".{out.name}.partial")
    try:
        count = write_page(
            partial, read_rows(rollouts), title=str(rollouts), note="Rollouts to read"
        )
        partial.rename(out)
    except OSError as error:
        raise ValueError(f"--out={out} cannot be written: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{rollouts} holds no rollouts: {error!r}") from error
    finally:
        partial.unlink(missing_ok=True)
    sys.stdout.write(f"{count} prompts in {out}\n")


def _evaluate(options: Options) -> int:
    """Sample and judge every set; the exit status."""
    count = options.flags["num_prompts"].value
    described = describe(_with_prompts(options, count))
    config = described.config
    names = tuple(options.flags["sets"].value or config.eval.sets or config.data.tasks)
    if len(set(names)) < len(names) or _OVERALL in names:
        raise ValueError(f"--sets={','.join(names)} must hold sets, each of them once")
    sets = {
        name: spread(evaluation_set(config, described.tokenizer, name), count)
        for name in names
    }
    check_verifiers(config, [each for prompts in sets.values() for each in prompts])
    out = Path(options.flags["out"].value or _default_out(options.checkpoint, names))
    started, begun_s = datetime.datetime.now(datetime.UTC), time.monotonic()
    with Results(out.absolute()) as results, open_policy(described) as policy:
        outcomes, complete = _sample(described, policy, sets, results)
        if not any(outcomes.values()):
            return _INTERRUPTED
        found = _summed(outcomes)
        summary = {
            "complete": complete,
            "checkpoint": policy.identity,
            "samples_per_prompt": config.eval.samples_per_prompt,
            "temperature": config.eval.temperature,
            "seed": config.seed,
            "sets": {name: found[name] for name in found if name != _OVERALL},
            "overall": found[_OVERALL],
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - begun_s, 1),
            "versions": versions(),
            "git_revision": git_revision(),
            "config": to_json(config),
        }
        results.finish(summary, title=_title(policy), note=_note(summary))
    shown = found if len(found) > 2 else summary["sets"]  # one set is all of it
    sys.stdout.write(f"{_title(policy)}\n{_note(summary)}\n\n{table(shown)}\n{out}\n")
    return 0 if complete else _INTERRUPTED


def _with_prompts(options: Options, count: int | None) -> Options:
    """So many held-out prompts of each task; data sets have as many as they have."""
    config = options.config
    if count is not None:
        own = dataclasses.replace(config.eval, num_prompts=count)
        config = dataclasses.replace(config, eval=own)
    return dataclasses.replace(options, config=config)


def _sample(
    described: Described, policy: Policy, sets: Sets, results: Results
) -> tuple[dict[str, list[Outcome]], bool]:
    """The outcomes by set, and whether they are all; Ctrl-C leaves what is done."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in sets}
    first = 0
    try:
        total = sum(map(len, sets.values()))
        with metered(policy.evaluator.progress, total) as meter:
            for name, prompts in sets.items():
                evaluator = dataclasses.replace(policy.evaluator, prompts=prompts)
                for group in evaluator.judged(
                    policy.params,
                    policy_version=policy.policy_version,
                    listener=meter.listen,
                ):
                    reference = group.prompt.reference
                    answers = [
                        final_answer(
                            given,
                            reference,
                            math_answer=described.config.reward.math_answer,
                        )
                        for given in group.answers
                    ]
                    votes = [each.vote for each in answers]
                    row = row_of(
                        group,
                        [each.text for each in answers],
                        name=name,
                        tokenizer=described.tokenizer,
                        answer_after=evaluator.judging.answer_after,
                    )
                    results.add(first + group.place, row)
                    outcomes[name].append(
                        Outcome.of(group, votes if has_votes(reference) else None)
                    )
                    meter.done()
                first += len(prompts)
    except KeyboardInterrupt:
        _log.warning("interrupted: what is done is kept, marked as incomplete")
        return outcomes, False
    return outcomes, True


def _summed(outcomes: Mapping[str, list[Outcome]]) -> dict[str, dict[str, Any]]:
    """The figures by set, and of all prompts alike, whichever set they are of."""
    found = {name: figures(each) for name, each in outcomes.items() if each}
    everything = [outcome for each in outcomes.values() for outcome in each]
    return found | {_OVERALL: figures(everything)}


def _default_out(checkpoint: str, names: Sequence[str]) -> Path:
    """evaluations/CHECKPOINT/SETS, where the command runs."""
    parts = [name.replace("/", "_").replace(":", "_") for name in names]
    return Path("evaluations") / Path(checkpoint).absolute().name / "+".join(parts)


def _title(policy: Policy) -> str:
    version = policy.policy_version
    return policy.identity["path"] + (f", version {version}" if version else "")


def _note(summary: Mapping[str, Any]) -> str:
    text = (
        f"{summary['samples_per_prompt']} samples of each of "
        f"{summary['overall']['prompts']} prompts at temperature "
        f"{summary['temperature']:g}, seed {summary['seed']}; pass rate "
        f"{_rate(summary['overall']['mean']['value'])}"
    )
    if summary["complete"]:
        return text
    return f"INTERRUPTED, and short completions finish first: {text}"


def _rate(value: float | None) -> str:
    return "unknown: nothing was judged" if value is None else f"{value:.3f}"
