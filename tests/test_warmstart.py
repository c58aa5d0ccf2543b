"""Supervised steps on rows: their loss beside torch's, their files, and their end."""

import contextlib
import json
import os
import shutil
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import small_chat
import small_run

from scalerl_jax import warmstart, wiring
from scalerl_jax.batching.answers import pack_answers
from scalerl_jax.batching.packing import pack
from scalerl_jax.data.tokenizer import load_tokenizer
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.weights import load_params
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.process.preemption import PREEMPTED
from scalerl_jax.run.ledger import Ledger
from scalerl_jax.run.progress import Progress
from scalerl_jax.train import ensure_saved
from scalerl_jax.wiring.learning import make_learning_rates
from scalerl_jax.wiring.sampling import make_tokenizer
from scalerl_jax.wiring.supervision import (
    AnswerRows,
    RowOrder,
    load_sequences,
    supervised,
)

BASE = small_run.ROOT / "scalerl_jax" / "assets" / "tiny_base"
QUESTIONS = [(f"{n} + {n + 3}", f"{n}+{n + 3}={2 * n + 3}") for n in range(3, 23)]
SIZES = dict(
    vocab_size=72,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
)
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "gemma3": (
        "Gemma3TextConfig",
        dict(query_pre_attn_scalar=16, sliding_window=9, sliding_window_pattern=2),
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24),
    ),
}


@pytest.fixture
def rows(tmp_path):
    """A file of prompts and completions, and a chat in it."""
    made = [{"prompt": f"{asked}=?", "completion": said} for asked, said in QUESTIONS]
    made[3] = {
        "messages": [
            {"role": "user", "content": "6 + 9=?"},
            {"role": "assistant", "content": "6+9=15"},
        ]
    }
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in made))
    return path


def changed(rows, **changes):
    """Settings of a warm start on these rows."""
    defaults = {
        "warmstart.rows": (str(rows),),
        "warmstart.batch_rows": 8,
        "warmstart.learning_rate": 1e-3,
        "warmstart.warmup_steps": 1,
        "checkpoint.every": 1,
        "data.template": "{question}<think>",
        "batch.row_tokens": 160,
    }
    return small_run.make_config(defaults | changes)


class Lossy:
    """A learner with its checkpoints: of two saves the first is lost as it is written.

    As over processes, of which one is lost: the others begin again without that save.
    """

    def __init__(self):
        self.asked, self.kept, self.checkpointer = [], [2], self

    def save(self, step, state, *, host, groups):
        self.asked.append((step, state))

    def good(self):
        self.wait()
        return self.kept

    def wait(self):
        self.kept += [step for step, _ in self.asked[1:]]


def test_a_last_checkpoint_that_is_lost_is_written_again():
    learner, books = Lossy(), SimpleNamespace(state=dict)
    books.activity = lambda *_, **__: contextlib.nullcontext()
    made = warmstart.WarmStart(
        **dict.fromkeys(("rows", "flops", "learning_rates", "progress", "digest")),
        config=small_run.make_config({"generators.placement": "apart"}),
        learner=learner,
        ledger=books,
        state="of 3",
        step=3,
    )
    made.ensure_saved()
    assert learner.asked == [(3, "of 3")] * 2 and 3 in learner.kept

    learner = Lossy()
    run = SimpleNamespace(
        learner=learner,
        activity=books.activity,
        orders=SimpleNamespace(snapshot=lambda tickets: ({}, ())),
        generators=SimpleNamespace(in_flight=list),
        ledger=books,
        assemble=books,
    )
    ensure_saved(run, "of 3", 3)
    assert learner.asked == [(3, "of 3")] * 2 and 3 in learner.kept


class Skipping:
    """A learner whose second step changes nothing."""

    made = 0

    def annotate(self, state, batches):
        return [{} for _ in batches]

    def step(self, state, batch, made_of):
        self.made += 1
        fault = "not finite" if self.made == 2 else ""
        return state, dict(loss=1.0, grad_norm=1.0, entropy=1.0), fault

    metrics = {}


