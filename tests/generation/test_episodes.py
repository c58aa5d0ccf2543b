"""Episodes of several turns: random ones, with real samplers and environments.

A policy of random weights writes turns of any bytes, and the environment of a user's
file answers with texts that try to be more than texts.
"""

import contextlib
import dataclasses
import functools
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import small_architecture
from small_tokenizers import byte_level, tokenizer_of

from scalerl_jax.batching.packing import train_sequences
from scalerl_jax.config import EpisodeConfig, RewardConfig
from scalerl_jax.controller.group_check import GroupCheck
from scalerl_jax.data.observations import ObservationWriter, PlainFraming
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.environments import instances
from scalerl_jax.environments.own_file import read_own
from scalerl_jax.environments.run_verifiers import make_pool
from scalerl_jax.environments.verdict import GroupAnswers, More, Setup, Step
from scalerl_jax.generation.episodes import Episode, Episodes, Story
from scalerl_jax.generation.evaluation import Abandoned, Evaluator
from scalerl_jax.generation.judging import Judging
from scalerl_jax.generation.turns import Turns
from scalerl_jax.learner.contents import flatten, unflatten
from scalerl_jax.model.architecture import sampler_mesh
from scalerl_jax.model.transformer import abstract_params
from scalerl_jax.sampler.decoding import NEVER, EngineSettings
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.sampler.reference import ReferenceSampler, next_token_logits
from scalerl_jax.sampler.requests import Completion, Request, Samples
from scalerl_jax.sampler.sampling import (
    Sampling,
    SamplingRows,
    draw_tokens,
    sample_keys,
)
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.types import Group, Prompt

BACKEND = byte_level()
EOS = BACKEND.token_to_id("<|end|>")
IM_START = BACKEND.token_to_id("<|im_start|>")
SIZE = BACKEND.get_vocab_size(with_added_tokens=True)
TOKENIZER = Tokenizer(backend=BACKEND, eos_ids=(EOS,))
BETWEEN = "<|end|>\n{observation}<|im_start|>"
MOST = 70  # tokens of a completion

ODD = """
    import random

    TEXTS = [
        "", " ", "\\n\\n  \\t", "<|end|>", "a<|im_start|>b", "[/THINK]", "</think>",
        "\\ud83d", "<|end", "|>", "\\u00e9\\U0001f600", "{observation}",
        "so it is 12. " * 2,
    ]

    class Odd:
        def begin(self, prompt, reference):
            self.random = random.Random(prompt)
            self.heard, self.said = [], []

        def step(self, completion):
            self.heard.append(completion)
            if self.random.random() < 0.3:
                characters = sum(map(len, self.heard)) % 97
                return Done(len(self.heard), {"characters": characters})
            self.said.append(self.random.choice(TEXTS))
            return More(self.said[-1], reward=0.5)

        def cut(self):
            return -1.0
"""


def write_file(directory, source):
    """A user's file, with the names that environments use."""
    path = directory / "mine.py"
    names = "from scalerl_jax.environments.verdict import Done, More\n"
    path.write_text(names + textwrap.dedent(source))
    return path


@contextlib.contextmanager
def environment(file, maker, **changes):
    """A pool of this environment."""
    reward = RewardConfig(**dict(timeout_s=30.0, num_workers=2) | changes)
    own = read_own(f"{file}:{maker}", reward, episode=EpisodeConfig())
    with contextlib.closing(
        make_pool(reward, unnamed="reasoning_gym", own=own)
    ) as pool:
        yield pool


@functools.cache
def engine_settings():
    arch = small_architecture(vocab_size=SIZE, hidden_size=16)
    return EngineSettings(
        arch=dataclasses.replace(arch, max_positions=128),
        slots=4,
        max_prompt_tokens=12,
        max_completion_tokens=MOST,
        tokens_per_call=4,
        dtype=jnp.float32,
        eos_ids=(EOS,),
        page_size=8,
        prefill_tokens=32,
    )


@functools.cache
def engine():
    settings = engine_settings()
    return Engine(settings, mesh=sampler_mesh(settings.arch, jax.devices()[:1]))


