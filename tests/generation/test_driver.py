"""The sampling thread with a real queue, stream, verifier and ledger.

Only the sampler is written by hand: it says what its table tells it, a token of each
completion per call, and makes a call when it is let.
"""

import contextlib
import dataclasses
import re
import textwrap
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from shared_parts import finish
from small_model import small_architecture
from test_assembly import make_group

from scalerl_jax import demonstrations
from scalerl_jax.batching.group_metrics import group_metrics
from scalerl_jax.controller.group_check import GroupCheck
from scalerl_jax.controller.orders import OrderBook
from scalerl_jax.controller.queue import Pacing, QueueState, RolloutQueue
from scalerl_jax.data import tasks
from scalerl_jax.data.prompts import PromptStream, build_prompts, read_numbers
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.environments.pool import VerifierPool
from scalerl_jax.environments.verdict import Verdict
from scalerl_jax.evaluate.metrics import PromptOutcome, figures
from scalerl_jax.generation.episodes import Episode, Episodes
from scalerl_jax.generation.evaluation import Abandoned, Evaluator
from scalerl_jax.generation.judging import Judging
from scalerl_jax.generation.replica import ReplicaThread
from scalerl_jax.run.ledger import Ledger
from scalerl_jax.sampler.requests import Completion, SamplerStats, Samples
from scalerl_jax.sampler.sampling import Sampling, sample_keys
from scalerl_jax.weights.publication import Published, checksums

LONG = 60.0  # a wait that a test does not expect to see the end of
BACKEND = demonstrations.make_tokenizer()
EOS = BACKEND.token_to_id(demonstrations.EOS)
TOKENIZER = Tokenizer(backend=BACKEND, eos_ids=(EOS,))
QUESTIONS = tasks.make_questions("chain_sum", count=40, seed=5, exclude=set())
PROMPTS = build_prompts(
    QUESTIONS,
    encode=TOKENIZER.encode,
    render=lambda question: f"{question.text}<think>",
    max_prompt_tokens=48,
)
GROUP_SIZE = 2


def right(prompt):
    return f"1+1=2</think>{prompt.reference['answer']}"


def wrong(prompt):
    return "</think>-1000"


def silent(prompt):
    return "hm hm "


def endless(prompt):
    return None


def sent(version):
    """Params that show their version."""
    params = {"weight": jnp.float32(version)}
    number = jnp.int32(version)
    return Published(
        params=params, policy_version=number, checksums=checksums(params, number)
    )


class WrittenScheduler:
    """Completions from a table: prompt id -> what to say in each of its samples."""

    def __init__(self, table, *, default=(right, wrong), steps=10**9):
        self._table, self._default = table, default
        self._texts = {tuple(prompt.tokens): prompt for prompt in PROMPTS}
        self._allowed = threading.Semaphore(steps)
        self.running = {}  # (request, sample) -> tokens to come
        self.said = {}  # the same -> tokens and versions so far
        self.requests = []
        self.listeners = {}
        self.calls = self.steps = 0  # begun, let
        self.error = None
        self.stats = SamplerStats()

    def allow(self, steps):
        self._allowed.release(steps)

    @property
    def free_slots(self):
        return 12 - len(self.running)

    @property
    def busy(self):
        return bool(self.running)

    def submit(self, request):
        self.requests.append(request)
        self.listeners[request.request_id] = request.listener
        prompt = self._texts[tuple(request.tokens)]
        speakers = self._table.get(prompt.prompt_id, self._default)
        for sample, speaker in enumerate(speakers):
            text = speaker(prompt)
            tokens = None if text is None else [*TOKENIZER.encode(text), EOS]
            self.running[request.request_id, sample] = tokens
            self.said[request.request_id, sample] = []

    def resume(self, request, turn, appended):
        raise AssertionError("every completion has one turn")

    def cancel(self, request_id):
        lost = [key for key in self.running if key[0] == request_id]
        tokens = self.unfinished_tokens(request_id)
        self.stats.wasted_tokens += tokens
        for key in lost:
            del self.running[key]
        return tokens

    def close(self):
        self.running.clear()

    def unfinished_tokens(self, request_id):
        running = [key for key in self.running if key[0] == request_id]
        return sum(len(self.said[key]) for key in running)

    def load(self, params, version):
        self.params, self.version = params, version

    def step(self):
        version = self.version
        self.calls += 1
        assert self._allowed.acquire(timeout=LONG), "no test let this call happen"
        if self.error is not None:
            raise self.error
        self.steps += 1
        assert self.params["weight"] == version
        finished = []
        for key, tokens in list(self.running.items()):
            said = self.said[key]
            said.append((0 if tokens is None else tokens[len(said)], version))
            self.stats.generated_tokens += 1
            self.listeners[key[0]](key[1], np.zeros(1, np.int32), np.zeros(1))
            if tokens is not None and len(said) == len(tokens):
                del self.running[key]
                finished.append(self._completion(key, said))
        return finished

    def _completion(self, key, said):
        tokens, versions = (
            np.array(part, np.int32) for part in zip(*said, strict=True)
        )
        return Completion(
            request_id=key[0],
            sample=key[1],
            tokens=tokens,
            mask=np.ones(len(tokens), bool),
            logprobs=np.full(len(tokens), -0.5, np.float32),
            full_logprobs=np.full(len(tokens), -0.5, np.float32),
            top_tokens=np.zeros((len(tokens), 0), np.int32),
            top_logprobs=np.zeros((len(tokens), 0), np.float32),
            versions=versions,
            cut_off=False,
            interrupted=False,
        )


