"""Train a policy as a config says:

    scalerl train --config=configs/tiny.py --workdir=runs/tiny

Starts a run in the directory, or resumes the one in it, for which `--workdir` alone is
enough.  `--help` lists every setting.  On a TPU VM `--distributed` lets the run save
itself before the machine is preempted.
"""

import logging
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from scalerl_jax.process.collecting import collect_rarely
from scalerl_jax.process.preemption import PREEMPTED, end_at_signals

if __name__ == "__main__":  # before the imports below, which take seconds
    end_at_signals()
    collect_rarely()

import jax
from absl import app, flags
from absl import logging as absl_logging

from scalerl_jax import config as config_lib
from scalerl_jax import wiring
from scalerl_jax.config.listing import list_settings
from scalerl_jax.config.resumption import recorded
from scalerl_jax.formats.bounded import last_lines, read_lines
from scalerl_jax.formats.reading import is_remote, parse_json
from scalerl_jax.machines import ray_access
from scalerl_jax.objective.describe import describe
from scalerl_jax.parallel import rendezvous
from scalerl_jax.parallel.xla import exact_products, keep_programs
from scalerl_jax.process.ending import FAILURE, INTERRUPTED, MISTAKE, answer, tell
from scalerl_jax.process.printing import (
    Stderr,
    guard_terminal,
    log_this_package,
    to_stderr,
    to_stdout,
)
from scalerl_jax.run.directory import (
    EVALS_FILE,
    STATUS_FILE,
    RunDirectory,
    local_directory,
    open_run_directory,
)
from scalerl_jax.run.progress import Progress
from scalerl_jax.train import RunOutcome, train
from scalerl_jax.wiring import loading

_CONFIG = config_lib.define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.")
_DESCRIBE = flags.DEFINE_bool(
    "describe", False, "Print the objective of the config, and run nothing."
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed",
    False,
    "Call jax.distributed.initialize() first. On TPU VMs, Kubernetes, Slurm and Open "
    "MPI the next three flags are detected; elsewhere all three are needed.",
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of process 0; the port must be free there."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Processes of the run.")
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "Number of this process, from 0."
)
_RAY = ray_access.define_flags("learner and generators")


def _opened(config: config_lib.Config, workdir: str) -> RunDirectory:
    return open_run_directory(workdir, **recorded(config))


def run(config: config_lib.Config, workdir: str) -> RunOutcome:
    """Build the parts of a run and train."""
    keep_programs(config.compile_cache)
    if why_not := wiring.why_not_one_process(config):
        raise ValueError(why_not)
    arch = wiring.make_architecture(config)
    devices = jax.devices()
    exact_products(config.model.compute_dtype)
    config = wiring.fit_devices(config, arch, len(devices), kind=devices[0].device_kind)
    with _opened(config, workdir) as directory, Progress() as progress:
        # An earlier run in this directory with several processes may have left it.
        (directory.path / STATUS_FILE).unlink(missing_ok=True)
        ledger = wiring.make_ledger(config)
        ledger.start()
        pool = wiring.learner_pool(config)
        with ledger.activity("startup", pool=pool), progress.bar("loading"):
            run_state = wiring.make_run(
                config, directory.path, ledger, progress, bucket=directory.bucket
            )
        try:
            return train(config, run_state, directory.path)
        finally:
            run_state.close()


def _run_on_ray(
    config: config_lib.Config, workdir: str, address: str
) -> RunOutcome | None:
    """Train over the processes of a cluster."""
    with ray_access.prepared(address, without_token=_RAY.without_token.value):
        from scalerl_jax.cluster.run import run_on_ray  # Ray is an extra

        return run_on_ray(
            config,
            address,
            timeout_s=_RAY.start_timeout_s.value,
            open_directory=lambda fitted: _opened(fitted, workdir),
        )


def main(argv: Sequence[str]) -> None:
    """Resolve the settings and run; print an expected failure as one line."""
    if len(argv) > 1:
        _end(f"unknown arguments {argv[1:]}")
    workdir = _WORKDIR.value
    # Our own messages, and other libraries' warnings.
    handler = absl_logging.get_absl_handler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.python_handler.setStream(Stderr())
    absl_logging.set_verbosity(absl_logging.WARNING)
    log_this_package()
    if not flags.FLAGS["config"].present:
        why = f"--workdir={workdir} has no run to resume, and " if workdir else ""
        _end(f"{why}--config is missing: --config=configs/tiny.py")
    config = _resolved()
    if _DESCRIBE.value:
        to_stdout(describe(config))
        return
    if not workdir:  # "" perhaps of a shell's variable that is not set
        _end("--workdir is missing: --workdir=runs/NAME")
    _join()
    try:
        if (address := _RAY.address.value) is None:
            outcome = run(config, workdir)
        else:
            outcome = _run_on_ray(config, workdir, address)
    except (ValueError, RuntimeError, OSError, FloatingPointError) as error:
        sys.exit(tell(error))
    if outcome is not None:
        status = answer(lambda: _say(outcome, workdir, ray=address))
        if outcome.preempted:  # and saved, whether or not that could be printed
            status = INTERRUPTED if outcome.interrupted else PREEMPTED
        if status:
            sys.exit(status)


