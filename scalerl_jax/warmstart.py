"""Supervised steps before reinforcement learning, or on what a run has solved:

    scalerl warmstart --config=configs/tiny.py --workdir=runs/warm ROWS...

ROWS are files of chats or of prompts with completions, in any form that `scalerl data`
reads, or directories of runs with tracking.train_rollouts.  Tokens of answers alone are
learned.  The directory holds checkpoints, metrics.jsonl and, at the end, `model`: a
Hugging Face directory, which `model.checkpoint` takes.  With `--workdir` alone, a warm
start that was stopped goes on.  With `--ray` the learner is mesh.processes processes of
a Ray cluster, on one machine or many.  `--help` lists every setting; those of this
command are in the section warmstart.
"""

import contextlib
import dataclasses
import logging
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from absl import flags

from scalerl_jax import config as config_lib
from scalerl_jax import wiring
from scalerl_jax.batching.packing import computed_tokens
from scalerl_jax.config import Config, to_json
from scalerl_jax.config.resumption import recorded
from scalerl_jax.contract import Learner
from scalerl_jax.export import export
from scalerl_jax.formats.reading import is_remote
from scalerl_jax.learner.checkpoint import Checkpointer
from scalerl_jax.learner.forward import LearnerFlops
from scalerl_jax.machines import ray_access
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.saving import check_place
from scalerl_jax.parallel.xla import (
    exact_products,
    explained,
    keep_freed_memory,
    keep_programs,
)
from scalerl_jax.process.ending import INTERRUPTED, answer
from scalerl_jax.process.preemption import PREEMPTED, Preemption
from scalerl_jax.process.printing import log_to_stderr, to_stdout
from scalerl_jax.run import lost_work
from scalerl_jax.run.directory import (
    STATUS_FILE,
    RunDirectory,
    local_directory,
    open_run_directory,
)
from scalerl_jax.run.ledger import Ledger, kept_on_disk
from scalerl_jax.run.metrics import MetricsWriter
from scalerl_jax.run.progress import Progress
from scalerl_jax.run.record import flatten
from scalerl_jax.wiring import loading
from scalerl_jax.wiring.devices import learner_pool, make_meshes
from scalerl_jax.wiring.learning import check_trained, make_flops, make_learning_rates
from scalerl_jax.wiring.sampling import constant_positions, make_tokenizer
from scalerl_jax.wiring.supervision import (
    AnswerRows,
    RowOrder,
    digest_of_sequences,
    load_sequences,
    name_rows,
    supervised,
)

if TYPE_CHECKING:
    from scalerl_jax.cluster.session import Cluster

MODEL = "model"  # in the directory, what was made
_EVERY_S = 10.0  # between two lines of progress where there is no terminal
_log = logging.getLogger("scalerl_jax.warmstart")  # not "__main__"


