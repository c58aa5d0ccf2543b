"""`World`: what all points of a sweep share, and the simulation of one of them."""

import dataclasses
from collections.abc import Callable, Iterable
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
        self._said = said
        self._pod: _Pod | None = None
        self._rates_of: Callable[[Scenario], Rates]
        rates = None
        if said["rates"] is not None:
            rates = measured_rates = read_rates(said["rates"])
            self._rates_of = lambda _: measured_rates
            if not config.sampler.slots:
                raise ValueError(
                    "sampler.slots = 0 needs a --topology; with --rates set it to the "
                    "slots of a replica to which the rates apply"
                )
        else:
            pod = self._pod = _Pod.of(config, parse_topology(said["topology"]))
            config = pod.config
            self._rates_of = lambda scenario: closed_rates(
                config, pod.arch, pod.topology.chip, scenario, self._lengths
            )
        if config.generators.placement == "shared":
            raise ValueError(
                "generators.placement = 'shared' is not simulated: its learner and "
                "generators take turns on the same chips; set generators.placement = "
                "'apart', and use scalerl preflight for shared ones"
            )
        self._config = config
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
        self.basis = basis_of(said, rates, self._lengths)

    def simulate(self, fields: dict[str, int]) -> SimulationOutcome:
        """Return the outcome with these fields of the scenario changed.

        Raises:
            ValueError: the changed scenario is not valid.
        """
        scenario = self._scenario(fields)
        return Simulation(scenario, self._rates_of(scenario), self._lengths).run()

    def learner_takes_rest(self, fields: Iterable[str]) -> bool:
        """Return True if the learner has all devices that swept generators leave."""
        swept = {"replicas", "replica_devices"}
        return self._pod is not None and not swept.isdisjoint(fields)

    def _scenario(self, fields: dict[str, int]) -> Scenario:
        said = self._said
        failures = Failures(
            replica_mtbf_s=said["replica_mtbf_h"] * _HOUR_S,
            learner_mtbf_s=said["learner_mtbf_h"] * _HOUR_S,
            replica_start_s=said["replica_start_s"],
            learner_start_s=said["learner_start_s"],
        )
        scenario = scenario_of(
            self._config,
            num_steps=said["steps"],
            prompt_tokens=round(said["prompt_tokens"]),
            zero_variance_share=said["zero_variance"],
            failures=failures,
            learner_devices=said["learner_chips"] or 1,
        )
        scenario = dataclasses.replace(scenario, **fields)
        least = scenario.epochs - 1 + (scenario.mode == "batched")
        if scenario.max_staleness < least or scenario.max_waiting < 0:
            raise ValueError(
                f"queue.max_staleness = {scenario.max_staleness} must be {least} or "
                f"more, and queue.max_waiting 0 or more"
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
        if self._pod is not None:
            rest = self.learner_takes_rest(fields)
            scenario = self._pod.placed(scenario, learner_takes_rest=rest)
        return scenario


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pod:
    """A topology, and a config that is fitted to it."""

    topology: Topology
    arch: Architecture
    config: config_lib.Config
    own_process: bool  # whether replicas are other processes than the learner

    @classmethod
    def of(cls, config: config_lib.Config, topology: Topology) -> "_Pod":
        """Fit a config to a topology.

        Raises:
            ValueError: nothing fits.
        """
        arch = make_architecture(config)
        fitted = fit_topology(config, arch, topology)
        own_process = isinstance(fitted.room, Slices)
        own_process = own_process or fitted.config.generators.versions == 1
        return cls(
            topology=topology,
            arch=arch,
            config=fitted.config,
            own_process=own_process,
        )

    def placed(self, scenario: Scenario, *, learner_takes_rest: bool) -> Scenario:
        """Return the scenario with a role, or none, for each device.

        The learner has the devices of its mesh, or all that generators leave.

        Raises:
            ValueError: a role does not fit.
        """
        self._check_replica(scenario)
        topology, mesh = self.topology, self.config.mesh
        left = topology.num_devices - scenario.replicas * scenario.replica_devices
        learner = left if learner_takes_rest else mesh.num_devices
        if left < max(learner, 1):
            some = "no device" if left < 1 else f"{left} devices"
            raise ValueError(
                f"generators.count = {scenario.replicas} times generators.devices = "
                f"{scenario.replica_devices} leave {some} of {topology.name} "
                f"({topology.num_devices}) to the learner, whose mesh has "
                f"{mesh.num_devices}"
            )
        return dataclasses.replace(
            scenario,
            learner_devices=learner,
            unused_devices=left - learner,
            devices_per_chip=topology.chip.devices_per_chip,
        )

    def _check_replica(self, scenario: Scenario) -> None:
        """Raise ValueError if a replica cannot be divided or does not fit."""
        each, slots = scenario.replica_devices, scenario.slots
        check_replica(self.arch, each)
        config = dataclasses.replace(
            self.config,
            sampler=dataclasses.replace(self.config.sampler, slots=slots),
            generators=dataclasses.replace(self.config.generators, devices=each),
        )
        usable = memory.usable_bytes(self.topology.chip)
        own = self.own_process
        needed = memory.sampler_bytes(config, self.arch, own_process=own)
        if needed > usable:
            raise ValueError(
                f"a replica of generators.devices = {each} with sampler.slots = "
                f"{slots} and a cache of {memory.cache_tokens(config):,} tokens needs "
                f"{needed / 2**30:.1f} of {usable / 2**30:.1f} GiB of a device; lower "
                f"sampler.cache_tokens, or give it more devices"
            )
