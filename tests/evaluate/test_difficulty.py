"""Pass rates of training prompts: measured, gone on with, and read by a curriculum."""

import fcntl
import hashlib
import json
import math

import numpy as np
import pytest
import small_run

from scalerl_jax.data.curriculum import read_pass_rates
from scalerl_jax.evaluate import difficulty
from scalerl_jax.evaluate.difficulty import histogram
from scalerl_jax.run.writing import open_to_append
from scalerl_jax.wiring.learning import make_architecture
from scalerl_jax.wiring.prompts import load_prompts
from scalerl_jax.wiring.sampling import make_tokenizer

# ml_collections loads config files in a way that Python means to drop.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning"),
]
FLAGS = {"dataset": "chain_sum", "num_prompts": 12, "samples": 2}


def rows_of(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_measurement_goes_on_where_it_was_killed(measure, tmp_path):
    out = tmp_path / "difficulty.jsonl"
    status, printed, _ = measure(out=out, **FLAGS)
    assert status == 0 and "12 of 12" in printed and "easy: " in printed
    rows = rows_of(out)
    assert len({row["sha256"] for row in rows}) == 12
    assert {row["pass_rate"] for row in rows} <= {0.0, 0.5, 1.0}
    assert 0 < np.mean([row["pass_rate"] for row in rows]) < 1
    # Killed in the middle of the eighth line.
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:7]) + lines[7][:20])
    assert measure(out=out, **FLAGS)[0] == 0
    again = out.read_text().splitlines(keepends=True)
    assert again[:7] == lines[:7] and sorted(again) == sorted(lines)


def test_two_processes_do_not_measure_into_one_file(measure, tmp_path):
    out = tmp_path / "difficulty.jsonl"
    with open_to_append(out) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        status, _, said = measure(out=out, **FLAGS)
    assert status == 2 and f"--out={out} is being written by another process" in said
    assert out.read_bytes() == b""


def test_what_another_process_has_written_since_is_kept(measure, tmp_path, monkeypatch):
    out, read = tmp_path / "difficulty.jsonl", difficulty._read

    def read_before_the_other_writes(*given):
        found = read(*given)
        out.write_bytes(b"{}\n")
        return found

    monkeypatch.setattr(difficulty, "_read", read_before_the_other_writes)
    status, _, said = measure(out=out, **FLAGS)
    assert status == 2 and "by another process meanwhile; start this again" in said
    assert out.read_bytes() == b"{}\n"


def test_a_curriculum_reads_what_was_measured(measure, tmp_path):
    out = tmp_path / "difficulty.jsonl"
    settings = {
        "data.tasks": ("chain_sum", "spell_backward"),
        "data.train_prompts": 8,
        "batch.num_prompts": 4,
        "eval.num_prompts": 9,
    }
    flags = {f"config.{name}": value for name, value in settings.items()}
    assert measure(out=out, samples=2, **flags)[0] == 0
    config = small_run.make_config(settings)
    tokenizer = make_tokenizer(config, make_architecture(config))
    prompts = load_prompts(config, tokenizer).train
    rates = {row["sha256"]: row["pass_rate"] for row in rows_of(out)}
    expected = [
        rates[hashlib.sha256(prompt.text.encode()).hexdigest()] for prompt in prompts
    ]
    np.testing.assert_array_equal(read_pass_rates(out, prompts), expected)


def test_other_conditions_need_another_file(measure, tmp_path):
    out = tmp_path / "difficulty.jsonl"
    row = {"sha256": "0" * 64, "pass_rate": 0.5, "samples": 3, "version": 0}
    row |= {"temperature": 1.0, "checkpoint": "elsewhere", "settings": "0" * 16}
    out.write_text(json.dumps(row) + "\n")
    status, _, said = measure(out=out, **FLAGS)
    assert status == 2 and "line 1 was measured with samples = 3 (now it would" in said
    assert "checkpoint = 'elsewhere' (" in said and "temperature" not in said
    out.write_text("{}\n")
    assert "line 1 is no measured pass rate" in measure(out=out, **FLAGS)[2]
    assert "--out is missing" in measure(**FLAGS)[2]


