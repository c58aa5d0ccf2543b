"""The record of a run, `config.json`: its settings, its code and its packages."""

import datetime
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import scalerl_jax
from scalerl_jax.config import Config, to_json
from scalerl_jax.process.child_environment import child_environment

_ASSETS = Path(scalerl_jax.__file__).resolve().parent / "assets"
_SHIPPED = re.compile(r"/.*/scalerl_jax/assets/([^/].*)")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_PACKAGES += ("reasoning_gym",)  # of an extra


def new_record(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a run that starts now; `settings` are by section."""
    return {
        "config": settings,
        "versions": versions(),
        "seed": settings.get("seed"),
        "git_revision": git_revision(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def flatten(settings: dict[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name: {"train": {"seed": 3}} as {"train.seed": 3}."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= flatten(value, prefix=f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a record holds, by dotted name, and all that it lacks.

    A setting that the code of a run did not have counts as its default, with which new
    code does what the old code did.  Files of the package are those of this one.
    """
    return flatten(to_json(Config())) | flatten(with_own_assets(settings))


def with_own_assets(values: Any) -> Any:
    """Return JSON values, with paths of shipped files moved to this installation.

    So a run or study that was started in another checkout can be resumed in this one.
    """
    if isinstance(values, dict):
        return {name: with_own_assets(value) for name, value in values.items()}
    if not isinstance(values, str) or not (found := _SHIPPED.fullmatch(values)):
        return values
    own = _ASSETS / found[1]
    return str(own) if ".." not in own.parts and own.exists() else values


def versions() -> dict[str, str | None]:
    """Return the versions of Python, of this package and of its main dependencies."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "scalerl_jax": scalerl_jax.__version__,
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_revision() -> str | None:
    """Return the source tree's commit, with "+dirty" if changed; None: no checkout."""
    root = Path(scalerl_jax.__file__).resolve().parent.parent
    if not (root / ".git").exists():  # installed, perhaps inside another checkout
        return None
    revision = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain")
    if revision is None or changes is None:
        return None
    return f"{revision}+dirty" if changes else revision


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=20.0,
            env=child_environment(GIT_OPTIONAL_LOCKS="0"),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
