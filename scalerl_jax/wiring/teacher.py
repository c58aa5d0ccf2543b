"""The teacher of a Config: its checks, and its log-probabilities of a window."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from scalerl_jax.config import Config, naming
from scalerl_jax.data.tokenizer import Tokenizer, load_tokenizer
from scalerl_jax.learner.endpoint_teacher import make_endpoint
from scalerl_jax.learner.forward import Forward
from scalerl_jax.learner.window_scores import Score, Scorer, of_params
from scalerl_jax.model.architecture import Architecture, param_shardings
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.transformer import abstract_params
from scalerl_jax.model.weights import load_params
from scalerl_jax.parallel import multihost
from scalerl_jax.types import PackedBatch, PyTree
from scalerl_jax.weights.publication import digest_of
from scalerl_jax.wiring.sampling import check_positions

# Parts of a `tokenizer.json` that determine the ids of a text.
_OF_IDS = ("model", "added_tokens", "normalizer", "pre_tokenizer")


def read_teacher(config: Config) -> Architecture:
    """Return the teacher's architecture.

    Raises:
        ValueError: its checkpoint cannot be read.
    """
    with naming("teacher.checkpoint"):
        return read_architecture(config.teacher.checkpoint)


def abstract_teacher(config: Config, mesh: Mesh) -> PyTree | None:
    """Return shapes, dtypes and shardings of the teacher's params on the learner.

    None: it holds no teacher.

    Raises:
        ValueError: its checkpoint cannot be read.
    """
    if not config.teacher.checkpoint:
        return None
    arch, dtype = read_teacher(config), jnp.dtype(config.model.compute_dtype)
    return jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        abstract_params(arch, dtype=dtype),
        param_shardings(arch, mesh),
    )


def check_teacher(config: Config, arch: Architecture, tokenizer: Tokenizer) -> None:
    """Refuse a teacher that cannot score the policy's tokens, those of `tokenizer`.

    Raises:
        ValueError: its checkpoint or endpoint cannot be read, its tokenizer gives other
            ids, its vocabulary is smaller than the policy's, or sequences are too long
            for it.
    """
    if config.teacher.endpoint:
        make_endpoint(config.teacher).check(tokenizer)
        return
    source, teacher = config.teacher.checkpoint, read_teacher(config)
    with naming("teacher.checkpoint"):
        theirs = load_tokenizer(source)
    if (own := ids_digest(tokenizer)) != (other := ids_digest(theirs)):
        raise ValueError(
            f"teacher.checkpoint = {source!r} has another tokenizer than the policy "
            f"({theirs.vocab_size:,} ids, digest {other}, beside "
            f"{tokenizer.vocab_size:,}, {own}), and so log-probabilities of other "
            f"tokens; choose a teacher of the policy's family"
        )
    if teacher.vocab_size < arch.vocab_size:
        raise ValueError(
            f"teacher.checkpoint = {source!r} has {teacher.vocab_size:,} embeddings "
            f"and the policy {arch.vocab_size:,}: it has no log-probability of some "
            f"tokens of the policy; choose one with as many"
        )
    check_positions(config, teacher, of=f"teacher.checkpoint = {source!r}")


def ids_digest(tokenizer: Tokenizer) -> str:
    """Return a digest of all parts of a tokenizer that determine the ids of a text."""
    parts = json.loads(tokenizer.backend.to_str())
    kept = json.dumps([parts.get(name) for name in _OF_IDS], sort_keys=True)
    return hashlib.sha256(kept.encode()).hexdigest()[:12]


def make_asked_teacher(config: Config) -> Score:
    """Return the log-probabilities that an endpoint gives.

    Raises:
        ValueError: the learner is of several processes.
    """
    if (count := multihost.process_count()) > 1:
        raise ValueError(
            f"teacher.endpoint = {config.teacher.endpoint!r} is asked by a learner of "
            f"one process, and this one is of {count}; name a teacher.checkpoint"
        )
    return make_endpoint(config.teacher)


def make_teacher(
    config: Config, forward: Forward, mesh: Mesh, *, batch: PackedBatch
) -> tuple[Score, str]:
    """Load the teacher onto the learner's devices.

    Return its log-probabilities, and the digest of its params.

    Its params have model.compute_dtype.

    Args:
        config: of the run.
        forward: the teacher's forward pass.
        mesh: the learner's mesh.
        batch: a microbatch like the policy's; it may be abstract.
    """
    arch, dtype = forward.arch, jnp.dtype(config.model.compute_dtype)
    with naming("teacher.checkpoint"):
        params = load_params(
            config.teacher.checkpoint,
            arch,
            dtype=dtype,
            shardings=param_shardings(arch, mesh),
        )

    def logprobs(params: PyTree, batch: PackedBatch) -> Array:
        # Experts to replay are the policy's, not the teacher's.
        return forward.logprobs(params, dataclasses.replace(batch, experts=None))[0]

    scorer = Scorer(logprobs, params=params, batch=batch, mesh=mesh)
    scorer.compile()
    return of_params(params, scorer), digest_of(params)
