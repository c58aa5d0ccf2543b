"""Join untrusted names to directories: objects of a bucket, entries of an index.

The author of such a name can choose it freely: `../../.bashrc` or `/etc/passwd`, joined
unchecked to a directory, is a file outside it.  All code joins such names by `inside`.
"""

import os
from pathlib import Path


def inside(
    root: Path, name: str, *, called: object = "", follow_links: bool = False
) -> Path:
    """Return the path of an untrusted name below a directory.

    Args:
        root: the directory; its own path may contain links.
        name: parts separated by "/".
        called: the user's name for the directory in errors; empty: its path.
        follow_links: allow links below the directory to lead out of it.  Only for
            reading, if the links are the user's own or made by the hub's cache.

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
