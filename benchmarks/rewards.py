"""The verifiers: the shares of real data that they accept, and their speed.

    make bench-rewards
    python benchmarks/rewards.py --sections=maths --workers=1,2
    python benchmarks/rewards.py --sections=maths --answers=DIRECTORY --every=10

Every verdict comes from a `VerifierPool`, as in a run.  Prints Markdown tables.  Maths
answers are MATH-500's and those of all prepared data sets, or of a directory's files:
JSON, JSON lines or Parquet in any form that `scalerl_jax.data` reads.
"""

import argparse
import ast
import contextlib
import gzip
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perturbing import PERTURBATIONS
from rewriting import REWRITINGS, Rule, number_of

from scalerl_jax.data import catalog, drafts, files, own, preparing, records, rows
from scalerl_jax.environments import sandbox
from scalerl_jax.environments.judges import comparing, maths
from scalerl_jax.environments.pool import VerifierPool
from scalerl_jax.environments.verdict import Verifier

THIRD_PARTY = Path(__file__).resolve().parent.parent / "third_party"
_TIMEOUT_S = 60.0
_CODE = {"cpu_s": 40, "wall_s": 45.0, "memory_mib": 1024}
_NAMED = {
    "code": Verifier("scalerl_jax.environments.judges.code:judge", _CODE),
    "math": Verifier(
        "scalerl_jax.environments.judges.maths:judge", {"answer_from": "boxed"}
    ),
}


class Item(NamedTuple):
    """One answer to judge, and the name by which it is listed."""

    name: str
    answer: str
    reference: dict[str, Any]


class Judged(NamedTuple):
    """Statuses in the order of the items, and their total time."""

    statuses: list[str]
    wall_s: float


def judge(items: Sequence[Item], *, workers: int) -> Judged:
    """Judge every item; the processes are warm when the clock starts."""
    pool = VerifierPool(
        score="math:exp", named=_NAMED, timeout_s=_TIMEOUT_S, num_workers=workers
    )
    try:
        warm = items[0]
        pool.submit(-1, "any", [warm.answer] * workers, warm.reference)
        _collect(pool)
        start = time.monotonic()
        for place, item in enumerate(items):
            pool.submit(place, "any", [item.answer], item.reference)
        found = _collect(pool)
        wall_s = time.monotonic() - start
    finally:
        pool.close()
    return Judged([found[place] for place in range(len(items))], wall_s)


def _collect(pool: VerifierPool) -> dict[int, str]:
    found: dict[int, str] = {}
    while pool.pending:
        pool.wait(_TIMEOUT_S)
        for verdicts in pool.poll():
            found[verdicts.key] = verdicts.statuses[0]
    return found


def math500_answers() -> list[str]:
    """Return the reference answers of MATH-500."""
    return json.loads((THIRD_PARTY / "math500/answers.json").read_text())


def boxed(name: str, answer: str, expected: str) -> Item:
    """Return an item whose answer is in a box at the end of a text."""
    reference = {"verifier": "math", "answer": expected}
    return Item(name, f"We find $x$, and so $\\boxed{{{answer}}}$.", reference)


def answers_in(directory: Path) -> dict[str, list[str]]:
    """Return the answers of maths questions in files, by file; others are left out."""
    readers = (rows.read_gsm8k, own.read_own, rows.read_maths)
    found: dict[str, list[str]] = {}
    for path in sorted(directory.rglob("*")):
        if not re.search(r"\.(json|jsonl|parquet)(\.gz)?$", path.name):
            continue
        answers = []
        for each in files.read_rows(path):
            for read in readers:
                with contextlib.suppress(drafts.Malformed, drafts.Unusable):
                    answers += maths.expected_answers(read(each.row or {}).reference)
                    break
        if answers:
            found[str(path.relative_to(directory))] = answers
    return found


def prepared_answers() -> dict[str, list[str]]:
    """Return the answers of the prepared data sets, and of MATH-500."""
    found = {"math500": math500_answers()}
    for name, data_set in catalog.DATA_SETS.items():
        for split in data_set.splits:
            place = preparing.prepared_path(name, split, preparing.DEFAULT_DIRECTORY)
            if records.is_prepared(place):
                questions = preparing.open_dataset(
                    name, split=split, directory=preparing.DEFAULT_DIRECTORY
                )
                found[f"{name}, {split}"] = [
                    answer
                    for question in questions
                    if question.reference["verifier"] == "math"
                    for answer in maths.expected_answers(question.reference)
                ]
    return {name: answers for name, answers in found.items() if answers}


def pairs_of(answers: Sequence[str], rules: Mapping[str, Rule]) -> list[Item]:
    """Return every answer in every form by the rules, with itself as reference."""
    return [
        boxed(f"{answer} | {form} ({name})", form, answer)
        for answer in answers
        for name, rule in rules.items()
        if (form := rule(answer))
    ]


