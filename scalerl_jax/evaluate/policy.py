"""The policy of a checkpoint that flags name, loaded for sampling."""

import contextlib
import dataclasses
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh

from scalerl_jax import config as config_lib
from scalerl_jax.config import (
    Config,
    ModelConfig,
    define_config,
    read_flags,
    to_json,
)
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.environments.verdict import OwnReward
from scalerl_jax.evaluate.metrics import MAX_SAMPLES
from scalerl_jax.generation.evaluation import Evaluator, JudgedPrompt
from scalerl_jax.model.architecture import Architecture, sampler_mesh, sampler_shardings
from scalerl_jax.model.transformer import make_lay_out
from scalerl_jax.parallel.xla import exact_products, explained, keep_programs
from scalerl_jax.process.ending import answer
from scalerl_jax.run.progress import Progress
from scalerl_jax.run.record import flatten
from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.types import Prompt, PyTree
from scalerl_jax.weights.publication import leaf_checksums
from scalerl_jax.wiring.learning import make_architecture
from scalerl_jax.wiring.loading import load_model, run_settings
from scalerl_jax.wiring.prompts import make_verifier
from scalerl_jax.wiring.sampling import (
    make_checked_tokenizer,
    make_engine,
    make_evaluator,
    weights_format,
)

_log = logging.getLogger(__name__)
_PLAIN_S = 10.0  # between two lines of progress where there is no terminal
# Settings that belong to the policy: sampled with other values it is another policy.
_OF_THE_POLICY = (
    "data.template",
    "data.system_prompt",
    "data.user_template",
    "data.enable_thinking",
    "data.answer_after",
    "interruption.enabled",
    "interruption.phrase",
    "reward.math_answer",
)
_DEFINE = {
    "string": flags.DEFINE_string,
    "list": flags.DEFINE_list,
    "integer": flags.DEFINE_integer,
    "boolean": flags.DEFINE_bool,
    "float": flags.DEFINE_float,
}
Flag = tuple[str, str, str]  # kind, name and meaning; the default is None
_SHARED: tuple[Flag, ...] = (
    (
        "string",
        "checkpoint",
        "A Hugging Face directory or id, a GGUF file, a run directory (its newest "
        "checkpoint) or one checkpoint of a run; without it, model.checkpoint.",
    ),
    ("integer", "samples", "Samples per prompt; default: eval.samples_per_prompt."),
    ("integer", "num_prompts", "Prompts, spread evenly over the set; default: all."),
    ("float", "temperature", "Sampling temperature, 0: greedy (eval.temperature)."),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A command line: the settings as changed by the flags, and the flags."""

    config: Config
    checkpoint: str  # a directory or a file
    flags: flags.FlagValues


def run_command(
    argv: Sequence[str],
    own: Sequence[Flag],
    act: Callable[[Options], int],
    *,
    about: str | None,
    view: Callable[[flags.FlagValues], int] | None = None,
) -> int:
    """Run a command with flags of its `own`, and return the exit status.

    `about` is the text of --help above the flags.  `view` replaces `act` if --rollouts
    is given, and needs no checkpoint.
    """

    def run() -> int:
        values = flags.FlagValues()
        config_flag = define_config(values, argv)
        for kind, name, meaning in (*_SHARED, *own):
            _DEFINE[kind](name, None, meaning, flag_values=values)
        if extra := read_flags(values, argv, settings=Config, about=about)[1:]:
            raise ValueError(f"unknown arguments {extra}")
        if view is not None and values["rollouts"].value:
            return view(values)
        if values["config"].value is None:
            raise ValueError("--config is missing: --config=configs/tiny.py")
        return act(_resolved(config_flag.value, values))

    return answer(run)


def _resolved(given: Any, values: flags.FlagValues) -> Options:
    """Return the checked settings, as changed by the flags."""
    config_lib.check(given)
    checkpoint = values["checkpoint"].value
    if checkpoint:  # the config's own checkpoint need not exist
        given.model.checkpoint = checkpoint
    if values["samples"].value is not None:
        given.eval.samples_per_prompt = values["samples"].value
    if "seed" in values and values["seed"].value is not None:
        given.seed = values["seed"].value
    config = config_lib.resolve(given, trained=False)
    samples, temperature = config.eval.samples_per_prompt, values["temperature"].value
    if samples > MAX_SAMPLES:
        raise ValueError(f"--samples={samples} must be {MAX_SAMPLES} at most")
    if (count := values["num_prompts"].value) is not None:
        limits = config_lib.SETTINGS["eval.num_prompts"]
        limits.check(count, given=f"--num_prompts={count}")
    if temperature is not None:
        if not 0.0 <= temperature < math.inf:
            raise ValueError(f"--temperature={temperature} must be 0 or more")
        own = dataclasses.replace(config.eval, temperature=temperature)
        config = dataclasses.replace(config, eval=own)
    checkpoint = checkpoint or config.model.checkpoint
    if not checkpoint:
        raise ValueError(
            "--checkpoint is missing, and model.checkpoint of the config is empty; "
            "name a Hugging Face directory, a GGUF file or a run directory"
        )
    return Options(config=config, checkpoint=checkpoint, flags=values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """A checkpoint before its weights are read."""

    config: Config  # the command's, with the checkpoint's tokenizer
    run: Config | None  # settings of the run that trained it; None: unknown
    checkpoint: str
    arch: Architecture
    tokenizer: Tokenizer


def describe(config: Config, checkpoint: str) -> Described:
    """Return the checkpoint's architecture and tokenizer; warn of changed settings."""
    own = run = run_settings(checkpoint)
    if own is None:
        own = Config(model=ModelConfig(checkpoint=checkpoint))
    else:
        was, now = flatten(to_json(own)), flatten(to_json(config))
        for name in _OF_THE_POLICY:
            if was[name] != now[name]:
                _log.warning(
                    "warning: %s = %r, and the run of the checkpoint had %r",
                    *(name, now[name], was[name]),
                )
    model = dataclasses.replace(
        config.model,
        architecture=own.model.architecture,
        checkpoint=own.model.checkpoint,
    )
    tokenizer = config.data.tokenizer or own.data.tokenizer
    data = dataclasses.replace(config.data, tokenizer=tokenizer)
    config = dataclasses.replace(config, model=model, data=data)
    arch = make_architecture(config)
    return Described(
        config=config,
        run=run,
        checkpoint=checkpoint,
        arch=arch,
        tokenizer=make_checked_tokenizer(config, arch),
    )


class Meter:
    """Counts prompts and tokens for the newest bar of a display."""

    def __init__(self, progress: Progress, done: int) -> None:
        """Start with `done` prompts already judged."""
        self._progress, self._done = progress, done
        self._started_s = time.monotonic()
        self.tokens = 0

    def listen(self, sample: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Count new tokens of a sample; a `requests.Listener`."""
        self.tokens += len(tokens)

    def done(self) -> None:
        """Count one more prompt, which is judged."""
        self._done += 1
        rate = self.tokens / max(time.monotonic() - self._started_s, 1e-9)
        self._progress.show({"tokens/s": f"{rate:,.0f}"}, done=self._done)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Params at one version, and an evaluator without prompts of its own."""

    params: PyTree
    policy_version: int  # optimizer steps; 0 without a run
    identity: dict[str, Any]  # of the checkpoint, JSON values
    evaluator: Evaluator

    @contextlib.contextmanager
    def metered(self, total: int, *, done: int = 0) -> Iterator[Meter]:
        """Open a progress bar for `total` prompts, `done` of them already judged."""
        progress = self.evaluator.progress
        with progress.bar("prompt", total=total, done=done, every_s=_PLAIN_S):
            yield Meter(progress, done)

    def judged(self, prompts: Sequence[Prompt], meter: Meter) -> Iterator[JudgedPrompt]:
        """Yield the prompts, sampled and judged, in the order in which verdicts come.

        The meter counts a prompt after the caller has handled it.
        """
        evaluator = dataclasses.replace(self.evaluator, prompts=prompts)
        for judged in evaluator.steps(
            self.params, policy_version=self.policy_version, listener=meter.listen
        ):
            for group in judged:
                yield group
                meter.done()


@contextlib.contextmanager
def open_policy(described: Described, own: OwnReward | None) -> Iterator[Policy]:
    """Load the policy, and run its verifiers until the end of the block.

    `own` judges in place of each prompt's verifier.  The policy is on the first device,
    or sharded over generators.devices of them.
    """
    config, arch = described.config, described.arch
    keep_programs(config.compile_cache)
    devices = jax.devices()[: config.generators.devices or 1]
    exact_products(config.model.sampler_dtype)
    mesh = sampler_mesh(arch, devices)
    with (
        contextlib.ExitStack() as opened,
        Progress() as progress,
        explained("the sampler", config),
    ):
        engine = make_engine(config, arch, described.tokenizer, mesh)
        engine.notice = progress.program
        pages = PagePool(engine, prefix_cache=config.sampler.prefix_cache)
        verifier = make_verifier(config, opened, own=own)
        with progress.bar(f"loading {described.checkpoint}"):
            model = load_model(
                described.checkpoint,
                dtype=config.model.sampler_dtype,
                require_finite=True,
            )
        version = model.policy_version
        identity = {
            "path": described.checkpoint,
            "policy_version": version,
            "dtype": config.model.sampler_dtype,
            "fingerprint": _fingerprint(model.params),
        }
        params = _placed(model.params, config, arch, mesh)
        del model  # its layers are stacked: a second copy of the weights
        yield Policy(
            params=params,
            policy_version=version,
            identity=identity,
            evaluator=make_evaluator(
                config, pages, (), described.tokenizer, verifier, progress
            ),
        )


def spread(prompts: Sequence[Any], count: int | None) -> Sequence[Any]:
    """Return `count` prompts, evenly over their order; all if None or more."""
    if count is None or count >= len(prompts):
        return prompts
    places = np.linspace(0, len(prompts) - 1, count).round().astype(int)
    return [prompts[place] for place in places.tolist()]


def _placed(params: PyTree, config: Config, arch: Architecture, mesh: Mesh) -> PyTree:
    """Return the params in the layout of `learner.publish`, for the same programs."""
    form = weights_format(config)
    laid_out = make_lay_out(arch, **form)(params)
    shardings = sampler_shardings(arch, mesh, form["weights_dtype"])
    return jax.device_put(laid_out, shardings)


def _fingerprint(params: PyTree) -> str:
    """Return 16 digits of SHA-256 over the checksums of the params, by their bits."""
    sums = np.asarray(leaf_checksums(params, jnp.int32(0)))
    return hashlib.sha256(sums.tobytes()).hexdigest()[:16]
