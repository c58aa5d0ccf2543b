"""The command `simulate`: figures, a sweep, a picture."""

import json
import re
from pathlib import Path

import pytest
import small_commands
import small_run

RATES = {
    "decode_s": [[1, 0.1], [64, 0.2]],
    "train_s": 2.0,
    "train_token_s": 1e-4,
    "publish_s": 0.1,
}
TINY = f"simulate --config={small_run.ROOT}/configs/tiny.py --rates=rates.json"
# An evaluation of 1000 prompts is simulated for longer than the steps are.
OPEN = (
    f"simulate --config={small_run.ROOT}/configs/8b.py --topology=v5p:4x4x4 "
    f"--config.eval.num_prompts=50"
)
POD = (
    f"{OPEN} --config.generators.count=1 --config.generators.devices=8 "
    f"--config.sampler.slots=64 --config.sampler.cache_tokens=300000 "
    f"--config.mesh.data=1 --config.model.remat=full"
)


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rates.json").write_text(json.dumps(RATES))


def ask(line):
    status, said, errors = small_commands.outcome(line)
    assert status == 0, errors
    return said


def test_figures_and_a_picture():
    said = ask(f"{TINY} --steps=30 --mean_tokens=30 --picture=run.png --price=2")
    assert "30 steps simulated" in said and "of money" in said
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")


def test_json_has_the_settings_of_the_config():
    line = f"{TINY} --json --steps=30 --mean_tokens=30"
    turns = json.loads(ask(f"{line} --config.queue.max_staleness=0"))
    ahead = json.loads(ask(line))
    assert turns["staleness_max"] == 0 < ahead["staleness_max"]
    assert ahead["step_s"] < turns["step_s"]
    assert ahead["trained_groups"] == 30 * 32
    assert "price_per_step" not in ahead
    priced = json.loads(ask(f"{line} --price=2"))
    assert priced["price_per_step"] == 2.0 * priced["chip_hours_per_step"] > 0


def test_figures_of_steps_without_a_decode_call_are_numbers():
    """All groups of three steps are sampled before the first one ends."""
    rates = {"decode_s": [[1, 1e-3]], "train_s": 10.0}
    Path("rates.json").write_text(json.dumps(rates))
    found = json.loads(ask(f"{TINY} --json --steps=3"))
    assert (found["generators_idle"], found["slots_in_use"]) == (1.0, 0.0)


