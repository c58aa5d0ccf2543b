"""No ticket is lost or trained on twice, whatever the settings and the losses."""

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scalerl_jax.controller.queue import RolloutQueue
from scalerl_jax.simulate.lengths import SimulatedLengths
from scalerl_jax.simulate.rates import Rates
from scalerl_jax.simulate.run import Simulation
from scalerl_jax.simulate.scenario import Failures, Scenario


class Watched(RolloutQueue):
    """A queue that keeps books of its own about who came and who went."""

    def __init__(self, pacing, **how):
        super().__init__(pacing, **how)
        self.came, self.went, self.stale = [], collections.Counter(), []

    def admit(self, version):
        ticket = super().admit(version)
        if ticket is not None:
            self.came.append(ticket)
        return ticket

    def take(self, version, timeout_s):
        groups = super().take(version, timeout_s)
        for group in groups:
            self.went[group.ticket] += 1
            self.stale.append(version - group.oldest_version)
            assert group.oldest_version <= group.finished_version <= version
        return groups


@st.composite
def scenarios(draw):
    mode = draw(st.sampled_from(["pipeline", "batched"]))
    epochs = draw(st.integers(1, 3))
    least = epochs if mode == "batched" else epochs - 1
    most_stale = least + epochs * draw(st.integers(0, 3))
    return Scenario(
        num_prompts=draw(st.integers(1, 6)),
        group_size=draw(st.integers(1, 4)),
        max_staleness=most_stale,
        mode=mode,
        max_waiting=draw(st.integers(0, 3)),
        epochs=epochs,
        max_refills=draw(st.integers(0, 2)),
        num_steps=draw(st.integers(1, 20)),
        replicas=draw(st.integers(1, 4)),
        slots=draw(st.integers(1, 10)),
        tokens_per_call=draw(st.sampled_from([1, 8])),
        cache_tokens=draw(st.sampled_from([0, 150, 400])),
        prompt_tokens=draw(st.integers(0, 20)),
        zero_variance_share=draw(st.sampled_from([0.0, 0.3, 0.8])),
        eval_every=draw(st.sampled_from([0, 3])),
        eval_completions=7,
        eval_beside=draw(st.booleans()),
        checkpoint_every=draw(st.sampled_from([0, 2])),
        failures=Failures(
            replica_mtbf_s=draw(st.sampled_from([0.0, 300.0])),
            learner_mtbf_s=draw(st.sampled_from([0.0, 200.0])),
            notice_s=1.0,
            replica_start_s=10.0,
            learner_start_s=20.0,
        ),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def machines(draw):
    seconds = st.sampled_from([0.0, 0.3, 5.0])
    return Rates(
        decode_s=((1, 0.1), (8, draw(st.sampled_from([0.1, 1.0])))),
        decode_context_s=draw(st.sampled_from([0.0, 1e-4])),
        prefill_s=draw(seconds),
        train_s=draw(seconds),
        assemble_s=draw(seconds),
        publish_s=draw(seconds),
        transfer_s=draw(seconds),
        place_s=draw(seconds),
        verify_s=draw(seconds),
        exchange_s=draw(seconds),
        group_s=draw(st.sampled_from([0.0, 0.05])),
        checkpoint_s=draw(seconds),
    )


# Seven samples for five slots, at whose rate half of a cache is quicker than all of it.
FEW = Scenario(
    num_prompts=1,
    group_size=1,
    max_staleness=0,
    num_steps=4,
    slots=5,
    tokens_per_call=8,
    cache_tokens=400,
    prompt_tokens=1,
    eval_every=3,
    eval_completions=7,
    eval_beside=True,
)


@settings(max_examples=60, deadline=None)
@example(scenario=FEW, rates=Rates(decode_s=((1, 0.1), (8, 0.1))), tail=1.0)
@given(scenario=scenarios(), rates=machines(), tail=st.sampled_from([1.0, 6.0]))
def test_every_ticket_is_trained_on_once_or_left_at_the_end(scenario, rates, tail):
    lengths = SimulatedLengths(
        mean_tokens=40.0, tail=tail, limit=100, seed=scenario.seed
    )
    simulation = Simulation(scenario, rates, lengths, make_queue=Watched)
    outcome, queue = simulation.run(), simulation.queue
    assert queue.version == scenario.num_steps
    assert queue.came == list(range(len(queue.came)))
    assert max(queue.went.values()) == 1
    assert len(queue.came) == sum(queue.went.values()) + queue.running + queue.buffered
    assert max(queue.stale) <= scenario.max_staleness
    # What is open in replicas, or on its way to another, is what the queue says.
    held = [ticket for each in simulation.replicas for ticket in each.open]
    assert len(held) == len(set(held)) <= queue.running
    if not scenario.failures.replica_mtbf_s:
        assert len(held) == queue.running
    for replica in simulation.replicas:
        spent = replica.busy_s + replica.eval_s + replica.down_s
        assert spent <= simulation.now_s + 1e-6
    assert outcome.counts["trained_groups"] >= scenario.num_steps
    for name in ("time_s", "busy_s", "slot_s", "eval_s", "down_s", "controller_s"):
        assert (np.diff(outcome.columns[name]) >= -1e-6).all(), name


@pytest.mark.parametrize("cache_tokens", [0, 1200])
def test_tokens_are_delivered_or_lost_or_in_progress(cache_tokens, monkeypatch):
    delivered, cut = [], []

    def put(self, replica, group):
        delivered.append(0 if group.lost else group.total)
        whole_put(self, replica, group)

    def lose(self, replica):
        cut.append(replica.unfinished()())  # `generated` has no tokens of these
        whole_lose(self, replica)

    whole_put, whole_lose = Simulation._put, Simulation._lose
    monkeypatch.setattr(Simulation, "_put", put)
    monkeypatch.setattr(Simulation, "_lose", lose)
    scenario = Scenario(
        **dict(num_prompts=4, group_size=16, max_staleness=8, replicas=3, slots=40),
        **dict(num_steps=100, tokens_per_call=10, cache_tokens=cache_tokens),
        failures=Failures(replica_mtbf_s=200.0, replica_start_s=50.0),
        prompt_tokens=20,
    )
    lengths = SimulatedLengths(mean_tokens=100.0, tail=3.0, limit=500)
    rates = Rates(decode_s=((1, 1.0),), verify_s=3.0, exchange_s=0.1)
    simulation = Simulation(scenario, rates, lengths)
    lost = simulation.run().counts["lost_tokens"]
    replicas = simulation.replicas
    sampled = sum(each.generated + each.unfinished()() for each in replicas) + sum(cut)
    in_progress = sum(each.sampled_tokens() for each in replicas)
    assert lost > 0
    assert sampled == sum(delivered) + lost + in_progress


def test_what_ends_before_new_params_are_placed_is_reported_after_the_pause():
    """Versions arrive in the last call before a completion ends."""

    class Timed(Simulation):
        def _boundary(self, replica, token):
            super()._boundary(replica, token)
            assert replica.time_s <= self.now_s + 1e-9

    scenario = Scenario(
        **dict(num_prompts=1, group_size=8, max_staleness=24, slots=7),
        **dict(num_steps=100, tokens_per_call=64, prompt_tokens=20),
    )
    rates = Rates(decode_s=((1, 0.1), (64, 0.2)), place_s=0.5, verify_s=0.5)
    Timed(scenario, rates, SimulatedLengths(mean_tokens=500.0, limit=1024)).run()


def test_a_controller_without_work_is_idle_while_messages_are_under_way():
    scenario = Scenario(
        **dict(num_prompts=4, group_size=2, max_staleness=2, replicas=2, slots=4),
        **dict(num_steps=30, tokens_per_call=10, prompt_tokens=0),
    )
    lengths = SimulatedLengths(mean_tokens=100.0, limit=500)
    rates = Rates(decode_s=((1, 1.0),), exchange_s=5.0)
    columns = Simulation(scenario, rates, lengths).run().columns
    assert not columns["controller_s"].any()


def test_losses_cost_time_and_no_groups():
    """A loss an hour per replica; each is away for a tenth of an hour."""
    scenario = Scenario(
        num_prompts=4,
        group_size=2,
        max_staleness=8,
        replicas=4,
        slots=4,
        num_steps=2000,
        tokens_per_call=10,
        prompt_tokens=0,
    )
    rates = Rates(decode_s=((1, 1.0),))
    lengths = SimulatedLengths(mean_tokens=100.0, tail=2.0, limit=500)
    failures = Failures(replica_mtbf_s=3600.0, notice_s=0.0, replica_start_s=400.0)
    whole = Simulation(scenario, rates, lengths).run()
    broken = dataclasses.replace(scenario, failures=failures)
    broken = Simulation(broken, rates, lengths).run()
    assert broken.counts["lost_replicas"] > 10
    assert broken.counts["reissued_groups"] > 0
    down = broken.figures()["generators_down"]
    assert down == pytest.approx(400 / 4000, rel=0.35)
    # Between any two steps replicas work and are away for no longer than that.
    columns = broken.columns
    spent = np.diff(columns["busy_s"] + columns["eval_s"] + columns["down_s"])
    assert (spent <= 4 * np.diff(columns["time_s"]) + 1e-6).all()
    slower = broken.figures()["step_s"] / whole.figures()["step_s"]
    assert slower == pytest.approx(1 / (1 - down), rel=0.06)


@pytest.mark.parametrize("lost", ["replica", "learner"])
def test_machines_that_are_lost_before_a_step_is_made_end_the_simulation(lost):
    """A completion takes ten calls of a second, and a start five seconds."""
    failures = Failures(
        **{f"{lost}_mtbf_s": 0.1}, replica_start_s=5.0, learner_start_s=5.0
    )
    scenario = Scenario(
        **dict(num_prompts=4, group_size=2, max_staleness=8, replicas=2, slots=4),
        **dict(tokens_per_call=10, prompt_tokens=0, failures=failures),
    )
    lengths = SimulatedLengths(mean_tokens=100.0, tail=1.0, limit=500)
    rates = Rates(decode_s=((1, 1.0),), train_s=1.0)
    with pytest.raises(ValueError, match=r"makes no step: .*raise --replica_mtbf_h"):
        Simulation(scenario, rates, lengths).run()
