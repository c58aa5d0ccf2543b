"""Settings that may differ between a run and its resumption."""

from typing import Any

from scalerl_jax.config import to_json
from scalerl_jax.config.sections import SETTINGS, Config

_SECTIONS = ("checkpoint", "debug", "generators", "scaling", "tracking")
_SETTINGS = (
    "compile_cache",
    "data.directory",
    "reward.num_workers",
    "reward.max_unjudged_share",
    "train.num_steps",
    "train.max_skipped_steps",
    "train.cut_off_warning_share",
    "queue.batch_timeout_s",
    "queue.group_timeout_s",
    "eval.logged_rollouts",
    "eval.concurrent",
    "mesh.data",
    "mesh.slices",
    "mesh.processes",
)


def recorded(config: Config) -> dict[str, Any]:
    """Return the arguments of `open_run_directory` about the settings of a run."""
    return dict(
        settings=to_json(config),
        free_settings=free_settings(config),
    )


def free_settings(config: Config) -> tuple[str, ...]:
    """Return the settings that may differ between this run and its resumption."""
    fixed = ()
    if config.optimizer.schedule == "cosine" and not config.optimizer.decay_steps:
        # The cosine ends at num_steps: another number changes every learning rate.
        fixed = ("train.num_steps",)
    return tuple(
        name
        for name in SETTINGS
        if name.split(".")[0] in _SECTIONS or name in _SETTINGS
        if name not in fixed
    )
