"""When verifiers fail too often, counted by hand."""

import pytest
from test_assembly import make_group, make_rollout

from scalerl_jax.controller.monitor import UnjudgedWatch


def group(failed, *, detail="late"):
    """Two rollouts, of which so many are unjudged."""
    statuses = ["verifier_timeout"] * failed + ["wrong"] * (2 - failed)
    rollouts = (make_rollout(1, -1.0, first=10, status=each) for each in statuses)
    return make_group(*rollouts).replace(detail=detail if failed else "")


def watch(max_share=0.25):
    """Of one prompt a batch: ten groups, twenty rollouts."""
    return UnjudgedWatch(max_share=max_share, num_prompts=1, group_size=2)


def test_a_run_stops_with_the_rollout_past_the_limit():
    counted = watch()
    for failed in (2, 1, 2):
        counted.add([group(failed)])
        assert counted.reason is None  # five of twenty
    counted.add([group(0), group(1, detail="broken")])
    assert counted.reason is not None
    for words in (
        "verifiers failed on 6 rollouts of the last 10 batches",
        "reward.max_unjudged_share = 0.25",
        "most often with: late",
        "--workdir",
    ):
        assert words in counted.reason


@pytest.mark.parametrize("judged", [False, True])
def test_an_answer_that_is_too_costly_has_a_verdict_once_it_is_wrong(judged):
    costly = make_rollout(1, -1.0, first=10, status="too_costly").replace(judged=judged)
    counted = watch()
    counted.add([make_group(costly, costly)] * 3)  # six of twenty
    assert (counted.reason is None) == judged


def test_old_failures_are_forgotten():
    counted = watch()
    for _ in range(100):
        counted.add([group(2), group(0), group(0), group(0), group(0)])
    assert counted.reason is None  # four of the last twenty
    assert watch(max_share=1.0).reason is None


@pytest.mark.parametrize(
    "share, no_figure, stops",
    [(0.25, False, False), (0.26, False, True), (1.0, True, True)],
)
def test_an_evaluation_is_held_to_the_same_share(share, no_figure, stops):
    for max_share in (0.25, 1.0):
        counted = watch(max_share=max_share)
        counted.evaluated(share, ["late"], no_figure=no_figure)
        assert (counted.reason is not None) == (stops if max_share < 1.0 else no_figure)