@dataclasses.dataclass(kw_only=True)
class WarmStart:
    """Everything that the steps of a warm start read and change."""

    config: Config
    rows: AnswerRows
    learner: Learner
    state: Any  # of the learner
    ledger: Ledger
    flops: LearnerFlops
    learning_rates: Callable[[int], Any]  # steps applied -> rate of the next one
    progress: Progress
    digest: str  # of the rows
    step: int = 0  # batches that have been learned, or skipped
    skipped: int = 0  # of these, those that changed nothing

    def save(self) -> None:
        """Save the state and the books."""
        with self.activity("checkpoint"):
            books: dict[str, Any] = {"ledger": self.ledger.state()}
            books |= {"rows": self.digest, "skipped": self.skipped}
            self.learner.save(self.step, self.state, host=books, groups=())

    def ensure_saved(self) -> None:
        """Return once the last checkpoint is on disk.

        A save that is lost with a process of the learner is made again, and a damaged
        one does not count.  `good` waits for the last save.
        """
        while self.step not in self.learner.checkpointer.good():
            self.save()

    def activity(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Count the time inside the block as `name` on the learner's chips."""
        return self.ledger.activity(name, pool=learner_pool(self.config))

    def resume(self, directory: Path) -> None:
        """Go on from the newest checkpoint, if there is any.

        Raises:
            ValueError: it is of other rows.
        """
        restored = self.learner.restore()
        lost_work.resume(self.ledger, directory, restored and restored.host)
        if restored is None:
            return
        if restored.host["rows"] != self.digest:
            raise ValueError(
                f"warmstart.rows = {self.config.warmstart.rows} have other tokens than "
                f"at step {restored.step}; put back what was learned, or choose "
                f"another --workdir"
            )
        self.state, self.step = restored.state, restored.step
        self.skipped = restored.host.get("skipped", 0)
        _log.info("resumed after step %d", restored.step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun:
    """A learner that has started."""

    learner: Learner
    state: Any  # of the learner
    chip: str  # kind of its devices


def warm_start(config: Config, workdir: str, cluster: "Cluster | None" = None) -> int:
    """Make the supervised steps of warmstart.rows; return the exit status.

    It is 0 if all are made, and another one where SIGTERM or Ctrl-C stopped them, the
    state saved.  With a cluster its processes make them, and this one has no device.

    Raises:
        ValueError: a setting, or a file that it names, cannot be used.
        RuntimeError: the directory cannot be written, or steps were not finite.
    """
    keep_programs(config.compile_cache)
    arch, rows, cluster = _prepared(config, cluster)
    config = rows.config
    with (
        open_run_directory(workdir, **recorded(config)) as directory,
        Progress() as progress,
        contextlib.ExitStack() as opened,
    ):
        if not is_remote(workdir):
            check_place(directory.path / MODEL)
        (directory.path / STATUS_FILE).unlink(missing_ok=True)  # of several processes
        files = wiring.make_checkpointer(config, directory.path, directory.bucket)
        opened.callback(files.close)
        started = time.monotonic()
        with progress.bar("loading"):
            begun = _begun(arch, rows, directory, files, progress, cluster, opened)
        ledger = wiring.make_ledger(config, chip=begun.chip)
        ledger.start(startup_s=time.monotonic() - started)
        made = WarmStart(
            config=config,
            rows=rows,
            learner=begun.learner,
            state=begun.state,
            ledger=ledger,
            flops=make_flops(config, arch),
            learning_rates=make_learning_rates(config),
            progress=progress,
            digest=digest_of_sequences(rows.sequences),
        )
        del begun  # its state would stay in memory beside later ones
        return _run(made, directory.path)


def _prepared(
    config: Config, cluster: "Cluster | None"
) -> tuple[Architecture, AnswerRows, "Cluster | None"]:
    """Return the rows, with the settings for these devices, and seats on a cluster."""
    arch = wiring.make_architecture(config)
    check_trained(config, arch)
    tokenizer, positions = make_tokenizer(config, arch), constant_positions(arch)
    sequences = load_sequences(config, tokenizer, positions=positions)
    own = config.warmstart
    order = RowOrder(
        len(sequences), epochs=own.epochs, batch_rows=own.batch_rows, seed=config.seed
    )
    config = supervised(config, num_steps=order.num_steps)
    if cluster is not None:
        from scalerl_jax.cluster.learner_alone import fit_learner  # Ray

        config, cluster = fit_learner(config, arch, cluster)
        rows = AnswerRows(config=config, sequences=sequences, order=order)
        return arch, rows, cluster
    if why_not := wiring.why_not_one_process(config):
        raise ValueError(why_not)
    if jax.default_backend() == "cpu":
        keep_freed_memory(arch.num_params)
    exact_products(config.model.compute_dtype)
    devices, kind = jax.devices(), jax.devices()[0].device_kind
    config = wiring.fit_devices(config, arch, len(devices), kind=kind)
    return arch, AnswerRows(config=config, sequences=sequences, order=order), None


def _begun(
    arch: Architecture,
    rows: AnswerRows,
    directory: RunDirectory,
    files: Checkpointer,
    progress: Progress,
    cluster: "Cluster | None",
    opened: contextlib.ExitStack,
) -> Begun:
    """Start the learner, here or over processes of a cluster, which `opened` ends."""
    config = rows.config
    if cluster is None:
        learner, state = wiring.make_local_learner(
            config,
            arch,
            make_meshes(config, arch, jax.devices())[0],
            to_sampler=None,
            checkpointer=files,
            progress=progress,
        )
        return Begun(learner=learner, state=state, chip=jax.devices()[0].device_kind)
    from scalerl_jax.cluster.learner_alone import learner_processes  # Ray

    learner = opened.enter_context(
        learner_processes(
            config,
            directory,
            cluster,
            files=files,
            packed=rows.packed,
            note=progress.note,
        )
    )
    return Begun(learner=learner, state=0, chip=learner.places[0].chip)


def _run(made: WarmStart, directory: Path) -> int:
    """Make the steps that are left; return the exit status."""
    made.resume(directory)
    num_steps, preemption = made.rows.order.num_steps, Preemption()
    checkpointer = made.learner.checkpointer
    writer = MetricsWriter(
        directory,
        after=made.step,
        settings=flatten(to_json(made.config)),
        wandb_project=made.config.tracking.wandb_project,
    )
    skipped = 0
    with (
        writer,
        preemption,
        kept_on_disk(made.ledger, directory),
        explained("the train step", made.config),
        made.progress.bar("step", total=num_steps, done=made.step, every_s=_EVERY_S),
    ):
        while made.step < num_steps and not preemption.reached(made.step):
            checkpointer.check()
            row, fault = _step(made)
            skipped = _count_fault(made, fault, skipped)
            writer.write_step(made.step, row)
            facts = {
                "loss": f"{row['loss']:.4f}",
                "tokens/s": f"{row['throughput/trained_tokens_per_s']:.0f}",
            }
            made.progress.show(facts, done=made.step)
            if checkpointer.due(made.step, since=made.step - 1):
                writer.sync()
                made.save()
        writer.sync()
        made.ensure_saved()
    if made.step == num_steps:
        return 0
    return INTERRUPTED if preemption.interrupted else PREEMPTED


def _step(made: WarmStart) -> tuple[dict[str, Any], str]:
    """Learn one batch; return its row, and why it changed nothing ("": it did)."""
    packed = made.rows.packed(made.step)
    started = time.monotonic()
    with made.activity("train"):
        made.learner.annotate(made.state, [packed])  # a window of one, without scores
        made.state, metrics, fault = made.learner.step(made.state, packed, made.step)
    elapsed_s = max(time.monotonic() - started, 1e-9)
    lengths = np.array([each.row_length for each in made.rows.of_step(made.step)])
    context = float((lengths * (lengths + 1)).sum() / lengths.sum() / 2)
    tokens, learned = computed_tokens(packed), int(packed.mask.sum())
    flops = made.flops.step(tokens, context)
    made.ledger.count(train_tokens=0 if fault else learned, train_flops=flops)
    row = {
        "loss": metrics["loss"],  # nats per token of an answer
        "grad_norm": metrics["grad_norm"],
        "entropy": metrics["entropy"],
        "train/tokens": learned,
        "train/rows": len(lengths),
        "train/epoch": made.rows.order.epoch(made.step),
        "train/learning_rate": float(made.learning_rates(made.step - made.skipped)),
        "time/train_s": elapsed_s,
        "throughput/trained_tokens_per_s": tokens / elapsed_s,
        **made.ledger.report(),
        **made.learner.metrics,
    }
    made.step, made.skipped = made.step + 1, made.skipped + bool(fault)
    return row, fault


def _count_fault(made: WarmStart, fault: str, skipped: int) -> int:
    """Return how many steps in a row have changed nothing.

    Raises:
        RuntimeError: there are too many.
    """
    if not fault:
        return 0
    limit = made.config.train.max_skipped_steps
    made.progress.note(f"warning: optimizer step skipped: {fault}")
    if skipped + 1 >= limit:
        raise RuntimeError(
            f"{skipped + 1} optimizer steps in a row were skipped, the limit "
            f"train.max_skipped_steps = {limit}; the last because {fault}; a lower "
            f"warmstart.learning_rate than {made.config.warmstart.learning_rate:g} may "
            f"help"
        )
    return skipped + 1


def run(argv: Sequence[str]) -> int:
    """Do what the command line asks for; return the exit status."""
    values = flags.FlagValues()
    config_flag = config_lib.define_config(values, argv)
    workdir = flags.DEFINE_string(
        "workdir", None, "Directory of the warm start.", flag_values=values
    )
    ray = ray_access.define_flags("the learner", values)

    def make() -> int:
        known = loading.with_settings(argv)
        rows = config_lib.read_flags(values, known, settings=Config, about=__doc__)[1:]
        config_lib.check(config_flag.value)
        if "warmstart" in config_flag.value:  # else of no run, which is refused below
            name_rows(config_flag.value, rows)
        config = config_lib.resolve(config_flag.value)
        if not workdir.value:
            raise ValueError("--workdir is missing: --workdir=runs/NAME")
        ray.check()
        if ray.address.value is None:
            return _made(config, workdir.value)
        return _made_on_ray(config, workdir.value, ray.address.value, ray)

    return answer(make)


def _made_on_ray(
    config: Config, workdir: str, address: str, flags: ray_access.RayFlags
) -> int:
    """Make a warm start over the processes of a cluster; return the exit status."""
    with ray_access.prepared(address, without_token=flags.without_token.value):
        from scalerl_jax.cluster.learner_alone import controlled  # Ray is an extra

        with controlled(address, timeout_s=flags.start_timeout_s.value) as cluster:
            # None: another host of the slice was the controller.
            return 0 if cluster is None else _made(config, workdir, cluster)


def _made(config: Config, workdir: str, cluster: "Cluster | None" = None) -> int:
    """Make a warm start and say where it is; return the exit status."""
    if status := warm_start(config, workdir, cluster):
        over = f" --ray={cluster.address}" if cluster else ""
        to_stdout(
            f"stopped, and saved; it goes on with:  scalerl warmstart "
            f"--workdir={shlex.quote(workdir)}{over}\n"
        )
        return status
    out = local_directory(workdir) / MODEL
    export(workdir, out)
    to_stdout(f"wrote {out}, for model.checkpoint\n")
    return 0


if __name__ == "__main__":
    log_to_stderr()
    sys.exit(run(sys.argv))
