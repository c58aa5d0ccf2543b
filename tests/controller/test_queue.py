"""The queue by hand, and between two threads."""

import threading
import time
import traceback

import numpy as np
import pytest
from queue_world import make_group

from scalerl_jax.controller.queue import Pacing, QueueClosed, QueueState, RolloutQueue


@pytest.mark.parametrize("mode, k, tickets", [("pipeline", 3, 8), ("batched", 3, 6)])
def test_admission_by_hand(mode, k, tickets):
    queue = RolloutQueue(Pacing(num_prompts=2, max_staleness=k, mode=mode))
    assert [queue.admit(0) for _ in range(tickets + 1)] == [*range(tickets), None]


def test_a_late_publish_holds_admission_back():
    """N = 2, k = 1: the worker's version counts, not the learner's."""
    queue = RolloutQueue(Pacing(num_prompts=2, max_staleness=1, mode="pipeline"))
    for ticket in range(4):
        assert queue.admit(0) == ticket
        queue.put(make_group(ticket, 0))
    queue.take(0, 0.0)
    queue.applied()
    assert queue.admit(0) is None  # consumed 2 + outstanding 2 = (1 + 0 + 1) * 2
    assert queue.admit(1) == 4


def test_a_slow_group_is_waited_for_and_not_overtaken_past_the_bound():
    """N = 2, k = 1: group 0 runs on at version 0 while newer ones finish."""
    queue = RolloutQueue(Pacing(num_prompts=2, max_staleness=1, mode="pipeline"))
    assert [queue.admit(0) for _ in range(4)] == [0, 1, 2, 3]
    for ticket in (1, 2, 3):
        queue.put(make_group(ticket, 0))
    assert [group.ticket for group in queue.take(0, 0.0)] == [1, 2]
    queue.applied()
    assert [queue.admit(1), queue.admit(1)] == [4, 5]
    for ticket in (4, 5):
        queue.put(make_group(ticket, 1))
    # Three are there, and 3 is among the oldest; but 0 could not wait for version 2.
    with pytest.raises(TimeoutError, match="3 of 2 groups.*oldest running version=0"):
        queue.take(1, 0.0)
    queue.put(make_group(0, 0, 1))
    assert [group.ticket for group in queue.take(1, 0.0)] == [0, 3]


def test_newer_groups_are_used_while_a_slow_one_can_wait():
    """N = 1, k = 3: group 0 may be used at version 3; 1, 2, 4 go before it."""
    queue = RolloutQueue(Pacing(num_prompts=1, max_staleness=3, mode="pipeline"))
    assert [queue.admit(0) for _ in range(4)] == [0, 1, 2, 3]
    for version, ticket in enumerate((1, 2)):
        queue.put(make_group(ticket, 0))
        assert queue.take(version, 0.0)[0].ticket == ticket
        queue.applied()
    queue.drop(3, "group_timeout")  # the other group of version 0
    assert queue.admit(2) == 4
    queue.put(make_group(4, 2))
    assert queue.take(2, 0.0)[0].ticket == 4
    queue.applied()
    assert queue.admit(3) == 5
    queue.put(make_group(5, 3))
    with pytest.raises(TimeoutError):
        queue.take(3, 0.0)
    queue.put(make_group(0, 0))
    assert queue.take(3, 0.0)[0].ticket == 0


def test_the_oldest_group_goes_first_even_if_it_was_admitted_later():
    """N = 1, k = 2: group 0 got its slot, and its first token, at version 1."""
    queue = RolloutQueue(Pacing(num_prompts=1, max_staleness=2, mode="pipeline"))
    assert [queue.admit(0) for _ in range(3)] == [0, 1, 2]
    queue.put(make_group(2, 0))
    queue.take(0, 0.0)
    queue.applied()
    queue.put(make_group(0, 1))
    queue.put(make_group(1, 0, 1))
    assert queue.take(1, 0.0)[0].ticket == 1


def test_no_group_starts_while_a_batch_of_finished_ones_waits():
    """N = 2, k = 8, W = 1: what runs goes on, and a take makes room."""
    queue = RolloutQueue(
        Pacing(num_prompts=2, max_staleness=8, mode="pipeline", max_waiting=1)
    )
    assert [queue.admit(0) for _ in range(5)] == [0, 1, 2, 3, 4]
    queue.put(make_group(0, 0))
    assert queue.admit(0) == 5
    queue.sampled(1)  # without its verdicts it waits too
    assert queue.admit(0) is None
    for ticket in (1, 2, 3, 4, 5):
        queue.put(make_group(ticket, 0))
    assert queue.buffered == 2 * 1 - 1 + 5  # five ran when the last one started
    for version in (0, 1):
        queue.take(version, 0.0)
        assert queue.admit(version) is None
        queue.applied()
    queue.take(2, 0.0)
    assert queue.admit(2) == 6


