"""Measure how hard training prompts are for a policy:

    scalerl data difficulty --config=configs/tiny.py --samples=8 \\
        --out=difficulty.jsonl [--dataset=NAME] [--checkpoint=PATH]

The file has a line per prompt, in the form that `data.difficulty` reads, with its pass
rate over the judged samples.  Started again with the same --out, the command resumes
with the missing prompts, including those without a judged sample.

Every line has a digest of the settings on which samples and verdicts depend; the first
line has them by name, too.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_jax.config import Config, to_json
from scalerl_jax.data import tasks
from scalerl_jax.data.curriculum import prompt_digest
from scalerl_jax.evaluate.policy import (
    Flag,
    Options,
    Policy,
    describe,
    open_policy,
    run_command,
    spread,
)
from scalerl_jax.formats.bounded import read_lines
from scalerl_jax.formats.reading import parse_json, require_local
from scalerl_jax.process.ending import INTERRUPTED
from scalerl_jax.process.full_disk import naming
from scalerl_jax.process.printing import to_stdout
from scalerl_jax.run.record import flatten
from scalerl_jax.run.writing import open_to_append
from scalerl_jax.types import Prompt
from scalerl_jax.wiring.prompts import check_environment, check_verifiers, load_prompts

_log = logging.getLogger(__name__)
_BAR = 40  # letters of the longest bar
# IsoCompute, https://arxiv.org/abs/2603.12151, which measures with 16 samples.
EASY, HARD = (0.3, 0.6), (0.0, 0.0625)
# Settings on which samples and verdicts depend, beside the prompt's text.
_SECTIONS = ("sampler", "interruption", "reward", "episode")
_OTHERS = (
    "seed",
    "environment",
    "data.tokenizer",
    "data.template",
    "data.system_prompt",
    "data.user_template",
    "data.enable_thinking",
    "data.answer_after",
    "model.sampler_dtype",
    "model.float32_head",
    "objective.cut_off_completions",
)
# Settings of those sections that decide about speed, about training alone, about which
# prompts there are, or about when a run is stopped.
_WITHOUT_EFFECT = frozenset(
    {
        "sampler.slots",
        "sampler.tokens_per_call",
        "sampler.prefill_tokens",
        "sampler.cache_tokens",
        "sampler.page_size",
        "sampler.attention",
        "sampler.prefix_cache",
        "sampler.kv_on_update",
        "sampler.length_stages",
        "sampler.temperature",
        "sampler.max_prompt_tokens",
        "reward.max_concurrent",
        "reward.max_unjudged_share",
        "reward.num_workers",
    }
)
PolicyId = tuple[int, str]  # policy version, fingerprint of the weights ("": unknown)
_FLAGS: tuple[Flag, ...] = (
    ("string", "out", "The file of JSON lines; an unfinished one is resumed."),
    (
        "string",
        "dataset",
        "A data set or task; without it, the training prompts of the config.",
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Measure what the flags ask for, and return the exit status."""
    return run_command(["difficulty", *arguments], _FLAGS, _measure, about=__doc__)


def _measure(options: Options) -> int:
    given, dataset, count = (
        options.flags[flag].value for flag in ("out", "dataset", "num_prompts")
    )
    if not given:
        raise ValueError("--out is missing: a file of JSON lines, which may be begun")
    require_local(given, flag="--out=")
    config = _with_prompts(options.config, dataset, count)
    own = check_environment(config)
    described = describe(config, options.checkpoint)
    config = described.config
    loaded = load_prompts(config, described.tokenizer)
    check_verifiers(config, loaded.examples)
    prompts = spread(loaded.train, count)
    names = [prompt_digest(prompt) for prompt in prompts]
    conditions = {
        "samples": config.eval.samples_per_prompt,
        "temperature": config.eval.temperature,
        "checkpoint": str(Path(options.checkpoint).absolute()),
    }
    settings = _settings(config)
    conditions["settings"] = _digest(settings)
    out = Path(given)
    rates, were, sizes = _read(out, conditions, settings)
    left = [
        prompt for name, prompt in zip(names, prompts, strict=True) if name not in rates
    ]
    complete = True
    if left:
        with _held(out, *sizes) as file, open_policy(described, own) as policy:
            _check_policy(out, were, policy)
            done = len(prompts) - len(left)
            complete = _append(
                file, policy, left, rates, conditions, settings, done=done
            )
    found = [rates[name] for name in names if name in rates]
    to_stdout(f"{histogram(found)}\n{len(found)} of {len(prompts)} in {out}\n")
    return 0 if complete else INTERRUPTED


