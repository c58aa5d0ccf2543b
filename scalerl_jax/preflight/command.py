"""The preflight's command line: parse flags and settings, check, print the result."""

import dataclasses
import json
from collections.abc import Callable, Sequence

from absl import flags
from ml_collections import config_flags

from scalerl_jax import config as config_lib
from scalerl_jax.planning.lengths import read_lengths
from scalerl_jax.preflight.check import CheckedConfig, check, estimate_largest
from scalerl_jax.preflight.hlo import compile_program
from scalerl_jax.preflight.memory import program_memory
from scalerl_jax.preflight.programs import make_parts
from scalerl_jax.preflight.report import to_json, to_text
from scalerl_jax.preflight.topologies import Topology, parse_topology
from scalerl_jax.process.ending import answer
from scalerl_jax.process.printing import to_stderr, to_stdout

_FITS, _TOO_LARGE = 0, 1


def run(argv: Sequence[str]) -> int:
    """Check the config and topology of the flags, print the result, return a status."""
    return answer(lambda: _run(list(argv)))


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "topology",
        None,
        "NAME:AxB or NAME:AxBxC, or a type like v5p-128; N* before it for N slices; or "
        "GPUs of a host: h100:8.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "lengths",
        None,
        "A run's directory, or a file with the tokens of one completion on each line; "
        "default: assumed from the config's limits.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "price",
        None,
        "Price of a chip-hour, in any currency.",
        lower_bound=0.0,
        flag_values=values,
    )
    for name, meaning in {
        "json": "One JSON object on stdout.",
        "search": "Find, by compiling, the most rows of a microbatch that fit.",
    }.items():
        flags.DEFINE_bool(name, False, meaning, flag_values=values)


def _run(argv: list[str]) -> int:
    values = flags.FlagValues()
    given = config_lib.define_config(values, argv)
    _define(values)
    about = "Check whether a config fits TPUs or GPUs, on a machine without them."
    if extra := config_lib.read_flags(
        values, argv, settings=config_lib.Config, about=about
    )[1:]:
        raise ValueError(f"unknown arguments {extra}")
    for name in ("config", "topology"):
        if not values[name].value:
            raise ValueError(
                f"--{name} is missing: --config=configs/8b.py --topology=v5p:4x4x4"
            )
    topology = parse_topology(str(values["topology"].value))
    config = config_lib.resolve(given.value)
    asked = values["lengths"].value
    lengths = read_lengths(str(asked), config) if asked else None
    result = check(config, topology, lengths)
    file = config_flags.get_config_filename(values["config"])
    price = values["price"].value
    # A search takes long: print what is known before it.
    say = to_stderr if values["json"].value else to_stdout
    say(to_text(result, config_file=file, price=price))
    found = search_rows(topology, result) if values["search"].value else None
    if values["json"].value:
        answer = to_json(result, config_file=file, price=price)
        answer |= {"largest_compiled": found} if found is not None else {}
        to_stdout(json.dumps(answer) + "\n")
    elif found is not None:
        to_stdout(
            f"compiled: the train step fits with batch.rows_per_microbatch = {found}\n"
        )
    return _FITS if result.fits else _TOO_LARGE


# -- the largest microbatch whose train step fits, found by compiling ------------------


def search_rows(topology: Topology, result: CheckedConfig) -> int:
    """Return the most rows of a microbatch whose train step fits; 0 if none does.

    The split and all other settings are those of the result.  Each number tried is
    compiled, and its result is printed to stderr.
    """
    config = result.parts.config
    mesh, batch = config.mesh, config.batch
    shards = mesh.data * mesh.fsdp
    estimate = estimate_largest(result).get("rows_per_microbatch", 0) // shards

    def fits(times: int) -> bool:
        rows = times * shards
        asked = dataclasses.replace(batch, rows_per_microbatch=rows)
        try:
            parts, step = make_parts(dataclasses.replace(config, batch=asked), topology)
        except ValueError as error:
            to_stderr(f"batch.rows_per_microbatch = {rows}: does not fit: {error}\n")
            return False
        lowered = step.lower_accumulate()
        compiled = compile_program(f"{rows} rows", lowered, topology.chip)
        size = sum(program_memory("accumulate", compiled, parts).values())
        found = not compiled.too_large and size <= result.limit
        to_stderr(
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
    """Return the largest number that fits, if all smaller ones fit too.

    The search goes up from the guess in steps that double, then bisects.

    Args:
        fits: expensive; called once per number.
        fitting: a number that is known to fit; 0 always does.
        failing: a number that is known not to fit; 0: unknown, larger ones are tried.
        guess: the first number to try.
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
