"""The simulator against arithmetic that anyone can do by hand."""

import numpy as np
import pytest

from scalerl_jax import config as config_lib
from scalerl_jax.machines.chips import CHIPS
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.planning.forecast import optimizer_step_seconds
from scalerl_jax.planning.rates import EXPECTED, decode_seconds
from scalerl_jax.simulate.lengths import Drawn, SimulatedLengths
from scalerl_jax.simulate.rates import Rates, closed_rates
from scalerl_jax.simulate.replica import LAG_CALLS
from scalerl_jax.simulate.run import Simulation
from scalerl_jax.simulate.scenario import Scenario

CALL_S, PER_CALL = 0.5, 10
RATES = Rates(decode_s=((1, CALL_S),))  # whatever the number of sequences
ALL_ALIKE = SimulatedLengths(mean_tokens=100.0, tail=1.0, limit=1000)


def simulate(rates, lengths, **settings):
    said = dict(num_prompts=4, group_size=2, slots=8, tokens_per_call=PER_CALL)
    said |= dict(max_staleness=0, num_steps=40, prompt_tokens=0) | settings
    return Simulation(Scenario(**said), rates, lengths).run()


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("slots", [8, 2])
def test_in_turn_a_step_takes_the_sum_of_its_parts(replicas, slots):
    """k = 0: rounds of calls of all samples, then verdicts, train step, publish."""
    rates = Rates(
        decode_s=((1, CALL_S),),
        train_s=3.0,
        train_token_s=0.01,
        publish_s=0.25,
        transfer_s=0.75,
        verify_s=2.0,
        assemble_s=0.125,
    )
    outcome = simulate(rates, ALL_ALIKE, replicas=replicas, slots=slots)
    rounds = -(-8 // (replicas * slots))
    # The first call of a replica that stood still is not waited for.
    sample_s = (rounds * (100 // PER_CALL + LAG_CALLS) - 1) * CALL_S
    step_s = sample_s + 2.0 + 0.125 + 3.0 + 8 * 100 * 0.01 + 0.25 + 0.75
    figures = outcome.figures()
    assert figures["step_s"] == pytest.approx(step_s)
    assert figures["learner_idle"] == pytest.approx((sample_s + 2.75) / step_s)
    assert figures["generators_idle"] == pytest.approx(1 - sample_s / step_s)
    assert figures["staleness_max"] == 0


@pytest.mark.parametrize("num_steps", [20, 23, 25])
def test_figures_of_batched_mode_are_those_of_whole_windows(num_steps):
    """k = 4: 32 completions in 8 slots, four rounds of calls, then four train steps."""
    rates = Rates(decode_s=((1, CALL_S),), train_s=3.0)
    figures = simulate(
        rates, ALL_ALIKE, mode="batched", max_staleness=4, num_steps=num_steps
    ).figures()
    sample_s = (4 * (100 // PER_CALL + LAG_CALLS) - 1) * CALL_S
    assert figures["step_s"] == pytest.approx(sample_s / 4 + 3.0)
    assert figures["learner_idle"] == pytest.approx(sample_s / (sample_s + 4 * 3.0))
    assert figures["staleness_queued"] == (0 + 1 + 2 + 3) / 4


def test_a_learner_that_is_slower_never_waits():
    """Saturation: a step takes what the learner takes.

    N = 4 groups, W = 2, and R = 8 in the slots: `Pacing` has the bound.  A quarter of W
    is left when a window is taken, beside the step in which a group finishes.
    """
    rates = Rates(decode_s=((1, CALL_S),), train_s=30.0, publish_s=2.0)
    figures = simulate(rates, ALL_ALIKE, max_staleness=8, slots=16).figures()
    assert figures["step_s"] == pytest.approx(32.0)
    assert figures["learner_idle"] == pytest.approx(0.0)
    assert 1.0 < figures["staleness_queued"] < 2.0


def test_a_sampler_that_is_slower_is_always_full():
    """Saturation: slots / seconds of a call, for each completion and its lag."""
    lengths = SimulatedLengths(mean_tokens=400.0, tail=3.0, limit=2000)
    figures = simulate(
        RATES, lengths, max_staleness=8, max_waiting=8, slots=12, num_steps=600
    ).figures()
    drawn = Drawn(lengths, group_size=2)
    tokens = np.array([drawn.tokens(ticket) for ticket in range(2400)])
    calls = np.ceil(tokens / PER_CALL).mean() + LAG_CALLS
    assert figures["slots_in_use"] == pytest.approx(1.0, abs=0.002)
    assert figures["generators_idle"] == pytest.approx(0.0, abs=1e-9)
    assert figures["step_s"] == pytest.approx(8 * calls * CALL_S / 12, rel=0.02)
    assert figures["tokens_per_s"] == pytest.approx(
        tokens.mean() * 12 / (calls * CALL_S), rel=0.02
    )


def test_a_controller_that_is_slower_takes_groups_without_a_pause():
    """Saturation: four groups of a step, one after the other, whoever sends them."""
    rates = Rates(decode_s=((1, CALL_S),), group_s=20.0)
    figures = simulate(
        rates, ALL_ALIKE, max_staleness=8, max_waiting=8, replicas=4, num_steps=200
    ).figures()
    assert figures["step_s"] == pytest.approx(4 * 20.0, rel=0.01)
    assert figures["controller_busy"] == pytest.approx(1.0, rel=0.01)
    # Where the learner is slower, a step does not wait for it.
    rates = Rates(decode_s=((1, CALL_S),), group_s=0.01, train_s=30.0)
    settings = dict(max_staleness=8, replicas=4, num_steps=400)
    figures = simulate(rates, ALL_ALIKE, **settings).figures()
    assert figures["step_s"] == pytest.approx(30.0, rel=0.01)
    assert figures["controller_busy"] == pytest.approx(4 * 0.01 / 30.0, rel=0.1)


def test_a_sampler_stands_still_for_every_version_that_takes_the_place_of_another():
    """Saturation: of every step, `place_s` is no sampling."""
    lengths = SimulatedLengths(mean_tokens=400.0, tail=1.0, limit=2000)
    settings = dict(max_staleness=8, max_waiting=8, slots=16, num_steps=300)
    plain, standing = (
        simulate(
            Rates(decode_s=((1, CALL_S),), place_s=place_s), lengths, **settings
        ).figures()["step_s"]
        for place_s in (0.0, 7.0)
    )
    assert standing - plain == pytest.approx(7.0, rel=0.02)


@pytest.mark.parametrize("beside", [False, True])
def test_an_evaluation_beside_the_run_costs_a_slower_learner_nothing(beside):
    """8 samples of 100 tokens: 11 calls, every fifth step."""
    rates = Rates(decode_s=((1, CALL_S),), train_s=30.0)
    settings = dict(max_staleness=8, slots=16, eval_every=5, eval_completions=8)
    figures = simulate(rates, ALL_ALIKE, eval_beside=beside, **settings).figures(
        first_step=5
    )
    evaluation_s = (100 // PER_CALL + LAG_CALLS) * CALL_S
    # The last one, of 35 steps, is waited for in any case.
    waited = evaluation_s * (1 if beside else 7) / 35
    assert figures["step_s"] == pytest.approx(30.0 + waited, rel=0.01)


def test_littles_law_holds_for_slots_and_for_groups():
    """Mean number inside = rate of arrival x mean stay."""
    rates = Rates(decode_s=((1, CALL_S),), train_s=60.0, verify_s=20.0)
    lengths = SimulatedLengths(mean_tokens=400.0, tail=3.0, limit=2000)
    outcome = simulate(rates, lengths, max_staleness=4, slots=12, num_steps=600)
    figures = outcome.figures()
    drawn = Drawn(lengths, group_size=2)
    tokens = np.array([drawn.tokens(ticket) for ticket in range(2400)])
    stay_s = (np.ceil(tokens / PER_CALL).mean() + LAG_CALLS) * CALL_S
    busy = 1 - figures["generators_idle"]
    inside = figures["slots_in_use"] * 12 * busy
    # A sequence that begins in an empty replica has one call of its lag less.
    rate = 8 / figures["step_s"]
    assert rate * (stay_s - CALL_S) <= inside <= rate * stay_s * 1.001
    # Verdicts: 20 s each, a group at a time leaves; seen after steps alone.
    assert figures["groups_sampled"] <= 20.0 * 4 / figures["step_s"] + 2


@pytest.mark.parametrize("tail, alike", [(1.5, 0.0), (4.0, 0.5), (10.0, 1.0)])
def test_lengths_have_the_mean_and_tail_that_were_asked_for(tail, alike):
    lengths = SimulatedLengths(mean_tokens=500.0, tail=tail, alike=alike, limit=50_000)
    drawn = Drawn(lengths, group_size=8)
    tokens = np.array([drawn.tokens(ticket) for ticket in range(4000)])
    assert tokens.mean() == pytest.approx(500.0, rel=0.06)
    found = np.quantile(tokens, 0.99) / np.quantile(tokens, 0.5)
    assert found == pytest.approx(tail, rel=0.12)
    logs = np.log(tokens)
    between = logs.mean(axis=1).var() - logs.var(axis=1, ddof=1).mean() / 8
    assert between / logs.var() == pytest.approx(alike, abs=0.05)


def test_a_cut_keeps_the_mean():
    drawn = Drawn(
        SimulatedLengths(mean_tokens=500.0, tail=8.0, limit=1500), group_size=8
    )
    tokens = np.array([drawn.tokens(ticket) for ticket in range(4000)])
    assert tokens.max() == 1500
    assert tokens.mean() == pytest.approx(500.0, rel=0.03)


def test_measured_lengths_end_at_the_limit_too():
    lengths = SimulatedLengths(measured=((3000, 200),), limit=1500)
    assert sorted(Drawn(lengths, group_size=2).tokens(0)) == [200, 1500]
    with pytest.raises(ValueError, match="drift = -1 must be from 0.01 to 100"):
        SimulatedLengths(measured=((3000, 200),), limit=1500, drift=-1.0)


def test_lengths_drift_and_do_not_depend_on_the_order():
    lengths = SimulatedLengths(
        mean_tokens=500.0, limit=50_000, drift=2.0, num_steps=100
    )
    drawn, again = (Drawn(lengths, group_size=4) for _ in range(2))
    early = [sum(drawn.tokens(ticket, 0)) for ticket in range(500)]
    middle = [sum(drawn.tokens(ticket, 50)) for ticket in range(500)]
    late = [sum(again.tokens(ticket, 100)) for ticket in reversed(range(500))]
    assert sum(late) == pytest.approx(2 * sum(early), rel=0.01)
    assert sum(middle) == pytest.approx(2**0.5 * sum(early), rel=0.01)
    assert np.argsort(early).tolist() == pytest.approx(np.argsort(late[::-1]).tolist())


def test_a_full_cache_holds_samples_back():
    """Room for the contexts of 4 at their end: a 16-slot sampler as fast as 4 slots."""
    lengths = SimulatedLengths(mean_tokens=200.0, tail=1.0, limit=1000)
    said = dict(max_staleness=8, max_waiting=8, num_steps=100, slots=16)
    held = simulate(RATES, lengths, cache_tokens=4 * 220, **said)
    free = simulate(RATES, lengths, **said)
    assert held.counts["suspended"] > 0 == free.counts["suspended"]
    ratio = held.figures()["step_s"] / free.figures()["step_s"]
    # Young samples are short: up to twice as many as at their end.
    assert 2.0 < ratio < 4.0


@pytest.mark.parametrize("name", ["llama3.1-8b", "scout", "gemma3-1b"])
def test_a_call_takes_its_seconds_at_the_mean_context(name):
    """Scout has chunks of 8,192, Gemma windows of 512: seconds are no line there."""
    settings = config_lib.defaults()
    settings.model.architecture, settings.model.sampler_dtype = name, "bfloat16"
    settings.model.remat = "full"
    scenario = Scenario(
        **dict(num_prompts=48, group_size=16, max_staleness=8, slots=128),
        **dict(
            tokens_per_call=1, replica_devices=4, learner_devices=8, prompt_tokens=0
        ),
    )
    lengths = SimulatedLengths(mean_tokens=4000.0, tail=1.0, limit=14_336)
    arch, chip = ARCHITECTURES[name], CHIPS["v5p"]
    found = closed_rates(config_lib.resolve(settings), arch, chip, scenario, lengths)
    call_s = found.call_seconds(128)[128] + found.decode_context_s * 128 * 2000
    exact_s = decode_seconds(arch, chip, slots=128, mean_context=2000, chips=4)
    assert call_s == pytest.approx(exact_s)


@pytest.mark.parametrize(
    "mesh, critic, learner_devices, shards",
    [
        pytest.param(dict(data=2, fsdp=8), False, 16, 8, id="a replica on each slice"),
        pytest.param(dict(data=4, fsdp=4), False, 16, 4, id="two replicas on each"),
        pytest.param(
            dict(data=2, fsdp=4, context=2), False, 16, 4, id="tokens of a row cut"
        ),
        pytest.param(dict(data=2, fsdp=8), False, 32, 16, id="other chips, by a sweep"),
        pytest.param(dict(data=2, fsdp=8), True, 16, 4, id="a critic: twice as many"),
    ],
)
def test_gradients_go_between_slices_in_the_shards_of_the_state(
    mesh, critic, learner_devices, shards
):
    scenario = Scenario(
        **dict(num_prompts=48, group_size=16, max_staleness=8, slots=128),
        **dict(replica_devices=4, learner_devices=learner_devices),
    )
    lengths = SimulatedLengths(mean_tokens=4000.0, tail=1.0, limit=14_336)
    arch, chip, found = ARCHITECTURES["llama3.1-8b"], CHIPS["v5p"], []
    for slices in (1, 2):
        settings = config_lib.defaults()
        settings.model.architecture, settings.model.remat = "llama3.1-8b", "full"
        settings.batch.rows_per_microbatch = 16
        settings.mesh.update(mesh | {"slices": slices})
        if critic:
            settings.objective.advantage = "critic"
            settings.objective.zero_variance_filter = False
        rates = closed_rates(
            config_lib.resolve(settings), arch, chip, scenario, lengths
        )
        found.append(rates.train_s)
    # Each of two slices sends half of what it sums, and receives as much.
    seconds = 4 * arch.num_params / shards / chip.host_bandwidth
    assert found[1] - found[0] == pytest.approx(seconds)


def test_a_learner_with_a_tensor_axis_reads_fewer_copies_of_its_weights():
    """Rows are short: a step takes as long as its weights take to be read."""
    arch, chip = ARCHITECTURES["llama3.1-8b"], CHIPS["v5p"]
    scenario = Scenario(
        **dict(num_prompts=48, group_size=16, max_staleness=8, slots=128),
        **dict(replica_devices=4, learner_devices=16),
    )
    lengths, found = SimulatedLengths(mean_tokens=8.0, tail=1.0, limit=16), []
    for tensor in (1, 4):
        settings = config_lib.defaults()
        settings.model.architecture, settings.model.remat = "llama3.1-8b", "full"
        settings.sampler.update(max_prompt_tokens=16, max_completion_tokens=16)
        settings.interruption.enabled = False
        settings.batch.update(row_tokens=32, rows_per_microbatch=16)
        settings.mesh.update(fsdp=16 // tensor, tensor=tensor)
        config = config_lib.resolve(settings)
        rates = closed_rates(config, arch, chip, scenario, lengths)
        found.append(rates.train_s + 16 * 32 * rates.train_token_s)
        step_s = optimizer_step_seconds(
            *(config, arch, chip),
            **dict(microbatches=1, rows=16, chips=16, tensor=tensor, reached=EXPECTED),
        )
        assert found[-1] == pytest.approx(step_s, rel=0.01)
    assert found[1] < 0.7 * found[0]
