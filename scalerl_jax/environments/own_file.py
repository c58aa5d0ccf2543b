"""The setting `environment`: a user's file as text, or the name of a module.

    my_task.py:score    reward functions, or the maker of an environment, in a file
    tools               a name: built in, or an entry point of `scalerl.environments`

Nothing here executes or imports the file: `own` does, in verifier processes.
"""

import os
import platform
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from scalerl_jax.config import EpisodeConfig, RewardConfig
from scalerl_jax.environments.verdict import OwnReward
from scalerl_jax.formats.bounded import read_text

_FORM = re.compile(r"(?P<file>.+\.py):(?P<functions>\w+(?:,\w+)*)")
_MOST_BYTES = 2**24  # of a file
_GROUP = "scalerl.environments"  # of entry points
TOOLS = "tools"  # the environment of our own
_NAMED = {TOOLS: "scalerl_jax.environments.tools:make"}


def split_name(environment: str) -> tuple[Path, tuple[str, ...]]:
    """Return the file and the functions of "my_task.py:correct,short".

    Raises:
        ValueError: it is not of this form.
    """
    found = _FORM.fullmatch(environment)
    if not found:
        raise ValueError(
            f"environment = {environment!r} must be FILE.py:FUNCTION, or "
            f"FILE.py:FUNCTION,FUNCTION for several, or env:PACKAGE, or one of "
            f"{sorted(_known_names())}"
        )
    functions = tuple(found["functions"].split(","))
    if len(set(functions)) < len(functions):
        raise ValueError(f"environment = {environment!r} must name each function once")
    return Path(found["file"]), functions


def _known_names() -> dict[str, str]:
    """Return the environments that have a name, and where each of them is."""
    installed = metadata.entry_points(group=_GROUP)
    return {each.name: each.value for each in installed} | _NAMED


def read_own(
    environment: str,
    reward: RewardConfig,
    *,
    episode: EpisodeConfig | None = None,
    answer_after: str = "",
    prints: bool = False,
) -> OwnReward:
    """Return the reward that a setting names, with the file's text.

    `prints`: what the functions print goes to stderr; else it is discarded.

    Raises:
        ValueError: there is no such file, or a weight or variable is missing.
    """
    text: str | None = None
    if place := _known_names().get(environment):
        name, _, function = place.partition(":")
        functions: tuple[str, ...] = (function,)
    else:
        path, functions = split_name(environment)
        name = str(path)
        try:
            text = read_text(path, most=_MOST_BYTES)
        except ValueError as error:
            raise ValueError(
                f"environment = {environment!r} cannot be read: {error}"
            ) from error
    if reward.weights and len(reward.weights) != len(functions):
        raise ValueError(
            f"reward.weights = {reward.weights} has {len(reward.weights)} weights for "
            f"the {len(functions)} functions of environment = {environment!r}"
        )
    check_variables(reward.variables)
    episode = episode or EpisodeConfig()
    return OwnReward(
        file=name,
        text=text,
        functions=functions,
        weights=reward.weights or (1.0,) * len(functions),
        max_magnitude=reward.max_magnitude,
        max_concurrent=reward.max_concurrent,
        variables=reward.variables,
        prints=prints,
        max_observation_tokens=episode.max_observation_tokens,
        given={
            "tools": episode.tools,
            "documents": episode.documents,
            "timeout_s": reward.timeout_s,
        },
        answer_after=answer_after,
    )


def check_variables(names: Iterable[str]) -> None:
    """Check that this process has the environment variables for its verifiers.

    Raises:
        ValueError: one is missing.
    """
    for name in names:
        if name not in os.environ:
            raise ValueError(
                f"reward.variables names {name!r}, which is not in the environment of "
                f"this process on {platform.node()}; export it there, or leave it out"
            )
