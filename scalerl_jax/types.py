"""The values that cross boundaries, and the letters of their axes.

Letters: N prompts of an optimizer step, G rollouts of one prompt, B = N * G
rollouts, P prompt tokens, T completion tokens, V vocabulary, D hidden size,
L layers, M microbatches, R rows of a microbatch, S tokens of a row.

Host-side records (`Prompt`, `Rollout`, `Group`) hold NumPy arrays of one
sequence; `PackedBatch` is a pytree of a whole batch.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt

# Static type of a parameter tree, a KV cache or a tree of gradients.
PyTree = Any
# A NumPy array on its way to the device, or a JAX array: jitted functions take both.
AnyArray = Any
# Values for each token of a batch, (M, R, S), by score name.  The axes have no letters,
# since batches of one window differ in M.
Scores = dict[str, Float[np.ndarray, "_ _ _"]]


@struct.dataclass(kw_only=True)
class Prompt:
    """Token ids given to the policy, and the data that its verifier needs."""

    prompt_id: int = struct.field(pytree_node=False)  # index in the data set
    epoch: int = struct.field(pytree_node=False)  # earlier passes over the data
    task: str = struct.field(pytree_node=False)  # name of its verifier's task
    text: str = struct.field(pytree_node=False)  # as given to the tokenizer
    tokens: np.ndarray  # int32 [P]
    reference: dict[str, Any] = struct.field(pytree_node=False)  # JSON values only


class Turn(NamedTuple):
    """A part of a completion: a sampled turn, or the observation after one."""

    start: int  # index of its first token in the completion
    end: int  # index after its last token
    sampled: bool  # by the policy, including forced phrases
    reward: float | None = None  # from its environment, for this turn


@struct.dataclass(kw_only=True)
class Rollout:
    """One completion of a prompt, as sampled and as judged.

    The completion of an episode holds all turns and the observations between them.
    """

    completion_tokens: np.ndarray  # int32 [T], EOS included when it was sampled
    completion_mask: np.ndarray  # bool [T], False on forced tokens
    behavior_logprobs: np.ndarray  # float32 [T], nats, at the sampler's temperature
    policy_versions: np.ndarray  # int32 [T], version that sampled each token
    cut_off: bool  # no EOS at the length limit
    interrupted: bool  # the end-of-thinking phrase was forced
    reward: float = 0.0
    passed: bool = False
    judged: bool = True  # False: its verifier failed, and it is not trained on
    status: str = struct.field(pytree_node=False, default="unverified")
    # In order, covering 0 to T; empty: the completion is one turn.
    turns: tuple[Turn, ...] = struct.field(pytree_node=False, default=())
    # Parts of the reward, by name; None: unjudged.
    parts: dict[str, float | None] = struct.field(
        pytree_node=False, default_factory=dict
    )
    # The experts that each token but the last was routed to, if a mixture's routing is
    # replayed: uint8 or uint16 [P - 1 + T, layers, k]; the dtype's maximum means none.
    experts: np.ndarray | None = None

    @property
    def generated_tokens(self) -> int:
        """Number of tokens that the sampler generated; observations do not count."""
        observed = sum(turn.end - turn.start for turn in self.turns if not turn.sampled)
        return len(self.completion_tokens) - observed


# The arrays of a rollout that have a value per token of its completion.
TOKEN_ARRAYS = {
    "completion_tokens": np.dtype(np.int32),
    "completion_mask": np.dtype(np.bool_),
    "behavior_logprobs": np.dtype(np.float32),
    "policy_versions": np.dtype(np.int32),
}


def count_turns(turns: tuple[Turn, ...]) -> int:
    """Return the number of sampled turns of a completion."""
    return sum(turn.sampled for turn in turns) or 1


@struct.dataclass(kw_only=True)
class Group:
    """The G rollouts of one prompt: the unit of queues and batches."""

    ticket: int = struct.field(pytree_node=False)  # order of admission, from 0
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    finished_version: int = struct.field(pytree_node=False)  # when its last token came
    detail: str = struct.field(pytree_node=False, default="")  # why verifiers failed

    @functools.cached_property
    def oldest_version(self) -> int:
        """Smallest policy version among the group's tokens; computed once."""
        return min(int(rollout.policy_versions.min()) for rollout in self.rollouts)

    @property
    def pass_rate(self) -> float:
        """Share of the judged rollouts that passed, in [0, 1]; NaN without any."""
        judged = self.num_judged
        return sum(each.passed for each in self.rollouts) / judged if judged else np.nan

    @property
    def num_judged(self) -> int:
        """Number of rollouts with a verdict."""
        return sum(rollout.judged for rollout in self.rollouts)

    @property
    def has_reward_variance(self) -> bool:
        """Return whether two judged rollouts have different rewards, in float32.

        Advantages are made of float32, in which 0.1 + 0.2 is 0.3.
        """
        judged = (each.reward for each in self.rollouts if each.judged)
        return len({np.float32(reward) for reward in judged}) > 1


