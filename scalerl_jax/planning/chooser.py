"""Choose the split of devices into learner and generators, and other open settings.

Open settings are mesh.data = 0, mesh.fsdp = 0, mesh.tensor = 0, generators.count = 0
and with it generators.devices = 0, generators.versions = 0, sampler.slots = 0 with its
cache, model.remat = "auto", model.head_chunk_vocab = 0, eval.concurrent = "auto" and
batch.rows_per_microbatch = 0.
The time of a step, with its part of the evaluations, is forecast for every possible
split whose programs fit, and the shortest one wins.  Ties go to more devices in use,
then to generators with more time to spare, then to fewer slots, since their tokens are
less stale.  Runs and the preflight both use this module.

The file is above 400 lines: what is left open is listed and filled in side by side.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.config.sections import HEAD_CHUNK_VOCAB, LOSSES
from scalerl_jax.machines.chips import (
    MEMORY_FRACTION,
    Chip,
    chip_of,
    memory_fraction,
)
from scalerl_jax.machines.partition import box_sizes, boxes, split_slice
from scalerl_jax.machines.slices import Slice
from scalerl_jax.model.architecture import Architecture, is_divisible
from scalerl_jax.planning import memory
from scalerl_jax.planning.forecast import (
    StepForecast,
    forecast,
    optimizer_step_seconds,
    slots_that_fit,
)
from scalerl_jax.planning.lengths import Lengths, assumed_lengths
from scalerl_jax.planning.rates import EXPECTED

# The fastest first; "none" has as many FLOPs as "dots" and keeps more activations.
_REMAT = ("dots", "attention", "full")
_SLOTS = (*range(1, 16), *range(16, 64, 4), *range(64, 128, 8), *range(128, 513, 16))
# Settings that a choice may fill in.
_CHOSEN = (
    *("mesh.data", "mesh.fsdp", "mesh.tensor", "batch.rows_per_microbatch"),
    *("generators.count", "generators.devices", "generators.placement"),
    *("generators.processes", "generators.versions"),
    *("sampler.slots", "sampler.cache_tokens", "eval.concurrent"),
    *("model.remat", "model.head_chunk_vocab"),
)
# Settings of one role's devices.
_OF_LEARNER = (
    *("mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.context", "mesh.expert"),
    *("mesh.slices", "batch.rows_per_microbatch"),
)
_OF_REPLICAS = ("generators.count", "generators.devices", "generators.processes")
_LEFT_OPEN = "mesh.*, generators.*, sampler.slots and sampler.cache_tokens"
_MOST_SIZES = 9  # in an error


@dataclasses.dataclass(frozen=True)
class Slices:
    """Slices with a process on each host; a role gets boxes of chips."""

    slices: tuple[Slice, ...]
    of_learner: int = 1  # slices on each of which the learner has a box

    @property
    def num_devices(self) -> int:
        """Chips of all slices, used or not."""
        return sum(each.num_chips for each in self.slices)

    def sizes(self) -> tuple[int, ...]:
        """Return the possible numbers of chips of a replica, which has one box."""
        found = {size for each in self.slices for size in box_sizes(each)}
        return tuple(sorted(found))

    def learner_sizes(self) -> tuple[int, ...]:
        """Return the possible numbers of chips of the learner: a box on each slice."""
        return tuple(size * self.of_learner for size in self.sizes())

    def hosts(self, each: int) -> int:
        """Return the hosts (one process each) of a box; 0: it depends on the slice."""
        found = {
            max(each // one.chips_per_host, 1)
            for one in self.slices
            if each in box_sizes(one)
        }
        return found.pop() if len(found) == 1 else 0

    def replicas(self, learner: int, each: int) -> int:
        """Return the number of boxes of `each` chips that fit beside the learner."""
        if len(self.slices) == 1:
            try:
                split = split_slice(
                    self.slices[0], learner_chips=learner, generator_chips=each
                )
            except ValueError:
                return 0
            return len(split.replicas)
        part = learner // self.of_learner
        homes = [
            one
            for one in sorted(self.slices, key=lambda one: one.num_chips)
            if part in box_sizes(one) and self.slices.count(one) >= self.of_learner
        ]
        if not homes:
            return 0
        own = boxes(homes[0], part)[0]
        found, left = 0, self.of_learner
        for one in self.slices:
            taken = left > 0 and one == homes[0]
            left -= taken
            found += len(boxes(one, each, beside=own if taken else None))
        return found


@dataclasses.dataclass(frozen=True)
class OneProcess:
    """Devices of one process; a role may get any number of them."""

    num_devices: int

    def sizes(self) -> range:
        """Return all possible numbers of devices of a role."""
        return range(1, self.num_devices + 1)

    def learner_sizes(self) -> range:
        """Return all possible numbers of devices of the learner."""
        return self.sizes()

    def hosts(self, each: int) -> int:
        """Return 1 for a replica of any size."""
        return 1

    def replicas(self, learner: int, each: int) -> int:
        """Return the number of replicas that fit beside the learner."""
        return (self.num_devices - learner) // each


Room = Slices | OneProcess  # devices, and how roles can divide them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A config with its open settings filled in, and its forecast."""

    config: Config
    forecast: StepForecast
    tried: int  # splits that fit

    @property
    def settings(self) -> dict[str, Any]:
        """The chosen settings by dotted name."""
        return {name: read(self.config, name) for name in _CHOSEN}


