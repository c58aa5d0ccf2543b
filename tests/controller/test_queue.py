"""The queue: wrong calls, checkpoints that are refused, and two threads.

Its arithmetic is compared with a count by trial in `test_queue_schedules.py`.
"""

import dataclasses
import threading
import time
import traceback

import numpy as np
import pytest
from queue_world import make_group

from scalerl_jax.controller.queue import Pacing, QueueClosed, QueueState, RolloutQueue


@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(lambda queue: queue.put(make_group(9, 0)), id="never admitted"),
        pytest.param(lambda queue: queue.put(make_group(0, 1)), id="from the future"),
        pytest.param(lambda queue: queue.drop(9, "lost"), id="drop of no group"),
        pytest.param(lambda queue: queue.sampled(9), id="sampled, never admitted"),
        pytest.param(lambda queue: queue.admit(1), id="params from the future"),
        pytest.param(lambda queue: queue.take(1, 0.0), id="another version"),
        pytest.param(lambda queue: queue.applied(), id="applied without a batch"),
        pytest.param(lambda queue: queue.skipped(), id="skipped without a batch"),
        pytest.param(lambda queue: queue.restart(9, 0), id="restarted, not running"),
    ],
)
def test_a_wrong_call_is_refused(misuse):
    queue = RolloutQueue(Pacing(num_prompts=1, max_staleness=1, mode="pipeline"))
    queue.admit(0)
    with pytest.raises(AssertionError):
        misuse(queue)


def test_a_restored_ticket_must_be_restarted_and_no_group_is_older_than_its_start():
    queue = RolloutQueue(Pacing(num_prompts=1, max_staleness=1, mode="pipeline"))
    running = QueueState(
        version=1, next_ticket=1, buffered=(), running=((0, 1),), dropped={}
    )
    queue.restore(running)
    with pytest.raises(AssertionError, match="not restarted"):
        queue.put(make_group(0, 1))
    queue.restart(0, 1)
    with pytest.raises(AssertionError, match="older than its admission"):
        queue.put(make_group(0, 0, 1))