def rollouts_of(groups: Iterable[Group]) -> list[Rollout]:
    """Return the rollouts of all groups, in order."""
    return [rollout for group in groups for rollout in group.rollouts]


@struct.dataclass(kw_only=True)
class Sharing:
    """Positions of the tokens of D streams in the rows that attention reads.

    A stream holds U tokens, first those that several sequences share (prompts).  It
    owns R / D of the R rows; a place is an index into these rows laid end to end; -1
    means no place.
    """

    source: Int[Array, "R S"]  # stream index of the token at each position; padding: 0
    place: Int[Array, "D U"]  # the first place of each token; -1 on padding
    copies: Int[Array, "D shared others"]  # further places of the shared tokens


@struct.dataclass(kw_only=True)
class Tokens:
    """Inputs of a per-token loss: arrays of one shape, usually rows [R, S].

    Every entry is finite, also where the mask is False.
    """

    logprobs: Float[Array, "..."]  # nats, of the params being trained; differentiable
    entropy: Float[Array, "..."]  # nats, of the whole distribution; differentiable
    behavior_logprobs: Float[Array, "..."]  # as the sampler computed them
    advantages: Float[Array, "..."]
    mask: Bool[Array, "..."]  # True on the tokens that are trained on
    sequence_ids: Int[Array, "..."]  # unique within a row; 0: no token is predicted
    # Further inputs of the objective's terms, as in `PackedBatch`.
    scores: Mapping[str, Float[Array, "..."]] = struct.field(default_factory=dict)


@struct.dataclass(kw_only=True)
class PackedBatch:
    """A batch for the train step: rollouts laid end to end in rows of S tokens.

    A batch has M microbatches; a single microbatch lacks the axis M.  Position s
    predicts `targets[..., s]`; the weight, advantage and behavior log-probability of
    that prediction are at s too.  Segment 0 is padding.
    """

    tokens: Int[Array, "M R S"]
    segment_ids: Int[Array, "M R S"]  # 1, 2, ... along a row; 0 on padding
    positions: Int[Array, "M R S"]  # from 0 in each segment
    targets: Int[Array, "M R S"]  # a valid id everywhere, padding included
    weights: Float[Array, "M R S"]  # weight of a token in the loss; all sum to 1
    advantages: Float[Array, "M R S"]  # 0 until they are computed
    behavior_logprobs: Float[Array, "M R S"]  # nats
    staleness: Int[Array, "M R S"]  # learner's version - token's version
    mask: Bool[Array, "M R S"]  # True where a sampled token is predicted
    # 1, 2, ... along a row, on a completion's predictions, forced tokens included;
    # 0 where no token is predicted
    sequence_ids: Int[Array, "M R S"]
    # Further inputs of the objective's terms, by name (`objective.scores.SCORES`):
    # log-probabilities in nats of other params, a token's regulariser factor, a
    # critic's values at the start of the window and the returns to learn.
    scores: Mapping[str, Float[Array, "M R S"]] = struct.field(default_factory=dict)
    # Experts to replay for each token, uint8 or uint16; the dtype's maximum: none.
    experts: UInt[Array, "M R S L k"] | None = None
    # With sharing, tokens, positions and experts are streams [M D U], segment_ids are
    # rows [M R S], and all other fields cover a stream's tokens after the shared ones.
    sharing: Sharing | None = None
    # Positions behind which all rows of a microbatch have padding alone, at most S;
    # None: S.  It is for hosts: a single microbatch on devices lacks it.
    row_ends: Int[np.ndarray, " M"] | None = None