def test_a_run_has_lengths_of_its_own():
    """10 and 40 tokens, equally often: log(2) about the middle, a tail of 2 ^ 2.33."""
    logged = [{"tokens": round(20 * 2**x)} for x in (-1, 1) * 40]
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text('{"completion/mean_tokens": 25.0}\n' * 3)
    Path("run/rollouts.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in logged))
    by_run = json.loads(ask(f"{TINY} --json --steps=40 --lengths=run"))
    by_hand = f"--mean_tokens=25 --tail={2**2.3263479:.6f}"
    by_flags = json.loads(ask(f"{TINY} --json --steps=40 {by_hand}"))
    by_rates = "decode_s, train_s, train_token_s, publish_s, as rates.json says"
    assert by_flags["measured"] == [by_rates]
    assert by_run["measured"] == [
        by_rates,
        "completions of 25 tokens on average, 99th percentile 5.02 times the median, "
        "in the run run",
    ]
    for name in by_run.keys() - {"measured", "assumed"}:
        assert by_run[name] == by_flags[name], name


def test_measured_lengths_are_drawn_from():
    Path("lengths.jsonl").write_text("[10, 10]\n[50, 50]\n")
    found = json.loads(ask(f"{TINY} --json --steps=40 --lengths=lengths.jsonl"))
    tokens = found["tokens_per_s"] * found["step_s"] / (32 * 8)
    assert tokens == pytest.approx(30, rel=0.1)
    assert found["measured"][1:] == ["lengths of completions, in lengths.jsonl"]


def test_it_is_said_what_is_assumed():
    said = ask(f"{POD} --steps=12 --mean_tokens=8000 --zero_variance=0.25")
    measured, assumed = said.split("measured:\n")[1].split("assumed:\n")
    assert measured == "  - nothing\n"
    for words in (
        "v5p:4x4x4 by closed forms, none measured on a TPU: a train step at 50% of the",
        "verify_s 0.5 s",
        "completions of 8,000 tokens on average, 99th percentile 4 times the median",
        "prompts of 200 tokens (--prompt_tokens), 25% of the groups without a gradient",
        "a learner is never lost",
    ):
        assert words in assumed
    said = ask(
        f"{TINY} --steps=30 --mean_tokens=30 --learner_mtbf_h=8 "
        f"--sweep='queue.max_waiting=1,2'"
    )
    assert "prompts of 48 tokens (--prompt_tokens)" in said  # the longest
    assert "  - decode_s, train_s, train_token_s, publish_s, as rates.json" in said
    assert "0 s for rates that it omits: decode_context_s, prefill_s, assemb" in said
    assert "a learner is lost every 8 h and back after 240 s" in said


def test_a_sweep_names_the_cheapest_and_what_cannot_be():
    """Nine replicas of four chips leave 28, of which a learner's box has 16."""
    line = f"{POD} --config.generators.devices=4 --steps=12 --mean_tokens=8000"
    said = ask(f"{line} --sweep='generators.count=1,9,16 sampler.slots=32'")
    rows = [line.split("|")[1:-1] for line in said.splitlines()[2:5]]
    hours = [float(row[2]) for row in rows[:2]]
    assert hours == sorted(hours)
    assert int(rows[0][0]) == 9 and int(rows[1][0]) == 1
    assert "leave no device of v5p:4x4x4 (64) to the learner" in rows[2][2]
    words = re.findall(r"--config\.\S+", said)
    assert words[:2] == ["--config.generators.count=9", "--config.sampler.slots=32"]
    *_, invalid = json.loads(ask(f"{line} --json --sweep=generators.count=9,16"))
    assert invalid["generators.count"] == 16 and "no device" in invalid["reason"]
    # A run with the settings that it names costs what the row says.
    alone = ask(" ".join([line, *words]))
    assert alone.startswith("16 chips learn, 9 x 4 generate with 32 slots each, 12 are")
    assert a_step(alone)[1] == hours[0]


def a_step(said):
    seconds, hours = re.search(r"a step: (\S+) s, (\S+) chip-hours", said).groups()
    return float(seconds), float(hours)


def test_the_learner_has_the_chips_of_its_mesh_and_others_are_paid_for():
    line = POD.replace("count=1", "count=4")
    line = f"{line} --config.mesh.fsdp=8 --steps=12 --mean_tokens=8000"
    said = ask(line)
    assert said.startswith(
        "8 chips learn, 4 x 8 generate with 64 slots each, 24 are paid for without a "
        "role; 12 steps simulated"
    )
    seconds, hours = a_step(said)
    assert hours == pytest.approx(64 * seconds / 3600, rel=1e-3)
    # With a sweep of generators the learner's chips are chosen: 32.
    [swept] = json.loads(ask(f"{line} --json --sweep=generators.count=4"))
    idle = float(re.search(r"idle: learner (\S+)%", said)[1])
    assert idle < 10 < 30 < 100 * swept["learner_idle"]


def test_both_halves_of_a_tpu7x_are_one_chip():
    line = POD.replace("v5p:4x4x4", "tpu7x:2x2x1").replace("devices=8", "devices=4")
    said = ask(f"{line} --steps=12 --mean_tokens=8000")
    assert said.startswith("2 chips learn, 1 x 2 generate with 64 slots each;")
    seconds, hours = a_step(said)
    assert hours == pytest.approx(4 * seconds / 3600, rel=1e-3)


def test_chips_that_are_shared_are_not_simulated():
    line = f"simulate --config={small_run.ROOT}/configs/tiny.py --topology=v6e:2x4"
    status, said, error = small_commands.outcome(line)
    assert (status, said) == (2, "")
    assert error.startswith("error: generators.placement = 'shared' is not simulated")
    apart = "--config.generators.placement=apart --steps=12 --mean_tokens=30"
    assert ask(f"{line} {apart}").startswith("1 chips learn, 1 x 1 generate")


def test_no_replica_is_recommended_that_cannot_be():
    said = ask(
        f"{POD} --steps=12 --mean_tokens=8000 --config.sampler.cache_tokens=600000 "
        f"--sweep=generators.devices=-1,1,3,8"
    )
    rows = [line.split("|")[1:-1] for line in said.splitlines()[2:6]]
    reasons = {int(row[0]): row[1] for row in rows}
    assert float(reasons[8]) > 0
    assert "generators.devices = -1 must be 0 or more" in reasons[-1]
    assert "generators.devices = 3 does not divide the 8 kv heads" in reasons[3]
    # 8.03e9 weights of 2 bytes and 128 KiB a token, 4 % more, and 0.6 GiB.
    assert "cache of 600,000 tokens needs 92.3 of 87.4 GiB" in reasons[1]
    assert "least chip-hours a step: --config.generators.devices=8\n" in said


def test_a_sweep_takes_no_flag_that_it_does_not_read():
    line = f"{TINY} --sweep=queue.max_waiting=1,2 --picture=run.png --price=2"
    status, said, error = small_commands.outcome(line)
    assert (status, said) == (2, "") and not Path("run.png").exists()
    assert error.startswith("error: --sweep does not read --picture and --price;")


@pytest.mark.slow
def test_what_a_config_leaves_open_is_chosen():
    found = json.loads(ask(f"{OPEN} --json --steps=12"))
    poor = json.loads(ask(f"{POD} --json --steps=12"))
    assert found["chip_hours_per_step"] < poor["chip_hours_per_step"] / 2


def test_losses_are_told():
    said = ask(
        f"{POD} --steps=12 --mean_tokens=8000 --replica_mtbf_h=0.5 "
        f"--learner_mtbf_h=0.5 --config.generators.count=4"
    )
    assert "groups sampled again" in said
