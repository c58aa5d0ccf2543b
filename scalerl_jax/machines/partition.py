"""Boxes of chips: partition a slice so that each job has its own chips.

A job cannot use an arbitrary set of chips: libtpu needs a box inside one host, or a box
of whole hosts with the shape of a slice.  Such a box starts at multiples of its sides,
like Ray's sub-slices; whether other boxes work is not documented.
"""

import dataclasses
import itertools
import math

from scalerl_jax.machines.slices import Bounds, Slice, tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Box:
    """The chips of one job, on one host or on several whole ones."""

    corner: Bounds  # the chip nearest the origin
    shape: Bounds

    @property
    def num_chips(self) -> int:
        """Number of chips in the box."""
        return math.prod(self.shape)

    @property
    def chips(self) -> tuple[Bounds, ...]:
        """Coordinates of the chips, along x first, then y, then z."""
        x, y, z = (
            range(start, start + side)
            for start, side in zip(self.corner, self.shape, strict=True)
        )
        return tuple((a, b, c) for c, b, a in itertools.product(z, y, x))

    def overlaps(self, other: "Box") -> bool:
        """Return True if the two boxes have a chip in common."""
        return all(
            mine < theirs + their_side and theirs < mine + side
            for mine, side, theirs, their_side in zip(
                self.corner, self.shape, other.corner, other.shape, strict=True
            )
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Boxes of a slice by role; all other chips stay idle."""

    learner: Box
    replicas: tuple[Box, ...]


def box_shapes(slice: Slice) -> tuple[Bounds, ...]:
    """Return the shapes of the boxes of a slice, the smallest first.

    A part of a host is one chip, two (1x2), or half a host of eight (2x2).
    """
    parts: list[Bounds] = [
        part
        for part in ((1, 1, 1), (1, 2, 1), (2, 2, 1))
        if tiles(part, slice.host) and math.prod(part) < slice.chips_per_host
    ]
    wholes = [
        shape
        for shape in (*slice.kind.shapes, slice.topology)
        if tiles(shape, slice.topology) and tiles(slice.host, shape)
    ]
    return tuple(dict.fromkeys((*parts, *wholes)))


def box_sizes(slice: Slice) -> tuple[int, ...]:
    """Return the numbers of chips that a box of a slice can have."""
    return tuple(sorted({math.prod(shape) for shape in box_shapes(slice)}))


def boxes(
    slice: Slice, num_chips: int, *, beside: Box | None = None
) -> tuple[Box, ...]:
    """Return adjacent boxes of `num_chips` chips that do not overlap with `beside`.

    They have the most compact shape with that number of chips; () if none exists.
    """
    shapes = [each for each in box_shapes(slice) if math.prod(each) == num_chips]
    return tuple(_places(slice, shapes[0], beside=beside)) if shapes else ()


def split_slice(
    slice: Slice,
    *,
    learner_chips: int = 0,
    generators: int = 0,
    generator_chips: int = 0,
) -> Split:
    """Return a learner's box at the origin and the boxes of the generator replicas.

    Args:
        slice: the slice to partition.
        learner_chips: 0: the largest box beside which the generators fit, at most half
            of the slice unless the two others are given.
        generators: number of replicas; 0: all that fit.
        generator_chips: chips of a replica; 0: the most with which `generators`
            replicas fit, or a whole host if that number is open too.

    Raises:
        ValueError: no such split; the message has the valid sizes, or how many fit.
    """
    asked = dict(
        learner_chips=learner_chips,
        generators=generators,
        generator_chips=generator_chips,
    )
    for name, value in asked.items():
        if value < 0:
            raise ValueError(f"{name} = {value} must be 0 (what is left) or above")
    half = slice.num_chips // 2
    learners = _candidates(
        slice,
        learner_chips,
        most=slice.num_chips - 1 if generators and generator_chips else half,
        setting="learner_chips",
    )
    replicas = _candidates(
        slice,
        generator_chips,
        most=half if generators else slice.chips_per_host,
        setting="generator_chips",
    )
    for shape, part in itertools.product(learners, replicas):
        learner = Box(corner=(0, 0, 0), shape=shape)
        places = _places(slice, part, beside=learner)
        if len(places) >= max(generators, 1):
            chosen = places[: generators or len(places)]
            return Split(learner=learner, replicas=tuple(chosen))
    raise ValueError(_no_room(slice, learners, replicas, asked))


def _candidates(slice: Slice, chips: int, *, most: int, setting: str) -> list[Bounds]:
    """Return the shapes of `chips` chips; 0: all up to `most`, largest first."""
    shapes = box_shapes(slice)
    if not chips:
        fitting = [shape for shape in shapes if math.prod(shape) <= most]
        # `sorted` is stable: among shapes of one size the most compact stays first.
        return sorted(fitting, key=math.prod, reverse=True)
    fitting = [shape for shape in shapes if math.prod(shape) == chips]
    if not fitting:
        raise ValueError(
            f"{setting} = {chips} chips are no box of {slice.name}, whose hosts have "
            f"{slice.chips_per_host}; choose from "
            f"{', '.join(map(str, box_sizes(slice)))}"
        )
    return fitting


def _places(slice: Slice, shape: Bounds, *, beside: Box | None) -> list[Box]:
    """Return all boxes of a shape that do not overlap `beside`, in order of workers."""
    starts = [
        range(0, whole, side) for whole, side in zip(slice.topology, shape, strict=True)
    ]
    found = [
        Box(corner=(x, y, z), shape=shape)
        for z, y, x in itertools.product(*reversed(starts))
    ]
    return [box for box in found if not (beside and box.overlaps(beside))]


def _no_room(
    slice: Slice,
    learners: list[Bounds],
    replicas: list[Bounds],
    asked: dict[str, int],
) -> str:
    """Return the error message for learner and generators that do not fit together."""
    said = ", ".join(f"{name} = {value}" for name, value in asked.items())
    if not learners or not replicas:
        return (
            f"{slice.name} has {slice.num_chips} chip, and learner and generators "
            f"need one each; take a larger slice, or run both in one process"
        )
    # The smallest shapes that were tried leave the most room.
    learner = Box(corner=(0, 0, 0), shape=learners[-1])
    fit = len(_places(slice, replicas[-1], beside=learner))
    return (
        f"{said} do not fit {slice.name} with {slice.num_chips} chips: beside a "
        f"learner of {learner.num_chips}, {fit} generators of "
        f"{math.prod(replicas[-1])} fit; lower one of the three (0: what is left)"
    )
