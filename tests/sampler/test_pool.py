"""Several schedulers on one pool: equal shares, and none of them waits for ever.

The engine is one of NumPy: it writes each token with its position into its page, and
decodes a sequence only if all its tokens are where the table says.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_model import small_architecture

from scalerl_jax.sampler.decoding import (
    NEVER,
    DecodedTokens,
    EngineSettings,
    empty_rows,
)
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.sampler.requests import Request, Samples
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.sampler.sizes import ProgramSizes

PROMPT, MOST, PER_CALL = 6, 18, 2
WHOLE = (PROMPT + MOST) // 2  # pages of a sequence at its full length


class Array(np.ndarray):
    """An array that is on the host already."""

    def copy_to_host_async(self):
        pass


class WrittenEngine(Engine):
    """A sequence of n tokens is n times the number of its request."""

    def __init__(self, *, slots, pages):
        self.settings = EngineSettings(
            arch=small_architecture(vocab_size=100_000),
            slots=slots,
            max_prompt_tokens=PROMPT,
            max_completion_tokens=MOST,
            tokens_per_call=PER_CALL,
            dtype=np.float32,
            eos_ids=(),
            page_size=2,
            prefill_tokens=8,
            cache_tokens=2 * pages,
        )
        self.decode_sizes = ProgramSizes((slots,), (WHOLE,))
        self.chunk_sizes = ProgramSizes((8,))
        self.insert_sizes = ProgramSizes((slots,))

    def load_params(self, params):
        return params

    def init_pages(self):
        return (np.full((self.settings.num_pages, 2, 2), -1),)

    def init_rows(self):
        rows = empty_rows(self.settings, self.settings.slots)
        return rows.replace(
            **{
                name: np.copy(getattr(rows, name))
                for name in ("tokens", "positions", "max_tokens", "active")
            },
            prompt_lengths=np.copy(rows.prompt_lengths),
        )

    def prefill(self, params, state, chunk):
        for at in range(chunk.num_sequences[0]):
            for place in range(*chunk.query_starts[at : at + 2]):
                self.write(state, chunk.table[at], chunk.positions[place])
                page, of_page = divmod(chunk.positions[place], 2)
                state.pages[0][chunk.table[at][page], of_page, 0] = chunk.tokens[place]
        return state, None

    def write(self, state, table, position):
        page, of_page = divmod(position, 2)
        state.pages[0][table[page], of_page, 1] = position

    def insert(self, state, *, slots, rows, copy_from, copy_to):
        for source, target in zip(copy_from, copy_to, strict=True):
            if target < self.settings.num_pages:
                state.pages[0][target] = state.pages[0][source]
        there = slots < self.settings.slots
        for name in ("tokens", "positions", "prompt_lengths", "max_tokens", "active"):
            getattr(state.rows, name)[slots[there]] = getattr(rows, name)[there]
        return state

    def generate(self, params, state, *, slots, table):
        rows, shape = state.rows, (PER_CALL, len(slots))
        found = {name: np.zeros(shape, bool) for name in ("valid", "forced")}
        tokens, cut_off = np.zeros(shape, np.int32), np.zeros(len(slots), bool)
        live = slots < self.settings.slots
        for step, column in itertools.product(range(PER_CALL), np.flatnonzero(live)):
            slot = slots[column]
            if not rows.active[slot]:
                continue
            token, position = rows.tokens[slot], rows.positions[slot]
            self.write(state, table[column], position)
            state.pages[0][table[column][position // 2], position % 2, 0] = token
            held = state.pages[0][table[column]].reshape(-1, 2)[: position + 1]
            assert held[:, 0].tolist() == [token] * (position + 1)
            assert held[:, 1].tolist() == list(range(position + 1))
            tokens[step, column], found["valid"][step, column] = token, True
            rows.positions[slot] += 1
            if (
                rows.positions[slot] + 1 - rows.prompt_lengths[slot]
                > (rows.max_tokens[slot])
            ):
                raise AssertionError("a token beyond the limit")
            if (
                rows.positions[slot] + 1 - rows.prompt_lengths[slot]
                == (rows.max_tokens[slot])
            ):
                rows.active[slot], cut_off[column] = False, True
        active = np.zeros(len(slots), bool)
        active[live] = rows.active[slots[live]]
        none = np.zeros((*shape, 0))
        results = DecodedTokens(
            tokens=tokens.view(Array),
            logprobs=np.zeros(shape, np.float32),
            full_logprobs=np.zeros(shape, np.float32),
            top_tokens=none,
            top_logprobs=none,
            active=active,
            cut_off=cut_off,
            failed=np.zeros(len(slots), bool),
            **found,
        )
        return state, results.replace(
            **{
                name: getattr(results, name).view(Array)
                for name in vars(results)
                if getattr(results, name) is not None
            }
        )

    def free_resource(self, state, *, slots):
        state.rows.active[slots] = False
        return state


class User:
    """A scheduler, and the tokens that are still to come of what it was asked."""

    def __init__(self, pool, number):
        self.scheduler, self.number = Scheduler(pool), number
        self.scheduler.load({}, 0)
        self.requests = itertools.count(1000 * (number + 1))
        self.to_come = {}  # limits by (request, sample)
        self.steps = 0

    def ask(self, prompt, limits):
        number = next(self.requests)
        self.scheduler.submit(
            Request(
                request_id=number,
                tokens=np.full(prompt, number, np.int32),
                samples=Samples(
                    keys=np.zeros((len(limits), 2), np.uint32),
                    thinking_limits=np.full(len(limits), NEVER, np.int32),
                    max_tokens=np.array(limits, np.int32),
                ),
            )
        )
        self.to_come |= {(number, each): limit for each, limit in enumerate(limits)}

    def step(self):
        self.steps += self.scheduler.busy
        for each in self.scheduler.step() if self.scheduler.busy else []:
            limit = self.to_come.pop((each.request_id, each.sample))
            assert each.tokens.tolist() == [each.request_id] * limit


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, PROMPT), st.lists(st.integers(1, MOST), min_size=1, max_size=4)
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 4),
    pages=st.integers(WHOLE + 1, 4 * WHOLE),
    asked=st.lists(REQUESTS, min_size=2, max_size=3),
    turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=20),
)
def test_who_makes_steps_ends_whatever_the_others_hold(slots, pages, asked, turns):
    pool = PagePool(WrittenEngine(slots=slots, pages=pages))
    users = [User(pool, number) for number in range(len(asked))]
    waiting = [iter(requests) for requests in asked]
    for number, times in turns:
        user = users[number % len(users)]
        if (request := next(waiting[number % len(users)], None)) is not None:
            user.ask(*request)
        for _ in range(times):
            user.step()
    for user, requests in zip(users, waiting, strict=True):
        for request in requests:
            user.ask(*request)
    for user in users:  # while the others stand still
        # A call for each token at worst, and a step that reads the last one.
        most = sum(user.to_come.values()) + len(user.to_come) + 1
        for _ in range(most):
            user.step()
        assert not user.to_come and not user.scheduler.busy
    assert pool._whole.in_use == 0


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    pages=st.integers(2 * WHOLE + 2, 6 * WHOLE),
    asked=REQUESTS,
    limits=st.lists(st.integers(1, MOST), min_size=8, max_size=8),
    before=st.integers(0, 30),
)
def test_neither_of_two_gets_less_than_its_half_would_give(
    pages, asked, limits, before
):
    """An evaluation beside training that has always more to sample, in turns."""

    def evaluated(user):
        for request in asked:
            user.ask(*request)
        return user

    def train(user):
        while user.scheduler.free_slots > 0:
            user.ask(4, limits)
        user.step()

    def engine(pages):
        return PagePool(WrittenEngine(slots=8, pages=pages))

    half = evaluated(User(engine(pages // 2), 0))
    while half.scheduler.busy:
        half.step()
    pool = engine(pages)
    training, evaluation = User(pool, 0), User(pool, 1)
    for _ in range(before):
        train(training)
    before = training.scheduler.stats.generated_tokens
    evaluated(evaluation)
    while evaluation.scheduler.busy:
        train(training)
        evaluation.step()
    assert evaluation.steps <= half.steps + 8
    alone = User(engine(pages // 2), 0)
    for _ in range(evaluation.steps):
        train(alone)
    got = training.scheduler.stats.generated_tokens - before
    assert got >= 0.5 * alone.scheduler.stats.generated_tokens - 8 * PER_CALL


def test_a_closed_scheduler_gives_its_pages_back():
    pool = PagePool(WrittenEngine(slots=2, pages=2 * WHOLE))
    training, evaluation = User(pool, 0), User(pool, 1)
    for user in (training, evaluation):
        user.ask(4, [MOST, MOST, MOST])
        user.step()
    held = training.scheduler.stats.pages_in_use
    assert pool._whole.in_use > held > 0
    evaluation.scheduler.close()
    assert pool._whole.in_use == held and not evaluation.scheduler.busy
    while training.to_come:
        training.step()
    assert pool._whole.in_use == 0


def test_an_evaluation_beside_training_gets_half_and_one_that_is_waited_for_all():
    pool = PagePool(WrittenEngine(slots=4, pages=4 * WHOLE))
    training, evaluation = User(pool, 0), User(pool, 1)
    training.ask(2, [MOST] * 4)
    for _ in range(6):
        training.step()
    assert training.scheduler.stats.pages_in_use == 4 * 7
    evaluation.ask(PROMPT, [MOST] * 4)
    half = 4 * WHOLE // 2
    for _ in range(2):
        training.step()
        evaluation.step()
    assert len(evaluation.scheduler._running) == 4, "its samples are placed at once"
    assert 0 < training.scheduler.stats.suspended < 4
    for _ in range(5):  # until they have 16 of 24 tokens
        evaluation.step()
    assert evaluation.scheduler.stats.pages_in_use > half
    while evaluation.to_come:
        evaluation.step()
    assert evaluation.scheduler.stats.suspended == 0
    while training.to_come:
        training.step()


def test_samples_are_not_placed_only_to_be_suspended():
    # Without pages that a suspended sample finds again, on which the order depends.
    pool = PagePool(WrittenEngine(slots=12, pages=6 * WHOLE), prefix_cache=False)
    training, evaluation = User(pool, 0), User(pool, 1)

    def train():
        while training.scheduler.free_slots > 0:
            training.ask(2, [MOST])
        training.step()

    for _ in range(12):
        train()
    before = training.scheduler.stats.suspended
    for number in range(40):
        evaluation.ask(2 + number % 4, [6 + number % 13])
    while evaluation.to_come:
        train()
        evaluation.step()
    # Half of its 12 make room once; otherwise it would be 15.
    assert training.scheduler.stats.suspended - before <= 8


def test_pages_with_an_owner_are_not_forgotten():
    pool = PagePool(WrittenEngine(slots=2, pages=2 * WHOLE))
    user = User(pool, 0)
    user.ask(4, [MOST])
    user.step()
    with pytest.raises(AssertionError, match="its pages would be lost"):
        pool.leave(user.scheduler)
