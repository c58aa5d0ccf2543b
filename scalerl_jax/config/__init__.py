"""Settings of a run: read from a file and the command line into a frozen Config.

`resolve` refuses unknown names, wrong types and impossible combinations before anything
is compiled.  Every setting is declared in `config.sections`.
"""

import dataclasses
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags, logging
from ml_collections import config_flags

from scalerl_jax.config import faults
from scalerl_jax.config.bases import ask_polaris as ask_polaris
from scalerl_jax.config.bases import based_on as based_on
from scalerl_jax.config.bases import scalerl_baseline as scalerl_baseline
from scalerl_jax.config.bases import vanilla_grpo as vanilla_grpo
from scalerl_jax.config.checks import validate as validate
from scalerl_jax.config.names import CONFIG_MEANS
from scalerl_jax.config.names import find_config as find_config
from scalerl_jax.config.sections import LOSSES as LOSSES
from scalerl_jax.config.sections import PACKAGES as PACKAGES
from scalerl_jax.config.sections import SETTINGS as SETTINGS
from scalerl_jax.config.sections import Config as Config
from scalerl_jax.config.sections import CriticConfig as CriticConfig
from scalerl_jax.config.sections import DataConfig as DataConfig
from scalerl_jax.config.sections import EpisodeConfig as EpisodeConfig
from scalerl_jax.config.sections import GeneratorsConfig as GeneratorsConfig
from scalerl_jax.config.sections import InterruptionConfig as InterruptionConfig
from scalerl_jax.config.sections import LoraConfig as LoraConfig
from scalerl_jax.config.sections import MathAnswer as MathAnswer
from scalerl_jax.config.sections import Mode as Mode
from scalerl_jax.config.sections import ModelConfig as ModelConfig
from scalerl_jax.config.sections import ObjectiveConfig as ObjectiveConfig
from scalerl_jax.config.sections import OptimizerConfig as OptimizerConfig
from scalerl_jax.config.sections import RewardConfig as RewardConfig
from scalerl_jax.config.sections import ScalingConfig as ScalingConfig
from scalerl_jax.config.sections import TeacherConfig as TeacherConfig
from scalerl_jax.config.settings import build as build
from scalerl_jax.config.settings import naming as naming


def defaults() -> ml_collections.ConfigDict:
    """Return the default settings, for config files and the command line to edit."""
    return ml_collections.ConfigDict(dataclasses.asdict(Config()))


def named(name: str) -> ml_collections.ConfigDict:
    """Return the editable settings of the package's config NAME[:ARGUMENT].

    Raises:
        ValueError: there is no such config.
    """
    file, _, argument = find_config(name).partition(":")
    return runpy.run_path(file)["get_config"](*([argument] if argument else []))