def test_a_skipped_batch_is_no_step_of_the_learning_rate(rows):
    config = supervised(changed(rows, **{"warmstart.warmup_steps": 4}), num_steps=4)
    sequences = load_sequences(config, load_tokenizer(BASE))
    order = RowOrder(len(sequences), epochs=2, batch_rows=8, seed=0)
    fields = dict.fromkeys(("progress", "digest", "state"))
    made = warmstart.WarmStart(
        **fields,
        config=wiring.fit_devices(config, wiring.make_architecture(config), 1),
        rows=AnswerRows(config=config, sequences=sequences, order=order),
        learner=Skipping(),
        ledger=Ledger(pools={"all": 1}, chip="cpu"),
        flops=SimpleNamespace(step=lambda tokens, context: 0.0),
        learning_rates=make_learning_rates(config),
    )
    made_rows = [warmstart._step(made)[0] for _ in range(4)]
    # Warm-up over four steps that are applied; the second batch is not.
    rates = [row["train/learning_rate"] for row in made_rows]
    np.testing.assert_allclose(rates, [2.5e-4, 5e-4, 5e-4, 7.5e-4], rtol=1e-6)
    learned = [row["train/tokens"] for row in made_rows]
    assert made_rows[-1]["compute/train_tokens"] == sum(learned) - learned[1]


