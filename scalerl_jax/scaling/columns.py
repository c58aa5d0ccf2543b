"""Which columns of a table make curves: as a user names them, as the table has them."""

import dataclasses

from scalerl_jax.scaling.cells import is_empty, is_number
from scalerl_jax.scaling.curves import CurveError
from scalerl_jax.scaling.tables import Table, is_step

ERRORS_ENDING = "_se"  # of the column of y's standard errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """What of a table makes a curve; None: what this kind of file usually has."""

    x: str | None = None  # column of the compute
    y: str | None = None  # column of the pass rate; "a,b": each is a run
    wide: bool = False  # every column of numbers besides x is a run
    group: str | None = None  # column, or columns "a,b", whose values tell runs apart
    where: tuple[tuple[str, str], ...] = ()  # (column, value): other rows do not count
    se: str | None = None  # column of standard errors; by default `<y>_se`, if there
    samples: str | None = None  # column of how many samples a rate is the mean of
    reward_range: tuple[float, float] | None = None  # y at no and at full success
    one_minus: bool = False  # y is an error rate: the pass rate is 1 - y
    x_scale: float = 1.0  # compute = x_scale * column: rollouts of a step, say
    x_name: str | None = None  # what the scaled compute is called
    constants: tuple[str, ...] = ()  # columns of settings, one value for each run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """A selection's columns, by the names that a table has for them."""

    x: str
    ys: list[str]
    group: list[str]
    where: list[tuple[str, str]]
    se: str | None
    samples: str | None
    constants: dict[str, str]  # asked name: column

    @property
    def numbers(self) -> list[str]:
        """The columns that are read as numbers."""
        named = [self.x, *self.ys, self.se, self.samples, *self.constants.values()]
        return [column for column in named if column is not None]


def find_columns(table: Table, chosen: Selection) -> Columns:
    """Find the columns of a selection; what is not there is refused with what is."""

    def named(flag: str, name: str | None) -> str | None:
        return None if name is None else table.require(flag, name)

    group = chosen.group or table.group
    found = Columns(
        x=table.require("--x", chosen.x or table.default_x),
        ys=[],
        group=[] if group is None else table.require_all("--group", group),
        where=find_conditions(table, chosen),
        se=named("--se", chosen.se),
        samples=named("--samples", chosen.samples),
        constants={c: table.require("the setting", c) for c in chosen.constants},
    )
    if chosen.wide:
        return dataclasses.replace(found, ys=_wide_columns(table, chosen, found))
    y = chosen.y or table.y
    ys = [table.require("--y", y)] if y is None else table.require_all("--y", y)
    return dataclasses.replace(found, ys=ys)


def find_conditions(table: Table, chosen: Selection) -> list[tuple[str, str]]:
    """The columns of `where`, each with the value that is asked for."""
    return [(table.require("--where", name), value) for name, value in chosen.where]


def _wide_columns(table: Table, chosen: Selection, found: Columns) -> list[str]:
    """The columns that are runs: all of numbers that nothing else was asked of."""
    if chosen.y is not None:
        raise CurveError(
            f"--wide takes every column of numbers as a run, and --y {chosen.y} names "
            "them: give one of the two"
        )
    others = {*found.numbers, *found.group, *(column for column, _ in found.where)}
    ys = [c for c in table.columns if c not in others and _holds_rates(table, c)]
    if not ys:
        raise CurveError(
            f"{table.path}: --wide finds no column of numbers besides {found.x}; name "
            f"the runs with --y, from: {', '.join(table.columns)}"
        )
    return ys


def _holds_rates(table: Table, column: str) -> bool:
    """Whether a column of a wide table is a run: numbers, no steps, no errors."""
    rates = column.removesuffix(ERRORS_ENDING)
    if is_step(column) or (rates != column and rates in table.columns):
        return False
    cells = [row.get(column) for _, row in table.rows]
    filled = [cell for cell in cells if not is_empty(cell)]
    return bool(filled) and all(is_number(cell) for cell in filled)
