"""Whole runs with replicas in one process."""

import pytest
import small_run

from scalerl_jax import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_parts")]

ON_POLICY = {
    "queue.max_staleness": 0,
    "mesh.fsdp": 2,
    "generators.count": 2,
    "optimizer.learning_rate": 1e-3,
}


def test_without_staleness_replicas_on_the_learners_devices_go_on_bit_for_bit(tmp_path):
    changes = ON_POLICY
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    main.run(small_run.make_config(changes), str(whole))
    main.run(small_run.make_config(changes | {"train.num_steps": 2}), str(cut))
    main.run(small_run.make_config(changes), str(cut))
    expected, found = (
        small_run.saved_arrays(small_run.checkpoints(at)[-1]) for at in (whole, cut)
    )
    assert expected.keys() == found.keys()
    for name, leaf in expected.items():
        assert leaf.tobytes() == found[name].tobytes(), name


def test_replicas_with_devices_of_their_own_evaluate_as_one_and_keep_the_books(
    tmp_path,
):
    apart = {
        "mesh.fsdp": 4,
        "generators.count": 2,
        "generators.devices": 2,
        "queue.max_staleness": 2,
    }
    main.run(small_run.make_config(apart), str(tmp_path / "apart"))
    main.run(small_run.make_config({"train.num_steps": 1}), str(tmp_path / "one"))
    evaluations = [
        small_run.rows(tmp_path / name, "evals.jsonl")[0] for name in ("apart", "one")
    ]
    for name in ("prompt_pass_rates", "mean_completion_tokens", "interrupted_share"):
        assert evaluations[0][name] == evaluations[1][name]
    rows = small_run.rows(tmp_path / "apart")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["staleness/max"] <= 2 for row in rows)
    assert rows[-1]["replicas/up"] == 2 and rows[-1]["replicas/lost"] == 0
    # Three pools of 4, 2 and 2 devices, each accounted for at every instant.
    shares = [rows[-1][f"idle/{pool}_share"] for pool in PLACES]
    assert all(0 <= share <= 1 for share in shares)


PLACES = ("learner", "replica0", "replica1")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"queue.max_staleness": 0}, id="one thread"),
        pytest.param(
            ON_POLICY | {"generators.devices": 1, "mesh.fsdp": 4},
            id="replicas with devices of their own",
        ),
    ],
)
def test_evaluations_beside_the_run_change_nothing_but_when_they_are_there(
    tmp_path, changes
):
    beside, apart, cut = (tmp_path / name for name in ("beside", "apart", "cut"))
    concurrent = changes | {"eval.concurrent": "on"}
    main.run(small_run.make_config(concurrent), str(beside))
    main.run(small_run.make_config(changes), str(apart))
    main.run(small_run.make_config(concurrent | {"train.num_steps": 3}), str(cut))
    main.run(small_run.make_config(concurrent), str(cut))
    evaluations = [
        small_run.rows(directory, "evals.jsonl") for directory in (beside, apart, cut)
    ]
    steps = [[row["step"] for row in rows] for rows in evaluations]
    assert steps == [[0, 2, 4], [0, 2, 4], [0, 2, 3, 4]]
    assert evaluations[2].pop(2)["policy_version"] == 3  # its own last one
    for rows in zip(*evaluations, strict=True):
        for name in ("policy_version", "prompt_pass_rates", "mean_completion_tokens"):
            assert rows[0][name] == rows[1][name] == rows[2][name]
    expected, *others = (
        small_run.saved_arrays(small_run.checkpoints(directory)[-1])
        for directory in (apart, beside, cut)
    )
    for found in others:
        for name, leaf in expected.items():
            assert leaf.tobytes() == found[name].tobytes(), name
    assert small_run.rows(beside)[-1]["compute/eval_chip_s"] > 0
