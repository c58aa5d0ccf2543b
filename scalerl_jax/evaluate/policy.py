"""The policy of a checkpoint, ready to be sampled and judged."""

import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from scalerl_jax.build.learning import check_kv_heads, make_architecture
from scalerl_jax.build.loading import load_model, run_settings
from scalerl_jax.build.sampling import (
    make_checked_tokenizer,
    make_engine,
    make_evaluator,
)
from scalerl_jax.build.verifying import make_verifier
from scalerl_jax.config import Config, ModelConfig, to_json
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.evals.evaluate import Evaluator
from scalerl_jax.evaluate.options import Options
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.shardings import sampler_shardings
from scalerl_jax.model.transformer import unstack_layers
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.parallel.publication import checksums
from scalerl_jax.types import PyTree
from scalerl_jax.utils.progress import Progress
from scalerl_jax.utils.run_directory import flatten
from scalerl_jax.utils.xla import explained, keep_programs

_log = logging.getLogger(__name__)
# A policy sampled with others than it was trained with is another one.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """What is known of a checkpoint before its weights are read."""

    config: Config  # the command's, with the checkpoint's tokenizer
    checkpoint: str
    arch: Architecture
    tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Params at one version, and an evaluator without prompts of its own."""

    params: PyTree
    policy_version: int  # optimizer steps; 0 without a run
    identity: dict[str, Any]  # of the checkpoint, JSON values
    evaluator: Evaluator


def describe(options: Options) -> Described:
    """Architecture and tokenizer of the checkpoint; says what its run did otherwise."""
    config = options.config
    own = run_settings(options.checkpoint)
    if own is None:
        own = Config(model=ModelConfig(checkpoint=options.checkpoint))
    else:
        _compare(own, config)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model,
            architecture=own.model.architecture,
            checkpoint=own.model.checkpoint,
        ),
        data=dataclasses.replace(
            config.data, tokenizer=config.data.tokenizer or own.data.tokenizer
        ),
    )
    arch = make_architecture(config)
    return Described(
        config=config,
        checkpoint=options.checkpoint,
        arch=arch,
        tokenizer=make_checked_tokenizer(config, arch),
    )


@contextlib.contextmanager
def open_policy(described: Described) -> Iterator[Policy]:
    """The policy loaded, its verifiers started until the end of the block.

    On the first device, or over as many as mesh.sampler_devices says.
    """
    config, arch = described.config, described.arch
    keep_programs(config.compile_cache)
    devices = jax.devices()[: config.mesh.sampler_devices or 1]
    check_kv_heads(arch, len(devices))
    mesh = make_mesh(devices, tensor=len(devices))
    with (
        contextlib.ExitStack() as opened,
        Progress() as progress,
        explained("the sampler", flatten(to_json(config))),
    ):
        engine = make_engine(config, arch, described.tokenizer, mesh)
        engine.notice = progress.program
        verifier = make_verifier(config, opened)
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
        params = _placed(model.params, arch, mesh)
        del model  # its layers are stacked: a second copy of the weights
        yield Policy(
            params=params,
            policy_version=version,
            identity=identity,
            evaluator=make_evaluator(
                config, engine, (), described.tokenizer, verifier, progress
            ),
        )


def spread(prompts: Sequence[Any], count: int | None) -> Sequence[Any]:
    """`count` of the prompts, evenly over their order; all if None or more."""
    if count is None or count >= len(prompts):
        return prompts
    places = np.linspace(0, len(prompts) - 1, count).round().astype(int)
    return [prompts[place] for place in places.tolist()]


def _compare(own: Config, given: Config) -> None:
    """Log what a run was trained with and is not evaluated with."""
    was, now = flatten(to_json(own)), flatten(to_json(given))
    for name in _OF_THE_POLICY:
        if was[name] != now[name]:
            _log.warning(
                "warning: %s = %r, and the run of the checkpoint had %r",
                *(name, now[name], was[name]),
            )


def _placed(params: PyTree, arch: Architecture, mesh: Mesh) -> PyTree:
    """The params as `learner.publish` gives them, and hence the same programs."""
    return jax.device_put(unstack_layers(params, arch), sampler_shardings(arch, mesh))


def _fingerprint(params: PyTree) -> str:
    """16 digits of SHA-256 over the checksums of the params: equal bits, equal text."""
    sums = np.asarray(checksums(params, np.int32(0)))
    return hashlib.sha256(sums.tobytes()).hexdigest()[:16]
