"""Groups with a single fault: each is refused with its reason, good ones pass."""

import ast
import dataclasses
import inspect
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_model import small_architecture

from scalerl_jax.contract import Order
from scalerl_jax.controller import group_check
from scalerl_jax.controller.group_check import GroupCheck, count_tokens, ticket_of
from scalerl_jax.model.architecture import Experts
from scalerl_jax.types import Group, Prompt, Rollout, Turn

OLDEST, NEWEST, BEGUN, LIMIT = 3, 9, 4, 12
MIXTURE = small_architecture(family="qwen3_moe", experts=Experts(6, 2, "normalized"))
DENSE = small_architecture()
VOCABULARY = DENSE.vocab_size
NOBODY = 255  # in place of an expert


def check_of(group_size, *, mixture=False):
    return GroupCheck(
        arch=MIXTURE if mixture else DENSE,
        group_size=group_size,
        length_limit=lambda version: LIMIT if version == BEGUN else 0,
        with_experts=mixture,
    )


def make_prompt(length):
    return Prompt(
        prompt_id=5,
        epoch=1,
        task="sum",
        text="1 + 1",
        tokens=np.arange(length, dtype=np.int32),
        reference={"answer": "2", "parts": [1, 1.0, np.nan]},
    )


@st.composite
def cases(draw, *, mixture=None):
    """An order, a good group of it, and a generator of random choices."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mixture = draw(st.booleans()) if mixture is None else mixture
    prompt = make_prompt(draw(st.integers(1, 6)))

    def rollout():
        length = draw(st.integers(2, LIMIT))
        shape = (len(prompt.tokens) - 1 + length, MIXTURE.num_layers, 2)
        experts = rng.integers(0, 6, shape).astype(np.uint8)
        experts[rng.random(shape) < 0.1] = NOBODY
        passed = bool(rng.random() < 0.5)
        return Rollout(
            completion_tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
            completion_mask=rng.random(length) < 0.8,
            # What rounding leaves above 0, what a forced token has, and a rare token.
            behavior_logprobs=rng.choice([1e-6, 0.0, -0.3, -90.0], length).astype("f4"),
            policy_versions=np.sort(rng.integers(OLDEST, NEWEST + 1, length, np.int32)),
            cut_off=bool(rng.random() < 0.5),
            interrupted=bool(rng.random() < 0.5),
            reward=float(rng.choice([1.0, -1.0, 0.25])),
            passed=passed,
            judged=passed or bool(rng.random() < 0.5),
            status=str(rng.choice(["correct", "no_answer", "verifier_timeout"])),
            experts=experts if mixture else None,
        )

    group = Group(
        ticket=7,
        prompt=dataclasses.replace(prompt, tokens=prompt.tokens.copy()),
        rollouts=tuple(rollout() for _ in range(draw(st.integers(1, 4)))),
        finished_version=NEWEST,
    )
    order = Order(ticket=7, prompt=prompt, begun_version=BEGUN)
    return order, group, rng


def fault_of(order, group, *, size, mixture):
    check = check_of(size, mixture=mixture)
    return check.fault(group, order, oldest=OLDEST, newest=NEWEST)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_good_groups_pass(case):
    order, group, _ = case
    group = pickle.loads(pickle.dumps(group))
    mixture = group.rollouts[0].experts is not None
    assert not fault_of(order, group, size=len(group.rollouts), mixture=mixture)
    tokens = sum(len(each.completion_tokens) for each in group.rollouts)
    assert (ticket_of(group), count_tokens(group)) == (7, tokens)


def test_observations_are_not_among_the_generated_tokens_of_a_discarded_group():
    def with_turns(turns):
        mask = np.array([True, False, False, False, True])
        rollout = Rollout(
            completion_tokens=np.zeros(5, np.int32),
            completion_mask=mask,
            behavior_logprobs=np.zeros(5, np.float32),
            policy_versions=np.zeros(5, np.int32),
            cut_off=False,
            interrupted=False,
            turns=turns,
        )
        return Group(
            ticket=7,
            prompt=make_prompt(2),
            rollouts=(rollout, rollout.replace(turns=())),
            finished_version=NEWEST,
        )

    turns = (Turn(0, 1, True), Turn(1, 4, False), Turn(4, 5, True))
    assert count_tokens(with_turns(turns)) == 2 + 5
    for bad in (3, [turns], turns[:2], (Turn(0, 10**9, False), *turns[2:])):
        assert count_tokens(with_turns(bad)) == 5 + 5


def in_group(name, value):
    return lambda group, rng: group.replace(**{name: value})


def in_prompt(name, value):
    return lambda group, rng: group.replace(
        prompt=group.prompt.replace(**{name: value})
    )


def in_rollout(name, change):
    """A fault in one rollout: `change` gets the field and the random generator."""

    def corrupt(group, rng):
        place = int(rng.integers(len(group.rollouts)))
        rollouts = list(group.rollouts)
        value = change(getattr(rollouts[place], name), rng)
        rollouts[place] = rollouts[place].replace(**{name: value})
        return group.replace(rollouts=tuple(rollouts))

    return corrupt


def at_a_place(value):
    """One number of an array replaced."""

    def change(array, rng):
        array = array.copy()
        array[tuple(rng.integers(extent) for extent in array.shape)] = value
        return array

    return change


def const(value):
    return lambda old, rng: value


def cast(dtype):
    return lambda array, rng: array.astype(dtype)


TOKENS, MASK = "completion_tokens", "completion_mask"
LOGPROBS, VERSIONS = "behavior_logprobs", "policy_versions"
ARRAYS = (TOKENS, MASK, LOGPROBS, VERSIONS)


def longer(group, rng):
    """A rollout of one token more than the limit, all of its arrays alike."""
    rollout = group.rollouts[0]
    arrays = {name: np.resize(getattr(rollout, name), LIMIT + 1) for name in ARRAYS}
    arrays[VERSIONS] = np.sort(arrays[VERSIONS])
    return group.replace(rollouts=(rollout.replace(**arrays), *group.rollouts[1:]))


def empty(group, rng):
    rollout = group.rollouts[0]
    arrays = {name: getattr(rollout, name)[:0] for name in ARRAYS}
    return group.replace(rollouts=(rollout.replace(**arrays), *group.rollouts[1:]))


def unjudged_pass(group, rng):
    rollout = group.rollouts[0].replace(passed=True, judged=False)
    return group.replace(rollouts=(rollout, *group.rollouts[1:]))


def falls(group, rng):
    """The last version is older than the one before it."""
    rollout = group.rollouts[-1]
    versions = np.full_like(rollout.policy_versions, OLDEST + 1)
    versions[-1] = OLDEST
    rollout = rollout.replace(policy_versions=versions)
    return group.replace(rollouts=(*group.rollouts[:-1], rollout))


FAULTS = {
    "another prompt": (in_prompt("prompt_id", 6), "its prompt differs in prompt_id"),
    "another pass": (in_prompt("epoch", 0), "its prompt differs in epoch"),
    "another task": (in_prompt("task", "product"), "its prompt differs in task"),
    "another text": (in_prompt("text", "1 + 2"), "its prompt differs in text"),
    "another answer": (in_prompt("reference", {}), "its prompt differs in reference"),
    "no NaN where the answer has one": (
        in_prompt("reference", {"answer": "2", "parts": [1, 1.0, 1.0]}),
        "its prompt differs in reference",
    ),
    "other prompt tokens": (
        lambda group, rng: group.replace(
            prompt=group.prompt.replace(tokens=at_a_place(15)(group.prompt.tokens, rng))
        ),
        "its prompt differs in tokens",
    ),
    "prompt tokens of 64 bits": (
        in_prompt("tokens", np.zeros(3, np.int64)),
        "its prompt's tokens are no array of int32",
    ),
    "no prompt": (in_group("prompt", None), "its prompt is a NoneType"),
    "a rollout too many": (
        lambda group, rng: group.replace(rollouts=group.rollouts + group.rollouts[:1]),
        "its rollouts are no tuple of batch.group_size",
    ),
    "a list": (
        lambda group, rng: group.replace(rollouts=list(group.rollouts)),
        "its rollouts are no tuple",
    ),
    "no rollout": (
        lambda group, rng: group.replace(rollouts=(None, *group.rollouts[1:])),
        "rollout 0: it is a NoneType",
    ),
    "too long": (longer, "13 tokens; 1 to 12 can be sampled"),
    "empty": (empty, "0 tokens; 1 to 12 can be sampled"),
    "a negative id": (in_rollout(TOKENS, at_a_place(-1)), "token ids from -1 to"),
    "an id past the vocabulary": (
        in_rollout(TOKENS, at_a_place(VOCABULARY)),
        f"to {VOCABULARY}; the vocabulary has 0 to {VOCABULARY - 1}",
    ),
    "NaN": (in_rollout(LOGPROBS, at_a_place(np.nan)), "log-probabilities from nan"),
    "a token that cannot be": (
        in_rollout(LOGPROBS, at_a_place(-np.inf)),
        "log-probabilities from -inf",
    ),
    "more than certain": (
        in_rollout(LOGPROBS, at_a_place(0.01)),
        "to 0.01; they must be finite and 0 at most",
    ),
    "older than its admission": (
        in_rollout(VERSIONS, lambda array, rng: np.full_like(array, OLDEST - 1)),
        "policy versions from 2 to",
    ),
    "from the future": (
        in_rollout(VERSIONS, lambda array, rng: np.full_like(array, NEWEST + 1)),
        "to 10; they must be from 3 to 9",
    ),
    "versions that fall": (falls, "the policy versions of a rollout decrease"),
    "a reward that is NaN": (in_rollout("reward", const(np.nan)), "reward = nan is no"),
    "a reward that is infinite": (
        in_rollout("reward", const(-np.inf)),
        "reward = -inf is no finite number",
    ),
    "a reward that is a text": (
        in_rollout("reward", const("1")),
        "reward = '1' is no finite number",
    ),
    "a reward that is a flag": (
        in_rollout("reward", const(True)),
        "reward = True is no finite number",
    ),
    "a part that is NaN": (
        in_rollout("parts", const({"short": np.nan})),
        "parts = {'short': nan} are no finite numbers",
    ),
    "an unknown status": (
        in_rollout("status", const("fine")),
        "status = 'fine' is not among",
    ),
    "a pass without a verdict": (unjudged_pass, "it passed without a verdict"),
    "finished in the future": (
        in_group("finished_version", NEWEST + 1),
        "finished_version = 10 is not from",
    ),
    "finished before its last token": (
        in_group("finished_version", OLDEST - 1),
        "finished_version = 2 is not from",
    ),
    "a detail that is no text": (in_group("detail", None), "detail is a NoneType"),
    "no field at all": (in_group("rollouts", 3), "its rollouts are no tuple"),
    "an object that raises": (
        in_prompt("reference", {"answer": np.zeros(2), "parts": [1, 1.0]}),
        "it cannot be checked: ValueError",
    ),
}
for name in ARRAYS:
    kind = np.float64 if name == LOGPROBS else np.int64
    FAULTS[f"{name} of another dtype"] = (in_rollout(name, cast(kind)), f"{name} is ")
    FAULTS[f"{name} of two dimensions"] = (
        in_rollout(name, lambda array, rng: array[None]),
        f"{name} is no array [T]",
    )
    FAULTS[f"{name} as a list"] = (
        in_rollout(name, lambda array, rng: array.tolist()),
        f"{name} is no array [T]",
    )
    FAULTS[f"{name} of another length"] = (
        in_rollout(name, lambda array, rng: np.append(array, array[-1:])),
        "values for",
    )
for name in ("cut_off", "interrupted", "passed", "judged"):
    FAULTS[f"{name} that is a number"] = (
        in_rollout(name, const(1)),
        f"{name} is 1 and no bool",
    )
OF_EXPERTS = {
    "no experts": (in_rollout("experts", const(None)), "its experts are a NoneType"),
    "experts of one token more": (
        in_rollout("experts", lambda array, rng: np.concatenate([array, array[:1]])),
        "its experts are uint8[",
    ),
    "experts of another dtype": (
        in_rollout("experts", cast(np.uint16)),
        "its experts are uint16[",
    ),
    "an expert that is not there": (
        in_rollout("experts", at_a_place(6)),
        "an expert is not among the 6 of a layer",
    ),
}


@pytest.mark.parametrize("name", FAULTS | OF_EXPERTS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_a_single_fault_is_refused_with_its_reason(name, data):
    corrupt, words = (FAULTS | OF_EXPERTS)[name]
    mixture = True if name in OF_EXPERTS else data.draw(st.booleans())
    order, group, rng = data.draw(cases(mixture=mixture))
    size = len(group.rollouts)
    fault = fault_of(order, corrupt(group, rng), size=size, mixture=mixture)
    assert words in fault and "\n" not in fault


def test_experts_are_refused_where_nothing_is_replayed():
    rollout = Rollout(
        completion_tokens=np.zeros(1, np.int32),
        completion_mask=np.ones(1, bool),
        behavior_logprobs=np.zeros(1, np.float32),
        policy_versions=np.full(1, NEWEST, np.int32),
        cut_off=False,
        interrupted=False,
        status="wrong",
        experts=np.zeros((1, MIXTURE.num_layers, 2), np.uint8),
    )
    order = Order(ticket=7, prompt=make_prompt(1), begun_version=BEGUN)
    group = Group(
        ticket=7, prompt=make_prompt(1), rollouts=(rollout,), finished_version=NEWEST
    )
    fault = fault_of(order, group, size=len(group.rollouts), mixture=False)
    assert fault == "rollout 0: it has experts, and no routing is replayed"


@pytest.mark.parametrize("handed_in", [None, "a group", Group])
def test_what_is_no_group_has_no_ticket(handed_in):
    assert ticket_of(handed_in) is None


def test_the_check_needs_no_assert():
    """`python -O` leaves these out."""
    tree = ast.parse(inspect.getsource(group_check))
    assert not [each for each in ast.walk(tree) if isinstance(each, ast.Assert)]