def make_samples(prompt, version):
    keys = sample_keys(
        0,
        "train",
        prompt_id=prompt.prompt_id,
        epoch=prompt.epoch,
        num_samples=GROUP_SIZE,
    )
    return Samples(keys=keys, thinking_limits=np.zeros(GROUP_SIZE, np.int32))


class Place:
    """A worker and all that it talks to."""

    def __init__(
        self,
        scheduler,
        *,
        verifier,
        timeout_s,
        books=None,
        state=None,
        **bounds,
    ):
        self.scheduler = scheduler
        self.queue = RolloutQueue(Pacing(num_prompts=2, mode="pipeline", **bounds))
        self.stream = PromptStream(PROMPTS, seed=0, max_pass_rate=None)
        self.ledger = Ledger(pools={"all": 1}, chip="a chip")
        self.verifier = verifier
        self.notes = []
        check = GroupCheck(
            arch=small_architecture(vocab_size=BACKEND.get_vocab_size()),
            group_size=GROUP_SIZE,
            length_limit=lambda version: 10**6,
        )
        self.orders = OrderBook(
            self.queue, self.stream, check=check, note=self.notes.append
        )
        if books is not None:
            self.wasted = self.orders.restore(books, (), version=0)
        if state is not None:
            self.queue.restore(state)
        judging = Judging(
            tokenizer=TOKENIZER, answer_after="</think>", correct=2.0, wrong=-0.5
        )
        self.generators = ReplicaThread(
            sampler=scheduler,
            orders=self.orders,
            episodes=Episodes(self.verifier, judging.answer),
            judging=judging,
            sampling=Sampling(),
            make_samples=make_samples,
            evaluator=None,
            probe=None,
            ledger=self.ledger,
            flops=lambda stats: 1000.0 * stats.generated_tokens,
            pool="all",
            group_timeout_s=timeout_s,
        )
        self.generators.publish(sent(0), policy_version=0)

    def stop(self, timeout_s):
        self.queue.close()
        self.generators.stop(timeout_s)

    def in_flight(self):
        return self.orders.snapshot(self.generators.in_flight())[0]["in_flight"]

    def stopped(self):
        return not [each for each in threading.enumerate() if each.name == "rollout"]


@pytest.fixture(scope="module")
def judges():
    """A verifier of the tasks, which one test after the other uses."""
    score = "scalerl_jax.data.tasks:score"
    with contextlib.closing(VerifierPool(score=score, timeout_s=LONG)) as pool:
        yield pool


@pytest.fixture
def place(judges):
    with contextlib.ExitStack() as stack:

        def make(scheduler, *, started=True, score=None, verdict_s=LONG, **settings):
            verifier = score and VerifierPool(score=score, timeout_s=verdict_s)
            settings = dict(max_staleness=0, timeout_s=LONG) | settings
            made = Place(scheduler, verifier=verifier or judges, **settings)

            def close():
                scheduler.allow(10**6)
                made.stop(LONG)
                if verifier:
                    verifier.close()
                else:
                    finish(judges)
                assert made.stopped()

            stack.callback(close)
            if started:
                made.generators.start()
            return made

        yield make


def in_order(count):
    """The prompts that are drawn first."""
    stream = PromptStream(PROMPTS, seed=0, max_pass_rate=None)
    return [stream.next() for _ in range(count)]