@pytest.mark.parametrize(
    "odd",
    [{"pass_rate": odd} for odd in ("high", None, 7, True, math.nan, [0.5])]
    + [{"sha256": 5}, {"version": "a"}, {"fingerprint": 3}, {"settings_by_name": [1]}],
    ids=str,
)
def test_a_line_with_a_value_of_another_kind_is_refused(measure, tmp_path, odd):
    out = tmp_path / "difficulty.jsonl"
    row = {"sha256": "0" * 64, "pass_rate": 0.5, "samples": 3, "version": 0}
    row |= {"temperature": 1.0, "checkpoint": "elsewhere", "settings": "0" * 16}
    out.write_text(json.dumps(row | odd) + "\n")
    status, _, said = measure(out=out, **FLAGS)
    assert status == 2 and "line 1 is no measured pass rate" in said


def test_the_histogram_counts_every_prompt_once():
    rates = [0.0, 0.0, 0.0625, 0.25, 0.3, 0.5, 0.6, 0.95, 1.0]
    text = histogram(rates)
    counts = {
        line[:12].strip(): int(line[12:].split()[0]) for line in text.splitlines()[:12]
    }
    assert sum(counts.values()) == 9
    assert (counts["0"], counts["1"], counts["0.9 to 1.0"]) == (2, 1, 1)
    # 0.3, 0.5 and 0.6; 0, 0 and 0.0625
    assert "easy: 3 of 9 in [0.3, 0.6]" in text
    assert "hard: 3 of 9 in [0.0, 0.0625]" in text


def test_other_settings_of_samples_or_verdicts_need_another_file(measure, tmp_path):
    out = tmp_path / "difficulty.jsonl"
    few = FLAGS | {"num_prompts": 3}
    assert measure(out=out, **few)[0] == 0
    rows = rows_of(out)
    assert len({row["settings"] for row in rows}) == 1
    assert ["settings_by_name" in row for row in rows] == [True, False, False]
    for name, value in {
        "sampler.max_completion_tokens": 60,
        "sampler.top_k": 5,
        "interruption.enabled": False,
        "reward.correct": 2.0,
        "data.answer_after": "=",
        "seed": 9,
        "objective.cut_off_completions": "wrong",
    }.items():
        status, _, said = measure(out=out, **FLAGS, **{f"config.{name}": value})
        assert status == 2, name
        assert f"line 1 was measured with {name} = " in said
        assert f"(now it would be {value!r}); name another file" in said
    assert rows_of(out) == rows
    # Settings of speed, or of training alone, may differ.
    free = {"sampler.tokens_per_call": 3, "reward.max_unjudged_share": 0.9}
    free |= {"sampler.temperature": 0.7, "objective.allow_sampling_filters": True}
    changes = {f"config.{name}": value for name, value in free.items()}
    assert measure(out=out, **FLAGS | {"num_prompts": 6}, **changes)[0] == 0
    rows = rows_of(out)
    assert len({row["settings"] for row in rows}) == 1 and len(rows) > 3
    assert sum("settings_by_name" in row for row in rows) == 1


def test_a_newer_checkpoint_needs_another_file(measure, run_directory, tmp_path):
    out = tmp_path / "difficulty.jsonl"
    row = {"sha256": "0" * 64, "pass_rate": 0.5, "samples": 2, "version": 1}
    row |= {"temperature": 1.0, "checkpoint": str(run_directory)}
    whole = tmp_path / "whole.jsonl"
    few = FLAGS | {"num_prompts": 1}
    assert measure(checkpoint=run_directory, out=whole, **few)[0] == 0
    row["settings"] = rows_of(whole)[0]["settings"]
    out.write_text(json.dumps(row) + "\n")
    status, _, said = measure(checkpoint=run_directory, out=out, **FLAGS)
    assert status == 2 and "at policy version [1]" in said and "is now at 2" in said
    assert len(rows_of(out)) == 1
    # Other weights in the same directory, at the same version.
    (row,) = rows_of(whole)
    whole.write_text(json.dumps(row | {"fingerprint": "0" * 16}) + "\n")
    status, _, said = measure(checkpoint=run_directory, out=whole, **FLAGS)
    assert status == 2 and f"now {row['fingerprint']}); name another file" in said
