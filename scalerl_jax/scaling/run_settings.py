"""Recipe and evaluations of a run, by the settings and the files in its directory.

Files of the user are known by their content: a path says nothing of a file that was
edited between two runs, or that each run has a copy of.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from scalerl_jax.formats.bounded import read_text
from scalerl_jax.formats.reading import read_json
from scalerl_jax.run.directory import CONFIG_FILE, DATA_FILE, ENVIRONMENT_FILE
from scalerl_jax.run.record import with_defaults

# Settings of a run that are not part of its recipe.
NOT_RECIPE = ("seed", "tracking", "compile_cache", "checkpoint", "scaling", "debug")
_MOST_BYTES = 2**24  # of the user's reward functions
_DIGITS = 12  # of a digest
# The field of `prompts` with the digests of the questions that a run was asked.
DIGESTS = "evaluation prompts in data.json"
# Settings that say when a completion of an evaluation has passed.
_JUDGED = (
    "reward.passed_at",
    "reward.weights",
    "reward.math_answer",
    "reward.code_float_tolerance",
    "reward.unjudged",
)


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a run directory; empty if they cannot be read."""
    return _object(_read(folder / CONFIG_FILE).get("config"))


class RunSettings:
    """Recipe and evaluations of one run, whose files are read once."""

    def __init__(self, folder: Path) -> None:
        """Read the settings, and the report on the data."""
        self._folder = folder
        self._settings = read_settings(folder)
        self._report = _read(folder / DATA_FILE)

    def recipe(self) -> tuple[str, str]:
        """Return a text that is equal for runs that differ only in seed, and the seed.

        "" stands for what is unknown.  A setting that the code of a run did not have
        counts as its default, and files of the package are those of this one.
        """
        settings = self._settings
        if not settings:
            return "", ""
        known = with_defaults(settings)
        known["environment"] = self._environment or ""
        kept = {
            name: each
            for name, each in known.items()
            if name.split(".")[0] not in NOT_RECIPE
        }
        text = json.dumps(kept, sort_keys=True)
        for name, digest in self._own_files().items():
            text = text.replace(json.dumps(name), json.dumps(digest))
        return text, str(settings.get("seed", ""))

    def evaluated(self) -> dict[str, dict[str, Any]]:
        """Return what makes a run's pass rates comparable, as fields of its curve.

        `prompts` chooses the prompts, and `sampling` how they are answered and judged.
        The prompts of `eval.sets` are all asked; without sets they are held out from
        those of the training.  `DIGESTS` tells them apart where names do not.
        """
        known = {
            f"{section}.{name}": value
            for section in ("eval", "data", "reward")
            for name, value in _object(self._settings.get(section)).items()
        }
        known["environment"] = self._environment
        held_out = () if known.get("eval.sets") else ("eval.num_prompts", "data.tasks")
        names = {
            "prompts": ("eval.sets", *held_out),
            "sampling": ("eval.temperature", "environment", *_JUDGED),
        }
        found = {
            field: {n: known[n] for n in each if known.get(n) is not None}
            for field, each in names.items()
        }
        sets = _object(self._report.get("evaluation"))
        digests = [_object(each).get("sha256") for each in sets.values()]
        if digests and all(digests):
            found["prompts"][DIGESTS] = [str(each)[:_DIGITS] for each in digests]
        return found

    @functools.cached_property
    def _environment(self) -> Any:
        """The setting `environment`; a user's file by its content."""
        named = self._settings.get("environment")
        path, found, functions = str(named or "").rpartition(":")
        if not found or not path.endswith(".py"):
            return named
        try:
            text = read_text(self._folder / ENVIRONMENT_FILE, most=_MOST_BYTES)
        except ValueError:
            return named
        return f"{Path(path).name} ({_digest(text)}):{functions}"

    def _own_files(self) -> dict[str, str]:
        """Return names of the user's files of prompts, with digests for paths."""
        found = {}
        for sets in map(_object, self._report.values()):
            for name, each in sets.items():
                files = _object(_object(each).get("prepared")).get("files") or ()
                for file in map(_object, files):
                    origin, digest = file.get("origin"), file.get("sha256")
                    if origin and digest and origin in name:
                        found[name] = name.replace(origin, digest)
        return found


def _digest(text: str) -> str:
    """Return the first digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _read(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if it cannot be read."""
    try:
        return read_json(file)
    except ValueError:
        return {}


def _object(value: Any) -> dict[str, Any]:
    """Return a JSON object; empty for any other value."""
    return value if isinstance(value, dict) else {}