@functools.cache
def params(seed):
    """Random ones, whose turns have about eight tokens."""
    rng = np.random.default_rng(seed)
    made = jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), leaf.dtype),
        abstract_params(engine_settings().arch, dtype=jnp.float32),
    )
    head = made["head"].at[:, 0].set(0.0).at[EOS, 0].set(1.0)
    return made | {
        "embedding": made["embedding"].at[:, 0].set(4.0),
        "head": head,
        "final_norm": made["final_norm"].at[0].set(1.0),
    }


def make_prompt(number):
    text = f"{number} so"
    return Prompt(
        prompt_id=number,
        epoch=0,
        task="any",
        text=text,
        tokens=np.array(TOKENIZER.encode(text), np.int32),
        reference={"answer": None},
    )


def make_samples(prompt):
    keys = sample_keys(0, "eval", prompt_id=prompt.prompt_id, epoch=0, num_samples=2)
    return Samples(keys=keys, thinking_limits=np.full(2, NEVER, np.int32))


WRITER = ObservationWriter(TOKENIZER, PlainFraming(BETWEEN, "{question}so"))
TURNS = Turns(
    writer=lambda: WRITER,
    max_turns=4,
    max_observation_tokens=60,
    max_tokens=MOST,
    timeout_s=0.0,
)
JUDGING = Judging(tokenizer=TOKENIZER, answer_after="", whole=True)


def episodes_of(pool, *, seed=0, count=6, fast=True, turns=TURNS):
    """Episodes of so many prompts, two of each, by prompt."""

    def make_sampler():
        if fast:
            return Scheduler(PagePool(engine()))
        return ReferenceSampler(engine_settings())

    evaluator = Evaluator(
        make_sampler=make_sampler,
        prompts=[make_prompt(number) for number in range(count)],
        sampling=Sampling(temperature=0.9),
        make_samples=make_samples,
        samples_per_prompt=2,
        verifier=pool,
        judging=JUDGING,
        logged_rollouts=2,
        turns=turns,
    )
    found = {}
    for judged in evaluator.steps(params(seed), policy_version=3, wait_s=lambda: 0.1):
        found |= {each.place: each for each in judged}
    assert sorted(found) == list(range(count))
    return evaluator, found


@jax.jit
def drawn_alone(logits, sampling, keys, index):
    return draw_tokens(logits, sampling, keys=keys, index=index)


def redrawn(seed, prompt, sample, completion):
    """Tokens and logprobs of the sampled tokens, by whole passes without a cache."""
    tokens, logprobs = [], []
    keys = jnp.asarray(make_samples(prompt).keys[sample][None])
    known = [*prompt.tokens.tolist(), *completion.tokens.tolist()]
    for place in np.flatnonzero(completion.mask).tolist():
        seen = known[: len(prompt.tokens) + place]
        logits = next_token_logits(params(seed), engine_settings(), seen)
        sampling = SamplingRows.of(Sampling(temperature=0.9), 1)
        draw = drawn_alone(logits[None], sampling, keys, jnp.array([place], jnp.int32))
        tokens.append(draw.tokens.item())
        logprobs.append(draw.logprobs.item())
    return tokens, logprobs


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_episode_is_its_sampled_tokens_and_what_was_said_between(tmp_path, seed):
    file = write_file(tmp_path, ODD)
    named = set(BACKEND.get_added_tokens_decoder())
    with environment(file, "Odd") as pool:
        evaluator, found = episodes_of(pool, seed=seed, count=4)
        _, slow = episodes_of(pool, seed=seed, count=4, fast=False)
    counts = []
    for place, group in found.items():
        for sample, (completion, turns, verdict) in enumerate(
            zip(group.completions, group.turns, group.verdicts, strict=True)
        ):
            tokens, mask = completion.tokens, completion.mask
            heard = []
            for turn, after in zip(turns, [*turns[1:], None], strict=True):
                own = tokens[turn.start : turn.end]
                assert (mask[turn.start : turn.end] == turn.sampled).all()
                if turn.sampled:
                    heard.append(TOKENIZER.decode(own.tolist()))
                    # Only its last token ends a turn.
                    assert EOS not in own[:-1]
                    assert after is None or turn.reward == 0.5
                else:
                    said = own.tolist()
                    begin = BACKEND.token_to_id("<|im_start|>")
                    assert said.pop() == begin
                    assert not named.intersection(said)
            assert turns[0].start == 0 and turns[-1].end == len(tokens)
            assert [turn.sampled for turn in turns] == [
                number % 2 == 0 for number in range(len(turns))
            ]
            if verdict.reward == -1.0:  # it was asked for its end
                assert len(heard) == 4 or len(tokens) + 20 > MOST
            else:
                assert verdict.reward == len(heard)
                assert verdict.parts == {"characters": sum(map(len, heard)) % 97}
            counts.append(len(heard))
            drawn, logprobs = redrawn(seed, group.prompt, sample, completion)
            assert tokens[mask].tolist() == drawn
            np.testing.assert_allclose(completion.logprobs[mask], logprobs, atol=3e-5)
            assert not completion.logprobs[~mask].any()
            assert (completion.versions == 3).all()
            theirs = slow[place].completions[sample]
            assert tokens.tolist() == theirs.tokens.tolist()
            assert turns == slow[place].turns[sample]
    assert max(counts) > 2 and min(counts) == 1
    summary = evaluator.summary(found.values(), policy_version=3)
    assert summary.figures()["mean_turns"] == np.mean(counts)


