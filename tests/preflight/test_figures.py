"""Figures of a report: none that is above 0 is printed as 0."""

import dataclasses

import pytest

from scalerl_jax import config as config_lib
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.planning.chooser import opened
from scalerl_jax.preflight.figures import amount, duration
from scalerl_jax.preflight.fitting import fit_topology
from scalerl_jax.preflight.topologies import parse_topology
from scalerl_jax.preflight.whole_step import make_whole_step, step_lines


@pytest.mark.parametrize(
    "value, expected",
    [(0, "0"), (0.00123, "0.00123"), (1.26, "1.26"), (71.04, "71"), (12345, "12,345")],
)
def test_an_amount_has_three_digits(value, expected):
    assert amount(value) == expected


@pytest.mark.parametrize(
    "seconds, expected",
    [
        (0.0, "0 us"),
        (8.5e-6, "8.5 us"),
        (0.0123, "12.3 ms"),
        (1.0, "1 s"),
        (3723.4, "3,723 s"),
    ],
)
def test_a_duration_has_three_digits_and_a_unit(seconds, expected):
    assert duration(seconds) == expected


def test_a_split_that_takes_more_chip_hours_than_the_config_is_not_called_the_best():
    """Not all settings of a config are tried: not fewer replicas than fit."""
    config = config_lib.defaults()
    config.model.architecture = "llama3.1-8b"
    config.model.compute_dtype = config.model.sampler_dtype = "bfloat16"
    arch, topology = ARCHITECTURES["llama3.1-8b"], parse_topology("v5p:2x2x2")
    fitted = fit_topology(opened(config_lib.resolve(config)), arch, topology)
    step = make_whole_step(fitted, arch, topology)
    assert step.best is not None
    longer = 2 * step.expected.step_seconds
    slower = dataclasses.replace(step.best.forecast, step_seconds=longer)
    sampler = dataclasses.replace(step.best.config.sampler, slots=1)
    other = dataclasses.replace(step.best.config, sampler=sampler)
    best = dataclasses.replace(step.best, forecast=slower, config=other)
    line = step_lines(dataclasses.replace(step, best=best), fitted, price=None)[-1]
    assert line == f"none of the {best.tried} splits tried takes fewer chip-hours"
