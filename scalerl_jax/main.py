"""The main job of every config:

    python -m scalerl_jax.main --config=configs/tiny.py --workdir=runs/tiny

Starts a run in the directory, or goes on with the one that is there.
"""

import logging
import sys
from collections.abc import Sequence

import jax
from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags

from scalerl_jax import build
from scalerl_jax import config as config_lib
from scalerl_jax.train import Outcome, train
from scalerl_jax.utils.run_directory import open_run_directory

_log = logging.getLogger("scalerl_jax.main")  # not "__main__", when run as a module

# What may differ between a run and its resumption.
FREE_SETTINGS = (
    "train.num_steps",
    "train.max_skipped_steps",
    "train.cut_off_warning_share",
    "checkpoint.every",
    "checkpoint.keep",
    "queue.batch_timeout_s",
    "queue.group_timeout_s",
    "eval.logged_rollouts",
)
_USAGE_ERROR = 2

_CONFIG = config_flags.DEFINE_config_file("config", None, "Settings, a Python file.")
_WORKDIR = flags.DEFINE_string("workdir", "", "Directory of the run.")
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Call jax.distributed.initialize() first (TPU VMs, pods)."
)


def run(config: config_lib.Config, workdir: str) -> Outcome:
    """Build the parts of a run and train."""
    directory = open_run_directory(
        workdir, settings=config_lib.to_json(config), free_settings=FREE_SETTINGS
    )
    with directory:
        ledger = build.make_ledger(config)
        ledger.start()
        _log.info("loading and compiling")
        with ledger.activity("startup", pool=build.pool_names(config)[0]):
            parts = build.build(config, directory.path, ledger)
        try:
            return train(config, parts, directory.path)
        finally:
            parts.close()


def main(argv: Sequence[str]) -> None:
    """Resolve the settings and run; a user's mistake is one line, status 2."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    if _DISTRIBUTED.value:
        jax.distributed.initialize()
    # Our own messages, and other libraries' warnings.
    absl_logging.get_absl_handler().setFormatter(logging.Formatter("%(message)s"))
    absl_logging.set_verbosity(absl_logging.WARNING)
    logging.getLogger("scalerl_jax").setLevel(logging.INFO)
    try:
        config = config_lib.resolve(_CONFIG.value)
        outcome = run(config, _WORKDIR.value)
    except ValueError as error:
        _log.debug("refused", exc_info=True)
        sys.stderr.write(f"error: {error}\n")
        sys.exit(_USAGE_ERROR)
    where = "stopped by SIGTERM" if outcome.preempted else "finished"
    sys.stdout.write(
        f"{where} after step {outcome.policy_version}; everything is in "
        f"{_WORKDIR.value}\n"
        f"fit the curve:  python -m scalerl_jax.scaling fit {_WORKDIR.value}\n"
    )


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