def test_its_records_are_checked_and_kept_as_they_are(tmp_path):
    with environment(write_file(tmp_path, ODD), "Odd") as pool:
        _, found = episodes_of(pool, count=3)
    check = GroupCheck(
        arch=engine_settings().arch, group_size=2, length_limit=lambda version: MOST
    )
    groups = []
    for place, each in found.items():
        rollouts = JUDGING.rollouts(each.completions, each.verdicts, each.turns)
        groups.append(
            Group(
                ticket=place, prompt=each.prompt, rollouts=rollouts, finished_version=3
            )
        )
    for group, back in zip(groups, unflatten(*flatten(groups)), strict=True):
        for rollout, same in zip(group.rollouts, back.rollouts, strict=True):
            assert rollout.turns == same.turns and rollout.reward == same.reward
        order = dataclasses.make_dataclass("Order", ["prompt", "begun_version"])(
            group.prompt, 3
        )
        assert not check.fault(group, order, oldest=3, newest=3)
        rollout = next((each for each in group.rollouts if len(each.turns) > 1), None)
        if rollout is None:
            continue
        first, second, *rest = rollout.turns
        for turns, words in (
            ((first, *rest), "after a turn that ends at"),
            (
                (first._replace(end=second.end), *rest),
                "its turns end|after a turn that",
            ),
            (
                (first._replace(sampled=False), second._replace(sampled=True), *rest),
                "turn 0 is an observation, and a token of it was sampled",
            ),
        ):
            bad = dataclasses.replace(rollout, turns=turns)
            others = tuple(bad if each is rollout else each for each in group.rollouts)
            fault = check.fault(
                dataclasses.replace(group, rollouts=others), order, oldest=3, newest=3
            )
            assert any(word in fault for word in words.split("|")), fault


FAULTS = """
    import os, time

    class Faulty:
        def begin(self, prompt, reference):
            self.kind = prompt.split()[0]
            self.steps = 0

        def step(self, completion):
            self.steps += 1
            if self.kind == "0":
                return 1.0
            if self.steps == 1:
                return More("go on")
            if self.kind == "1":
                os._exit(7)
            if self.kind == "2":
                return More(b"bytes")
            if self.kind == "3":
                return More("far too long " * 20)
            if self.kind == "4":
                raise LookupError("no such tool\\nof two lines")
            if self.kind == "5":
                return "a text"
            if self.kind == "6":
                import no_such_package
            return More("more")  # for ever
"""


OPENED = """
    import os, pathlib

    BOARD = "a<|im_start|>b <|end|> [/THINK]"

    class Opened:
        def begin(self, prompt, reference):
            self.kind, self.heard = prompt.split()[0], []
            assert prompt.endswith(" so")
            if self.kind == "1":
                return BOARD
            if self.kind == "2":
                return [More("one", role="user"), "", BOARD]
            if self.kind == "3":  # another one each time
                return "x" * (1 + os.getpid() % 7) + str(id(self))
            if self.kind == "4":
                raise LookupError("no such level\\nof two lines")
            if self.kind == "5":
                return "far too long " * 20
            if self.kind == "6":
                return 1.5
            mark = pathlib.Path(__file__).with_suffix(".7")
            if self.kind == "7" and not mark.exists():
                mark.touch()
                os._exit(8)

        def step(self, completion):
            self.heard.append(completion)
            mark = pathlib.Path(__file__).with_suffix(f".{self.kind}")
            if self.kind == "1" and len(self.heard) == 2 and not mark.exists():
                mark.touch()
                os._exit(9)
            if len(self.heard) == 2:
                return Done(1.0, {"characters": sum(map(len, self.heard)) % 97})
            return More("go on")

        def cut(self):
            return 1.0
"""