@pytest.mark.parametrize(
    "mode, k, num_prompts",
    [
        pytest.param("pipeline", 0, 2, id="a smaller bound"),
        pytest.param("pipeline", 1, 1, id="a smaller batch"),
        pytest.param("batched", 1, 2, id="another mode"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_up_is_refused(mode, k, num_prompts):
    state = QueueState(
        version=1,
        next_ticket=5,
        buffered=(make_group(2, 0),),
        running=((3, 0), (4, 1)),
        dropped={},
    )
    RolloutQueue(Pacing(num_prompts=2, max_staleness=1, mode="pipeline")).restore(state)
    queue = RolloutQueue(Pacing(num_prompts=num_prompts, max_staleness=k, mode=mode))
    with pytest.raises(ValueError, match=f"queue.max_staleness = {k}"):
        queue.restore(state)


def test_a_window_that_fewer_steps_cannot_use_up_is_refused_by_their_number():
    pacing = Pacing(num_prompts=2, max_staleness=2, mode="batched", num_steps=1)
    running = tuple((ticket, 0) for ticket in range(4))
    state = QueueState(
        version=0, next_ticket=4, buffered=(), running=running, dropped={}
    )
    with pytest.raises(ValueError, match="train.num_steps = 1;"):
        RolloutQueue(pacing).restore(state)
    more = dataclasses.replace(pacing, num_steps=2)
    RolloutQueue(more).restore(state)


@pytest.mark.parametrize("mode", ["pipeline", "batched"])
def test_a_finished_run_may_be_resumed_with_fewer_steps(mode):
    pacing = Pacing(num_prompts=2, max_staleness=1, mode=mode, num_steps=3)
    queue = RolloutQueue(pacing)
    queue.restore(
        QueueState(version=5, next_ticket=10, buffered=(), running=(), dropped={})
    )
    assert queue.admit(5) is None


def test_the_timeout_says_what_is_missing():
    queue = RolloutQueue(Pacing(num_prompts=2, max_staleness=1, mode="pipeline"))
    for _ in range(3):
        queue.admit(0)
    queue.put(make_group(1, 0))
    queue.drop(2, "group_timeout")
    with pytest.raises(TimeoutError) as raised:
        queue.take(0, 0.5)
    message = str(raised.value)
    for part in (
        "1 of 2 groups at policy version 0",
        "max_staleness=1",
        "running=1",
        "buffered=1",
        "dropped={'group_timeout': 1}",
        "queue.batch_timeout_s",
    ):
        assert part in message


LONG = 30.0


def run_in_thread(target):
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_a_dead_worker_is_the_learners_error():
    queue = RolloutQueue(Pacing(num_prompts=1, max_staleness=0, mode="pipeline"))
    error = ZeroDivisionError("in the worker")

    def sample():
        queue.admit(0)
        time.sleep(0.05)  # the learner waits by now
        try:
            raise error
        except ZeroDivisionError as failure:
            queue.fail(failure)

    thread = run_in_thread(sample)
    with pytest.raises(ZeroDivisionError) as raised:
        queue.take(0, 30.0)
    thread.join(30.0)
    assert raised.value is error
    assert "sample" in [
        frame.name for frame in traceback.extract_tb(error.__traceback__)
    ]
    queue.fail(ValueError("a later one"))
    for call in (queue.raise_if_over, lambda: queue.wait(0.0)):
        with pytest.raises(ZeroDivisionError):
            call()


def test_a_take_wakes_the_worker():
    queue = RolloutQueue(
        Pacing(num_prompts=1, max_staleness=8, mode="pipeline", max_waiting=1)
    )
    for version in (0, 1):  # the worker is told whether it waits already or not
        assert queue.admit(version) == version
        queue.put(make_group(version, version))
        assert queue.admit(version) is None
        if version:
            queue.take(version, 0.0)
        worker = run_in_thread(lambda: queue.wait(LONG))
        time.sleep(0.05)
        if not version:
            queue.take(version, 0.0)
        worker.join(LONG / 3)
        assert not worker.is_alive()
        queue.applied()


def test_no_group_starts_while_starts_are_held():
    queue = RolloutQueue(Pacing(num_prompts=2, max_staleness=0, mode="pipeline"))
    assert queue.admit(0) == 0
    queue.hold(True)
    assert queue.admit(0) is None
    queue.put(make_group(0, 0))  # what runs already may end
    worker = run_in_thread(lambda: queue.wait(LONG))
    queue.hold(False)
    worker.join(LONG / 3)
    assert not worker.is_alive()
    assert queue.admit(0) == 1


def test_close_wakes_both():
    queue = RolloutQueue(Pacing(num_prompts=1, max_staleness=0, mode="pipeline"))
    queue.admit(0)
    ended = []

    def expect_the_end(name, call):
        try:
            call()
        except QueueClosed:
            ended.append(name)

    worker = run_in_thread(lambda: expect_the_end("worker", lambda: queue.wait(30.0)))
    learner = run_in_thread(
        lambda: expect_the_end("learner", lambda: queue.take(0, 30.0))
    )
    time.sleep(0.05)
    queue.close()
    worker.join(30.0)
    learner.join(30.0)
    assert sorted(ended) == ["learner", "worker"]
    with pytest.raises(QueueClosed):
        queue.admit(0)
    queue.put(make_group(0, 0))  # what was under way may still end
    assert [group.ticket for group in queue.snapshot().buffered] == [0]


def test_a_change_between_admit_and_wait_is_not_slept_over():
    queue = RolloutQueue(Pacing(num_prompts=1, max_staleness=0, mode="pipeline"))
    queue.admit(0)
    queue.put(make_group(0, 0))
    queue.take(0, 0.0)
    assert queue.admit(0) is None
    queue.applied()  # by the learner, before the worker waits
    start = time.monotonic()
    queue.wait(30.0)
    assert queue.admit(0) is None  # the new params are not here yet
    queue.wake()  # they are now
    queue.wait(30.0)
    assert time.monotonic() - start < 10.0
    assert queue.admit(1) == 1
    start = time.monotonic()
    queue.wait(0.02)
    assert time.monotonic() - start >= 0.015


def test_two_threads_finish_a_run():
    queue = RolloutQueue(Pacing(num_prompts=3, max_staleness=2, mode="pipeline"))
    published = [0]
    random = np.random.default_rng(0)

    def sample():
        waiting = []
        try:
            while True:
                version = published[0]
                ticket = queue.admit(version)
                if ticket is not None:
                    waiting.append((ticket, version))
                elif not waiting:
                    queue.wait(10.0)
                if waiting and (ticket is None or random.random() < 0.5):
                    ticket, version = waiting.pop(random.integers(len(waiting)))
                    queue.put(make_group(ticket, version, published[0]))
        except QueueClosed:
            return
        except BaseException as failure:  # noqa: BLE001  raised again by take()
            queue.fail(failure)

    thread = run_in_thread(sample)
    consumed = []
    for version in range(50):
        groups = queue.take(version, 30.0)
        assert all(version - group.oldest_version <= 2 for group in groups)
        consumed.extend(group.ticket for group in groups)
        queue.applied()
        published[0] = version + 1
        queue.wake()
    queue.close()
    thread.join(30.0)
    assert not thread.is_alive()
    assert len(set(consumed)) == 150
