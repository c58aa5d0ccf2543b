"""`python -m scalerl_jax.evaluate`: its files against each other, and its mistakes."""

import contextlib
import io
import itertools
import json
import math
import re
import statistics
from collections import Counter

import pytest
import small_run
from small_evaluation import BASE, FLAGS, SETS, command_line

from scalerl_jax.data.tokenizer import load_tokenizer
from scalerl_jax.evaluate import __main__ as command
from scalerl_jax.evaluate import policy
from scalerl_jax.evaluate.policy import Meter, describe, open_policy
from scalerl_jax.evaluate.results import SAMPLES_FILE, can_vote, final_answer
from scalerl_jax.wiring.prompts import evaluation_set

# ml_collections loads config files in a way that Python means to drop.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An evaluation of the base checkpoint: its directory, and what was printed."""
    out, printed = tmp_path_factory.mktemp("finished") / "out", io.StringIO()
    flags = {"checkpoint": BASE, "out": out} | FLAGS
    with contextlib.redirect_stdout(printed):
        assert command.run(["evaluate", *command_line(flags)]) == 0
    return out, printed.getvalue()


def rows_of(out):
    return [json.loads(line) for line in (out / SAMPLES_FILE).read_text().splitlines()]


def majority(samples, k):
    """maj@k by writing down every subset, ties shared."""
    found = []
    for subset in itertools.combinations(samples, k):
        votes = Counter(each["answer"] for each in subset if each["answer"])
        leaders = [vote for vote in votes if votes[vote] == max(votes.values())]
        right = {each["answer"] for each in subset if each["verdict"] == "correct"}
        found.append(sum(vote in right for vote in leaders) / max(len(leaders), 1))
    return statistics.mean(found)


def test_every_figure_follows_from_the_samples(finished):
    out, printed = finished
    summary, rows = json.loads((out / "summary.json").read_text()), rows_of(out)
    assert summary["complete"] and not out.with_name("out.partial").exists()
    assert [row["id"] for row in rows] == [f"{s}/{n}" for s in SETS for n in range(5)]
    judge_again(rows)
    for name, figures in [*summary["sets"].items(), ("overall", summary["overall"])]:
        own = [row["samples"] for row in rows if name in (row["set"], "overall")]
        right = [sum(each["verdict"] == "correct" for each in row) for row in own]
        assert 0 < sum(right) < 3 * len(own)  # or the rest says little
        mean = [count / 3 for count in right]
        assert figures["mean"]["value"] == pytest.approx(statistics.mean(mean))
        error = statistics.stdev(mean) / len(own) ** 0.5
        assert figures["mean"]["se"] == pytest.approx(error)
        # Of 3 samples with c right, 2 are both wrong in C(3 - c, 2) of 3 ways.
        pairs = [1 - {0: 3, 1: 1, 2: 0, 3: 0}[count] / 3 for count in right]
        assert figures["pass_at"]["2"]["value"] == pytest.approx(statistics.mean(pairs))
        for k in (1, 2, 3):
            if str(k) in figures["majority_at"]:
                expected = statistics.mean(majority(row, k) for row in own)
                found = figures["majority_at"][str(k)]["value"]
                assert found == pytest.approx(expected)
        every = [each for row in own for each in row]
        lengths = [each["tokens"] for each in every]
        found = figures["completion_tokens"]
        assert found["value"] == pytest.approx(statistics.mean(lengths))
        assert found["quantiles"]["0.5"] == pytest.approx(statistics.median(lengths))
        for field in ("cut_off", "interrupted"):
            share = statistics.mean(each[field] for each in every)
            assert figures[field]["value"] == pytest.approx(share)
        verdicts = Counter(each["verdict"] for each in every)
        for verdict, share in figures["verdicts"].items():
            assert share == pytest.approx(verdicts[verdict] / len(every))
        assert (
            f"{figures['mean']['value']:.3f} ± {figures['mean']['se']:.3f}" in printed
        )
    assert "mean@3" in printed and "maj@3" in printed and str(out) in printed


def judge_again(rows):
    """The verdicts by the tasks themselves, on what stands in the file."""
    for row in rows:
        for each in row["samples"]:
            text = each["completion"].removesuffix("<eos>")
            _, ended, answer = text.rpartition("</think>")
            if not ended:
                assert each["verdict"] == "no_answer" and each["answer"] is None
                continue
            assert each["completion"][each["answer_start"] :].startswith(answer)
            if row["task"] == "spell_backward":
                score = answer.strip() == row["reference"]
            else:
                score = answer.strip() == row["reference"].strip()
            assert (each["verdict"] == "correct") == score