def is_open(config: Config) -> bool:
    """Return True if a config leaves a setting open for `choose`.

    model.head_chunk_vocab = 0 alone does not: it is 16,384 then.
    """
    mesh = config.mesh
    return (
        0 in (mesh.data, mesh.tensor, config.generators.count, config.sampler.slots)
        or "auto" in (config.model.remat, config.eval.concurrent)
        or not config.generators.versions
    )


def balanced(config: Config, arch: Architecture, num_devices: int, kind: str) -> Config:
    """Return the config with open settings filled in for the devices of one process.

    `kind` is JAX's name of the devices; a config for unknown devices stays unchanged.
    """
    chip = chip_of(kind)
    if chip is None or not is_open(config):
        return config
    return choose(config, arch, chip, OneProcess(num_devices)).config


def opened(config: Config) -> Config:
    """Return the config with every setting open that `choose` fills in."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, remat="auto", head_chunk_vocab=0),
        eval=dataclasses.replace(config.eval, concurrent="auto"),
        mesh=dataclasses.replace(config.mesh, data=0, fsdp=0),
        batch=dataclasses.replace(config.batch, rows_per_microbatch=0),
        sampler=dataclasses.replace(config.sampler, slots=0, cache_tokens=0),
        generators=dataclasses.replace(
            config.generators,
            count=0,
            devices=0,
            processes=1,
            placement="auto",
            versions=0,
        ),
    )


def choose(
    config: Config,
    arch: Architecture,
    chip: Chip,
    room: Room,
    lengths: Lengths | None = None,
) -> Choice:
    """Return the split with the shortest step among those that fit.

    With eval.concurrent = "auto" it is that for evaluations in the loop, and they are
    beside the run if that makes the run with this split shorter.  A split that would
    need them beside the run leaves generators time to spare, of which closed forms see
    the use, and not the times in which the learner waits.

    Args:
        config: a config with open settings.
        arch: the policy's architecture.
        chip: the kind of device.
        room: the available devices.
        lengths: token counts of rollouts; None: assumed from the config's limits.

    Raises:
        ValueError: no split fits.
    """
    lengths = lengths or assumed_lengths(config)
    evaluations, auto = config.eval, config.eval.concurrent == "auto"
    if auto:
        evaluations = dataclasses.replace(evaluations, concurrent="off")
    best, tried = None, 0

    def consider(config: Config) -> None:
        nonlocal best, tried
        for candidate in candidates(config, arch, chip, room, lengths):
            found = forecast(candidate, arch, chip, lengths, devices=room.num_devices)
            tried += 1
            if best is None or _rank(candidate, found) < _rank(*best):
                best = candidate, found

    consider(dataclasses.replace(config, eval=evaluations))
    if auto and best is not None:
        consider(_beside(config, split=best[0]))
    if best is None:
        raise ValueError(
            f"no split of {room.num_devices} {chip.name} devices into learner and "
            f"generators fits model.architecture = {config.model.architecture!r}: "
            + _why_none(config, arch, chip, room)
        )
    return Choice(config=best[0], forecast=best[1], tried=tried)


def _why_none(config: Config, arch: Architecture, chip: Chip, room: Room) -> str:
    """Return why no split fits, and the way out: the numbers that are set, or memory.

    Numbers contradict the devices if no learner, or no replica beside one, has them.
    """
    sizes = room.learner_sizes()
    learners = {size: shape for size in sizes for shape in _shapes(config, arch, size)}
    if not learners:
        return (
            f"no learner has {_set(config, _OF_LEARNER)}; it has {_sizes(sizes)} "
            f"devices, mesh.data * mesh.fsdp * mesh.tensor * mesh.context, of which "
            f"mesh.fsdp divides the model's width, {arch.hidden_size:,}, and "
            f"mesh.data * mesh.fsdp the rows; change one, or leave it at 0"
        )
    splits = (
        split
        for size, learner in learners.items()
        for placement in _placements(config, room)
        for split in _with_replicas(learner, arch, room, size, placement)
    )
    if next(splits, None) is None:
        fit = [each for each in room.sizes() if is_divisible(arch, each)]
        numbers = _set(config, _OF_REPLICAS)
        with_numbers = f" with {numbers}" if numbers else ""
        return (
            f"no learner of {_sizes(learners)} devices leaves room for replicas"
            f"{with_numbers}; a replica has {_sizes(fit)} devices; change a number "
            f"that is set, or leave it at 0"
        )
    sampler = config.sampler
    least = sampler.tokens_of(1)
    if not sampler.slots and 0 < sampler.cache_tokens < least:
        return (
            f"sampler.cache_tokens = {sampler.cache_tokens:,} must hold the longest "
            f"sequence and a page, {least:,} tokens; raise it, or set it to 0"
        )
    said = _set(config, ("sampler.slots", "sampler.cache_tokens"))
    return (
        f"of {chip.hbm_bytes / 2**30:.0f} GiB a device can use "
        f"{memory.usable_bytes(chip) / 2**30:.1f}; take more devices, or "
        + (f"lower {said}" if said else f"set {_LEFT_OPEN} to numbers")
        + _for_a_gpu(config, chip)
    )


def _set(config: Config, names: Iterable[str]) -> str:
    """Return the settings among `names` above 1, with their values; 0 is open."""
    values = {name: read(config, name) for name in names}
    return ", ".join(f"{name} = {value}" for name, value in values.items() if value > 1)


def _sizes(counts: Iterable[int]) -> str:
    """Return numbers of devices as text: the first ones, and the last one."""
    texts = [str(each) for each in counts]
    if len(texts) > _MOST_SIZES:
        texts = [*texts[: _MOST_SIZES - 1], "...", texts[-1]]
    return ", ".join(texts)


def _for_a_gpu(config: Config, chip: Chip) -> str:
    """Return what leaves more of a GPU's memory to the rest, as an error's end."""
    if chip.platform != "gpu":
        return ""
    return (
        f"; on GPUs a larger {MEMORY_FRACTION} = {memory_fraction():g} gives programs "
        f"more memory, and batch.row_segments = {config.batch.row_segments} and "
        f"batch.row_tokens = {config.batch.row_tokens} set what attention reserves"
    )


def _beside(config: Config, *, split: Config) -> Config:
    """Return the config with evaluations beside the run, and the split of another."""
    names = ("count", "devices", "placement")
    taken: Any = {name: getattr(split.generators, name) for name in names}
    return dataclasses.replace(
        config,
        mesh=split.mesh,
        generators=dataclasses.replace(config.generators, **taken),
        eval=dataclasses.replace(config.eval, concurrent="on"),
    )


def _rank(config: Config, found: StepForecast) -> tuple[float, ...]:
    """Return the sort key of a split; the best has the smallest key.

    If the learner bounds the step, the generators with the most time to spare are best:
    lengths vary, and a completion is the younger, the sooner it is sampled.
    """
    return (
        found.step_seconds + found.evaluation_seconds_per_step(config),
        -found.devices_at_work,
        found.shared,
        config.eval.beside,
        found.generate_seconds,
        config.sampler.slots,
        config.generators.count,
    )


def candidates(
    config: Config, arch: Architecture, chip: Chip, room: Room, lengths: Lengths
) -> Iterator[Config]:
    """Yield the filled-in config of each split that fits the devices' memory."""
    placements = _placements(config, room)
    for size in room.learner_sizes():
        learner = _with_learner(config, arch, chip, size)
        if learner is None:
            continue
        for placement in placements:
            for split in _with_replicas(learner, arch, room, size, placement):
                for one in _with_versions(split, room):
                    # One version is for replicas in their own processes.
                    own = isinstance(room, Slices) or one.generators.versions == 1
                    yield from _that_fit(one, arch, chip, lengths, own_process=own)


