"""The command line: `python -m scalerl_jax.scaling fit RUN_DIR_OR_EVALS_FILE`.

It reads, calls, prints and writes; what it prints is made in `report.py`.  A run
directory also gets `fit.json` and `fit.png`.  Input that cannot be fitted ends with
one message and exit status 2.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scalerl_jax.scaling import report
from scalerl_jax.scaling.curves import DEFAULT_X, DEFAULT_Y, CurveError, load_curve
from scalerl_jax.scaling.figure import draw
from scalerl_jax.scaling.fit import fit_curve


def _parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m scalerl_jax.scaling",
        description="Fit scaling laws of reinforcement learning to evaluation curves.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fit = commands.add_parser(
        "fit",
        help="fit ScaleRL's sigmoid to one curve",
        description="Fit R = R0 + (A - R0) / (1 + (C_mid / x)^B) to one curve, with "
        "intervals, and say so when the curve does not identify A. A run directory "
        "also gets fit.json and fit.png.",
    )
    fit.add_argument(
        "path",
        help="a run directory with evals.jsonl, a .jsonl file, or a .csv file",
    )
    fit.add_argument("--x", default=DEFAULT_X, help="compute column (%(default)s)")
    fit.add_argument("--y", default=DEFAULT_Y, help="pass rate column (%(default)s)")
    fit.add_argument(
        "--r0",
        type=float,
        help="pass rate at zero compute (default: the point at x = 0; without one, "
        "R0 is fitted)",
    )
    fit.add_argument(
        "--from",
        dest="start",
        type=float,
        metavar="X",
        help="leave out points with 0 < x < X",
    )
    fit.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    flags = _parser().parse_args(arguments)
    try:
        _fit(flags)
    except (CurveError, OSError, UnicodeDecodeError) as failure:
        sys.stderr.write(f"error: {failure}\n")
        return 2
    return 0


def _fit(flags: argparse.Namespace) -> None:
    """Fit one curve, write beside a run directory's data, and print."""
    curve = load_curve(flags.path, x=flags.x, y=flags.y, start=flags.start)
    result = fit_curve(curve, r0=flags.r0)
    text = report.to_json(result) if flags.json else report.to_text(result, curve)
    folder = Path(flags.path)
    if folder.is_dir():
        (folder / "fit.json").write_text(report.to_json(result), encoding="utf-8")
        draw(result, curve, folder / "fit.png", title=folder.resolve().name)
        if not flags.json:
            text += f"wrote {folder / 'fit.json'} and {folder / 'fit.png'}\n"
    if flags.json:
        for warning in result.warnings:
            sys.stderr.write(f"warning: {warning}\n")
    sys.stdout.write(text)


if __name__ == "__main__":
    sys.exit(main())