def _resolved() -> config_lib.Config:
    """Return the checked settings, or end the process."""
    try:
        config = config_lib.resolve(_CONFIG.value)
    except ValueError as error:
        _end(str(error))
    except TimeoutError as error:  # a file in a bucket, which does not answer
        _end(str(error), status=FAILURE)
    if rows := config.warmstart.rows:
        _end(
            f"warmstart.rows = {rows} are for scalerl warmstart, and scalerl train "
            f"learns from rollouts of its own; leave them out, and give it another "
            f"--workdir than a warm start's"
        )
    return config


def _say(outcome: RunOutcome, workdir: str, *, ray: str | None = None) -> None:
    """Print the end of a run, and where its files are; `ray`: the value of --ray."""
    where = "finished"
    if outcome.preempted:
        where = "interrupted" if outcome.interrupted else "stopped by SIGTERM"
        over = f" --ray={shlex.quote(ray)}" if ray else ""
        to_stdout(
            f"{where} after step {outcome.policy_version}, which is saved; resume it "
            f"with:  scalerl train --workdir={shlex.quote(workdir)}{over}\n"
        )
        return
    if outcome.stop_reason is not None:
        where = f"stopped early (scaling.stop: {outcome.stop_reason})"
    here = local_directory(workdir)
    first = parse_json(next(read_lines(here / EVALS_FILE)))
    last = parse_json(*last_lines(here / EVALS_FILE))
    measured = f"{first['pass_rate']:.3f} before"
    if last["step"] > first["step"]:
        measured += (
            f", {last['pass_rate']:.3f} at step {last['step']}, after "
            f"{last['compute_chip_hours']:.4f} chip-hours"
        )
    to_stdout(
        f"{where} after step {outcome.policy_version}: pass rate on held-out prompts "
        f"{measured}\n"
        f"everything is in {workdir}; the curve and its fit:  scalerl fit "
        f"{shlex.quote(str(here) if is_remote(workdir) else workdir)}\n"
    )


def _join() -> None:
    """Connect to the other processes; end this one if they cannot form a run."""
    try:
        _RAY.check()
    except ValueError as error:
        _end(str(error))
    if not _DISTRIBUTED.value:
        for flag in (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID):
            if flag.value is not None:
                _end(
                    f"--{flag.name}={flag.value} has no meaning without "
                    f"--distributed; add it"
                )
        return

    try:
        place = rendezvous.find_place(
            coordinator=_COORDINATOR.value,
            num_processes=_NUM_PROCESSES.value,
            process_id=_PROCESS_ID.value,
            timeout_s=_RAY.start_timeout_s.value,
        )
        if place.num_processes > 1:
            _end(
                f"--distributed: this is one of {place.num_processes} processes, but "
                f"the sampler, the prompts and the evaluation of a run are in one "
                f"process; start one, on a machine whose devices hold the learner and "
                f"the sampler, or several with --ray"
            )
        rendezvous.initialize(place, timeout_s=_RAY.start_timeout_s.value)
    except ValueError as error:
        _end(str(error))
    except (RuntimeError, TimeoutError) as error:
        _end(str(error), status=FAILURE)
    end_at_signals()  # again: JAX has replaced the handler by its own


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Read the flags; return the other arguments.  A wrong flag ends the program."""
    if config_lib.wants_help(argv):
        modules = (config_lib, ray_access, sys.modules[__name__])
        own = "\n".join(map(flags.FLAGS.module_help, modules))
        text = config_lib.flags_text(own)
        to_stdout(f"{__doc__}\n{text}\n{list_settings()}\n")
        sys.exit(0)
    try:
        argv = loading.with_settings(argv)
        return config_lib.read_flags(flags.FLAGS, argv, settings=config_lib.Config)
    except ValueError as error:
        _end(str(error))
    except TimeoutError as error:  # the bucket of --workdir does not answer
        _end(str(error), status=FAILURE)


def _end(message: str, *, status: int = MISTAKE) -> NoReturn:
    to_stderr(f"error: {' '.join(message.split())}\n")
    sys.exit(status)


if __name__ == "__main__":
    guard_terminal()
    app.run(main, flags_parser=parse_flags)