def _placements(config: Config, room: Room) -> list[str]:
    """Return the possible generators.placement; processes share no devices."""
    if config.generators.placement != "auto":
        return [config.generators.placement]
    return ["apart", "shared"] if isinstance(room, OneProcess) else ["apart"]


def _with_learner(
    config: Config, arch: Architecture, chip: Chip, size: int
) -> Config | None:
    """Return the config with a learner of `size` devices, None if they divide unevenly.

    An open mesh.tensor becomes the smallest with which the learner fits, since the
    forecast leaves out the forward pass's all-reduces over it.
    """
    usable = memory.usable_bytes(chip)
    for found in _shapes(config, arch, size):
        lean = _leanest(found, arch)
        if config.mesh.tensor or _learner_bytes(lean, arch, chip) <= usable:
            return found
    return None


def _shapes(config: Config, arch: Architecture, size: int) -> Iterator[Config]:
    """Yield the config with data and fsdp for `size` devices, by mesh.tensor."""
    heads, asked = arch.num_kv_heads, config.mesh.tensor
    divisors = [each for each in range(1, heads + 1) if heads % each == 0]
    for tensor in (asked,) if asked else divisors:
        mesh = dataclasses.replace(config.mesh, tensor=tensor)
        found = _with_shards(dataclasses.replace(config, mesh=mesh), arch, size)
        if found is not None:
            yield found