def _check_policy(out: Path, were: set[PolicyId], policy: Policy) -> None:
    """Refuse to resume a file that other weights of the same checkpoint were used for.

    A run's newest checkpoint moves on, and a directory may be written again.
    """
    versions = {version for version, _ in were}
    if versions - {policy.policy_version}:
        raise ValueError(
            f"--out={out} was measured at policy version {sorted(versions)}, and the "
            f"checkpoint is now at {policy.policy_version}; name another file, or the "
            f"checkpoint of that version"
        )
    now = policy.identity["fingerprint"]
    prints = {fingerprint for _, fingerprint in were if fingerprint}
    if prints - {now}:
        raise ValueError(
            f"--out={out} was measured with other weights of the checkpoint "
            f"(fingerprint {', '.join(sorted(prints))}; now {now}); name another file"
        )


def _with_prompts(config: Config, dataset: str | None, count: int | None) -> Config:
    """Return the settings with the requested prompts; batches of 1 use all of them."""
    batch = dataclasses.replace(config.batch, num_prompts=1)
    data = config.data
    if dataset:
        generated = tasks.is_generated(dataset)
        data = dataclasses.replace(
            data,
            tasks=(dataset,),
            task_weights=(),
            train_prompts=(count or data.train_prompts) if generated else count or 0,
        )
    return dataclasses.replace(config, batch=batch, data=data)


def _settings(config: Config) -> dict[str, Any]:
    """Return the settings on which samples and verdicts depend, by name."""
    return {
        name: value
        for name, value in flatten(to_json(config)).items()
        if name in _OTHERS
        or (name.split(".")[0] in _SECTIONS and name not in _WITHOUT_EFFECT)
    }


