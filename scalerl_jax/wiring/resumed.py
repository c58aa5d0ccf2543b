"""The settings of a run that goes on: a config file, `--config=resumed.py:WORKDIR`."""

import dataclasses
from pathlib import Path

import ml_collections

from scalerl_jax.wiring.loading import read_settings


def get_config(workdir: str) -> ml_collections.ConfigDict:
    """Return the settings that its directory says it was started with."""
    config = read_settings(Path(workdir).expanduser() / "config.json")
    return ml_collections.ConfigDict(dataclasses.asdict(config))