def _with_shards(config: Config, arch: Architecture, size: int) -> Config | None:
    """Return the config with data and fsdp for `size` devices, None if uneven.

    fsdp is the largest number of shards that divides the model's width; the remaining
    factor, data, is the number of replicas of the state, equally many on each slice.
    """
    mesh, rows = config.mesh, config.batch.rows_per_microbatch
    others = mesh.context * mesh.tensor
    if size % others:
        return None
    both = size // others  # data * fsdp
    for data in range(mesh.slices, both + 1, mesh.slices):
        if both % data or mesh.data not in (0, data):
            continue
        fsdp = both // data
        uneven = arch.hidden_size % fsdp or rows % both or fsdp % mesh.expert
        if mesh.fsdp not in (0, fsdp) or uneven:
            continue
        return dataclasses.replace(
            config,
            mesh=dataclasses.replace(mesh, data=data, fsdp=fsdp),
            batch=dataclasses.replace(
                config.batch, rows_per_microbatch=rows or data * fsdp
            ),
        )
    return None


def _with_replicas(
    config: Config, arch: Architecture, room: Room, learner: int, placement: Any
) -> Iterator[Config]:
    """Yield the config with as many replicas of each size as fit."""
    asked = config.generators
    shared = placement == "shared"
    for each in room.sizes():
        if asked.devices not in (0, each) or not is_divisible(arch, each):
            continue
        fit = learner // each if shared else room.replicas(learner, each)
        count = asked.count or fit
        if not count or (count > fit and not shared) or not fit:
            continue
        hosts = room.hosts(each)
        if not hosts or asked.processes not in (1, hosts):
            continue
        yield dataclasses.replace(
            config,
            generators=dataclasses.replace(
                asked,
                count=count,
                devices=each,
                processes=hosts,
                placement=placement,
            ),
        )


def _with_versions(config: Config, room: Room) -> Iterator[Config]:
    """Yield the config with each number of versions that its replicas can hold.

    One version is only for replicas in their own processes, which keep the next version
    in host memory.  An evaluation beside the run has one more.
    """
    asked, one = config.generators.versions, isinstance(room, Slices)
    for versions in (asked,) if asked else (2, 1)[: 1 + one]:
        generators: Any = dataclasses.replace(config.generators, versions=versions)
        yield dataclasses.replace(config, generators=generators)


