"""The command line: `scalerl data {prepare,inspect,list,difficulty}`.

Input that cannot be used ends with one message and exit status 2.
"""

import argparse
import collections
import importlib
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from scalerl_jax.config import DataConfig
from scalerl_jax.data.catalog import (
    DATA_SETS,
    OWN_FILES,
    columns_of,
    find,
    is_own_file,
    with_columns,
)
from scalerl_jax.data.chat import chat_renderer
from scalerl_jax.data.own import PARTS
from scalerl_jax.data.preparing import (
    DEFAULT_DIRECTORY,
    choose_split,
    open_dataset,
    prepare,
    prepared_path,
)
from scalerl_jax.data.questions import CHAT, Question, plain_renderer
from scalerl_jax.data.records import is_prepared, read_report, upload, upload_file
from scalerl_jax.data.tokenizer import Tokenizer, load_tokenizer
from scalerl_jax.formats import remote
from scalerl_jax.formats.reading import is_remote, local_file
from scalerl_jax.process.ending import Parser, answer
from scalerl_jax.process.printing import to_stdout

# This command is in a layer above, and is imported when it is requested.
_DIFFICULTY = "scalerl_jax.evaluate.difficulty"
_CHUNK = 512  # texts tokenised together
_SHOWN = 2000  # characters of a reference; tests can have millions


def make_parser() -> Parser:
    """Make the parser of all commands."""
    parser = Parser(
        prog="python -m scalerl_jax.data",
        description="Prepare data sets of prompts with verifiable answers, and look at "
        "them. Status 2: the input cannot be used; the message says why.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    everywhere = Parser(add_help=False)
    everywhere.add_argument(
        "--directory",
        type=a_directory,
        default=DEFAULT_DIRECTORY,
        metavar="DIR",
        help="with prepared data sets, as data.directory (default: %(default)s)",
    )
    both = [_which(), everywhere]
    preparing = commands.add_parser(
        "prepare",
        parents=both,
        help="fetch or read a data set, and write it as records",
    )
    preparing.add_argument(
        "--overwrite", action="store_true", help="prepare it again if it exists"
    )
    preparing.add_argument(
        "--upload",
        metavar="gs://BUCKET/PATH",
        help="also copy it there, as data.directory of runs on other machines; for "
        "jsonl:FILE and the like copy the file",
    )
    inspecting = commands.add_parser(
        "inspect",
        parents=both,
        help="show questions as the policy sees them, and their lengths",
    )
    _add_view(inspecting)
    commands.add_parser(
        "list", parents=[everywhere], help="the known data sets, and which are prepared"
    )
    commands.add_parser(
        "difficulty", add_help=False, help="measure a policy's pass rate on each prompt"
    )
    return parser


def _which() -> Parser:
    """Return the flags that choose a data set and the rows to leave out."""
    which = Parser(add_help=False)
    which.add_argument(
        "--dataset",
        required=True,
        metavar="NAME",
        help=f"one of {', '.join(DATA_SETS)}; {OWN_FILES}, or arrow:FOLDER of "
        "save_to_disk(); OWNER/NAME of the Hugging Face hub",
    )
    which.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="PART=COLUMN",
        help="the column of a part of the question, if it does not have a usual name; "
        f"parts: {', '.join(PARTS)}; a field in a column is COLUMN.FIELD; no "
        "COLUMN: not read. May be given several times; in data.tasks of a run write "
        "NAME?PART=COLUMN&PART=COLUMN",
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
        "JSON array, .csv, .tsv, also gzipped; Parquet or Arrow); may be given several "
        "times",
    )
    which.add_argument(
        "--max-bad-rows",
        type=a_count,
        metavar="N",
        help="most rows to skip that are broken or not in the data set's form "
        "(default: 1 %% of the rows, at least 10)",
    )
    which.add_argument(
        "--no-check",
        action="store_true",
        help="do not try the tests of programs; otherwise tests that pass without a "
        "solution are dropped",
    )
    return which


