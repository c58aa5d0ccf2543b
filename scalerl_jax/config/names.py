"""The config files that come with the package, by name: `tiny`, `recipes/dapo:tiny`.

In a clone they are in `configs/`, beside the package.  An installed package contains
them as `scalerl_jax/configs`, where setup.py puts them into a wheel.
"""

import difflib
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "configs"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"
STUDIES = "studies"  # the folder of studies, in FOLDER
CONFIG_MEANS = "Settings: a name (tiny, recipes/dapo:tiny), or a Python file."
_MOST_NEAR = 4


def names() -> list[str]:
    """Return the names of all files in the folder; a study is `studies/NAME`."""
    files = sorted(FOLDER.rglob("*.py"))
    return [file.relative_to(FOLDER).with_suffix("").as_posix() for file in files]


def find_config(given: str) -> str:
    """Return FILE[:ARGUMENT] for --config's value: a path, or a name of this package.

    A file of the working directory comes first.  If there is none, a path below
    configs/ is taken as a name, so that the documentation's commands work from any
    directory.

    Raises:
        ValueError: there is neither such a file nor such a name; lists similar names.
    """
    path, colon, argument = given.partition(":")
    if not path or (Path(path).exists() and not Path(path).is_dir()):
        return given
    name = path.removeprefix("configs/").removesuffix(".py")
    if name in (known := names()):
        return f"{FOLDER / name}.py{colon}{argument}"
    raise ValueError(
        f"--config={given}: there is no such file, and no config of the package has "
        f"this name; near: {', '.join(_near(name, known))}"
    )


def _near(name: str, known: list[str]) -> list[str]:
    """Return similar names, or, without any, the names that are in no folder."""
    configs = [each for each in known if not each.startswith(f"{STUDIES}/")]
    by_last: dict[str, list[str]] = {}
    for each in configs:
        by_last.setdefault(each.rpartition("/")[2], []).append(each)
    close = difflib.get_close_matches(name.rpartition("/")[2], by_last, n=_MOST_NEAR)
    found = [each for last in close for each in by_last[last]]
    return found or [each for each in configs if "/" not in each]
