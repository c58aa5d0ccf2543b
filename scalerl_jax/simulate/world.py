"""`World`: what all points of a sweep share, and the simulation of one of them.

A point is a config with other values of some settings: what they leave open is chosen
for it, so that the command without the sweep, given these values, simulates the same.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scalerl_jax import config as config_lib
from scalerl_jax.model.architecture import Architecture, check_replica
from scalerl_jax.planning import memory
from scalerl_jax.planning.chooser import Slices
from scalerl_jax.planning.lengths import read_lengths as read_run
from scalerl_jax.preflight.fitting import fit_topology
from scalerl_jax.preflight.topologies import Topology, parse_topology
from scalerl_jax.simulate.basis import basis_of
from scalerl_jax.simulate.lengths import SimulatedLengths, law_of, read_lengths
from scalerl_jax.simulate.outcome import SimulationOutcome
from scalerl_jax.simulate.rates import Rates, closed_rates, read_rates
from scalerl_jax.simulate.run import Simulation
from scalerl_jax.simulate.scenario import Failures, Scenario, scenario_of
from scalerl_jax.wiring.learning import make_architecture

_MOST_WORK = 5_000_000  # rollouts of a simulation, which takes a minute
_HOUR_S = 3600.0


class World:
    """Config, machine and lengths, which all points of a sweep share."""

    def __init__(self, config: config_lib.Config, said: dict[str, Any]) -> None:
        """Read the files that the flags name."""
        self._said, self._config = said, config
        self._pod = self._rates = None
        if said["rates"] is not None:
            self._rates = read_rates(said["rates"])
        else:
            topology = parse_topology(said["topology"])
            self._pod = _Pod(topology, make_architecture(config))
        limit, measured = config.sampler.max_completion_tokens, ()
        mean, tail = said["mean_tokens"] or limit / 2, said["tail"]
        if said["lengths"] and Path(said["lengths"]).is_dir():
            mean, tail = law_of(read_run(said["lengths"], config).completions)
        elif said["lengths"]:
            measured = read_lengths(said["lengths"])
        self._lengths = SimulatedLengths(
            mean_tokens=mean,
            tail=tail,
            alike=said["alike"],
            limit=limit,
            drift=said["drift"],
            num_steps=said["steps"],
            measured=measured,
            seed=config.seed,
        )
        self.basis = basis_of(said, self._rates, self._lengths)

    def simulate(self, settings: Mapping[str, int]) -> SimulationOutcome:
        """Return the outcome with other values of these settings, by dotted name.

        Raises:
            ValueError: a run with these settings cannot be simulated.
        """
        config = self._config
        if self.learner_takes_rest(settings):
            settings = {**settings, "mesh.data": 0, "mesh.fsdp": 0}
        for name, value in settings.items():
            section, field = name.split(".")
            changed = dataclasses.replace(getattr(config, section), **{field: value})
            config = dataclasses.replace(config, **{section: changed})
        if settings:
            config_lib.validate(config)
        if self._pod is not None:
            config = self._pod.fitted(config)
        elif not config.sampler.slots:
            raise ValueError(
                "sampler.slots = 0 needs a --topology; with --rates set it to the "
                "slots of a replica to which the rates apply"
            )
        if config.generators.placement == "shared":
            raise ValueError(
                "generators.placement = 'shared' is not simulated: its learner and "
                "generators take turns on the same chips; set generators.placement = "
                "'apart', and use scalerl preflight for shared ones"
            )
        scenario, rates = self._scenario(config), self._rates
        if self._pod is not None:
            scenario = self._pod.placed(config, scenario)
        if rates is None:
            assert self._pod is not None, "either has seconds"
            rates = self._pod.rates(config, scenario, self._lengths)
        return Simulation(scenario, rates, self._lengths).run()

    def learner_takes_rest(self, settings: Iterable[str]) -> bool:
        """Return True if the learner's mesh is chosen for swept generators."""
        swept = {"generators.count", "generators.devices"}
        return self._pod is not None and not swept.isdisjoint(settings)

    def _scenario(self, config: config_lib.Config) -> Scenario:
        said = self._said
        failures = Failures(
            replica_mtbf_s=said["replica_mtbf_h"] * _HOUR_S,
            learner_mtbf_s=said["learner_mtbf_h"] * _HOUR_S,
            replica_start_s=said["replica_start_s"],
            learner_start_s=said["learner_start_s"],
        )
        scenario = scenario_of(
            config,
            num_steps=said["steps"],
            prompt_tokens=round(said["prompt_tokens"]),
            zero_variance_share=said["zero_variance"],
            failures=failures,
            learner_devices=said["learner_chips"] or 1,
        )
        rollouts = scenario.num_steps * scenario.num_prompts * scenario.group_size
        if rollouts > _MOST_WORK:
            raise ValueError(
                f"{rollouts:,} rollouts in --steps={scenario.num_steps} are more than "
                f"{_MOST_WORK:,}; lower --steps"
            )
        if scenario.num_steps < 2 * scenario.steps_per_window:
            raise ValueError(
                f"--steps={scenario.num_steps} must be two windows of "
                f"{scenario.steps_per_window} steps (queue.mode, queue.max_staleness, "
                f"batch.epochs) or more"
            )
        return scenario