def other_answers(answers: Sequence[str]) -> list[Item]:
    """Return each answer with other ones: the next, one at random, and the nearest.

    Pairs that differ only in spaces are left out.  The nearest is the next in the order
    of the texts.
    """
    chance = random.Random(0)
    in_order = sorted(answers)
    behind = dict(zip(in_order, in_order[1:] + in_order[:1], strict=True))
    pairs = dict.fromkeys(
        (mine, other)
        for mine, following in zip(answers, [*answers[1:], answers[0]], strict=True)
        for other in (following, chance.choice(answers), behind[mine])
        if "".join(mine.split()) != "".join(other.split())
    )
    return [boxed(f"{mine} | {other}", other, mine) for mine, other in pairs]


def is_confirmed(item: Item) -> bool:
    """Return whether an accepted pair is equal by exact numbers, or by `math-verify`.

    Units are left out, as the comparison ignores them by intent.
    """
    expected, found = (
        re.sub(r"\s*(\\(text|mbox)\{[^{}]*\}(\^\{?\d\}?)?|\^\{?\\circ\}?)$", "", each)
        for each in item.name.split(" | ")
    )
    numbers = number_of(expected), number_of(found)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return bool(comparing.same_expressions(expected, found))


def judge_maths(sets: Mapping[str, Sequence[str]], workers: Sequence[int]) -> None:
    """Print shares: rewritten answers accepted, changed and other answers rejected."""
    table: list[tuple[Any, ...]] = [
        (
            *("answers", "different", "rewritten, accepted", "changed, accepted"),
            *("other problems', accepted", "and confirmed"),
        )
    ]
    exceptions: list[str] = []
    for name, answers in sets.items():
        answers = list(dict.fromkeys(answers))
        row = [name, str(len(answers))]
        for rules, usual in ((REWRITINGS, True), (PERTURBATIONS, False)):
            items = pairs_of(answers, rules)
            statuses = judge(items, workers=max(workers)).statuses
            accepted = [status == "correct" for status in statuses]
            row.append(f"{_percent(accepted)} of {len(items):,}")
            exceptions += [
                f"{name}: {item.name}: {status}"
                for item, status in zip(items, statuses, strict=True)
                if (status == "correct") != usual
            ]
        items = other_answers(answers)
        statuses = judge(items, workers=max(workers)).statuses
        equal = [i for i, s in zip(items, statuses, strict=True) if s == "correct"]
        confirmed = [item for item in equal if is_confirmed(item)]
        exceptions += [f"{name}: other: {i.name}" for i in equal if i not in confirmed]
        table.append((*row, f"{len(equal)} of {len(items):,}", str(len(confirmed))))
    _print(table)
    print("\n".join(f"* `{each}`" for each in exceptions), "\n")
    sample = list(dict.fromkeys(each for answers in sets.values() for each in answers))
    sample = random.Random(0).sample(sample, min(len(sample), 60))
    items = [*pairs_of(sample, REWRITINGS), *pairs_of(sample, PERTURBATIONS)]
    random.Random(0).shuffle(items)
    _throughput("maths", items, workers)
    start = time.monotonic()
    for item in items[:200]:
        expected, _, form = item.name.rpartition(" (")[0].partition(" | ")
        comparing.same_expressions(expected, form)
    print(f"math-verify alone, one process: {200 / (time.monotonic() - start):.0f}/s\n")


def _percent(accepted: Sequence[bool]) -> str:
    return f"{100 * sum(accepted) / len(accepted):.3f} %" if accepted else "none"


def human_eval() -> dict[str, Item]:
    """Return canonical solutions of HumanEval, with their tests."""
    with gzip.open(THIRD_PARTY / "human_eval/HumanEval.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    return {
        row["task_id"]: _program(
            row["task_id"],
            row["prompt"] + row["canonical_solution"],
            setup=row["prompt"],
            tests=row["test"] + "\ncheck(candidate)\n",
            entry_point=row["entry_point"],
        )
        for row in rows
    }


def mbpp(path: Path) -> dict[str, Item]:
    """Return canonical solutions in a copy of sanitized-mbpp.json, with their tests."""
    items = {}
    for row in json.loads(path.read_text()):
        name = f"MBPP/{row['task_id']}"
        called = [
            function.name
            for function in ast.parse(row["code"]).body
            if isinstance(function, ast.FunctionDef)
            and re.search(rf"\b{function.name}\s*\(", row["test_list"][0])
        ]
        items[name] = _program(
            name,
            row["code"],
            setup="\n".join(row["test_imports"]),
            tests="\n".join(row["test_list"]),
            entry_point=called[-1] if called else "",
        )
    return items


