"""The command line: flags and settings in, one answer out."""

import json
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from scalerl_jax import config as config_lib
from scalerl_jax.balance.lengths import read_lengths
from scalerl_jax.preflight.check import check
from scalerl_jax.preflight.report import to_json, to_text
from scalerl_jax.preflight.search import search_rows
from scalerl_jax.preflight.topologies import parse_topology
from scalerl_jax.utils.failures import tell

_FITS, _TOO_LARGE = 0, 1


def run(argv: Sequence[str]) -> int:
    """Check what the flags name, print the answer, and return the exit status."""
    try:
        return _run(list(argv))
    except ValueError as error:
        return tell(error)


def _run(argv: list[str]) -> int:
    values = flags.FlagValues()
    given = config_flags.DEFINE_config_file(
        "config", None, "Settings, a Python file.", flag_values=values, sys_argv=argv
    )
    flags.DEFINE_string(
        "topology",
        None,
        "NAME:AxB or NAME:AxBxC, or a type like v5p-128; N* before it for N slices.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "lengths",
        None,
        "A run's directory, or a file with the tokens of one completion on each line; "
        "default: what the config's limits let expect.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "price",
        None,
        "Of a chip-hour, in any currency.",
        lower_bound=0.0,
        flag_values=values,
    )
    for name, meaning in {
        "json": "One JSON object on stdout.",
        "search": "Compile for the most rows of a microbatch that fit.",
    }.items():
        flags.DEFINE_bool(name, False, meaning, flag_values=values)
    if extra := config_lib.read_flags(values, argv, settings=config_lib.Config)[1:]:
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
    found = search_rows(config, topology, result) if values["search"].value else None
    file = config_flags.get_config_filename(values["config"])
    price = values["price"].value
    text = to_text(result, config_file=file, price=price)
    if values["json"].value:
        answer = to_json(result, config_file=file, price=price)
        answer |= {"largest_compiled": found} if found is not None else {}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stderr.write(text)
    else:
        sys.stdout.write(text)
        if found is not None:
            sys.stdout.write(
                f"compiled: the train step fits with batch.rows_per_microbatch = "
                f"{found}\n"
            )
    return _FITS if result.fits else _TOO_LARGE