def to_json(config: Config) -> dict[str, Any]:
    """Return the resolved settings as JSON values, to store beside the results."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def resolve(config: ml_collections.ConfigDict, *, trained: bool = True) -> Config:
    """Return the settings of a file and the command line, checked and frozen.

    Without `trained` a policy is only sampled, and any sampling filter will do.

    Raises:
        ValueError: names the setting, its value, the limit and the way out.
    """
    check(config)
    resolved = build(Config, config.to_dict())
    resolved = _of_environment(resolved)
    validate(resolved, trained=trained)
    return resolved


def _of_environment(config: Config) -> Config:
    """Return the settings with absolute paths, and a package's prompts as data.tasks.

    A package's environment (env:...) brings its own prompts.
    """
    named, episode = config.environment, config.episode
    if episode.documents:
        episode = dataclasses.replace(episode, documents=_path(episode.documents))
        config = dataclasses.replace(config, episode=episode)
    if named.startswith(PACKAGES):
        if not all(task.startswith(PACKAGES) for task in config.data.tasks):
            data = dataclasses.replace(config.data, tasks=(named,))
            return dataclasses.replace(config, data=data)
    elif ".py" in named:  # a run may be resumed from another working directory
        return dataclasses.replace(config, environment=_path(named))
    return config


def _path(name: str) -> str:
    return os.path.abspath(os.path.expanduser(name))


_MOST_BYTES = 2**24  # size limit of a config file
_MORE_HELP = "--config.NAME=VALUE changes any setting; scalerl train --help lists them."


def define_config(
    values: flags.FlagValues = flags.FLAGS, argv: Sequence[str] | None = None
) -> flags.FlagHolder[Any]:
    """Define the flag --config, and one for each setting of the file it names.

    `argv` is the command line in which they are looked for; None: sys.argv.
    """
    return config_flags.DEFINE_config_file(
        "config",
        None,
        CONFIG_MEANS,
        flag_values=values,
        sys_argv=None if argv is None else list(argv),
    )


def wants_help(argv: Sequence[str]) -> bool:
    """Return whether a command line asks for help."""
    return bool({"--help", "-help", "-h"} & set(argv[1:]))


def flags_text(text: str) -> str:
    """Return absl's help on flags, without absl's own flags and names of modules."""
    text = text.partition("\nabsl.flags:\n")[0]
    lines = [line for line in text.splitlines() if line.startswith(" ")]
    return "\n".join(["flags:", *lines, ""])


def read_flags(
    values: flags.FlagValues,
    argv: Sequence[str],
    *,
    settings: type,
    about: str | None = None,
) -> list[str]:
    """Parse the flags of a command line; return the remaining arguments.

    `settings` is the dataclass that the settings of --config fill.  With --help or -h
    the text `about` and the flags are printed, and the program ends.

    Raises:
        ValueError: a flag or a setting is wrong, or the config file (a Python program)
            fails.
    """
    if wants_help(argv):
        about = (about or f"usage: {argv[0]} [flags]").strip()
        own = flags_text(values.get_help())
        sys.stdout.write(f"{about}\n\n{own}\n{_MORE_HELP}\n")
        sys.exit(0)
    argv = _with_found_config(argv)
    names = [word.lstrip("-") for argument in argv for word in argument.split("=", 1)]
    changed = [name for name in names if name.startswith("config.")]
    if changed and "config" not in names:
        raise ValueError(
            f"--{changed[0]} changes a setting of a config, and --config is missing: "
            f"add --config=configs/tiny.py"
        )
    if "config" in names[:-1]:
        _check_file(names[names.index("config") + 1])
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # a warning would repeat the error
    try:
        return values(list(argv))
    except (Exception, SystemExit) as error:  # a config runs any code
        if (reason := faults.explain(error, argv, settings)) is None:
            raise
        raise ValueError(reason) from error
    finally:
        logging.set_verbosity(verbosity)


def _with_found_config(argv: Sequence[str]) -> list[str]:
    """Return the command line with --config's name replaced by its file."""
    words = list(argv)
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag not in ("--config", "-config"):
            continue
        if equals:
            words[place] = f"{flag}={find_config(value)}"
        elif place + 1 < len(words):
            words[place + 1] = find_config(words[place + 1])
    return words


def _check_file(name: str) -> None:
    """Refuse a config file whose reading might never end (see `check_program`).

    The text after a colon is its argument.  A missing file is reported by the read.
    """
    path = Path(name.partition(":")[0])
    if path.exists() and not path.is_dir():
        check_program(path, called=f"--config={path}")


def check_program(path: Path, *, called: str) -> None:
    """Refuse a Python file whose reading might never end, before it is executed.

    Raises:
        ValueError: it is no regular file, or too large; `called` is its name there.
    """
    if not path.is_file():
        raise ValueError(f"{called} is no regular file; write its content into one")
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise ValueError(
            f"{called} has {size:,} bytes, and {_MOST_BYTES:,} are read at most; name "
            f"a Python file"
        )


def check(config: object) -> None:
    """Refuse a config whose file is missing or gives no ConfigDict.

    Raises:
        ValueError: there is no such file, or its get_config returns something else.
    """
    try:
        known = hasattr(config, "to_dict")
    except OSError as error:  # ml_collections raises a missing file's error only here
        said = str(error)
        reason = said[max(0, said.rfind("[Errno")) :]
        raise ValueError(f"--config cannot be read: {reason}") from error
    if not known:
        raise ValueError(
            f"--config is missing, or get_config in the file returns "
            f"{type(config).__name__}; it must return an ml_collections.ConfigDict, "
            f"such as scalerl_jax.config.defaults()"
        )
