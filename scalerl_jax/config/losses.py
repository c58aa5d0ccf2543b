"""The losses that there are: which settings each reads, and what is known of it."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss: the function `NAME_loss` of `algo.losses`, and what is known of it."""

    settings: tuple[str, ...] = ()  # of the objective: the function's keywords
    ratio: Literal["none", "token", "sequence_mean", "sequence_sum"] = "token"
    clips: bool = False  # a token can lose its gradient
    # Whose log-probabilities the ratio is over, where objective.anchor cannot say it.
    anchor: Literal["behavior", "recomputed"] | None = None
    paper: str

    @property
    def of_sequences(self) -> bool:
        """Say whether a token's loss depends on the others of its sequence."""
        return self.ratio.startswith("sequence")


_CLIP = ("clip_low", "clip_high")
LOSSES = {
    "cispo": Loss(
        settings=("max_importance_ratio", "min_importance_ratio"),
        paper="MiniMax-M1, 2506.13585, eq. 4; ScaleRL, 2510.13786, eq. 4",
    ),
    "clipped": Loss(
        settings=_CLIP,
        clips=True,
        paper="PPO, 1707.06347; GRPO, 2402.03300; DAPO, 2503.14476",
    ),
    "decoupled": Loss(
        settings=(*_CLIP, "max_importance_ratio"),
        clips=True,
        anchor="recomputed",
        paper="Hilton et al., 2110.00641; AReaL, 2505.24298",
    ),
    "dppo": Loss(settings=("mask_low", "mask_high"), clips=True, paper="2602.04879"),
    "dual_clip": Loss(
        settings=(*_CLIP, "dual_clip"), clips=True, paper="Ye et al., 1912.09729"
    ),
    "gspo": Loss(
        settings=_CLIP, ratio="sequence_mean", clips=True, paper="2507.18071, eq. 5"
    ),
    "gspo_token": Loss(
        settings=_CLIP, ratio="sequence_mean", clips=True, paper="2507.18071, eq. 13"
    ),
    "reinforce": Loss(ratio="none", paper="Williams 1992"),
    "sequence_truncated_is": Loss(
        settings=("max_importance_ratio",),
        ratio="sequence_sum",
        anchor="behavior",
        paper="Liu et al. 2025, https://richardli.xyz/rl-collapse",
    ),
    "truncated_is": Loss(
        settings=("max_importance_ratio",),
        anchor="behavior",
        paper="Yao et al. 2025, https://fengyao.notion.site/off-policy-rl",
    ),
}
