"""Experts that the sampler chose for tokens: checked, counted, and saved.

The learner's router, in another precision or by another kernel, may choose other
experts than the sampler's did.  With routing replay the learner uses the sampler's
choice.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from scalerl_jax.batching.packing import TrainSequence
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.types import Group, PackedBatch


def replayed_experts(groups: Sequence[Group], arch: Architecture) -> list[np.ndarray]:
    """Return the experts [P - 1 + T, layers, k] of each rollout of the groups.

        chosen[t, layer] = the sampler's;  gates = of the learner's own router logits

    so that the router has a gradient.  R3, https://arxiv.org/abs/2510.11370.

    Raises:
        ValueError: a rollout has no experts, or experts of another model.
    """
    assert arch.experts is not None, "only a mixture's are replayed"
    of_token = (arch.num_layers, arch.experts.top_k)
    dtype, found = arch.experts.id_dtype, []
    none = np.iinfo(dtype).max
    for group in groups:
        for rollout in group.rollouts:
            experts = rollout.experts
            length = len(group.prompt.tokens) - 1 + len(rollout.completion_tokens)
            if experts is None:
                raise ValueError(
                    f"objective.routing_replay = 'on', but the group of ticket "
                    f"{group.ticket} was sampled without reporting its experts: "
                    f"resume with 'off', or begin in another --workdir"
                )
            same = (experts.dtype, experts.shape) == (dtype, (length, *of_token))
            if not same or (experts[experts != none] >= arch.experts.count).any():
                raise ValueError(
                    f"the group of ticket {group.ticket} has experts "
                    f"{experts.dtype}{list(experts.shape)}, the largest "
                    f"{experts.max()}; the model routes {dtype}"
                    f"{[length, *of_token]} among {arch.experts.count}: resume with "
                    f"the model that sampled it"
                )
            found.append(experts)
    return found


@dataclasses.dataclass(frozen=True)
class Replay:
    """The replay of a mixture's routing, as an `assembly.Assembler` uses it."""

    arch: Architecture

    def experts(self, groups: Sequence[Group]) -> list[np.ndarray]:
        """Return each rollout's experts, as `replayed_experts` does."""
        return replayed_experts(groups, self.arch)

    def load(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Return metrics of the experts' load, as `expert_load` does."""
        return expert_load([each.experts for each in sequences], self.arch)

    def of_microbatch(self, microbatch: PackedBatch) -> PackedBatch:
        """Return a microbatch's shapes with that of the experts."""
        assert self.arch.experts is not None, "`wiring.mixtures` has looked"
        of_token = (self.arch.num_layers, self.arch.experts.top_k)
        experts = jax.ShapeDtypeStruct(
            (*microbatch.tokens.shape, *of_token), self.arch.experts.id_dtype
        )
        return dataclasses.replace(microbatch, experts=experts)


def join_experts(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Lay the experts of all rollouts end to end, with the offsets of each.

    Raises:
        ValueError: a rollout's experts differ in dtype or [layers, k] from the first's.
    """
    pairs = [(group.prompt, each) for group in groups for each in group.rollouts]
    like = next(each.experts for _, each in pairs if each.experts is not None)
    parts = []
    for prompt, rollout in pairs:
        experts = like[:0] if rollout.experts is None else rollout.experts
        length = len(prompt.tokens) - 1 + len(rollout.completion_tokens)
        wanted = (length, *like.shape[1:])
        whole = (experts.dtype, experts.shape) == (like.dtype, wanted)
        if rollout.experts is not None and not whole:
            raise ValueError(
                f"experts is {experts.dtype}{list(experts.shape)}; it must be "
                f"{like.dtype}{list(wanted)} to be saved"
            )
        parts.append(experts)
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return {"experts": np.concatenate(parts), "experts_offsets": offsets}


def split_experts(arrays: dict[str, np.ndarray]) -> list[np.ndarray | None]:
    """Return the experts of each rollout: the inverse of `join_experts`."""
    parts = np.split(arrays["experts"], arrays["experts_offsets"][1:-1])
    return [part.copy() if len(part) else None for part in parts]


def expert_load(
    chosen: Sequence[np.ndarray | None], arch: Architecture
) -> dict[str, float]:
    """Measure how evenly tokens fall on the experts, as `load_metrics` does.

    Args:
        chosen: experts [tokens, layers, k] of each sequence; the dtype's maximum: none.
        arch: the mixture.
    """
    assert arch.experts is not None, "only a mixture's are counted"
    count, known = arch.experts.count, [each for each in chosen if each is not None]
    if not known:
        return {}
    flat = np.concatenate(known).swapaxes(0, 1)
    layers = flat.reshape(len(flat), -1)
    # The id for "none" is larger than every expert's.
    taken = np.stack([np.bincount(layer, minlength=count)[:count] for layer in layers])
    taken = taken[taken.sum(axis=1) > 0]
    if not len(taken):
        return {}
    return {name: value.item() for name, value in load_metrics(taken).items()}


def load_metrics(taken: Any) -> dict[str, Any]:
    """Return metrics of how evenly choices fall on the experts, by name.

        load[layer, expert] = choices of the expert * count / choices in the layer

    The load is 1 everywhere if all are chosen equally, and 0 for a dead expert, which
    no token chose.

    Args:
        taken: number of choices [layers, experts], positive in each layer; a NumPy or
            JAX array.
    """
    load = taken * taken.shape[-1] / taken.sum(axis=-1, keepdims=True)
    return {
        "experts/max_load": load.max(),
        "experts/mean_max_load": load.max(axis=-1).mean(),  # mean over the layers
        "experts/dead": (taken == 0).sum(),
    }