def start(config, sequences):
    """The learner of a warm start on one device, its state, and all rows as a batch."""
    config = supervised(config, num_steps=5)
    arch = wiring.make_architecture(config)
    learner, state = wiring.make_local_learner(
        config,
        arch,
        make_mesh(jax.devices()[:1]),
        to_sampler=None,
        checkpointer=None,
        progress=Progress(),
    )

    def lay_out(sequences):
        size = config.batch.rows_per_microbatch
        return pack(sequences, row_tokens=160, rows_per_microbatch=size)

    return arch, learner, state, pack_answers(sequences, lay_out)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(each, marks=pytest.mark.slow) for each in list(FAMILIES)[1:]),
    ],
)
def test_loss_and_gradient_are_torchs_with_masked_labels(tmp_path, rows, family):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    plain = getattr(transformers, name)(**SIZES | settings, pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(plain).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.2)
    model.save_pretrained(tmp_path / "model")
    for file in ("tokenizer.json", "generation_config.json"):
        shutil.copy(BASE / file, tmp_path / "model" / file)
    config = changed(rows, **{"model.checkpoint": str(tmp_path / "model")})
    tokenizer = load_tokenizer(BASE)
    sequences = load_sequences(config, tokenizer)
    arch, learner, state, batch = start(config, sequences)
    total = learner.train_step.total(state.params, batch, state.frozen)

    losses, count = [], 0
    for (asked, said), found in zip(QUESTIONS, sequences, strict=True):
        prompt = tokenizer.encode(f"{asked}=?<think>")
        answer = [*tokenizer.encode(said), tokenizer.eos_ids[0]]
        assert found.tokens.tolist() == [*prompt, *answer]
        logits = model(torch.tensor([prompt + answer])).logits[0, :-1]
        labels = torch.tensor([*[-100] * (len(prompt) - 1), *answer])
        losses.append(
            torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        )
        count += len(answer)
    loss = sum(losses) / count
    loss.backward()
    assert float(total.loss) == pytest.approx(loss.item(), abs=1e-4, rel=1e-5)
    # As a checkpoint they have the layout of ours.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path / "gradient")
    expected = load_params(tmp_path / "gradient", arch, dtype=np.float32)
    for (path, own), theirs in zip(
        jax.tree_util.tree_leaves_with_path(total.grads),
        jax.tree.leaves(expected),
        strict=True,
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        np.testing.assert_allclose(own, theirs, atol=1e-4, rtol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_parts")  # four times the same programs
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ml_collections
def test_a_warm_start_that_was_stopped_goes_on_bit_for_bit(
    tmp_path, rows, monkeypatch, capsys
):
    """And it ends as another model, in a directory that knows its rows."""
    words = [
        "--config=tiny",
        *(
            f"--config.{name}={value}"
            for name, value in {
                **small_run.SETTINGS,
                "warmstart.epochs": 2,
                "warmstart.batch_rows": 8,
                "warmstart.learning_rate": 2e-3,
                "warmstart.warmup_steps": 1,
                "checkpoint.every": 2,
                "mesh.fsdp": 1,
            }.items()
        ),
        str(rows),
    ]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert warmstart.run(["warmstart", f"--workdir={whole}", *words]) == 0
    assert "for model.checkpoint" in capsys.readouterr().out
    step = warmstart._step

    def fails(made):
        if made.step == 3:
            raise RuntimeError("pulled the plug")
        return step(made)

    with monkeypatch.context() as patch:
        patch.setattr(warmstart, "_step", fails)
        with pytest.raises(RuntimeError, match="pulled the plug"):
            warmstart.run(["warmstart", f"--workdir={broken}", *words])
    assert not (broken / "model").exists()

    def preempted(made):
        if made.step == 2:  # learns step 3, which is no multiple of checkpoint.every
            os.kill(os.getpid(), signal.SIGTERM)
        return step(made)

    with monkeypatch.context() as patch:
        patch.setattr(warmstart, "_step", preempted)
        assert warmstart.run(["warmstart", f"--workdir={broken}"]) == PREEMPTED
    assert f"scalerl warmstart --workdir={broken}" in capsys.readouterr().out
    assert small_run.checkpoints(broken)[-1].name == "step_00000003"
    assert warmstart.run(["warmstart", f"--workdir={broken}"]) == 0  # alone
    arrays = [
        small_run.saved_arrays(small_run.checkpoints(run)[-1])
        for run in (whole, broken)
    ]
    assert arrays[0].keys() == arrays[1].keys()
    for name, leaf in arrays[0].items():
        np.testing.assert_array_equal(leaf, arrays[1][name], err_msg=name)

    losses = [row["loss"] for row in small_run.rows(whole)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert [row["step"] for row in small_run.rows(broken)] == [1, 2, 3, 4, 5]
    arch = read_architecture(whole / "model")
    made, before = (
        load_params(each, arch, dtype=np.float32) for each in (whole / "model", BASE)
    )
    assert any(
        (one != other).any()
        for one, other in zip(*map(jax.tree.leaves, (made, before)), strict=True)
    )
    capsys.readouterr()
    rows.write_text(rows.read_text().replace("6+9=15", "6+9=14"))
    assert warmstart.run(["warmstart", f"--workdir={whole}"]) == 2
    assert "have other tokens than at step 5" in capsys.readouterr().err


@pytest.mark.slow
def test_factors_are_warmed_and_the_base_is_not(rows):
    """The gradient of `up` is the weight's, through `down`; that of `down` is 0."""
    config = changed(rows)
    sequences = load_sequences(config, load_tokenizer(BASE))
    _, learner, state, batch = start(config, sequences)
    whole = learner.train_step.total(state.params, batch, state.frozen)
    config = changed(rows, **{"model.lora.rank": 2, "model.lora.alpha": 6.0})
    _, learner, state, batch = start(config, sequences)
    total = learner.train_step.total(state.params, batch, state.frozen)
    assert float(total.loss) == pytest.approx(float(whole.loss), rel=1e-5)
    for name, pair in total.grads["layers"].items():
        down = np.asarray(state.params["layers"][name].down)
        weight = np.asarray(whole.grads["layers"][name])
        expected = 3.0 * np.einsum("lir,lip->lrp", down, weight)
        np.testing.assert_allclose(pair.up, expected, rtol=1e-3, atol=1e-5)
        np.testing.assert_array_equal(pair.down, 0)


def test_rows_of_a_run_are_its_ids_as_they_were_sampled(tmp_path, rows):
    """Ids that no tokenizer would give for their text."""
    run = tmp_path / "run"
    run.mkdir()
    settings = json.loads(json.dumps(wiring_settings()))
    (run / "config.json").write_text(json.dumps({"config": settings}))
    kept = [
        rollout(prompt=[7, 8], completion=[9, 9, 1], passed=True, reward=1.0),
        rollout(prompt=[7, 8], completion=[10, 1], passed=False, reward=-1.0),
        rollout(prompt=[5, 6], completion=[11, 12, 1], passed=True, forced=[1]),
    ]
    file = run / "train_rollouts.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    config = changed(run)
    found = load_sequences(
        config, make_tokenizer(config, wiring.make_architecture(config))
    )
    assert [each.tokens.tolist() for each in found] == [
        [7, 8, 9, 9, 1],
        [5, 6, 11, 12, 1],
    ]
    assert [each.mask.tolist() for each in found] == [
        [True, True, True],
        [True, False, True],
    ]
    with pytest.raises(ValueError, match="token ids of another tokenizer"):
        other = small_run.ROOT / "scalerl_jax" / "assets" / "tools_base"
        load_sequences(config, load_tokenizer(other))
    file.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="line 1, is no rollout of a run"):
        load_sequences(config, load_tokenizer(BASE))


def wiring_settings():
    from scalerl_jax.config import to_json

    return to_json(small_run.make_config())


def rollout(*, prompt, completion, passed, reward=1.0, forced=()):
    return {
        "step": 1,
        "reward": reward,
        "passed": passed,
        "judged": True,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "forced": list(forced),
    }


def test_what_is_no_answer_is_told(tmp_path, rows, caplog):
    tokenizer = load_tokenizer(BASE)
    with rows.open("a") as file:
        file.write(json.dumps({"prompt": "1", "completion": "9" * 200}) + "\n")
        file.write(json.dumps({"prompt": "no more"}) + "\n")
    with caplog.at_level("INFO"):
        assert len(load_sequences(changed(rows), tokenizer)) == len(QUESTIONS)
    said = " ".join(caplog.messages)
    assert "1 rows are left out: it has more than 161 tokens" in said
    assert "field 'completion' or " in said and "rows.jsonl, line 22" in said
    only = tmp_path / "only.jsonl"
    only.write_text('{"prompt": "no more"}\n')
    for name, words in (
        (only, "leave nothing to learn from: field 'completion'"),
        (tmp_path / "no.jsonl", "warmstart.rows: .*there is no such file"),
        (tmp_path, "is no directory of a run with train_rollouts.jsonl"),
    ):
        with pytest.raises(ValueError, match=words):
            load_sequences(changed(name), tokenizer)
    only.write_text('{"prompt": "no more"}\n' * 11)
    with pytest.raises(ValueError, match="11 rows are broken, more than 10; the first"):
        load_sequences(changed(only), tokenizer)


def test_rows_beyond_the_positions_of_a_dynamic_rope_are_left_out(tmp_path, rows):
    """Its frequencies would change with every token there, and are constant here."""
    base = shutil.copytree(BASE, tmp_path / "base")
    values = json.loads((base / "config.json").read_text())
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    values |= {"rope_scaling": dynamic, "max_position_embeddings": 16}
    (base / "config.json").write_text(json.dumps(values))
    config = changed(rows, **{"model.checkpoint": str(base), "mesh.fsdp": 1})
    _, found, _ = warmstart._prepared(config, None)
    whole = load_sequences(config, load_tokenizer(BASE))
    lengths = [len(each.tokens) for each in whole]
    assert max(lengths) > 17 and min(lengths) <= 17
    fitting = [length for length in lengths if length <= 17]
    assert [len(each.tokens) for each in found.sequences] == fitting


def test_answers_that_a_template_changes_later_are_sequences_of_one_row(
    tmp_path, caplog
):
    """Those that fit are learned, and those that do not are told."""
    model = tmp_path / "model"
    template = small_chat.TEMPLATES["Qwen3"]
    small_chat.make_directory(model, chat_template=template, eos_token="<|im_end|>")
    tokenizer = load_tokenizer(model)
    row = {"messages": [{"role": "user", "content": "1"}]}
    for said in ("2", "3" * 200, "4"):
        row["messages"].append({"role": "assistant", "content": said})
        row["messages"].append({"role": "user", "content": "?"})
    del row["messages"][-1]
    file = tmp_path / "chat.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 2)
    more = {"data.template": "chat", "data.tokenizer": str(model)}
    with caplog.at_level("INFO"):
        found = load_sequences(changed(file, **more), tokenizer)
    first = "<think>\n\n</think>\n\n2<|im_end|>"
    tokens = len(tokenizer.encode(first))
    assert [each.tokens[each.prompt_length :].tolist() for each in found] == [
        tokenizer.encode(first)
    ] * 2
    words = "4 answers are left out of rows that are learned: it has more than 161 tok"
    assert words in caplog.text
    assert f"2 rows with {2 * tokens} tokens to learn, in 2 seq" in caplog.text
    with caplog.at_level("INFO"):
        more["batch.row_tokens"] = 600
        found = load_sequences(changed(file, **more), tokenizer)
    assert len(found) == 6 and "in 6 sequences" in caplog.messages[-1]


def test_a_trace_that_no_warm_start_writes_is_refused():
    config = small_run.make_config({"tracking.profile_steps": (1, 2)})
    with pytest.raises(ValueError, match=r"^tracking\.profile_steps = \(1, 2\) is of"):
        supervised(config, num_steps=2)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, "the steps that warmstart.rows give, 4"),
        ({"optimizer.decay_steps": 4}, "optimizer.decay_steps = 4"),
    ],
)
def test_a_cosine_that_ends_within_the_warm_up_is_refused_by_its_settings(
    changes, words
):
    changes |= {"optimizer.schedule": "cosine", "warmstart.warmup_steps": 4}
    changes |= {"optimizer.warmup_steps": 1, "warmstart.rows": ("x",)}
    with pytest.raises(ValueError, match=f"^warmstart.warmup_steps = 4 .* {words}"):
        supervised(small_run.make_config(changes), num_steps=4)
