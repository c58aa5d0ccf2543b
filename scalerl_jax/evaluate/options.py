"""Flags of the commands that sample a checkpoint, and the settings that they change."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from scalerl_jax import config as config_lib
from scalerl_jax.config import Config
from scalerl_jax.config.command_line import read_flags
from scalerl_jax.evals.metrics import MAX_SAMPLES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a command line asks for."""

    config: Config  # with what the flags change
    checkpoint: str  # a directory or a file
    flags: flags.FlagValues


def parse(
    argv: Sequence[str], *, define: Callable[[flags.FlagValues], None]
) -> Options | flags.FlagValues:
    """Settings and flags of a command, whose own flags `define` adds.

    The flags alone if they ask for help or, by `rollouts`, for no checkpoint.

    Raises:
        ValueError: what is wrong with a flag or a setting.
    """
    values = flags.FlagValues()
    config_flag = config_flags.DEFINE_config_file(
        "config",
        None,
        "Settings, a Python file.",
        flag_values=values,
        sys_argv=list(argv),
    )
    _define_shared(values)
    define(values)
    if extra := read_flags(values, argv, settings=Config)[1:]:
        raise ValueError(f"unknown arguments {extra}")
    if values["help"].value or ("rollouts" in values and values["rollouts"].value):
        return values
    if values["config"].value is None:
        raise ValueError("--config is missing: --config=configs/tiny.py")
    return _resolved(config_flag.value, values)


def usage(values: flags.FlagValues) -> str:
    """What `--help` prints."""
    return (
        f"{values.get_help()}\n--config.NAME=VALUE changes any setting; "
        f"python -m scalerl_jax.main --help lists them.\n"
    )


def _define_shared(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "checkpoint",
        None,
        "A Hugging Face directory or id, a GGUF file, a run directory (its newest "
        "checkpoint) or one checkpoint of a run; without it, model.checkpoint.",
        flag_values=values,
    )
    numbers = {
        "samples": "Of each prompt; without it, eval.samples_per_prompt.",
        "num_prompts": "Spread evenly over those that there are; without it, all.",
    }
    for name, meaning in numbers.items():
        flags.DEFINE_integer(name, None, meaning, flag_values=values)
    flags.DEFINE_float(
        "temperature",
        None,
        "Of sampling, 0: the likeliest token; without it, eval.temperature.",
        flag_values=values,
    )
    flags.DEFINE_bool("help", False, "Say what the flags are.", flag_values=values)


def _resolved(given: Any, values: flags.FlagValues) -> Options:
    """The settings with what the flags change, checked."""
    checkpoint = values["checkpoint"].value
    if checkpoint:  # what the config names need not be there
        given.model.checkpoint = checkpoint
    if values["samples"].value is not None:
        given.eval.samples_per_prompt = values["samples"].value
    if "seed" in values and values["seed"].value is not None:
        given.seed = values["seed"].value
    config_lib.check(given)
    given.objective.allow_sampling_filters = True  # nothing is trained
    config = config_lib.resolve(given)
    if config.eval.samples_per_prompt > MAX_SAMPLES:
        raise ValueError(
            f"--samples={config.eval.samples_per_prompt} must be {MAX_SAMPLES} at most"
        )
    count = values["num_prompts"].value
    if count is not None:
        limits = config_lib.SETTINGS["eval.num_prompts"]
        limits.check(count, given=f"--num_prompts={count}")
    temperature = values["temperature"].value
    if temperature is not None:
        if not 0.0 <= temperature < math.inf:
            raise ValueError(f"--temperature={temperature} must be 0 or more")
        config = dataclasses.replace(
            config, eval=dataclasses.replace(config.eval, temperature=temperature)
        )
    checkpoint = checkpoint or config.model.checkpoint
    if not checkpoint:
        raise ValueError(
            "--checkpoint is missing, and model.checkpoint of the config is empty; "
            "name a Hugging Face directory, a GGUF file or a run directory"
        )
    return Options(config=config, checkpoint=checkpoint, flags=values)
