"""Settings of a run: from what a file and the command line give to a frozen Config.

`resolve` refuses unknown names, wrong types and impossible combinations before anything
is compiled.  Every setting stands in `config.sections`.
"""

import dataclasses
import json
from typing import Any

import ml_collections

from scalerl_jax.config.bases import ask_polaris as ask_polaris
from scalerl_jax.config.bases import based_on as based_on
from scalerl_jax.config.bases import scalerl_baseline as scalerl_baseline
from scalerl_jax.config.bases import vanilla_grpo as vanilla_grpo
from scalerl_jax.config.checks import validate
from scalerl_jax.config.command_line import check as check
from scalerl_jax.config.sections import SETTINGS as SETTINGS
from scalerl_jax.config.sections import Config as Config
from scalerl_jax.config.sections import DataConfig as DataConfig
from scalerl_jax.config.sections import InterruptionConfig as InterruptionConfig
from scalerl_jax.config.sections import MathAnswer as MathAnswer
from scalerl_jax.config.sections import Mode as Mode
from scalerl_jax.config.sections import ModelConfig as ModelConfig
from scalerl_jax.config.sections import ObjectiveConfig as ObjectiveConfig
from scalerl_jax.config.sections import RewardConfig as RewardConfig
from scalerl_jax.config.sections import ScalingConfig as ScalingConfig
from scalerl_jax.config.settings import build as build


def defaults() -> ml_collections.ConfigDict:
    """Return the defaults above, as what `configs/*.py` and the command line edit."""
    return ml_collections.ConfigDict(dataclasses.asdict(Config()))


def to_json(config: Config) -> dict[str, Any]:
    """Return the resolved settings as JSON values, to be written beside the results."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def resolve(config: ml_collections.ConfigDict) -> Config:
    """Return frozen and checked settings from what a file and the command line gave.

    Raises:
        ValueError: names the setting, its value, the limit and the way out.
    """
    check(config)
    resolved = build(Config, config.to_dict())
    validate(resolved, SETTINGS)
    return resolved