def until(condition):
    """Wait for another thread; the test fails if it never comes."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def test_a_group_is_what_was_sampled_and_judged(place):
    first, second = in_order(2)
    scheduler = WrittenScheduler(
        {first.prompt_id: (wrong, right)}, default=(silent, right)
    )
    at = place(scheduler)
    groups = at.queue.take(0, LONG)
    assert [group.ticket for group in groups] == [0, 1]
    assert [group.prompt.prompt_id for group in groups] == [
        first.prompt_id,
        second.prompt_id,
    ]
    statuses = [[each.status for each in group.rollouts] for group in groups]
    assert statuses == [["wrong", "correct"], ["no_answer", "correct"]]
    rewards = [[each.reward for each in group.rollouts] for group in groups]
    assert rewards == [[-0.5, 2.0], [-0.5, 2.0]]
    for prompt, group, speakers in zip(
        (first, second), groups, ((wrong, right), (silent, right)), strict=True
    ):
        assert group.pass_rate == 0.5 and group.finished_version == 0
        for rollout, speaker in zip(group.rollouts, speakers, strict=True):
            expected = [*TOKENIZER.encode(speaker(prompt)), EOS]
            assert rollout.completion_tokens.tolist() == expected
            assert not rollout.policy_versions.any()
    # The learner records what it takes; when a verdict came must not matter.
    assert not any(read_numbers(at.stream.state()["rollouts"]))
    tokens = sum(
        len(each.completion_tokens) for group in groups for each in group.rollouts
    )
    report = at.ledger.report()
    assert report["compute/generated_tokens"] == tokens
    assert report["compute/generate_flops"] == 1000.0 * tokens
    assert report["compute/wasted_tokens"] == 0


@pytest.mark.parametrize(
    "cut_off, is_wrong, passed",
    [(True, True, False), (True, False, True), (False, True, True)],
)
def test_a_cut_off_completion_may_count_as_wrong_whatever_it_says(
    cut_off, is_wrong, passed
):
    scheduler = WrittenScheduler({})
    whole = scheduler._completion((0, 0), [(EOS, 0)])
    judging = Judging(
        tokenizer=TOKENIZER,
        answer_after="</think>",
        correct=2.0,
        wrong=-0.5,
        cut_off_is_wrong=is_wrong,
    )
    completion = dataclasses.replace(whole, cut_off=cut_off)
    (rollout,) = judging.rollouts([completion], [Verdict("correct")])
    assert (rollout.passed, rollout.reward) == (passed, 2.0 if passed else -0.5)
    assert rollout.status == "correct"


@pytest.mark.parametrize("status", ["correct", "verifier_error"])
@pytest.mark.parametrize("is_wrong", [True, False])
def test_an_evaluation_counts_a_completion_as_training_does(status, is_wrong):
    judging = Judging(
        tokenizer=TOKENIZER,
        answer_after="</think>",
        wrong=-0.5,
        cut_off_is_wrong=is_wrong,
    )
    completion = dataclasses.replace(
        WrittenScheduler({})._completion((0, 0), [(EOS, 0)]), cut_off=True
    )
    episode = Episode(key=0, prompt=PROMPTS[0], num_samples=1, begun_s=0.0)
    episode.completions[0], episode.answers = completion, ("2",)
    episode.verdicts = (Verdict(status),)
    evaluator = Evaluator(
        make_sampler=pytest.fail,
        prompts=PROMPTS[:1],
        sampling=Sampling(),
        make_samples=pytest.fail,
        samples_per_prompt=1,
        verifier=None,
        judging=judging,
        logged_rollouts=1,
    )
    judged = evaluator._judged(episode)  # private: no sampler is needed
    group = make_group(*judging.rollouts([completion], episode.verdicts))
    found = evaluator.summary([judged], policy_version=0)
    summary = figures([PromptOutcome.of(judged, None)])
    if np.isnan(group.pass_rate):
        assert not is_wrong and status == "verifier_error"
        assert np.isnan(found.pass_rate) and np.isnan(found.reward_mean)
        assert summary["mean"]["value"] is None
    else:
        (rollout,) = group.rollouts
        assert group.pass_rate == (0.0 if is_wrong else 1.0)
        assert found.pass_rate == summary["mean"]["value"] == group.pass_rate
        assert found.reward_mean == rollout.reward
    assert found.rollouts[0]["status"] == status  # what the verifier has said


@pytest.mark.parametrize("status", ["verifier_timeout", "verifier_error"])
@pytest.mark.parametrize(
    "settings, judged, reward",
    [
        ({}, False, 0.0),
        ({"unjudged_is_wrong": True}, True, -0.5),
        # Cut off, it is wrong whatever a verifier would have said.
        ({"cut_off_is_wrong": True}, True, -0.5),
    ],
    ids=str,
)
def test_a_failure_of_the_verifier_is_no_wrong_answer(status, settings, judged, reward):
    judging = Judging(
        tokenizer=TOKENIZER,
        answer_after="</think>",
        correct=2.0,
        wrong=-0.5,
        **settings,
    )
    whole = WrittenScheduler({})._completion((0, 0), [(EOS, 0)])
    completion = dataclasses.replace(whole, cut_off=True)
    # Nine that fail are as little at fault as one.
    for rollout in judging.rollouts([completion] * 9, [Verdict(status)] * 9):
        assert (rollout.judged, rollout.passed) == (judged, False)
        assert (rollout.reward, rollout.status) == (reward, status)


@pytest.mark.parametrize(
    "share, costly, judged",
    [
        pytest.param(0.25, 1, False, id="a quarter of four is excused"),
        pytest.param(0.25, 2, True, id="half of four is not"),
        pytest.param(0.5, 2, False, id="but where half is allowed"),
        pytest.param(0.0, 1, True, id="none is allowed"),
    ],
)
def test_completions_that_are_too_costly_to_judge_are_soon_wrong(share, costly, judged):
    """A failure of the machine in the same group stays unjudged, and is not counted."""
    judging = Judging(
        tokenizer=TOKENIZER,
        answer_after="</think>",
        wrong=-0.5,
        max_too_costly_share=share,
    )
    whole = WrittenScheduler({})._completion((0, 0), [(EOS, 0)])
    statuses = ["too_costly"] * costly + ["verifier_error"] + ["correct"] * (3 - costly)
    rollouts = judging.rollouts([whole] * 4, list(map(Verdict, statuses)))
    for rollout in rollouts[:costly]:
        assert (rollout.judged, rollout.passed) == (judged, False)
        assert rollout.reward == (-0.5 if judged else 0.0)
    assert not rollouts[costly].judged
    assert all(rollout.judged for rollout in rollouts[costly + 1 :])
    group = make_group(*rollouts)
    metrics = group_metrics([group], learner_version=0)
    assert metrics["verifier/too_costly_share"] == costly / 4
    assert metrics["verifier/error_share"] == 1 / 4
    assert metrics["verifier/unjudged_share"] == (1 + costly * (not judged)) / 4


def test_new_params_take_over_in_the_midst_of_a_completion(place):
    short = {prompt.prompt_id for prompt in in_order(2)}
    long = "hm " * 500 + "</think>1"
    scheduler = WrittenScheduler(
        dict.fromkeys(short, (wrong, wrong)),
        default=(lambda prompt: long,) * 2,
        steps=0,
    )
    at = place(scheduler, max_staleness=2)  # six groups at once: 12 slots
    taken = []
    while not taken:  # verdicts are looked for between two calls
        scheduler.allow(1)
        with contextlib.suppress(TimeoutError):
            taken = at.queue.take(0, 0.05)
    assert {group.prompt.prompt_id for group in taken} == short
    at.queue.applied()
    at.generators.publish(sent(1), policy_version=1)
    scheduler.allow(1000)
    groups = at.queue.take(1, LONG)
    length = len(TOKENIZER.encode(long)) + 1
    for group in groups:
        for rollout in group.rollouts:
            assert len(rollout.policy_versions) == length
            assert sorted(set(rollout.policy_versions.tolist())) == [0, 1]
            assert (np.diff(rollout.policy_versions) >= 0).all()
        assert (group.oldest_version, group.finished_version) == (0, 1)
    metrics = group_metrics(groups, learner_version=1)
    assert (metrics["staleness/max"], metrics["staleness/in_flight_mean"]) == (1, 1.0)


def versions(groups):
    return [
        rollout.policy_versions.tolist()
        for group in groups
        for rollout in group.rollouts
    ]


def test_a_call_under_way_keeps_its_params_and_the_next_has_the_newest(place):
    scheduler = WrittenScheduler({}, steps=1)
    # The learner is two steps ahead of the params that the worker has.
    ahead = QueueState(version=2, next_ticket=4, buffered=(), running=(), dropped={})
    at = place(scheduler, max_staleness=2, state=ahead)
    until(lambda: scheduler.calls == 2)  # the second waits to be let
    for version in (1, 2):
        at.generators.publish(sent(version), policy_version=version)
    scheduler.allow(10**6)
    for each in versions(at.queue.take(2, LONG)):
        assert each == [0, 0] + [2] * (len(each) - 2)


@pytest.mark.parametrize(
    "broken, words",
    [
        (
            sent(1).replace(params={"weight": jnp.float32(1.5)}),
            "version 1 .*: weight has checksum 0x",
        ),
        (sent(0), "of version 0 as those of version 1"),
    ],
    ids=["damaged", "the one before"],
)
def test_params_that_did_not_arrive_are_the_learners_error(place, broken, words):
    scheduler = WrittenScheduler({}, steps=1)
    at = place(scheduler)
    with pytest.raises(RuntimeError, match=words):
        at.generators.publish(broken, policy_version=1)
    # The worker lives on, with the version that it has.
    scheduler.allow(10**6)
    for each in versions(at.queue.take(0, LONG)):
        assert set(each) == {0}


def test_a_late_group_is_dropped_its_place_used_and_its_tokens_wasted(place):
    late, second, third = in_order(3)
    scheduler = WrittenScheduler({late.prompt_id: (right, endless)})
    at = place(scheduler, timeout_s=1.0)
    groups = at.queue.take(0, LONG)
    assert [group.prompt.prompt_id for group in groups] == [
        second.prompt_id,
        third.prompt_id,
    ]
    assert at.queue.dropped == {"timeout": 1}
    at.stop(LONG)
    spoken = {
        ticket: sum(len(scheduler.said[ticket, sample]) for sample in range(GROUP_SIZE))
        for ticket in (0, 1, 2)
    }
    assert spoken[0] > len(TOKENIZER.encode(right(late))) + 1
    report = at.ledger.report()
    assert report["compute/wasted_tokens"] == spoken[0]
    assert report["compute/generated_tokens"] == sum(spoken.values())
    assert read_numbers(at.stream.state()["rollouts"])[late.prompt_id] == 0
    assert not at.orders._open  # private: a snapshot is for the time between windows


HANGING = """
    import time
    from scalerl_jax.data import tasks

    def score(task, answer, reference):
        if answer == "-1000":
            time.sleep(600)
        return tasks.score(task, answer, reference)
