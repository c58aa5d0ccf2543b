"""Paths from names of outside: objects of a bucket, entries of an index or a manifest.

Whoever wrote such a name chose it.  Joined to a directory as it stands, `../../.bashrc`
or `/etc/passwd` is a file elsewhere.  `inside` is the one place that joins them.
"""

import os
from pathlib import Path


def inside(
    root: Path, name: str, *, called: object = "", follow_links: bool = False
) -> Path:
    """Return the path that a name of outside has below a directory.

    Args:
        root: the directory; it may itself be reached through links.
        name: parts with "/" between them.
        called: what the user calls the directory, where that is not its path.
        follow_links: let links below the directory lead out of it.  Only for reading,
            and where they are the user's own or made by the hub's cache.

    Raises:
        ValueError: the name is empty, absolute or not plain ("..", "//", a NUL), or a
            link leads out of the directory.
    """
    parts = name.replace(os.sep, "/").split("/")
    plain = not {"", ".", ".."} & {*parts} and not os.path.splitdrive(name)[0]
    if not plain or "\0" in name:
        raise ValueError(
            f"{name!r} is no path below {called or root}: it is empty or absolute, or "
            f"has empty parts, '.', '..' or a NUL in it; remove or rename it there"
        )
    path = root / name
    if not follow_links:
        place = Path(os.path.realpath(path))
        if not place.is_relative_to(os.path.realpath(root)):
            raise ValueError(
                f"{name!r} is no path below {called or root}: a link in {root} leads "
                f"to {str(place)!r}; remove the link"
            )
    return path