def _digest(settings: dict[str, Any]) -> str:
    """Return 16 digits of SHA-256 of settings."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(
    out: Path, conditions: dict[str, Any], settings: dict[str, Any]
) -> tuple[dict[str, float], set[PolicyId], tuple[int, int]]:
    """Return the pass rates in a file by prompt, their policies, and two sizes.

    They are the bytes of its lines without a torn last one, and of the file.

    Raises:
        ValueError: they were measured with other conditions, or are no pass rates.
    """
    try:
        lines = list(read_lines(out)) if out.exists() else []
    except (OSError, ValueError) as error:
        raise ValueError(f"--out={out} cannot be read: {error}") from error
    size = sum(map(len, lines))
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    rates, policies, by_name = {}, set(), {}
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            digest, rate, policy = _measured(row)
            rates[digest] = rate
            policies.add(policy)
            was = {name: row[name] for name in conditions}
            by_name = dict(row.get("settings_by_name", by_name))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"--out={out}, line {number} is no measured pass rate ({error!r}); "
                f"name another file"
            ) from error
        if was != conditions:
            raise ValueError(
                f"--out={out}, line {number} was measured with "
                f"{_differences(was | by_name, conditions | settings)}; name another "
                f"file"
            )
    return rates, policies, (sum(map(len, lines)), size)


@contextlib.contextmanager
def _held(out: Path, complete: int, size: int) -> Iterator[io.FileIO]:
    """Open the file for this process alone, without a torn line after its lines.

    Raises:
        ValueError: it cannot be written, or another process writes it, or has written
            it since its `size` bytes were read.
    """
    try:
        file = open_to_append(out)
    except OSError as error:
        raise ValueError(f"--out={out} cannot be written: {error}") from error
    with file, naming(f"--out={out}"):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"--out={out} is being written by another process; name another file, "
                f"or wait for its end"
            ) from error
        if os.fstat(file.fileno()).st_size != size:
            raise ValueError(
                f"--out={out} has been written by another process meanwhile; start "
                f"this again, which measures what is left"
            )
        file.truncate(complete)
        yield file


def _measured(row: dict[str, Any]) -> tuple[str, float, PolicyId]:
    """Return a line's prompt, pass rate and policy.

    Raises:
        KeyError, TypeError or ValueError: it lacks one, or has a value of another kind.
    """
    digest, rate = row["sha256"], row["pass_rate"]
    version, fingerprint = row["version"], row.get("fingerprint", "")
    if type(rate) not in (int, float) or not 0.0 <= rate <= 1.0:
        raise ValueError(f"pass_rate = {rate!r} must be from 0 to 1")
    if not (isinstance(digest, str) and isinstance(fingerprint, str)):
        raise TypeError("sha256 and fingerprint must be texts")
    if type(version) is not int:
        raise TypeError(f"version = {version!r} must be an integer")
    return digest, rate, (version, fingerprint)


def _differences(was: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the conditions and settings that differ, for a message."""
    names = [name for name in now if was.get(name) != now[name]]
    if len(names) > 1 and "settings" in names:
        names.remove("settings")  # the digest of others that are named
    return ", ".join(
        f"{name} = {was.get(name)!r} (now it would be {now[name]!r})" for name in names
    )


def _append(
    file: io.FileIO,
    policy: Policy,
    prompts: Sequence[Prompt],
    rates: dict[str, float],
    conditions: dict[str, Any],
    settings: dict[str, Any],
    *,
    done: int,
) -> bool:
    """Measure prompts and write a line for each; return False after Ctrl-C."""
    try:
        with policy.metered(done + len(prompts), done=done) as meter:
            for group in policy.judged(prompts, meter):
                if not any(group.judged):
                    _log.warning(
                        "prompt %r is left out: its verifier failed (%s)",
                        *(group.prompt.text[:60], group.detail),
                    )
                    continue
                name = prompt_digest(group.prompt)
                rates[name] = group.pass_rate
                row = {"sha256": name, "pass_rate": rates[name], **conditions}
                row |= {"task": group.prompt.task, "version": policy.policy_version}
                row["fingerprint"] = policy.identity["fingerprint"]
                if len(rates) == 1:
                    row["settings_by_name"] = settings
                file.write(json.dumps(row).encode() + b"\n")
    except KeyboardInterrupt:
        return False
    return True


def histogram(rates: Iterable[float]) -> str:
    """Return pass rates in ten bins, at 0 and at 1, and IsoCompute's easy and hard."""
    found = np.array(list(rates))
    edges = np.round(np.linspace(0.0, 1.0, 11), 1)  # so that 0.3 is in its own bin
    inside = found[(found > 0.0) & (found < 1.0)]
    bins = {f"{low:.1f} to {low + 0.1:.1f}": 0 for low in edges[:-1]}
    bins = dict(zip(bins, np.histogram(inside, edges)[0].tolist(), strict=True))
    bins = {"0": int((found == 0.0).sum()), **bins, "1": int((found == 1.0).sum())}
    most = max(1, *bins.values())
    lines = [
        f"{name:>12} {count:>7} {'█' * round(_BAR * count / most)}\n"
        for name, count in bins.items()
    ]
    for name, (low, high) in {"easy": EASY, "hard": HARD}.items():
        count = int(((found >= low) & (found <= high)).sum())
        lines.append(f"{name}: {count} of {len(found)} in [{low}, {high}]\n")
    return "".join(lines)