def test_tokens_and_their_logprobs_stand_beside_the_text(finished):
    out, _ = finished
    for row in rows_of(out):
        for each in row["samples"]:
            assert "".join(each["token_texts"]) == each["completion"]
            values = each["logprobs"]
            assert len(values) == len(each["token_texts"]) == each["tokens"]
            assert (None in values) == each["interrupted"]
            assert all(value <= 0 for value in values if value is not None)
            assert min(value for value in values if value is not None) < -0.01


def test_the_same_seed_gives_the_same_samples(evaluate, finished, tmp_path):
    flags, out = FLAGS | {"sets": SETS[1], "json": True}, tmp_path / "again"
    status, printed, _ = evaluate(checkpoint=BASE, out=out, **flags)
    assert status == 0
    assert rows_of(out) == rows_of(finished[0])[5:]
    summary = json.loads((out / "summary.json").read_text())
    assert json.loads(printed) == summary | {"out": str(out)}


def test_a_run_is_evaluated_at_its_newest_checkpoint(
    evaluate, finished, run_directory, tmp_path, caplog
):
    out = tmp_path / "of_run"
    status, printed, _ = evaluate(checkpoint=run_directory, out=out, **FLAGS)
    assert status == 0 and "version 2" in printed
    summaries = [
        json.loads((at / "summary.json").read_text()) for at in (finished[0], out)
    ]
    assert [each["checkpoint"]["policy_version"] for each in summaries] == [0, 2]
    assert len({each["checkpoint"]["fingerprint"] for each in summaries}) == 1
    assert rows_of(out) == rows_of(finished[0])
    first = run_directory / "checkpoints" / "step_00000001"
    flags = FLAGS | {"sets": SETS[0], "samples": 1, "out": tmp_path / "first"}
    status, printed, _ = evaluate(checkpoint=first, temperature=0, **flags)
    assert status == 0 and "version 1" in printed and "temperature 0," in printed
    # Of what runs are trained on is known for a run alone, and of its settings.
    assert summaries[0]["training_prompts"] is None
    assert summaries[1]["training_prompts"] == dict.fromkeys(SETS, 0)
    assert "training prompts" not in caplog.text
    described = describe(small_run.make_config(), str(run_directory))
    prompts = evaluation_set(
        small_run.make_config({"eval.num_prompts": 300}), described.tokenizer, SETS[0]
    )
    asked = {SETS[0]: prompts}
    found = command._training_prompts(described, asked, asked)
    assert found and found[SETS[0]] > 0
    assert f"{found[SETS[0]]} of 300 prompts of chain_sum are training" in caplog.text
    assert "--num_prompts=3 asks those that it held out" in caplog.text
    of_two = small_run.make_config({"eval.num_prompts": 2})  # of three tasks
    assert "num_prompts" not in command._way_out(of_two, of_two.data.tasks[2])


@pytest.mark.parametrize("cached", [True, False])
def test_the_prefix_cache_is_that_of_the_settings(monkeypatch, cached):
    class Made(Exception):
        pass

    def make_now(engine, *, prefix_cache=True):
        raise Made(prefix_cache)

    monkeypatch.setattr(policy, "PagePool", make_now)
    settings = small_run.make_config({"sampler.prefix_cache": cached})
    with pytest.raises(Made) as made, open_policy(describe(settings, BASE), None):
        pass
    assert made.value.args == (cached,)


def test_ctrl_c_keeps_what_is_finished(evaluate, tmp_path, monkeypatch):
    done = Meter.done

    left = iter(range(5, -1, -1))

    def interrupted(meter):
        done(meter)
        if not next(left):
            raise KeyboardInterrupt

    monkeypatch.setattr(Meter, "done", interrupted)
    out = tmp_path / "out"
    flags = FLAGS | {"num_prompts": 40, "samples": 1}
    status, printed, _ = evaluate(checkpoint=BASE, out=out, **flags)
    assert status == 130 and "INTERRUPTED" in printed
    summary = json.loads((out / "summary.json").read_text())
    assert not summary["complete"]
    assert summary["overall"]["prompts"] == len(rows_of(out)) == 6
    assert "INTERRUPTED" in (out / "viewer.html").read_text()


