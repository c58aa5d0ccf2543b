"""Tokens for tests of losses, and every loss with bounds that are easy to pass."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scalerl_jax.algo import anchors, losses
from scalerl_jax.types import Tokens

CAP, CLIP = 5.0, {"clip_low": 0.2, "clip_high": 0.3}

# Every loss whose ratio is over `behavior_logprobs`, but for REINFORCE.
TRUST_REGION_LOSSES = {
    "cispo": functools.partial(losses.cispo_loss, max_importance_ratio=CAP),
    "truncated_is": functools.partial(
        losses.truncated_is_loss, max_importance_ratio=CAP
    ),
    "sequence_truncated_is": functools.partial(
        losses.sequence_truncated_is_loss, max_importance_ratio=CAP
    ),
    "clipped": functools.partial(losses.clipped_loss, **CLIP),
    "dual_clip": functools.partial(losses.dual_clip_loss, **CLIP, dual_clip=3.0),
    "dppo": functools.partial(losses.dppo_loss, mask_low=0.2, mask_high=0.3),
    "gspo": functools.partial(losses.gspo_loss, **CLIP),
    "gspo_token": functools.partial(losses.gspo_token_loss, **CLIP),
}
LOSSES = TRUST_REGION_LOSSES | {
    "reinforce": losses.reinforce_loss,
    "decoupled": functools.partial(
        anchors.decoupled_loss, **CLIP, max_importance_ratio=CAP
    ),
    "anchored": anchors.anchored(functools.partial(losses.clipped_loss, **CLIP)),
    "corrected": anchors.corrected(
        anchors.anchored(functools.partial(losses.clipped_loss, **CLIP)),
        max_importance_ratio=CAP,
    ),
}


def make_tokens(logprobs, behavior_logprobs=None, advantages=1.0, **others):
    """Tokens of one sequence per row; on policy unless something else is said.

    `others` are fields, or scores by their names.
    """
    logprobs = jnp.asarray(logprobs, jnp.float32)
    behavior = logprobs if behavior_logprobs is None else behavior_logprobs
    fields = {
        "entropy": 0.0,
        "behavior_logprobs": behavior,
        "advantages": advantages,
        "proximal": behavior,
        "reference": behavior,
    }
    fields |= {"mask": True, "sequence_ids": 1} | others
    dtypes = {"mask": bool, "sequence_ids": jnp.int32}
    arrays = {
        name: jnp.broadcast_to(
            jnp.asarray(value, dtypes.get(name, jnp.float32)), logprobs.shape
        )
        for name, value in fields.items()
    }
    scores = {name: arrays.pop(name) for name in ("proximal", "reference")}
    return Tokens(logprobs=logprobs, scores=scores, **arrays)


@functools.partial(jax.jit, static_argnums=0)
def values_and_slopes(loss, tokens, weights=1.0):
    """The losses, and the gradient of their weighted sum by the log-probabilities."""
    values, back = jax.vjp(lambda x: loss(tokens.replace(logprobs=x)), tokens.logprobs)
    return values, back(jnp.broadcast_to(weights, values.shape))[0]


def slope(loss, tokens):
    """The gradient of a loss by the log-probabilities."""
    return values_and_slopes(loss, tokens)[1]


def at_ratio(logprob, ratio, advantage, **others):
    """A token of this importance ratio."""
    return make_tokens(logprob, logprob - math.log(ratio), advantage, **others)


def floats(shape, low, high):
    """Float32 arrays between two numbers."""
    elements = st.floats(low, high, width=32, allow_subnormal=False)
    return hnp.arrays(np.float32, shape, elements=elements)