def _add_view(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the questions to show, and their form."""
    add, shown = parser.add_argument, "(default: %(default)s)"
    add(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a Hugging Face directory or id, a tokenizer.json, or a .gguf file",
    )
    add(
        "--template",
        default=DataConfig().template,
        help=f"'chat', or a text with {{question}}, as data.template {shown}",
    )
    add("--system-prompt", default="", help="as data.system_prompt")
    add("--user-template", default="{question}", help="as data.user_template")
    add("--no-thinking", action="store_true", help="as data.enable_thinking = False")
    add("--rows", type=a_count, default=3, help=f"number of questions to show {shown}")
    add("--start", type=a_count, default=0, help=f"first question to show {shown}")
    add("--ids", action="store_true", help="show token ids too")


def a_directory(text: str) -> Path:
    """Parse a local directory."""
    if is_remote(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is in a bucket: data sets are prepared on this machine, and "
            f"prepare --upload={text} copies them there"
        )
    return Path(text)


def a_count(text: str) -> int:
    """Parse a whole number of at least 0."""
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 0")
    return int(text)


def prepare_data(flags: argparse.Namespace) -> None:
    """Prepare a split, or all of them."""
    data_set = find(flags.dataset)
    splits = data_set.splits if flags.split is None else (flags.split,)
    if flags.path and len(splits) > 1 and not data_set.split_of:
        raise ValueError(
            f"--path: {flags.dataset} has the splits {', '.join(splits)}; say which "
            f"one the files hold, as --split={splits[0]}"
        )
    if flags.upload:
        if flags.dataset.startswith("arrow:"):
            raise ValueError(
                f"--upload={flags.upload}: of {flags.dataset} write Parquet first, "
                f"to_parquet() of `datasets`, and upload parquet:FILE"
            )
        # Check the bucket first: preparing may take long.
        remote.open_path(flags.upload, setting="--upload=")
    for split in splits:
        choose_split(data_set, split)
        target = prepared_path(flags.dataset, split, flags.directory)
        if is_prepared(target) and not flags.overwrite:
            _say(f"Already prepared; --overwrite prepares it again: {target}")
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
        if flags.upload and not is_own_file(flags.dataset):
            place = upload(target, flags.directory, flags.upload)
            _say(f"Uploaded: {place}", f"  --config.data.directory={flags.upload}")
    if flags.upload and is_own_file(flags.dataset):
        bare, columns = columns_of(flags.dataset)
        kind, _, file = bare.partition(":")
        place = upload_file(local_file(file), flags.upload)
        name = with_columns(f"{kind}:{place}", [*map("=".join, columns)])
        _say(f"Uploaded: --config.data.tasks=\"('{name}',)\"")


def inspect_data(flags: argparse.Namespace) -> None:
    """Show the dropped rows, some questions, and a table of all."""
    split = choose_split(find(flags.dataset), flags.split)
    place = flags.directory
    with tempfile.TemporaryDirectory() as made:
        if flags.path or is_own_file(flags.dataset):
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
        if report.bad.total > report.usual_limit:
            _say(
                f"  prepare would refuse it: it skips {report.usual_limit} bad rows, "
                f"unless --max-bad-rows allows more"
            )
        _say("")
        _show(questions, flags)


def _show(questions: Sequence[Question], flags: argparse.Namespace) -> None:
    view = View(flags)
    if not 0 <= flags.start < len(questions) or flags.rows < 0:
        raise ValueError(
            f"--start={flags.start} --rows={flags.rows}: there are {len(questions)} "
            f"questions, from 0"
        )
    stop = min(flags.start + flags.rows, len(questions))
    for place in range(flags.start, stop):
        _say(*view.lines(place, questions[place], ids=flags.ids), "")
    _say(*view.summary(questions))


class View:
    """Questions as a policy sees them; without a tokenizer, lengths are characters."""

    def __init__(self, flags: argparse.Namespace) -> None:
        """Read the template and the tokenizer that the flags name.

        Raises:
            ValueError: they do not fit each other, or cannot be read.
        """
        chat, path = flags.template == CHAT, flags.tokenizer
        if chat and path is None:
            raise ValueError("--template=chat needs --tokenizer, which brings it")
        if not chat and (flags.system_prompt or flags.user_template != "{question}"):
            raise ValueError(
                f"--system-prompt and --user-template are for --template={CHAT}; put "
                f"their text into --template={flags.template!r}"
            )
        settings = DataConfig(
            system_prompt=flags.system_prompt,
            user_template=flags.user_template,
            enable_thinking=not flags.no_thinking,
        )
        self._render = (
            chat_renderer(settings, path) if chat else plain_renderer(flags.template)
        )
        self._tokenizer: Tokenizer | None = None
        self._unit = "characters"
        if path:
            self._tokenizer = load_tokenizer(path, must_end=False)
            self._unit = "tokens"

    def lines(self, place: int, question: Question, *, ids: bool) -> list[str]:
        """Return a question as lines of text."""
        text = self._render(question)
        (length,) = self._lengths([text])
        reference = json.dumps(question.reference, ensure_ascii=False)
        if len(reference) > _SHOWN:
            left = len(reference) - _SHOWN
            reference = f"{reference[:_SHOWN]}... and {left:,} characters more"
        head = f"--- {place}: {question.reference['id']}, {length:,} {self._unit} "
        found = [head.ljust(79, "-"), text, "--- reference", reference]
        if ids and self._tokenizer:
            tokens = self._tokenizer.encode(text)
            found += ["--- token ids", " ".join(map(str, tokens))]
        return found

    def summary(self, questions: Sequence[Question]) -> list[str]:
        """Return a table of the lengths of all prompts, and of their verifiers."""
        lengths: list[int] = []
        verifiers: collections.Counter[str] = collections.Counter()
        remaining = iter(tqdm(questions, desc="lengths", unit=" rows", disable=None))
        while chunk := list(itertools.islice(remaining, _CHUNK)):
            lengths += self._lengths([self._render(question) for question in chunk])
            verifiers.update(map(_kind, chunk))
        quantiles = np.quantile(lengths, [0.5, 0.9, 0.99])
        table = {
            "mean": np.mean(lengths),
            **dict(zip(("50 %", "90 %", "99 %"), quantiles, strict=True)),
            "greatest": max(lengths),
        }
        return [
            f"{len(lengths):,} questions; {self._unit} of a prompt:",
            *(f"  {label:<10} {value:>10,.1f}" for label, value in table.items()),
            "verifiers:",
            *(f"  {kind:<14} {count:>6,}" for kind, count in verifiers.most_common()),
        ]

    def _lengths(self, texts: list[str]) -> list[int]:
        if self._tokenizer:
            return self._tokenizer.count_tokens(texts)
        return list(map(len, texts))


def _kind(question: Question) -> str:
    verifier = question.reference["verifier"]
    tests = question.reference.get("tests")
    return f"{verifier}, {tests['kind']}" if tests else verifier


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
        to_stdout(f"{line}\n")


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "prepare": prepare_data,
    "inspect": inspect_data,
    "list": list_data,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["difficulty"]:
        return importlib.import_module(_DIFFICULTY).main(arguments[1:])
    flags = make_parser().parse_args(arguments)
    return answer(lambda: _run(flags))


def _run(flags: argparse.Namespace) -> None:
    if "dataset" in flags:
        flags.dataset = with_columns(flags.dataset, flags.column)
    COMMANDS[flags.command](flags)


if __name__ == "__main__":
    sys.exit(main())