"""


def test_a_verifier_that_hangs_is_marked_and_counted(place, tmp_path, monkeypatch):
    (tmp_path / "hanging_score.py").write_text(textwrap.dedent(HANGING))
    monkeypatch.syspath_prepend(tmp_path)
    first, _ = in_order(2)
    scheduler = WrittenScheduler(
        {first.prompt_id: (right, wrong)}, default=(right, silent)
    )
    at = place(scheduler, score="hanging_score:score", verdict_s=6.0)
    groups = at.queue.take(0, LONG)
    statuses = [[each.status for each in group.rollouts] for group in groups]
    assert statuses == [["correct", "verifier_timeout"], ["correct", "no_answer"]]
    timed_out = groups[0].rollouts[1]
    assert not timed_out.judged and not timed_out.passed
    assert groups[0].detail == "no verdict within reward.timeout_s = 6.0"
    assert (groups[0].pass_rate, groups[0].has_reward_variance) == (1.0, False)
    metrics = group_metrics(groups, learner_version=0)
    assert metrics["verifier/timeout_share"] == 0.25
    assert metrics["verifier/error_share"] == 0.0
    assert metrics["verifier/unjudged_share"] == 0.25
    assert metrics["reward/mean"] == (2.0 + 2.0 - 0.5) / 3
    assert metrics["pass_rate/mean"] == 0.75


def test_groups_that_lack_verdicts_wait_like_those_that_have_them(
    place, tmp_path, monkeypatch
):
    """N = 2, k = 8, W = 1: six groups begin at once, and are more than may wait."""
    (tmp_path / "hanging_score.py").write_text(textwrap.dedent(HANGING))
    monkeypatch.syspath_prepend(tmp_path)
    scheduler = WrittenScheduler({}, default=(wrong, wrong))
    place(scheduler, score="hanging_score:score", max_staleness=8, max_waiting=1)
    until(lambda: scheduler.requests and not scheduler.busy)
    time.sleep(0.2)
    assert len(scheduler.requests) == 6


def test_a_snapshot_needs_no_pause(place):
    """Books taken at any moment name every ticket once, however busy the thread is."""
    at = place(WrittenScheduler({}), max_staleness=8)
    taken = []
    while len(taken) < 60:
        books, groups = at.orders.snapshot(at.generators.in_flight())
        assert [each["ticket"] for each in books["in_flight"]] == [
            ticket for ticket, _ in books["running"]
        ]
        known = [each["ticket"] for each in books["in_flight"]]
        known += [group.ticket for group in groups]
        assert sorted([*known, *taken]) == list(range(books["next_ticket"]))
        assert sum(read_numbers(books["stream"]["drawn"])) == books["next_ticket"]
        if len(groups) >= 2:
            taken += [group.ticket for group in at.queue.take(at.queue.version, LONG)]
            at.queue.applied()
            version = at.queue.version
            at.generators.publish(sent(version), policy_version=version)


def test_what_else_is_asked_is_done_between_two_steps(place):
    at = place(WrittenScheduler({}, default=(endless, endless)))
    until(lambda: at.scheduler.steps > 3)

    def still():
        steps = at.scheduler.steps
        time.sleep(0.05)
        assert at.scheduler.steps == steps
        return steps, at.in_flight(), threading.current_thread().name

    for _ in range(2):
        steps, in_flight, thread = at.generators.between_steps(still)
        assert thread == "rollout"
        until(lambda steps=steps: at.scheduler.steps > steps)
    assert in_flight == [
        {
            "ticket": ticket,
            "prompt_id": prompt.prompt_id,
            "epoch": 0,
            "begun_version": 0,
            "tokens": GROUP_SIZE * steps,
        }
        for ticket, prompt in enumerate(in_order(2))
    ]


class StepsOf:
    """An evaluator whose steps are numbers, and what it saw of the sampling."""

    def __init__(self, at, count, failure=None):
        self.at, self.count, self.failure = at, count, failure
        self.seen = []
        self.broken = lambda: False

    def steps(self, params, *, policy_version, places, stopped, wait_s):
        for number in range(self.count):
            assert params["weight"] == policy_version
            assert not self.broken(), "the sampler has failed"
            self.seen.append(self.at.scheduler.steps)
            yield [number] * (number % 2)
        if self.failure:
            raise self.failure


def test_an_evaluation_beside_the_sampling_alternates_with_it_at_its_own_version(place):
    at = place(WrittenScheduler({}, default=(endless, endless)), max_staleness=4)
    until(lambda: at.scheduler.steps > 3)
    at.ledger.start()
    at.generators.evaluator = evaluator = StepsOf(at, 6)
    pinned = sent(0)
    at.generators.publish(sent(1), policy_version=1)
    judged = at.generators.judge(
        pinned, policy_version=0, stopped=lambda: False, beside=True
    )
    assert judged == [1, 3, 5]
    first = evaluator.seen[0]
    assert evaluator.seen == list(range(first, first + 6))
    assert at.ledger.report()["compute/eval_chip_s"] > 0
    at.generators.evaluator = StepsOf(at, 2, failure=ZeroDivisionError("a verifier"))
    with pytest.raises(ZeroDivisionError, match="a verifier"):
        at.generators.judge(
            pinned, policy_version=0, stopped=lambda: False, beside=True
        )
    until(lambda: at.scheduler.steps > first + 20)


def test_an_evaluation_beside_the_sampling_ends_with_the_thread(place):
    at = place(WrittenScheduler({}, default=(endless, endless)), max_staleness=4)
    at.generators.evaluator = StepsOf(at, 10**9)
    found = []

    def evaluate():
        with pytest.raises(Abandoned):
            at.generators.judge(
                sent(0), policy_version=0, stopped=lambda: False, beside=True
            )
        found.append("abandoned")

    waiting = threading.Thread(target=evaluate)
    waiting.start()
    until(lambda: at.generators.evaluator.seen)
    at.stop(LONG)
    waiting.join(LONG)
    assert found == ["abandoned"]


def test_an_evaluation_beside_the_sampling_makes_no_step_after_a_failure(place):
    at = place(WrittenScheduler({}, default=(endless, endless)), max_staleness=4)
    at.generators.evaluator = evaluator = StepsOf(at, 10**9)
    with ThreadPoolExecutor(1) as pool:
        judged = pool.submit(
            at.generators.judge,
            sent(0),
            policy_version=0,
            stopped=lambda: False,
            beside=True,
        )
        until(lambda: evaluator.seen)
        # The sampler is the evaluation's too, and would fail there in other words.
        evaluator.broken = lambda: at.queue.failure
        at.scheduler.error = ArithmeticError("a bad number")
        with pytest.raises(Abandoned):
            judged.result(LONG)
    with pytest.raises(ArithmeticError):
        at.queue.take(0, LONG)


def test_a_job_hands_its_error_to_who_asked_and_the_thread_lives_on(place):
    at = place(WrittenScheduler({}))
    with pytest.raises(ZeroDivisionError):
        at.generators.between_steps(lambda: 1 / 0)
    assert len(at.queue.take(0, LONG)) == 2


def test_a_job_says_when_a_step_does_not_end(place, monkeypatch):
    monkeypatch.setattr("scalerl_jax.generation.jobs._STEP_TIMEOUT_S", 0.1)
    at = place(WrittenScheduler({}, steps=0))
    until(lambda: at.scheduler.calls)
    where = r"'rollout' .* since \d\d:\d\d:\d\d.*Driver\.step"
    with pytest.raises(TimeoutError, match=where):
        at.generators.between_steps(lambda: pytest.fail("the step was not over"))
    at.scheduler.allow(1000)
    assert len(at.queue.take(0, LONG)) == 2


def test_a_job_that_hangs_is_said_with_the_place_where_it_does(place):
    at = place(WrittenScheduler({}))
    at.generators._batch_timeout_s = 0.2
    go_on = threading.Event()
    where = r"'rollout' .*Jobs\.do .*batch_timeout_s = 0\.2"
    with pytest.raises(TimeoutError, match=where):
        at.generators.between_steps(lambda: go_on.wait(LONG))
    go_on.set()
    at.generators._batch_timeout_s = LONG
    assert len(at.queue.take(0, LONG)) == 2
    assert at.generators.hang() == ""


def test_a_long_job_makes_no_group_late(place, monkeypatch):
    """All groups stand still meanwhile."""
    passed_s = 0.0

    class Clock:
        @staticmethod
        def monotonic():
            return time.monotonic() + passed_s

    def job():
        nonlocal passed_s
        passed_s += 10 * LONG

    for module in ("driver", "jobs"):
        monkeypatch.setattr(f"scalerl_jax.generation.{module}.time", Clock)
    at = place(WrittenScheduler({}, steps=0))
    until(lambda: at.scheduler.calls)
    with ThreadPoolExecutor(1) as caller:
        called = caller.submit(at.generators.between_steps, job)
        until(lambda: at.generators._jobs.waiting)
        at.scheduler.allow(1000)
        called.result(LONG)
    assert len(at.queue.take(0, LONG)) == 2
    assert at.queue.dropped == {}


def test_a_thread_that_hangs_is_not_waited_for(place):
    at = place(WrittenScheduler({}, steps=0))
    at.generators._batch_timeout_s = 0.2
    until(lambda: at.scheduler.calls)
    at.stop(LONG)
    assert not at.stopped()
    assert re.search(r"in Driver\.step \(scaler", at.generators.hang())
    at.scheduler.allow(1000)
    until(at.stopped)
    assert at.generators.hang() == ""


def test_jobs_need_no_thread(place):
    at = place(WrittenScheduler({}), started=False)
    assert at.generators.between_steps(threading.current_thread) is (
        threading.current_thread()
    )
    at.generators.start()
    at.queue.take(0, LONG)
    at.stop(LONG)
    assert at.generators.between_steps(lambda: 5) == 5


def test_the_thread_starts_after_a_job_that_runs_without_it(place):
    """Both would use the sampler and its pages."""
    at = place(WrittenScheduler({}), started=False)
    begun, go_on = threading.Event(), threading.Event()

    def job():
        begun.set()
        return go_on.wait(LONG)

    with ThreadPoolExecutor(2) as callers:
        called = callers.submit(at.generators.between_steps, job)
        assert begun.wait(LONG)
        started = callers.submit(at.generators.start)
        try:
            with pytest.raises(TimeoutError):
                started.result(0.2)
            assert at.stopped()
        finally:
            go_on.set()
        assert called.result(LONG)
        started.result(LONG)
    assert len(at.queue.take(0, LONG)) == 2
    assert at.generators.between_steps(threading.current_thread).name == "rollout"


def test_groups_in_flight_are_sampled_again_as_they_were(place):
    before = place(WrittenScheduler({}, default=(right, endless)), max_staleness=1)
    until(lambda: len(before.scheduler.requests) == 4 == len(before.scheduler.running))

    def look():
        books, _ = before.orders.snapshot(before.generators.in_flight())
        return books, sum(len(each) for each in before.scheduler.said.values())

    books, said = before.generators.between_steps(look)
    before.stop(LONG)

    after = place(WrittenScheduler({}, steps=0), max_staleness=1, books=books)
    # Right answers have ended by now, endless ones have not; both are said again.
    assert after.wasted == said > 0
    until(lambda: len(after.scheduler.requests) == 4)
    for asked, again in zip(
        before.scheduler.requests, after.scheduler.requests, strict=True
    ):
        assert asked.request_id == again.request_id
        assert asked.tokens.tolist() == again.tokens.tolist()
        assert (asked.samples.keys == again.samples.keys).all()
    after.scheduler.allow(10**6)
    tickets = [group.ticket for group in after.queue.take(0, LONG)]
    after.queue.applied()
    after.generators.publish(sent(1), policy_version=1)
    tickets += [group.ticket for group in after.queue.take(1, LONG)]
    assert sorted(tickets) == [0, 1, 2, 3]
    # The next prompt is a new one.
    until(lambda: len(after.scheduler.requests) > 4)
    assert after.scheduler.requests[4].request_id == 4
    assert after.scheduler.requests[4].tokens.tolist() == in_order(5)[4].tokens.tolist()


def test_an_error_in_the_thread_is_the_learners(place):
    at = place(WrittenScheduler({}, steps=3))
    until(lambda: at.scheduler.steps == 3)
    at.scheduler.error = ArithmeticError("a bad number")
    at.scheduler.allow(1)
    with pytest.raises(ArithmeticError) as failure:
        at.queue.take(0, LONG)
    assert failure.value is at.queue.failure is at.scheduler.error
    until(at.stopped)
    # To be saved, and begun again.
    assert [each["ticket"] for each in at.in_flight()] == [0, 1]


class NoisyScheduler(WrittenScheduler):
    """Log-probabilities that are NaN in the first completions."""

    def __init__(self, *, bad, **like):
        super().__init__({}, **like)
        self.left = bad

    def _completion(self, key, said):
        completion = super()._completion(key, said)
        if self.left > 0:
            self.left -= 1
            logprobs = np.full_like(completion.logprobs, np.nan)
            completion = dataclasses.replace(completion, logprobs=logprobs)
        return completion


def test_a_bad_group_is_sampled_again_from_its_prompt(place):
    made = place(NoisyScheduler(bad=1))
    groups = made.queue.take(0, LONG)
    assert [group.prompt.prompt_id for group in groups] == [
        prompt.prompt_id for prompt in in_order(2)
    ]
    assert made.orders.refused == 1
    assert "log-probabilities from nan to nan; they must be finite" in made.notes[0]
    tokens = [len(each.completion_tokens) for g in groups for each in g.rollouts]
    wasted = made.ledger.report()["compute/wasted_tokens"]
    assert wasted in (sum(tokens[:2]), sum(tokens[2:]))


def test_bad_groups_of_the_only_sampler_end_the_run(place):
    made = place(NoisyScheduler(bad=10**6))
    with pytest.raises(RuntimeError, match="3 bad groups, the limit is 3"):
        made.queue.take(0, LONG)


def test_a_prompt_that_cannot_be_drawn_takes_no_place(place):
    at = place(WrittenScheduler({}), started=False)
    at.stream._max_pass_rate = 0.0
    for prompt in PROMPTS:
        at.stream.record(prompt.prompt_id, passed=1, total=1)
    at.generators.start()
    with pytest.raises(ValueError, match="data.no_positive_resampling"):
        at.queue.take(0, LONG)
    assert at.queue.snapshot().running == () == tuple(at.in_flight())


def test_a_call_that_ends_after_the_worker_was_stopped_changes_nothing(place):
    at = place(WrittenScheduler({}, steps=0))
    until(lambda: at.scheduler.calls)
    at.stop(0.1)
    state = at.queue.snapshot()
    at.scheduler.allow(10**6)
    until(at.stopped)
    assert at.queue.snapshot() == state
    tickets = [each["ticket"] for each in at.in_flight()]
    assert tickets == [ticket for ticket, _ in state.running] == [0, 1]


def test_a_worker_with_nothing_to_do_can_be_stopped(place):
    at = place(WrittenScheduler({}))
    at.queue.take(0, LONG)  # and no step is applied: nothing more may start
    assert at.queue.admit(0) is None
    at.stop(LONG)
    assert at.stopped()


def test_params_take_the_place_of_others_between_two_steps(place):
    scheduler = WrittenScheduler({}, default=(endless, endless), steps=0)
    at = place(scheduler, max_staleness=4)
    scheduler.allow(3)
    until(lambda: scheduler.calls == 4)  # the fourth has the params of version 0
    stood, end = [], Future()

    def make():
        stood.append((scheduler.steps, scheduler.calls))
        return sent(1)

    def replace():
        at.generators.replace(make, policy_version=1)
        end.set_result(None)

    threading.Thread(target=replace, daemon=True).start()
    until(lambda: at.generators._jobs.waiting)
    assert not end.done() and not stood
    scheduler.allow(1)
    end.result(LONG)
    assert stood == [(4, 4)]  # none was under way
    scheduler.allow(2)  # each looks at the version of its params
    until(lambda: scheduler.steps == 6)


def test_a_replacement_that_fails_ends_the_sampling(place):
    scheduler = WrittenScheduler({}, default=(endless, endless), steps=0)
    at = place(scheduler, started=False)
    failures = []
    at.orders.fail = failures.append

    def make():
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        at.generators.replace(make, policy_version=1)
    at.generators.publish(sent(0), policy_version=0)  # another try is free to come
    at.generators.start()
    until(lambda: scheduler.calls == 1)
    thread = threading.Thread(
        target=lambda: pytest.raises(
            MemoryError, at.generators.replace, make, policy_version=1
        )
    )
    thread.start()
    until(lambda: at.generators._jobs.waiting)
    scheduler.allow(1)
    thread.join(LONG)
    until(lambda: failures)
    assert "params were lost" in str(failures[0])