@dataclasses.dataclass(frozen=True)
class _Pod:
    """A topology, and the policy that runs on it."""

    topology: Topology
    arch: Architecture

    def fitted(self, config: config_lib.Config) -> config_lib.Config:
        """Return the config with what it leaves open chosen for the topology.

        Raises:
            ValueError: nothing fits, or no run has this layout.
        """
        self._check_generators(config)
        fitted = fit_topology(config, self.arch, self.topology)
        if fitted.why_not and isinstance(fitted.room, Slices):
            raise ValueError(fitted.why_not)
        return fitted.config

    def placed(self, config: config_lib.Config, scenario: Scenario) -> Scenario:
        """Return the scenario with a role, or none, for each device."""
        topology, learner = self.topology, config.mesh.num_devices
        left = topology.num_devices - scenario.replicas * scenario.replica_devices
        assert left >= learner, "a fitted config has room for both roles"
        return dataclasses.replace(
            scenario,
            learner_devices=learner,
            unused_devices=left - learner,
            devices_per_chip=topology.chip.devices_per_chip,
        )

    def rates(
        self,
        config: config_lib.Config,
        scenario: Scenario,
        lengths: SimulatedLengths,
    ) -> Rates:
        """Return the closed forms of a placed scenario."""
        return closed_rates(config, self.arch, self.topology.chip, scenario, lengths)

    def _check_generators(self, config: config_lib.Config) -> None:
        """Raise ValueError if replicas of given sizes cannot fit in any split."""
        generators, sampler = config.generators, config.sampler
        count, each = generators.count or 1, generators.devices
        if not each:
            return
        check_replica(self.arch, each)
        topology = self.topology
        if generators.placement != "shared" and count * each >= topology.num_devices:
            raise ValueError(
                f"generators.count = {count} times generators.devices = {each} leave "
                f"no device of {topology.name} ({topology.num_devices}) to the learner"
            )
        if not sampler.slots:
            return
        generators = dataclasses.replace(generators, versions=generators.versions or 1)
        least = dataclasses.replace(config, generators=generators)
        usable = memory.usable_bytes(topology.chip)
        needed = memory.sampler_bytes(least, self.arch)
        if needed > usable:
            raise ValueError(
                f"a replica of generators.devices = {each} with sampler.slots = "
                f"{sampler.slots} and a cache of {memory.cache_tokens(config):,} "
                f"tokens needs {needed / 2**30:.1f} of {usable / 2**30:.1f} GiB of a "
                f"device; lower sampler.cache_tokens, or give it more devices"
            )
