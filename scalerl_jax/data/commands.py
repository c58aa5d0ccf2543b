"""The commands of `python -m scalerl_jax.data`, and their flags."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from scalerl_jax.data import inspecting
from scalerl_jax.data.catalog import DATA_SETS, OWN_FORMS, find
from scalerl_jax.data.datasets import QuestionSource, open_dataset
from scalerl_jax.data.preparing import (
    DEFAULT_DIRECTORY,
    choose_split,
    is_prepared,
    prepare,
    prepared_path,
    read_report,
    usual_limit,
)
from scalerl_jax.utils.failures import Parser


def make_parser() -> Parser:
    """All commands."""
    parser = Parser(
        prog="python -m scalerl_jax.data",
        description="Prepare data sets of prompts with verifiable answers, and look at "
        "them. Status 2: the input cannot be used; the message says why.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    everywhere = Parser(add_help=False)
    everywhere.add_argument(
        "--directory",
        type=Path,
        default=DEFAULT_DIRECTORY,
        metavar="DIR",
        help=f"where prepared data sets lie, as data.directory (default: "
        f"{DEFAULT_DIRECTORY})",
    )
    which = Parser(add_help=False)
    which.add_argument(
        "--dataset",
        required=True,
        metavar="NAME",
        help=f"one of {', '.join(DATA_SETS)}; jsonl:FILE or parquet:FILE; OWNER/NAME "
        "of the Hugging Face hub",
    )
    which.add_argument(
        "--split", help="default: of prepare, all; of inspect, the first"
    )
    which.add_argument(
        "--path",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="local files instead of the public ones, in the same form (JSON lines, a "
        "JSON array or Parquet; also gzipped); may be given several times",
    )
    which.add_argument(
        "--max-bad-rows",
        type=a_count,
        metavar="N",
        help="rows that are broken or not in the data set's form, and are skipped "
        "(default: 1 %% of the rows, at least 10)",
    )
    which.add_argument(
        "--no-check",
        action="store_true",
        help="do not try the tests of programs; without it those are dropped that pass "
        "without a solution",
    )
    _prepare(commands.add_parser("prepare", parents=[which, everywhere], help=_PREPARE))
    _inspect(commands.add_parser("inspect", parents=[which, everywhere], help=_INSPECT))
    commands.add_parser(
        "list", parents=[everywhere], help="the known data sets, and which are prepared"
    )
    commands.add_parser(
        "difficulty", add_help=False, help="measure a policy's pass rate on each prompt"
    )
    return parser


def a_count(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 0")
    return int(text)


_PREPARE = "fetch or read a data set, and write it as records"
_INSPECT = "show questions as the policy sees them, and their lengths"


def _prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--overwrite", action="store_true", help="prepare it again if it is there"
    )


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a Hugging Face directory or id, a tokenizer.json, or a .gguf file",
    )
    parser.add_argument(
        "--template",
        default="{question}",
        help="'chat', or a text with {question}, as data.template (default: "
        "%(default)s)",
    )
    parser.add_argument("--system-prompt", default="", help="as data.system_prompt")
    parser.add_argument(
        "--user-template", default="{question}", help="as data.user_template"
    )
    parser.add_argument(
        "--no-thinking",
        action="store_true",
        help="as data.enable_thinking = False",
    )
    parser.add_argument(
        "--rows",
        type=a_count,
        default=3,
        help="how many are shown (default: %(default)s)",
    )
    parser.add_argument(
        "--start", type=a_count, default=0, help="the first (default: %(default)s)"
    )
    parser.add_argument("--ids", action="store_true", help="show token ids too")


def prepare_data(flags: argparse.Namespace) -> None:
    """Prepare a split, or all of them."""
    data_set = find(flags.dataset)
    splits = data_set.splits if flags.split is None else (flags.split,)
    if flags.path and len(splits) > 1 and not data_set.split_of:
        raise ValueError(
            f"--path: {flags.dataset} has the splits {', '.join(splits)}; say which "
            f"one the files hold, as --split={splits[0]}"
        )
    for split in splits:
        choose_split(data_set, split)
        target = prepared_path(flags.dataset, split, flags.directory)
        if is_prepared(target) and not flags.overwrite:
            _say(f"It is there already; --overwrite prepares it again: {target}")
            report = read_report(target)
        else:
            report = prepare(
                flags.dataset,
                split=split,
                directory=flags.directory,
                paths=flags.path,
                max_bad_rows=flags.max_bad_rows,
                overwrite=flags.overwrite,
                try_tests=not flags.no_check,
            )
            _say(f"Prepared: {target}")
        _say(*report.lines())


def inspect_data(flags: argparse.Namespace) -> None:
    """Show what is dropped, some questions, and a table of all."""
    split = choose_split(find(flags.dataset), flags.split)
    own = flags.dataset.partition(":")[0] in OWN_FORMS
    place = flags.directory
    with tempfile.TemporaryDirectory() as made:
        if flags.path or own:
            prepared = prepared_path(flags.dataset, split, place)
            if flags.path or not is_prepared(prepared):
                place = Path(made)
                limit = flags.max_bad_rows
                prepare(
                    flags.dataset,
                    split=split,
                    directory=place,
                    paths=flags.path,
                    max_bad_rows=sys.maxsize if limit is None else limit,
                    try_tests=not flags.no_check,
                )
        questions = open_dataset(flags.dataset, split=split, directory=place)
        report = questions.report
        _say(*report.lines())
        if report.bad.total > usual_limit(report):
            _say(
                f"  prepare would refuse it: it skips {usual_limit(report)} bad rows, "
                f"unless --max-bad-rows allows more"
            )
        _say("")
        _show(questions, flags)


def _show(questions: QuestionSource, flags: argparse.Namespace) -> None:
    view = inspecting.View.make(
        template=flags.template,
        system_prompt=flags.system_prompt,
        user_template=flags.user_template,
        enable_thinking=not flags.no_thinking,
        tokenizer=flags.tokenizer,
    )
    if not 0 <= flags.start < len(questions) or flags.rows < 0:
        raise ValueError(
            f"--start={flags.start} --rows={flags.rows}: there are {len(questions)} "
            f"questions, from 0"
        )
    stop = min(flags.start + flags.rows, len(questions))
    for place in range(flags.start, stop):
        _say(*view.lines(place, questions[place], ids=flags.ids), "")
    _say(*inspecting.summary(questions, view))


def list_data(flags: argparse.Namespace) -> None:
    """Show the known data sets."""
    for data_set in DATA_SETS.values():
        _say(
            data_set.name,
            f"  {data_set.title}",
            f"  {data_set.homepage}",
            f"  {data_set.citation}",
            f"  licence: {data_set.license}",
        )
        for split in data_set.splits:
            target = prepared_path(data_set.name, split, flags.directory)
            state = "not prepared"
            if is_prepared(target):
                state = f"{read_report(target).kept:,} questions in {target}"
            _say(f"  {split}: {state}")


def _say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "prepare": prepare_data,
    "inspect": inspect_data,
    "list": list_data,
}
