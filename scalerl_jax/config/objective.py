"""The objective's settings.  The defaults are ScaleRL's, section 3.2.

A setting that the chosen loss, advantage or regulariser does not read must keep its
default: `config.objective_validation` refuses the others.
"""

import dataclasses
import typing

Loss = typing.Literal[
    "cispo",
    "clipped",
    "decoupled",
    "dppo",
    "dual_clip",
    "gspo",
    "gspo_token",
    "reinforce",
    "sequence_truncated_is",
    "truncated_is",
]
Anchor = typing.Literal["behavior", "recomputed"]
Aggregation = typing.Literal["constant", "prompt", "sample", "token"]
Advantage = typing.Literal["critic", "group_mean", "leave_one_out"]
Normalization = typing.Literal["batch", "none", "prompt", "reward_std", "running"]
KlEstimator = typing.Literal["none", "k1", "k2", "k3"]
KlIn = typing.Literal["loss", "reward"]
Regularize = typing.Literal["all", "easy"]
OverlongOn = typing.Literal["all", "correct"]
CutOff = typing.Literal["keep", "mask", "wrong"]

# What each loss reads, by the names of its keywords.
LOSS_SETTINGS: dict[str, tuple[str, ...]] = {
    "cispo": ("max_importance_ratio", "min_importance_ratio"),
    "clipped": ("clip_low", "clip_high"),
    "decoupled": ("clip_low", "clip_high", "max_importance_ratio"),
    "dppo": ("mask_low", "mask_high"),
    "dual_clip": ("clip_low", "clip_high", "dual_clip"),
    "gspo": ("clip_low", "clip_high"),
    "gspo_token": ("clip_low", "clip_high"),
    "reinforce": (),
    "sequence_truncated_is": ("max_importance_ratio",),
    "truncated_is": ("max_importance_ratio",),
}
# Those under which a token can lose its gradient.
CLIPPING_LOSSES = ("clipped", "decoupled", "dppo", "dual_clip", "gspo", "gspo_token")


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """The loss: ScaleRL's is CISPO, prompt average, batch-normalised advantages."""

    loss: Loss = "cispo"  # ScaleRL section 3.2; formulas: algo/losses.py
    # Whose log-probabilities the ratio is over: the sampler's, or the trainer's own of
    # the params at the start of the window.
    anchor: Anchor = "behavior"
    clip_low: float = 0.0  # the ratio's clip is [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.0  # see clip_low
    dual_clip: float = 0.0  # most that a punished token's ratio counts; above 1
    max_importance_ratio: float = 5.0  # absolute cap; ScaleRL finds 4, 5, 8 alike
    min_importance_ratio: float = 0.0  # CISPO's floor; ScaleRL: none
    # A ratio over the sampler's log-probabilities beside top-k, top-p or min-p, whose
    # share of the distribution it then is; config/objective_validation.py
    allow_sampling_filters: bool = False
    # Beside a recomputed anchor: cap of recomputed over behavior (TIS); 0: left out.
    correction_cap: float = 0.0
    mask_low: float = 0.0  # DPPO: most that a probability may have fallen
    mask_high: float = 0.0  # DPPO: most that it may have risen
    aggregation: Aggregation = "prompt"  # ScaleRL section 3.2
    advantage: Advantage = "group_mean"  # a reward less this; algo/advantages.py
    advantage_normalization: Normalization = "batch"  # ScaleRL section 3.2
    advantage_eps: float = 1e-6  # added to what advantages are divided by
    zero_variance_filter: bool = True  # drop groups of equal verdicts
    kl_coefficient: float = 0.0  # of KL(policy || reference); 0: no reference is held
    kl_estimator: KlEstimator = "none"  # per token; algo/regularizers.py
    kl_in: KlIn = "loss"  # where the KL is subtracted
    reference_every: int = 0  # optimizer steps between refreshes; 0: never refreshed
    entropy_coefficient: float = 0.0  # of the bonus
    regularize: Regularize = "all"  # easy: KL and entropy on easy prompts alone
    regularize_from_pass_rate: float = 0.0  # easy: groups with at least this pass rate
    overlong_cache_tokens: int = 0  # L_cache of DAPO's soft punishment; 0: none
    overlong_max_tokens: int = 0  # L_max; 0: sampler.max_completion_tokens
    overlong_on: OverlongOn = "all"  # correct: of those alone, as in ScaleRL
    # mask: no loss on completions without EOS, which their group's baseline still
    # counts; wrong: their reward is that of a wrong answer
    cut_off_completions: CutOff = "keep"
