"""The largest microbatch whose train step fits, found by compiling."""

import dataclasses
import sys
from collections.abc import Callable

from scalerl_jax.config import Config
from scalerl_jax.preflight.check import Result, estimate_largest, program_memory
from scalerl_jax.preflight.hlo import compile_program
from scalerl_jax.preflight.programs import make_parts
from scalerl_jax.preflight.topologies import Topology


def search_rows(config: Config, topology: Topology, result: Result) -> int:
    """Return the most rows of a microbatch whose train step fits; 0 if none does.

    Each number that is tried is compiled, and said on stderr.
    """
    mesh, batch = result.parts.config.mesh, result.parts.config.batch
    shards = mesh.data * mesh.fsdp
    estimate = estimate_largest(result).get("rows_per_microbatch", 0) // shards

    def fits(times: int) -> bool:
        rows = times * shards
        asked = dataclasses.replace(config.batch, rows_per_microbatch=rows)
        parts, step = make_parts(dataclasses.replace(config, batch=asked), topology)
        compiled = compile_program(f"{rows} rows", step.lower()["accumulate"])
        size = sum(program_memory("accumulate", compiled, parts).values())
        found = not compiled.too_large and size <= result.limit
        sys.stderr.write(
            f"batch.rows_per_microbatch = {rows}: "
            f"{'fits' if found else 'does not fit'}, {size / 2**30:.2f} GiB"
            f"{' or more' if compiled.too_large else ''}\n"
        )
        return found

    known = result.programs["accumulate"]
    now = batch.rows_per_microbatch // shards
    if known.too_large or known.peak_bytes > result.limit:
        return most_that_fit(fits, fitting=0, failing=now) * shards
    return most_that_fit(fits, fitting=now, guess=max(estimate, now + 1)) * shards


def most_that_fit(
    fits: Callable[[int], bool], *, fitting: int, failing: int = 0, guess: int = 0
) -> int:
    """Return the largest number that fits, where all smaller ones do.

    From the guess upwards in steps that double, then by halving what is left.

    Args:
        fits: asked once for a number; dear.
        fitting: a number that is known to fit; 0 always does.
        failing: one that is known not to; 0: none is known, and larger ones are tried.
        guess: which to try first.
    """
    tried, step = max(guess, fitting + 1), 1
    while not failing:
        if fits(tried):
            fitting, tried, step = tried, tried + step, 2 * step
        else:
            failing = tried
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting
