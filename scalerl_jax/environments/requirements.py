"""Names that tests need, and modules that tests and programs import, by their text.

References are parsed here, but nothing that a policy wrote.
"""

import ast
import builtins
import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path


def _parse(trusted: str) -> ast.Module:
    with any_digits():
        return ast.parse(trusted)


@contextlib.contextmanager
def any_digits() -> Iterator[None]:
    """Lift Python's limit of 4,300 digits for the whole numbers in a reference."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


@functools.lru_cache(maxsize=64)
def names_asked(setup: str, tests: str) -> list[str]:
    """Return the names that tests use and that neither they nor Python define."""
    nodes = [*ast.walk(_parse(setup)), *ast.walk(_parse(tests))]
    known = set(dir(builtins))
    for node in nodes:
        match node:
            case ast.Name(ctx=ast.Store() | ast.Del(), id=name) | ast.arg(arg=name):
                known.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                known.add(name)
            case ast.alias(name=name, asname=given):
                known.add(given or name.partition(".")[0])
    used = (node.id for node in nodes if isinstance(node, ast.Name))
    return sorted(set(used) - known)


# Modules that a program or its tests import and a sandbox does not have.  That is a
# fault of the sandbox, not of the program.  But an unjudged failure is not punished
# either, and `import anything` must not avoid a verdict: for programs only a short list
# of modules counts, which a program can expect to find and a user can install.

WELL_KNOWN = frozenset(
    "bitarray bs4 cv2 gmpy2 jax lxml matplotlib mpmath networkx nltk numba numpy "
    "pandas PIL plotly pydantic pytest regex requests scipy seaborn skimage sklearn "
    "sortedcontainers statsmodels sympy tensorflow torch yaml".split()
)
# An import at the beginning of a line ends the program if the package is missing.  By
# pattern: nothing that a policy wrote is parsed in the verifier's own process.
_IMPORT = re.compile(
    r"^(?:import[ \t]+(?P<names>\w[\w., \t]*)"
    r"|from[ \t]+(?P<name>\w+)[\w.]*[ \t]+import\b)",
    re.MULTILINE,
)


def missing_of_program(source: str, packages: str) -> str:
    """Return the first well-known module that a program imports and misses, or ""."""
    for found in _IMPORT.finditer(source):
        names = [found["name"]] if found["name"] else found["names"].split(",")
        for each in names:
            name = re.match(r"\s*(\w*)", each)
            if name and name[1] in WELL_KNOWN and not _is_there(name[1], packages):
                return name[1]
    return ""


@functools.lru_cache(maxsize=64)
def missing_of_tests(code: str, packages: str) -> str:
    """Return the first module of any name that tests import and miss, or ""."""
    for node in _parse(code).body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            if not _is_there(name.partition(".")[0], packages):
                return name
    return ""


def _is_there(name: str, packages: str) -> bool:
    """Return whether a module is in the standard library or among `packages`."""
    if name in sys.stdlib_module_names:
        return True
    return bool(packages) and any(
        path.name.partition(".")[0] == name for path in Path(packages).glob(f"{name}*")
    )
