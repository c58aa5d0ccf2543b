"""Samples that got a slot, as the rows that the engine inserts."""

import dataclasses
from typing import Any

import jax
import numpy as np

from scalerl_jax.sampler.decoding import SlotRows, empty_rows
from scalerl_jax.sampler.requests import Sample
from scalerl_jax.sampler.sampling import SamplingRows
from scalerl_jax.sampler.settings import EngineSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """A sample, its slot, and the broken page of its prefix that it copies."""

    slot: int
    sample: Sample
    copy: tuple[int, int] | None  # from page, to page


def insertion(settings: EngineSettings, placed: list[Placed]) -> dict[str, Any]:
    """The arguments of `Engine.insert`, padded to a power of two."""
    count = min(1 << (len(placed) - 1).bit_length(), settings.slots)
    slots = np.full(count, settings.slots, np.int32)
    copies = np.full((2, count), settings.num_pages, np.int32)
    rows = jax.tree.map(np.copy, empty_rows(settings, count))
    for place, each in enumerate(placed):
        slots[place] = each.slot
        if each.copy is not None:
            copies[:, place] = each.copy
        row = each.sample.row or _first_row(settings, each.sample)
        each.sample.row = None
        for held, new in zip(jax.tree.leaves(rows), jax.tree.leaves(row), strict=True):
            held[place] = new
    return dict(slots=slots, rows=rows, copy_from=copies[0], copy_to=copies[1])


def _first_row(settings: EngineSettings, sample: Sample) -> SlotRows:
    """A sample whose prompt is cached but for its last token."""
    request = sample.request
    row = jax.tree.map(lambda rows: rows[0], empty_rows(settings, 1))
    return dataclasses.replace(
        row,
        tokens=request.tokens[-1],
        positions=len(request.tokens) - 1,
        prompt_lengths=len(request.tokens),
        max_tokens=sample.limit,
        keys=request.samples.keys[sample.number],
        active=True,
        thinking_limits=request.samples.thinking_limits[sample.number],
        sampling=jax.tree.map(
            lambda rows: rows[0], SamplingRows.of(request.sampling, 1)
        ),
    )
