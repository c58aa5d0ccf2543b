"""Measure how hard training prompts are for a policy:

    python -m scalerl_jax.data difficulty --config=configs/tiny.py --samples=8 \
        --out=difficulty.jsonl [--dataset=NAME] [--checkpoint=PATH]

A line per prompt, in the form that `data.difficulty` reads, its pass rate over the
samples that were judged.  Started again with the same --out it goes on with the prompts
that are not there yet, those without a judged sample among them.
"""

import dataclasses
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from scalerl_jax.build.prompts import load_prompts
from scalerl_jax.build.verifying import check_verifiers
from scalerl_jax.config import Config
from scalerl_jax.data import tasks
from scalerl_jax.data.prompts import text_digest
from scalerl_jax.evaluate.meter import metered
from scalerl_jax.evaluate.options import Options, parse, usage
from scalerl_jax.evaluate.policy import Policy, describe, open_policy, spread
from scalerl_jax.types import Prompt
from scalerl_jax.utils.failures import tell
from scalerl_jax.utils.reading import parse_json

_log = logging.getLogger(__name__)
_INTERRUPTED = 130  # exit status
_BAR = 40  # letters of the longest bar
# IsoCompute, https://arxiv.org/abs/2603.12151, which measures with 16 samples.
EASY, HARD = (0.3, 0.6), (0.0, 0.0625)


def main(arguments: Sequence[str]) -> int:
    """Measure what the flags ask for; the exit status."""
    try:
        options = parse(["difficulty", *arguments], define=_define)
        if not isinstance(options, Options):
            sys.stdout.write(usage(options))
            return 0
        return _measure(options)
    except (ValueError, RuntimeError, TimeoutError, FloatingPointError) as error:
        return tell(error)


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "out",
        None,
        "The file of JSON lines; one that is begun goes on.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "dataset",
        None,
        "A data set or task; without it, the training prompts of the config.",
        flag_values=values,
    )


def _measure(options: Options) -> int:
    values = options.flags
    if not values["out"].value:
        raise ValueError("--out is missing: a file of JSON lines, which may be begun")
    options = dataclasses.replace(
        options,
        config=_config(
            options.config, values["dataset"].value, values["num_prompts"].value
        ),
    )
    described = describe(options)
    loaded = load_prompts(described.config, described.tokenizer)
    check_verifiers(described.config, loaded.examples)
    prompts = spread(loaded.train, values["num_prompts"].value)
    conditions = {
        "samples": described.config.eval.samples_per_prompt,
        "temperature": described.config.eval.temperature,
        "checkpoint": str(Path(options.checkpoint).absolute()),
    }
    out = Path(values["out"].value)
    rates, were = _read(out, conditions)
    names = [text_digest(prompt.text) for prompt in prompts]
    left = [place for place, name in enumerate(names) if name not in rates]
    complete = True
    if left:
        with open_policy(described) as policy:
            _check_version(out, policy.policy_version, were)
            complete = _append(
                out,
                policy,
                [prompts[place] for place in left],
                conditions,
                rates,
                total=len(prompts),
            )
    found = [rates[name] for name in names if name in rates]
    sys.stdout.write(f"{histogram(found)}\n{len(found)} of {len(prompts)} in {out}\n")
    return 0 if complete else _INTERRUPTED


def _config(config: Config, dataset: str | None, count: int | None) -> Config:
    """The settings with the prompts that are asked for; none is left over a batch."""
    batch = dataclasses.replace(config.batch, num_prompts=1)
    data = config.data
    if dataset:
        generated = dataset in tasks.TASKS
        data = dataclasses.replace(
            data,
            tasks=(dataset,),
            task_weights=(),
            train_prompts=(count or data.train_prompts) if generated else count or 0,
        )
    return dataclasses.replace(config, batch=batch, data=data)


def _read(out: Path, conditions: dict[str, Any]) -> tuple[dict[str, float], set[int]]:
    """Pass rates that are there, by prompt, and of which policy versions they are.

    A torn last line is cut off.

    Raises:
        ValueError: they were measured in another way, or it is another file.
    """
    try:
        lines = out.read_bytes().splitlines(keepends=True) if out.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            with open(out, "rb+") as file:
                file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
    except OSError as error:
        raise ValueError(f"--out={out} cannot be read: {error}") from error
    rates, versions = {}, set()
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            rates[row["sha256"]] = row["pass_rate"]
            versions.add(row["version"])
            was = {name: row[name] for name in conditions}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"--out={out}, line {number} is no measured pass rate ({error!r}); "
                f"name another file"
            ) from error
        if was != conditions:
            raise ValueError(
                f"--out={out}, line {number} was measured with {was}, and now it "
                f"would be {conditions}; name another file"
            )
    return rates, versions


def _check_version(out: Path, version: int, were: set[int]) -> None:
    """A run's newest checkpoint is another one after some time."""
    if were - {version}:
        raise ValueError(
            f"--out={out} was measured at policy version {sorted(were)}, and the "
            f"checkpoint is now at {version}; name another file, or the checkpoint of "
            f"that version"
        )


def _append(
    out: Path,
    policy: Policy,
    prompts: Sequence[Prompt],
    conditions: dict[str, Any],
    rates: dict[str, float],
    *,
    total: int,
) -> bool:
    """Measure prompts, a line each as they finish; False if Ctrl-C came before all."""
    evaluator = dataclasses.replace(policy.evaluator, prompts=prompts)
    try:
        with (
            open(out, "ab", buffering=0) as file,
            metered(evaluator.progress, total, done=total - len(prompts)) as meter,
        ):
            for group in evaluator.judged(
                policy.params,
                policy_version=policy.policy_version,
                listener=meter.listen,
            ):
                meter.done()
                if not any(group.judged):
                    _log.warning(
                        "prompt %r is left out: its verifier failed (%s)",
                        *(group.prompt.text[:60], group.detail),
                    )
                    continue
                name = text_digest(group.prompt.text)
                rates[name] = group.pass_rate
                row = {"sha256": name, "pass_rate": rates[name], **conditions}
                row |= {"task": group.prompt.task, "version": policy.policy_version}
                file.write(json.dumps(row).encode() + b"\n")
    except OSError as error:
        raise ValueError(f"--out={out} cannot be written: {error}") from error
    except KeyboardInterrupt:
        return False
    return True


def histogram(rates: Iterable[float]) -> str:
    """Pass rates in ten bins and those at 0 and 1, and IsoCompute's easy and hard."""
    found = np.array(list(rates))
    edges = np.round(np.linspace(0.0, 1.0, 11), 1)  # so that 0.3 is in its own bin
    inside = found[(found > 0.0) & (found < 1.0)]
    bins = [("0", int((found == 0.0).sum()))]
    bins += [
        (f"{low:.1f} to {low + 0.1:.1f}", int(count))
        for low, count in zip(edges, np.histogram(inside, edges)[0], strict=False)
    ]
    bins.append(("1", int((found == 1.0).sum())))
    most = max(1, *(count for _, count in bins))
    lines = [
        f"{name:>12} {count:>7} {'█' * round(_BAR * count / most)}\n"
        for name, count in bins
    ]
    for name, (low, high) in {"easy": EASY, "hard": HARD}.items():
        count = int(((found >= low) & (found <= high)).sum())
        lines.append(f"{name}: {count} of {len(found)} in [{low}, {high}]\n")
    return "".join(lines)