@pytest.mark.parametrize(
    "mode, k, waiting, tickets",
    [
        pytest.param("pipeline", 0, 1, 2, id="in turn: one batch"),
        pytest.param("pipeline", 3, 0, 8, id="0: as many as k allows"),
        pytest.param("pipeline", 3, 1, 2, id="one batch"),
        pytest.param("pipeline", 3, 2, 4, id="two batches"),
        pytest.param("batched", 3, 1, 6, id="a whole window, whatever is set"),
    ],
)
def test_a_sampler_without_an_equal_stops_at_the_bound(mode, k, waiting, tickets):
    """N = 2; every group finishes before the next starts, and no step is made."""
    queue = RolloutQueue(
        Pacing(num_prompts=2, max_staleness=k, mode=mode, max_waiting=waiting)
    )
    for ticket in range(tickets):
        assert queue.admit(0) == ticket
        queue.put(make_group(ticket, 0))
    assert queue.admit(0) is None
    assert len(queue.take(0, 0.0)) == (6 if mode == "batched" else 2)


def test_more_may_wait_at_first_than_may_be_added():
    waiting = tuple(make_group(ticket, 0) for ticket in range(5))
    state = QueueState(
        version=0, next_ticket=6, buffered=waiting, running=((5, 0),), dropped={}
    )
    queue = RolloutQueue(
        Pacing(num_prompts=2, max_staleness=8, mode="pipeline", max_waiting=1)
    )
    queue.restore(state)
    queue.restart(5, 0)
    queue.put(make_group(5, 0))
    for version, tickets in enumerate([[0, 1], [2, 3], [4, 5]]):
        assert queue.admit(version) is None
        assert [group.ticket for group in queue.take(version, 0.0)] == tickets
        queue.applied()
    assert queue.admit(3) == 6


def test_a_drop_and_a_skipped_step_give_places_back():
    queue = RolloutQueue(Pacing(num_prompts=1, max_staleness=0, mode="pipeline"))
    assert queue.admit(0) == 0 and queue.admit(0) is None
    queue.drop(0, "verifier")
    assert queue.admit(0) == 1
    queue.put(make_group(1, 0))
    queue.take(0, 0.0)
    assert queue.admit(0) is None
    queue.skipped()
    assert queue.version == 0
    assert queue.admit(0) == 2
    assert queue.dropped == {"verifier": 1}


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


def test_a_group_older_than_its_admission_is_refused():
    queue = RolloutQueue(Pacing(num_prompts=1, max_staleness=1, mode="pipeline"))
    queue.admit(0)
    queue.put(make_group(0, 0))
    queue.take(0, 0.0)
    queue.applied()
    queue.admit(1)
    with pytest.raises(AssertionError, match="older than its admission"):
        queue.put(make_group(1, 0, 1))


def test_a_restored_queue_keeps_groups_places_and_counts():
    queue = RolloutQueue(Pacing(num_prompts=2, max_staleness=1, mode="pipeline"))
    assert [queue.admit(0) for _ in range(4)] == [0, 1, 2, 3]
    queue.put(make_group(1, 0))
    queue.drop(2, "group_timeout")
    state = queue.snapshot()
    assert (state.version, state.next_ticket) == (0, 4)
    assert [group.ticket for group in state.buffered] == [1]
    assert state.running == ((0, 0), (3, 0))

    restored = RolloutQueue(Pacing(num_prompts=2, max_staleness=1, mode="pipeline"))
    restored.restore(state)
    assert restored.admit(0) == 4  # the dropped one's place, and no other
    assert restored.admit(0) is None
    with pytest.raises(AssertionError, match="not restarted"):
        restored.put(make_group(0, 0))
    restored.restart(0, 0)
    restored.put(make_group(0, 0))
    assert [group.ticket for group in restored.take(0, 0.0)] == [0, 1]
    assert restored.dropped == {"group_timeout": 1}


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
        "1 of 2 groups after 0.5 s",
        "at policy version 0",
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
