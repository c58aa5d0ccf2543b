"""The prompts of a run: generated tasks, data sets, mixtures, and what is refused."""

import collections
import dataclasses
import json

import pytest
import small_run
import task_splits

from scalerl_jax.data.mixture import MixtureStream
from scalerl_jax.data.prompts import PromptStream
from scalerl_jax.data.tokenizer import load_tokenizer
from scalerl_jax.evaluate.policy import spread
from scalerl_jax.run.directory import keep_data_report
from scalerl_jax.wiring.prompts import (
    count_trained,
    evaluation_set,
    load_prompts,
    make_stream,
)

CONFIG = small_run.make_config()
TOKENIZER = load_tokenizer(CONFIG.model.checkpoint)


def write(path, questions):
    """A file of questions and answers, as the name of a data set."""
    rows = [{"question": text, "answer": answer} for text, answer in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def sums(count, *, sign="+"):
    return [(f"what is {i} {sign} 1?", str(i + 1)) for i in range(count)]


def baskets(count, *, first=0):
    return [
        (f"{first + i} figs and nuts in one big bag: {i}?", "1") for i in range(count)
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Data sets by name, and the directory that they are prepared in."""
    directory = tmp_path_factory.mktemp("questions")
    long = "how many words has this question that goes on and on and on?"
    names = {
        "sums": write(directory / "sums.jsonl", sums(60)),
        "products": write(directory / "products.jsonl", sums(20, sign="*")),
        "twice": write(directory / "twice.jsonl", sums(20) + sums(10)),
        "baskets": write(directory / "baskets.jsonl", baskets(20)),
        "few baskets": write(directory / "few.jsonl", baskets(3, first=90)),
        "long": write(directory / "long.jsonl", [*sums(5), (long, "13")]),
        "too long": write(directory / "too_long.jsonl", [(long, "13")] * 3 + sums(1)),
    }
    return names, str(directory / "prepared")


@pytest.fixture
def made(files):
    """A Config of these data sets, and changes."""
    names, directory = files

    def make(*data_sets, sets=(), **changes):
        changes = {
            "data.tasks": tuple(names.get(name, name) for name in data_sets),
            "eval.sets": tuple(names.get(name, name) for name in sets),
            "data.directory": directory,
            "data.train_prompts": 0,
            "data.overlap_ngram": 0,
        } | changes
        return small_run.make_config(changes)

    return make


def texts(prompts):
    return [prompt.text for prompt in prompts]


def test_generated_tasks_give_the_prompts_of_their_splits():
    loaded = load_prompts(CONFIG, TOKENIZER)
    expected = task_splits.make_splits(
        CONFIG.data.tasks, train_prompts=60, eval_prompts=9, seed=CONFIG.seed
    )
    for prompts, questions in zip(
        (loaded.train, loaded.held_out), expected, strict=True
    ):
        assert texts(prompts) == [f"{each.text}<think>" for each in questions]
        assert [each.reference for each in prompts] == [
            each.reference for each in questions
        ]
        assert [each.prompt_id for each in prompts] == list(range(len(questions)))


def test_a_data_set_is_split_at_random_and_wholly_used(made):
    config = made("sums", **{"eval.num_prompts": 20})
    loaded = load_prompts(config, TOKENIZER)
    train, held_out = texts(loaded.train), texts(loaded.held_out)
    assert len(held_out) == 20 and len(train) == 40
    assert sorted(train + held_out) == sorted(f"{text}<think>" for text, _ in sums(60))
    assert held_out != [f"{text}<think>" for text, _ in sums(20)]
    prompt = loaded.train[3]
    assert prompt.tokens.tolist() == TOKENIZER.encode(prompt.text)
    assert prompt.task == config.data.tasks[0]
    assert prompt.reference["verifier"] == "math"
    number = int(prompt.text.split()[2])
    assert prompt.reference["answer"] == str(number + 1)


def test_the_seed_draws_what_is_trained_on_and_not_what_is_held_out(made):
    drawn = [
        load_prompts(made("sums", seed=seed, **{"data.train_prompts": 20}), TOKENIZER)
        for seed in (0, 1, 1)
    ]
    held_out = [texts(each.held_out) for each in drawn]
    train = [texts(each.train) for each in drawn]
    assert held_out[0] == held_out[1] == held_out[2]
    assert train[0] != train[1] == train[2]
    for each in train:
        assert len(each) == 20 and not set(each) & set(held_out[0])
    more = load_prompts(made("sums"), TOKENIZER)
    assert texts(more.held_out) == held_out[0]


def test_duplicates_and_overlap_are_dropped_and_counted(made):
    config = made("twice", sets=("products",))
    loaded = load_prompts(config, TOKENIZER)
    assert len(loaded.train) == 20 and len(loaded.held_out) == 20
    assert loaded.report["training"][config.data.tasks[0]]["dropped"] == {
        "duplicate": 10
    }
    config = made("sums", sets=("twice",))
    loaded = load_prompts(config, TOKENIZER)
    assert texts(loaded.train) == [f"{text}<think>" for text, _ in sums(60)[20:]]
    assert len(loaded.held_out) == 30  # a set is asked as it is
    report = loaded.report["training"][config.data.tasks[0]]
    assert report["dropped"] == {"equals_evaluation": 20}
    assert (report["questions"], report["looked_at"], report["kept"]) == (60, 60, 40)
    json.dumps(loaded.report)


def test_long_prompts_are_dropped_and_counted(made):
    limit = {"sampler.max_prompt_tokens": 30, "eval.num_prompts": 1}
    config = made("long", **limit)
    loaded = load_prompts(config, TOKENIZER)
    assert len(loaded.train) == 4
    dropped = [
        report[config.data.tasks[0]]["dropped"].get("over_long", 0)
        for report in loaded.report.values()
    ]
    assert max(dropped) == 1
    assert all(len(prompt.tokens) <= 30 for prompt in loaded.train)


@pytest.mark.parametrize(
    "sets", [(), ("chain_sum", "products")], ids=["held out", "named"]
)
def test_training_prompts_in_an_evaluation_set_are_counted(made, sets):
    run = made("chain_sum", "sums", sets=sets, **{"data.train_prompts": 90})
    loaded = load_prompts(run, TOKENIZER)
    trained = {prompt.text for prompt in loaded.train}
    # Other settings of an evaluation: more prompts, and another template.
    asked = made(
        "chain_sum", **{"eval.num_prompts": 400, "data.template": "{question}"}
    )
    shown = {text.removesuffix("<think>") for text in trained}
    prompts = evaluation_set(asked, TOKENIZER, "chain_sum")
    known = sum(prompt.text in shown for prompt in prompts)
    assert count_trained(run, asked, "chain_sum", prompts, size=400) == known > 0
    (share,) = {len(loaded.held_out) // 2} if not sets else {0}
    held = [each for each in loaded.held_out if each.task == "chain_sum"]
    assert count_trained(run, run, "chain_sum", held, size=len(held)) == 0
    name = run.data.tasks[1]  # of a data set: any but those held out
    prompts = evaluation_set(run, TOKENIZER, name)
    size = len(prompts)
    assert count_trained(run, run, name, prompts, size=size) == size - share
    assert count_trained(made("chain_sum"), run, name, prompts, size=size) == 0


def test_a_few_prompts_of_a_data_set_may_all_be_training_prompts(made):
    run = made("sums")
    loaded = load_prompts(run, TOKENIZER)
    (name,), held = run.data.tasks, len(loaded.held_out)
    prompts = evaluation_set(run, TOKENIZER, name)
    trained = {prompt.text for prompt in loaded.train}
    for count in (1, held, len(prompts) - 1, len(prompts)):
        few = spread(prompts, count)
        found = count_trained(run, run, name, few, size=len(prompts))
        assert found == min(count, len(prompts) - held)
        assert found >= sum(prompt.text in trained for prompt in few)


def test_evaluation_sets_come_one_after_the_other(made):
    config = made("sums", sets=("products", "chain_sum"))
    loaded = load_prompts(config, TOKENIZER)
    names = [prompt.task for prompt in loaded.held_out]
    first, second = config.eval.sets
    assert names == [first] * 20 + [second] * 9
    assert [prompt.prompt_id for prompt in loaded.held_out] == list(range(29))
    assert len(loaded.train) == 60
    alone = evaluation_set(config, TOKENIZER, first)
    assert texts(alone) == texts(loaded.held_out[:20])
    generated = task_splits.make_splits(
        ("chain_sum",), train_prompts=0, eval_prompts=9, seed=5
    )[1]
    assert texts(loaded.held_out[20:]) == [f"{each.text}<think>" for each in generated]


def test_tasks_and_data_sets_share_a_run(made):
    config = made("chain_sum", "sums", **{"data.train_prompts": 30})
    loaded = load_prompts(config, TOKENIZER)
    counts = collections.Counter(prompt.task for prompt in loaded.train)
    assert counts == dict.fromkeys(config.data.tasks, 15)
    counts = collections.Counter(prompt.task for prompt in loaded.held_out)
    assert [counts[name] for name in config.data.tasks] == [5, 4]
    assert [prompt.prompt_id for prompt in loaded.train] == list(range(30))
    assert not set(texts(loaded.train)) & set(texts(loaded.held_out))
    verifiers = [each.reference.get("verifier") for each in loaded.examples]
    assert verifiers == [None, "math"]
    assert isinstance(make_stream(config, loaded.train), PromptStream)


def test_weights_give_each_task_its_share(made):
    config = made(
        "chain_sum",
        "sums",
        **{"data.train_prompts": 30, "data.task_weights": (1.0, 3.0)},
    )
    loaded = load_prompts(config, TOKENIZER)
    stream = make_stream(config, loaded.train)
    assert isinstance(stream, MixtureStream)
    drawn = [stream.next() for _ in range(40)]
    counts = collections.Counter(prompt.task for prompt in drawn)
    assert [counts[name] for name in config.data.tasks] == [10, 30]
    for prompt in drawn:
        assert dataclasses.replace(prompt, epoch=0).text == (
            loaded.train[prompt.prompt_id].text
        )


def test_difficulties_go_to_the_streams_of_their_tasks(made, tmp_path):
    rates = tmp_path / "rates.jsonl"
    rates.write_text(
        "".join(
            json.dumps({"prompt_id": i, "pass_rate": i / 30}) + "\n" for i in range(30)
        )
    )
    config = made(
        "chain_sum",
        "sums",
        **{
            "data.train_prompts": 30,
            "data.task_weights": (1.0, 1.0),
            "data.order": "easy_to_hard",
            "data.difficulty": str(rates),
        },
    )
    stream = make_stream(config, load_prompts(config, TOKENIZER).train)
    assert [stream.next().prompt_id for _ in range(4)] == [14, 29, 13, 28]


@pytest.mark.parametrize(
    "data_sets, changes, message",
    [
        pytest.param(
            ("sums", "gsm9k"),
            {},
            r"data\.tasks holds 'gsm9k'; ",
            id="unknown data set",
        ),
        pytest.param(
            ("sums",),
            {"eval.sets": ("gsm9k",)},
            r"eval\.sets holds 'gsm9k'; choose from",
            id="unknown evaluation set",
        ),
        pytest.param(
            ("gsm8k@dev",),
            {},
            r"data\.tasks holds 'gsm8k@dev'",
            id="unknown split",
        ),
        pytest.param(
            ("gsm8k",), {}, r"data\.tasks holds 'gsm8k': .*prepare", id="not prepared"
        ),
        pytest.param(
            ("jsonl:nowhere",), {}, r"data\.tasks holds 'jsonl:nowhere': ", id="no file"
        ),
        pytest.param(
            ("chain_sum", "sums"),
            {},
            r"data\.train_prompts = 0 .*'chain_sum'",
            id="all of what has no end",
        ),
        pytest.param(
            ("sums",),
            {"data.train_prompts": 52},
            r"data\.train_prompts = 52 .* 51 .* = 9",
            id="more than there are",
        ),
        pytest.param(
            ("sums",),
            {"eval.num_prompts": 60},
            r"data\.train_prompts = 0 .*num_prompts = 60",
            id="nothing left to train on",
        ),
        pytest.param(
            ("sums",),
            {"eval.num_prompts": 61},
            r"eval\.num_prompts = 61 .* 60 of 60",
            id="more to hold out than there are",
        ),
        pytest.param(
            ("too long",),
            {"sampler.max_prompt_tokens": 30, "eval.sets": ("chain_sum",)},
            "3 of 4 .*max_prompt_tokens = 30 .* 61",
            id="most are too long",
        ),
        pytest.param(
            ("baskets",),
            {"sets": ("few baskets",), "data.overlap_ngram": 7},
            r"20 of 20 .*data\.overlap_ngram = 7",
            id="all of them overlap",
        ),
        pytest.param(
            ("sums", "products", "twice"),
            {
                "data.train_prompts": 2,
                "data.task_weights": (1.0, 1.0, 1.0),
                "batch.num_prompts": 2,
            },
            r"data\.train_prompts = 2 .*data\.tasks",
            id="a share of nothing",
        ),
        pytest.param(
            ("long",),
            {"batch.num_prompts": 6, "eval.num_prompts": 1},
            r"batch\.num_prompts = 6 .* 4 prompts",
            id="less than a batch",
        ),
    ],
)
def test_what_cannot_be_met_is_refused(made, data_sets, changes, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(made(*data_sets, **changes), TOKENIZER)


def test_a_run_goes_on_with_the_prompts_that_it_began_with(made, tmp_path):
    report = load_prompts(made("sums"), TOKENIZER).report
    keep_data_report(tmp_path, report)
    assert json.loads((tmp_path / "data.json").read_text()) == report
    other = load_prompts(made("sums", **{"data.train_prompts": 20}), TOKENIZER).report
    keep_data_report(tmp_path, other)  # nothing was trained on the first
    (tmp_path / "metrics.jsonl").touch()
    keep_data_report(tmp_path, other)
    with pytest.raises(ValueError, match="prompts of 'jsonl:.*are not"):
        keep_data_report(tmp_path, report)
    none = {kind: dict.fromkeys(sets, {}) for kind, sets in other.items()}
    assert len(none) == 2  # both have the data set, which is named once
    with pytest.raises(ValueError, match="prompts of 'jsonl:[^']*' are not"):
        keep_data_report(tmp_path, none)
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(ValueError, match="data.json is broken"):
        keep_data_report(tmp_path, report)