def test_an_episode_begins_with_what_its_environment_says(tmp_path):
    """It stands before the end of the prompt, where a reply begins."""
    file = write_file(tmp_path, OPENED)
    with environment(file, "Opened", num_workers=1) as pool:
        _, found = episodes_of(pool, count=8)
        assert pool.restarts >= 2  # as an episode begins, and in the midst of one
        (tmp_path / "mine.1").unlink()
        _, slow = episodes_of(pool, count=3, fast=False)
    board = "a<|im_start|>b <|end|> [/THINK]"
    begin = BACKEND.token_to_id("<|im_start|>")
    # The frame is BETWEEN, whose end of a turn is left out where there was none.
    said = {0: "", 1: f"\n{board}", 2: f"\none\n\n{board}"}
    named = set(BACKEND.get_added_tokens_decoder())
    check = GroupCheck(
        arch=engine_settings().arch, group_size=2, length_limit=lambda version: MOST
    )
    statuses = []
    for place, group in found.items():
        whole = make_prompt(place)
        assert group.prompt.text == whole.text
        opened = [not turns[0].sampled for turns in group.turns]
        assert opened == [place in (1, 2, 3)] * 2
        kept = group.prompt.tokens
        assert kept.tolist() == whole.tokens[: len(kept)].tolist()
        if not any(opened):
            assert len(kept) == len(whole.tokens)
        rollouts = JUDGING.rollouts(group.completions, group.verdicts, group.turns)
        made = Group(
            ticket=place, prompt=group.prompt, rollouts=rollouts, finished_version=3
        )
        order = dataclasses.make_dataclass("Order", ["prompt", "begun_version"])(
            whole, 3
        )
        assert not check.fault(made, order, oldest=3, newest=3)
        for sample, (completion, turns, verdict) in enumerate(
            zip(group.completions, group.turns, group.verdicts, strict=True)
        ):
            statuses.append((place, verdict.status))
            first = completion.tokens[: turns[0].end].tolist()
            if opened[sample]:
                assert not completion.mask[: turns[0].end].any()
                assert first.pop() == begin and not named.intersection(first)
            if place in (1, 2):
                text = TOKENIZER.decode_all([*kept.tolist(), *first])
                assert text == f"{place} {said[place]}"
                assert completion.tokens[turns[0].end :].tolist()
            drawn, logprobs = redrawn(0, group.prompt, sample, completion)
            assert completion.tokens[completion.mask].tolist() == drawn
            np.testing.assert_allclose(
                completion.logprobs[completion.mask], logprobs, atol=3e-5
            )
            assert (completion.versions == 3).all() and not completion.interrupted
            if verdict.parts:
                texts = [
                    TOKENIZER.decode(completion.tokens[turn.start : turn.end].tolist())
                    for turn in turns
                    if turn.sampled
                ]
                assert verdict.parts == {"characters": sum(map(len, texts)) % 97}
            if place < 3:
                theirs = slow[place].completions[sample]
                assert completion.tokens.tolist() == theirs.tokens.tolist()
                assert turns == slow[place].turns[sample]
    assert statuses.count((1, "verifier_error")) == statuses.count((1, "correct")) == 1
    assert statuses.count((7, "verifier_error")) == statuses.count((7, "correct")) == 1
    for place, status, words in (
        (4, "verifier_error", "LookupError: no such level"),
        (5, "bad_observation", "episode.max_observation_tokens = 60 is the limit"),
        (6, "bad_observation", "begin returned a float; the policy reads a text"),
    ):
        assert statuses.count((place, status)) == 2 and words in found[place].detail
    # Samples whose openings differ have in common what stands before them.
    first, second = (completion.tokens.tolist() for completion in found[3].completions)
    assert first[: len(first) // 2] != second[: len(second) // 2]


UNLIKE = f"""
    class Unlike:
        begun = 0

        def begin(self, prompt, reference):
            Unlike.begun += 1
            end = {TOKENIZER.encode(" so")}  # of the prompt, which the other one lacks
            return More(tokens=[1] if Unlike.begun > 1 else end + [7] * {MOST - 1})

        def step(self, completion):
            return Done(1.0)
"""


def test_an_opening_that_is_too_long_behind_what_all_share_ends_its_sample(tmp_path):
    """Behind the whole prompt it would leave one token to sample."""
    writer = ObservationWriter(TOKENIZER, PlainFraming(BETWEEN, "{question} so"))
    turns = dataclasses.replace(
        TURNS, writer=lambda: writer, max_observation_tokens=2 * MOST
    )
    file = write_file(tmp_path, UNLIKE)
    with environment(file, "Unlike", num_workers=1) as pool:
        _, found = episodes_of(pool, count=1, turns=turns)
    prompt, end = make_prompt(0), TOKENIZER.encode(" so")
    assert prompt.tokens.tolist()[-len(end) :] == end
    group = found[0]
    statuses = [verdict.status for verdict in group.verdicts]
    assert sorted(statuses) == ["bad_observation", "correct"]
    assert f"has {MOST - 1 + len(end)} tokens, of the {MOST}" in group.detail
    opening = group.turns[statuses.index("bad_observation")][0]
    assert (opening.end, opening.sampled) == (len(end), False)


OPENING = [5, EOS, IM_START, 300, 41]
BETWEEN_IDS = [EOS, IM_START, 7, 7, EOS, IM_START]  # an end of a turn, in the midst
RENDERED = f"""
    import os

    import numpy

    OPENING, BETWEEN = {OPENING}, {BETWEEN_IDS}

    class Rendered:
        def begin(self, prompt, reference):
            self.kind, self.heard = prompt.split()[0], []
            if self.kind == "0":
                first, *others = OPENING
                return [More(tokens=(first,)), More(tokens=numpy.array(others))]
            if self.kind == "1":
                return [More("a board"), More(tokens=[1])]
            if self.kind == "2":
                return More(tokens=[{SIZE}])

        def step(self, completion):
            self.heard.append(completion)
            if len(self.heard) == 3:
                return Done(1.0, dict(characters=sum(map(len, self.heard)) % 97))
            if self.kind == "0" and len(self.heard) == 2:
                return More("a<|end|>")
            if self.kind == "10":
                os._exit(9)
            return dict(zip("03456789", [
                More(tokens=BETWEEN),
                More(tokens=[3, {SIZE}]), More(tokens=[-1]), More(tokens=[2**40]),
                More("a", tokens=[1]), More(tokens=[]), More(tokens="12"),
                More(tokens=[1] * 1025),
            ]))[self.kind]

        def cut(self):
            return 0.0
"""


def test_token_ids_of_an_environment_are_the_learners_bit_for_bit(tmp_path):
    """By hand: ids open the episode and answer its first turn, a text the second."""
    file = write_file(tmp_path, RENDERED)
    with environment(file, "Rendered", num_workers=1) as pool:
        _, found = episodes_of(pool, seed=4, count=11)
        assert pool.restarts == 2  # and the others' turns were given again
        _, slow = episodes_of(pool, seed=4, count=1, fast=False)
    group, wholes = found[0], []
    # The prompt is "0 so", of which "so" begins a reply, and gives way to the ids.
    before, space, newline, *letters = map(BACKEND.token_to_id, "0ĠĊa<|end|>")
    assert group.prompt.tokens.tolist() == [before]
    text = [newline, *letters, IM_START]  # spelled in letters, and in its frame
    for sample, (completion, turns, verdict) in enumerate(
        zip(group.completions, group.turns, group.verdicts, strict=True)
    ):
        tokens = completion.tokens.tolist()
        parts = [tokens[turn.start : turn.end] for turn in turns]
        assert [turn.sampled for turn in turns] == [False, True] * 3
        assert parts[::2] == [[space, *OPENING], BETWEEN_IDS, text]
        heard = [TOKENIZER.decode(each) for each in parts[1::2]]
        assert verdict.parts == {"characters": sum(map(len, heard)) % 97}
        drawn, logprobs = redrawn(4, group.prompt, sample, completion)
        assert completion.tokens[completion.mask].tolist() == drawn
        assert drawn == sum(parts[1::2], [])
        np.testing.assert_allclose(
            completion.logprobs[completion.mask], logprobs, atol=3e-5
        )
        assert slow[0].completions[sample].tokens.tolist() == tokens
        wholes.append([before, *tokens])
    rollouts = JUDGING.rollouts(group.completions, group.verdicts, group.turns)
    made = Group(ticket=0, prompt=group.prompt, rollouts=rollouts, finished_version=3)
    weights = np.zeros((2, MOST), np.float32)
    for row, rollout in zip(weights, rollouts, strict=True):
        row[: len(rollout.completion_mask)] = rollout.completion_mask
    learned = train_sequences([made], weights=weights, learner_version=3)
    assert [each.tokens.tolist() for each in learned.values()] == wholes
    assert [each.mask.tolist() for each in learned.values()] == [
        each.mask.tolist() for each in group.completions
    ]
    for place, words in enumerate(
        (
            "begin returned texts and tokens together",
            f"the token id {SIZE}; those of data.tokenizer are 0 to {SIZE - 1}",
            f"the token id {SIZE}; those of data.tokenizer are 0 to {SIZE - 1}",
            "the observation has the token id -1;",
            f"the observation has the token id {2**40};",
            "the observation has both a text and tokens; give one of them",
            "the observation's tokens are none, and the next turn begins behind them",
            "tokens are no sequence of token ids: 'str' object cannot be interpreted",
            "has 1,025 tokens; episode.max_observation_tokens = 1024 is the limit",
        ),
        start=1,
    ):
        statuses = {verdict.status for verdict in found[place].verdicts}
        assert statuses <= {"bad_observation", "wrong"}, found[place].detail
        assert words in found[place].detail and "\n" not in found[place].detail


def test_what_goes_wrong_in_a_turn_is_its_own_episodes_status(tmp_path):
    expected = [
        ("correct", ""),
        ("verifier_error", "the verifier process ended with exit code 7"),
        ("bad_observation", "the observation is of type bytes"),
        ("bad_observation", "episode.max_observation_tokens = 60 is the limit"),
        ("verifier_error", "line 23: LookupError: no such tool"),
        ("bad_reward", "'a text' of type str, and must be More, Done or a number"),
        ("verifier_error", "line 27: ModuleNotFoundError: No module named 'no_such"),
        ("no_end", "did not end within episode.max_turns"),
    ]
    with environment(write_file(tmp_path, FAULTS), "Faulty") as pool:
        evaluator, found = episodes_of(pool, count=len(expected))
        assert pool.restarts >= 2  # each of them was replaced
    for place, (status, words) in enumerate(expected):
        for verdict, turns in zip(
            found[place].verdicts, found[place].turns, strict=True
        ):
            if status != "correct" and len(turns) == 1:
                continue  # its first turn has filled the length
            assert (verdict.status, words in verdict.detail) == (status, True), verdict
    good, bad = evaluator.summary(found.values(), policy_version=3).rollouts
    assert "detail" not in good and bad["status"] == "no_end"
    assert bad["detail"] == found[7].verdicts[0].detail
    judged = [all(found[place].judged) for place in range(len(expected))]
    assert judged[0] and not any(judged[1:])


HANGING = """
    import time

    class Hanging:
        def begin(self, prompt, reference):
            self.kind = prompt.split()[0]
            if self.kind == "0":
                time.sleep(600)

        def step(self, completion):
            if self.kind == "1":
                time.sleep(600)
            return 1.0
"""


def test_one_that_hangs_is_ended_as_it_begins_and_in_a_turn(tmp_path):
    file = write_file(tmp_path, HANGING)
    with environment(file, "Hanging", timeout_s=2.0) as pool:
        _, found = episodes_of(pool, count=3)
        assert pool.restarts >= 4
    for place, status in enumerate(["verifier_timeout"] * 2 + ["correct"]):
        assert [each.status for each in found[place].verdicts] == [status] * 2


ENDLESS = """
    import pathlib

    def note(what):
        with open(pathlib.Path(__file__).with_suffix(".log"), "a") as log:
            log.write(what + "\\n")

    class Endless:
        def begin(self, prompt, reference):
            note("begin")

        def step(self, completion):
            return More("on")

        def close(self):
            note("close")
"""


def are_closed(file):
    """Whether each environment that has begun was closed, and there were some."""
    lines = file.with_suffix(".log").read_text().split()
    return lines.count("close") == lines.count("begin") > 0


@pytest.mark.parametrize(
    "limit, status, words",
    [
        ({"timeout_s": 1e-6}, "verifier_timeout", "episode.timeout_s = 1e-06"),
        ({"max_observation_tokens": 1}, "bad_observation", "tokens = 1 is the limit"),
    ],
)
def test_an_episode_that_a_limit_ends_is_closed(tmp_path, limit, status, words):
    file = write_file(tmp_path, ENDLESS)
    hasty = dataclasses.replace(TURNS, **limit)
    with environment(file, "Endless") as pool:
        _, found = episodes_of(pool, count=2, turns=hasty)
        assert are_closed(file)
    for group in found.values():
        for verdict, turns in zip(group.verdicts, group.turns, strict=True):
            assert len(turns) == 1
            assert verdict.status in (status, "no_end")
    assert words in found[0].detail + found[1].detail


class NoSampler:
    """A sampler that is asked for turns, and makes none."""

    free_slots = 2

    def __init__(self):
        self.asked = []

    def submit(self, request):
        self.free_slots = 0

    def resume(self, request, turn, appended):
        self.asked.append(turn.sample)


@pytest.mark.parametrize("returns", ["", " -> None"], ids=["opens", "no opening"])
def test_environments_of_a_dropped_episode_are_closed(tmp_path, returns):
    source = ENDLESS.replace("reference):", f"reference){returns}:")
    file, sampler = write_file(tmp_path, source), NoSampler()
    tokens = np.array(TOKENIZER.encode("a"), np.int32)
    values = np.zeros(len(tokens), np.float32)
    completion = Completion(
        request_id=0,
        sample=0,
        tokens=tokens,
        mask=np.ones(len(tokens), bool),
        logprobs=values,
        full_logprobs=values,
        top_tokens=np.zeros((len(tokens), 0), np.int32),
        top_logprobs=np.zeros((len(tokens), 0), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        cut_off=False,
        interrupted=False,
    )

    with environment(file, "Endless") as pool:
        episodes = Episodes(pool, JUDGING.answer, TURNS)
        prompts = iter([make_prompt(0)])

        def begun():
            if (prompt := next(prompts, None)) is None:
                return None
            episode = episodes.begin(0, prompt, 2)
            episode.request = Request(
                request_id=0,
                tokens=prompt.tokens,
                samples=make_samples(prompt),
                sampling=Sampling(),
            )
            return episode

        def answered(until):
            for _ in range(600):
                assert not list(episodes.judged(sampler))
                if until():
                    return
                episodes.wait(0.1)
            raise AssertionError("no answer came")

        episodes.fill(sampler, begun)
        (episode,) = episodes.open.values()
        if returns:
            episodes.add(completion, 0)
            answered(lambda: sampler.asked == [0])  # for its second turn
            episodes.add(dataclasses.replace(completion, sample=1), 0)
        episodes.drop(episode)  # a sample waits for a turn, or an environment is asked
        assert not episodes.open
        answered(lambda: not episodes.waiting)
        assert are_closed(file)


def test_environments_of_an_abandoned_evaluation_are_closed(tmp_path):
    file = write_file(tmp_path, ENDLESS)
    with environment(file, "Endless") as pool:
        evaluator, _ = episodes_of(pool, count=1)
        steps = evaluator.steps(
            params(0), policy_version=3, stopped=lambda: bool(pool.pending)
        )
        with pytest.raises(Abandoned):
            list(steps)
        assert pool.pending
        episodes_of(pool, count=1)  # another one takes the answers
        assert are_closed(file)


GAMES = """
    from scalerl_jax.environments.verdict import More

    OPEN = []

    class Game:
        def begin(self, prompt, reference) -> None:
            OPEN.append(prompt)
            self.prompt = prompt
            if prompt == "bad":
                raise LookupError("no such game")

        def step(self, completion):
            return More("on")

        def close(self):
            OPEN.remove(self.prompt)
"""


def test_an_instance_that_is_no_longer_kept_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(instances, "_MOST", 2)
    (tmp_path / "games.py").write_text(textwrap.dedent(GAMES))
    own = read_own(f"{tmp_path}/games.py:Game", RewardConfig(), episode=EpisodeConfig())
    setup = Setup(verifiers={}, preload="", timeout_s=60.0, memory_mib=0, own=own)
    verify = instances.OwnVerify(setup, None, None)
    games = instances.load_own(setup, verify, goes_on=lambda: None)
    still_open = games._make.step.__globals__["OPEN"]  # private: the file's own list

    def answer(prompt, **step):
        said = []
        work = GroupAnswers("", "t", [(0, "a")], {}, prompt, Step(**step))
        games.judge([work], lambda share, place, answer: said.append(answer))
        return said[0]

    on = More("on")
    assert [answer(name, episode=name) for name in "abc"] == [on] * 3
    assert still_open == ["b", "c"]  # two at most
    # A turn of another place than the instance's: another gets all turns.
    assert answer("d", episode="b", turns=(("a", on), ("a", on))) == on
    assert still_open == ["c", "d"]
    assert answer("bad", episode="e").status == "verifier_error"
    assert still_open == ["c", "d"]
    # One that answers otherwise than before.
    differs = answer("f", episode="f", turns=(("a", More("off")),))
    assert "answered otherwise" in differs.detail
    assert still_open == ["c", "d"]
    games._runner.close()  # private: a verifier process ends with its event loop


def test_missing_samples_are_counted_while_the_sampling_thread_adds_turns():
    episode = Episode(key=0, prompt=make_prompt(0), num_samples=3, begun_s=0.0)

    class Meanwhile:
        @property
        def verdict(self):
            episode.stories[1] = Story()  # another sample's first turn ends

    episode.stories[0] = Meanwhile()
    assert episode.lacking == 3


KILLED = """
    import os, pathlib

    class Killed:
        def begin(self, prompt, reference):
            self.kind, self.told = prompt.split()[0], []

        def step(self, completion):
            self.told.append(completion)
            mark = pathlib.Path(__file__).with_suffix(f".{self.kind}")
            if self.kind == "0" and len(self.told) == 2 and not mark.exists():
                mark.touch()
                os._exit(9)
            if len(self.told) == 3:
                return Done(1.0, {"characters": sum(map(len, self.told)) % 97})
            return More("go on")

        def cut(self):
            return 0.0
"""


def test_an_episode_outlives_a_process_that_another_one_ended(tmp_path):
    with environment(write_file(tmp_path, KILLED), "Killed", num_workers=1) as pool:
        _, found = episodes_of(pool, count=4)
        assert pool.restarts >= 1
    statuses = [
        verdict.status for group in found.values() for verdict in group.verdicts
    ]
    assert statuses.count("verifier_error") == 1
    for group in found.values():
        for verdict, completion, turns in zip(
            group.verdicts, group.completions, group.turns, strict=True
        ):
            if verdict.status == "correct":
                texts = [
                    TOKENIZER.decode(completion.tokens[turn.start : turn.end].tolist())
                    for turn in turns
                    if turn.sampled
                ]
                assert verdict.parts == {"characters": sum(map(len, texts)) % 97}


ASYNC = """
    import asyncio

    RUNNING = MOST = 0

    class Slow:
        def __init__(self):
            self.steps = 0

        async def begin(self, prompt, reference):
            await asyncio.sleep(0)

        async def step(self, completion):
            global RUNNING, MOST
            RUNNING += 1
            MOST = max(MOST, RUNNING)
            await asyncio.sleep(0.2)
            RUNNING -= 1
            self.steps += 1
            return Done(MOST) if self.steps == 2 else More("on")

        async def cut(self):
            return 0.0
"""


def test_async_environments_of_a_process_work_beside_each_other(tmp_path):
    with environment(write_file(tmp_path, ASYNC), "Slow", num_workers=1) as pool:
        _, found = episodes_of(pool, count=6)
    rewards = [each.reward for group in found.values() for each in group.verdicts]
    assert max(rewards) > 1


@pytest.mark.parametrize("kind", ["metaspace", "byte fallback", "byte level"])
def test_a_tokenizer_must_write_the_same_behind_other_tokens(kind):
    tokenizer = tokenizer_of(kind)
    if kind == "byte level":
        ObservationWriter(tokenizer, PlainFraming(BETWEEN, "{question}so"))
    else:
        with pytest.raises(ValueError, match="data.tokenizer writes a text otherwise"):
            ObservationWriter(tokenizer, PlainFraming(BETWEEN, "{question}so"))