def _program(name: str, source: str, **tests: str) -> Item:
    reference = {"verifier": "code", "tests": {"kind": "asserts", **tests}}
    return Item(name, f"```python\n{source}\n```", reference)


_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
    **{ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.And: ast.Or, ast.Or: ast.And, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}


class _Swap(ast.NodeTransformer):
    """A transformer that swaps every operator or, if `returns`, changes results."""

    def __init__(self, *, returns: bool) -> None:
        self._returns = returns
        self.swapped = 0

    def visit(self, node: ast.AST) -> ast.AST:
        """Return the node that replaces it."""
        other = _SWAPS.get(type(node))
        if other is not None and not self._returns:
            self.swapped += 1
            return other()
        if self._returns and isinstance(node, ast.Return) and node.value:
            node.value = ast.Tuple([node.value, ast.Constant(0)], ast.Load())
            return node
        return self.generic_visit(node)


def mutated(item: Item) -> Item:
    """Return the same program with every operator swapped."""
    source = item.answer.removeprefix("```python\n").removesuffix("\n```")
    swap = _Swap(returns=False)
    tree = swap.visit(ast.parse(source))
    if not swap.swapped:
        tree = _Swap(returns=True).visit(tree)
    return item._replace(answer=f"```python\n{ast.unparse(tree)}\n```")


def code(workers: Iterable[int], sets: dict[str, dict[str, Item]]) -> None:
    """Print shares of canonical solutions that pass and mutated ones that fail."""
    sandbox.check()
    table = [("programs", "passed", "of", "exceptions")]
    for name, found in sets.items():
        items = list(found.values())
        statuses = judge(items, workers=max(workers)).statuses
        table.append(
            (name, *_share(statuses, "correct"), _listed(items, statuses, "correct"))
        )
        others = [mutated(item) for item in items]
        statuses = judge(others, workers=max(workers)).statuses
        passed = ["passed" if s == "correct" else "failed" for s in statuses]
        table.append(
            (
                f"{name}, mutated",
                *_share(passed, "passed"),
                _listed(others, passed, "failed"),
            )
        )
    _print(table)
    first = next(iter(sets.values()))
    _throughput("asserts", list(first.values())[:100], workers)
    reference = {
        "verifier": "code",
        "tests": {"kind": "stdin", "inputs": ["1 2"] * 10, "outputs": ["3"] * 10},
    }
    program = "```\nprint(sum(map(int, input().split())))\n```"
    _throughput("stdin, 10 each", [Item("", program, reference)] * 100, workers)


def _throughput(name: str, items: Sequence[Item], workers: Iterable[int]) -> None:
    table = [(name, "answers/s", "load of the machine")]
    for count in workers:
        before = os.getloadavg()[0]
        rate = len(items) / judge(items, workers=count).wall_s
        table.append((f"{count} processes", f"{rate:.1f}", f"{before:.1f}"))
    _print(table)


def _share(statuses: Sequence[str], wanted: str) -> tuple[str, str]:
    count = Counter(statuses)[wanted]
    return f"{count} ({count / len(statuses):.1%})", str(len(statuses))


def _listed(items: Sequence[Item], statuses: Sequence[str], usual: str) -> str:
    others = [
        f"`{item.name}` {status}"
        for item, status in zip(items, statuses, strict=True)
        if status != usual
    ]
    return ", ".join(others[:20]) or "none"


def _print(table: Sequence[tuple[str, ...]]) -> None:
    for place, row in enumerate(table):
        print("|", " | ".join(row), "|")
        if place == 0:
            print("|", " | ".join("---" for _ in row), "|")
    print(flush=True)


def main() -> None:
    """Run the requested sections."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", default="maths,code")
    parser.add_argument("--workers", default="1,2", help="numbers of processes")
    parser.add_argument("--answers", type=Path, help="a directory of maths questions")
    parser.add_argument("--every", type=int, default=1, help="take each Nth answer")
    parser.add_argument("--mbpp", type=Path, help="a copy of sanitized-mbpp.json")
    options = parser.parse_args()
    workers = [int(each) for each in options.workers.split(",")]
    for section in options.sections.split(","):
        if section == "maths":
            sets = (
                answers_in(options.answers) if options.answers else prepared_answers()
            )
            judge_maths(
                {name: found[:: options.every] for name, found in sets.items()}, workers
            )
        elif section == "code":
            sets = {"HumanEval": human_eval()}
            if options.mbpp:
                sets["MBPP sanitized"] = mbpp(options.mbpp)
            code(workers, sets)
        else:
            raise SystemExit(f"--sections={section!r}; choose from maths, code")


if __name__ == "__main__":
    main()