def _learner_bytes(config: Config, arch: Architecture, chip: Chip) -> float:
    """Return the learner's bytes on a device, on a GPU with what only GPUs need."""
    needed = memory.learner_bytes(config, arch)
    if chip.platform != "gpu":
        return needed
    from scalerl_jax.model.attention_kernels import why_not  # Pallas

    needed += memory.terms_bytes(config, arch) * config.model.float32_head
    if config.model.attention in ("auto", "cudnn") and not why_not(
        "cudnn",
        arch=arch,
        platform=chip.platform,
        shards=config.mesh.context,
        dtype=config.model.compute_dtype,
        row_tokens=config.batch.row_tokens,
        capability=chip.capability,
    ):
        needed += memory.cudnn_bytes(config, arch)
    return needed


def _that_fit(
    config: Config,
    arch: Architecture,
    chip: Chip,
    lengths: Lengths,
    *,
    own_process: bool,
) -> Iterator[Config]:
    """Yield the config with slots, a cache and what the learner keeps, if they fit."""
    usable = memory.usable_bytes(chip)
    shared = config.generators.placement == "shared"
    for found in _with_policies(config, arch, chip):
        learner = _learner_bytes(found, arch, chip)
        if learner > usable:
            continue
        left = usable - learner * shared
        yield from _with_slots(found, arch, lengths, left, own_process=own_process)
        if not shared:
            return  # a slower policy gives the replicas no more memory


def _with_policies(config: Config, arch: Architecture, chip: Chip) -> list[Config]:
    """Return the config with each remat policy and tile of the head, fastest first."""
    asked, mesh = config.model, config.mesh
    found = [
        dataclasses.replace(
            config,
            model=dataclasses.replace(asked, remat=remat, head_chunk_vocab=chunk),
        )
        for remat in (_REMAT if asked.remat == "auto" else (asked.remat,))
        for chunk in _tiles(config, arch)
    ]

    def seconds(one: Config) -> float:
        return optimizer_step_seconds(
            *(one, arch, chip),
            microbatches=1,
            rows=one.batch.rows_per_microbatch,
            chips=mesh.num_devices,
            tensor=mesh.tensor,
            reached=EXPECTED,
        )

    return sorted(found, key=seconds)


def _tiles(config: Config, arch: Architecture) -> tuple[int, ...]:
    """Return the possible model.head_chunk_vocab, the one that needs least last."""
    if config.model.head_chunk_vocab:
        return (config.model.head_chunk_vocab,)
    whole = arch.vocab_size // config.mesh.tensor
    once = not LOSSES[config.objective.loss].of_sequences and whole > HEAD_CHUNK_VOCAB
    return (whole, HEAD_CHUNK_VOCAB) if once else (HEAD_CHUNK_VOCAB,)


def _leanest(config: Config, arch: Architecture) -> Config:
    """Return the config with what the learner keeps at its least."""
    remat: Any = _REMAT[-1] if config.model.remat == "auto" else config.model.remat
    *_, chunk = _tiles(config, arch)
    model = dataclasses.replace(config.model, remat=remat, head_chunk_vocab=chunk)
    return dataclasses.replace(config, model=model)


def _with_slots(
    config: Config,
    arch: Architecture,
    lengths: Lengths,
    usable: float,
    *,
    own_process: bool,
) -> Iterator[Config]:
    """Yield the config with each number of slots that fits a replica's memory."""
    asked = config.sampler
    if asked.slots:
        needed = memory.sampler_bytes(config, arch, own_process=own_process)
        if needed <= usable:
            yield config
        return
    most = memory.largest_cache(
        config,
        arch,
        chips=config.generators.devices,
        usable=usable,
        own_process=own_process,
    )
    cache = asked.cache_tokens or most
    if cache > most or cache < asked.tokens_of(1):
        return
    limit = min(slots_that_fit(cache, lengths), memory.slots_limit(config))
    for slots in _SLOTS:
        if slots > limit:
            return
        held = min(cache, asked.tokens_of(slots))
        page = asked.page_size
        yield dataclasses.replace(
            config,
            sampler=dataclasses.replace(
                asked, slots=slots, cache_tokens=held // page * page
            ),
        )


def read(config: Config, name: str) -> Any:
    """Return a setting by its dotted name."""
    section, field = name.split(".")
    return getattr(getattr(config, section), field)