MISTAKES = [
    ({"sets": "chain_sum,nope"}, ("'nope'", "'chain_sum'", "'math500'")),
    ({"sets": "chain_sum,chain_sum"}, ("--sets=", "once")),
    ({"samples": 0}, ("eval.samples_per_prompt = 0", "above 0")),
    ({"samples": 1001}, ("--samples=1001", "1000 at most")),
    ({"temperature": -1}, ("--temperature=-1.0", "0 or more")),
    ({"checkpoint": "/nowhere"}, ("--checkpoint=/nowhere: there is no such",)),
    ({"config": "configs/none.py"}, ("configs/none.py",)),
    ({"config.eval.nope": 3}, ("--config has no such setting",)),
    ({"smaples": 3}, ("smaples",)),
]


@pytest.mark.parametrize("flags, words", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(evaluate, tmp_path, flags, words):
    flags = {"checkpoint": BASE, "out": tmp_path / "out", **FLAGS, **flags}
    status, printed, said = evaluate(**flags)
    *_, line = said.splitlines()
    assert (status, printed) == (2, "") and line.startswith("error: ")
    for word in words:
        assert word in line
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(evaluate, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    status, _, said = evaluate(checkpoint=BASE, out=tmp_path / "out", **FLAGS)
    assert status == 2 and "already exists" in said
    (tmp_path / "killed.partial").mkdir()
    status, _, said = evaluate(checkpoint=BASE, out=tmp_path / "killed", **FLAGS)
    assert status == 2 and "was killed" in said


def test_a_page_of_rollouts_that_are_there(evaluate, finished, tmp_path):
    samples, out = finished[0] / "samples.jsonl", tmp_path / "page.html"
    status, printed, _ = evaluate(rollouts=samples, out=out)
    assert status == 0 and "10 prompts" in printed
    data = r'<script type="application/json" id="p\d+">.*'
    written, again = (
        re.findall(data, at.read_text()) for at in (finished[0] / "viewer.html", out)
    )
    assert again == written and len(again) == 10
    assert evaluate(rollouts=samples, out=out)[0] == 2


@pytest.mark.parametrize("odd", [math.nan, -math.inf, 1e308, "-1"])
def test_a_page_needs_finite_log_probabilities(evaluate, finished, tmp_path, odd):
    row = rows_of(finished[0])[0]
    row["samples"][1]["logprobs"][0] = odd
    (tmp_path / "odd.jsonl").write_text(json.dumps(row) + "\n")
    status, _, said = evaluate(rollouts=tmp_path / "odd.jsonl", out=tmp_path / "page")
    assert status == 2 and "odd.jsonl holds no rollouts" in said
    assert not (tmp_path / "page").exists()


def test_a_policy_without_a_single_answer_is_told_why(evaluate, tmp_path, caplog):
    flags = {"samples": 1, "num_prompts": 2, "config.data.answer_after": "[/THINK]"}
    assert not evaluate(**FLAGS | flags, checkpoint=BASE, out=tmp_path / "out")[0]
    told = "no completion holds an answer: an answer is what follows '[/THINK]'"
    assert told in caplog.text


def test_tokens_inside_of_a_character_are_put_together():
    tokenizer = load_tokenizer(BASE)
    tokens = tokenizer.encode("12 + 3</think>15") + [1]
    texts = tokenizer.written.texts(tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == tokenizer.decode_all(tokens)


@pytest.mark.parametrize(
    "given, verifier, text, vote",
    [
        (r"so \boxed{ \frac{1}{2} }.", "math", r" \frac{1}{2} ", r"\frac{1}{2}"),
        ("no box", "math", None, None),
        ("see\n```python\nx = 1\n```", "code", "x = 1\n", None),
        ("  two  words ", None, "  two  words ", "two words"),
        ("", None, "", None),
        (None, "math", None, None),
    ],
)
def test_the_final_answer_and_its_vote(given, verifier, text, vote):
    reference = {"verifier": verifier} if verifier else {}
    assert final_answer(given, reference, math_answer="boxed") == (text, vote)


@pytest.mark.parametrize(
    ("verifier", "environment", "votes"),
    [
        ("math", "", True),
        ("math", "tools", True),
        ("code", "", False),
        ("math", "/mine/guess.py:Guess", False),
        ("own", "env:my_words", False),
    ],
)
def test_only_answers_that_can_be_compared_have_votes(verifier, environment, votes):
    """A reward function may read more than the final answer: no box is no wrong one."""
    assert can_vote({"verifier": verifier}, environment) == votes
