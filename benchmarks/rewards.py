"""The verifiers: what they accept and reject of real data, and how fast.

    make bench-rewards
    python benchmarks/rewards.py --sections=maths --workers=1,2

Every verdict comes from a `VerifierPool`, as in a run.  Prints Markdown tables.
"""

import argparse
import ast
import gzip
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scalerl_jax.rewards import sandbox
from scalerl_jax.rewards.serving import Verifier
from scalerl_jax.rewards.verifier import VerifierPool

THIRD_PARTY = Path(__file__).resolve().parent.parent / "third_party"
_TIMEOUT_S = 60.0
_CODE = {"cpu_s": 40, "wall_s": 45.0, "memory_mib": 1024}
_NAMED = {
    "code": Verifier("scalerl_jax.rewards.code:judge", _CODE),
    "math": Verifier("scalerl_jax.rewards.maths:judge", {"answer_from": "boxed"}),
}


class Item(NamedTuple):
    """One answer to judge, and the name by which it is listed."""

    name: str
    answer: str
    reference: dict[str, Any]


class Judged(NamedTuple):
    """Statuses in the order of the items, and how long they took together."""

    statuses: list[str]
    wall_s: float


def judge(items: Sequence[Item], *, workers: int) -> Judged:
    """Have every item judged; processes are warm when the clock starts."""
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
    """The reference answers of MATH-500."""
    return json.loads((THIRD_PARTY / "math500/answers.json").read_text())


def rewritings(answer: str) -> dict[str, str]:
    """An answer in three other writings of the same value."""
    return {
        "typeset": _typeset(answer),
        "plain": _plain(answer),
        "not reduced": _not_reduced(answer),
    }


def _typeset(answer: str) -> str:
    text = answer.replace(r"\frac", r"\dfrac")
    text = re.sub(r",(?!\d{3}|\\!)", r",\\,", text)  # not within a number
    if r"\left" not in text:
        text = text.replace("(", r"\left(").replace(")", r"\right)")
        if text.count(r"\left") != text.count(r"\right"):  # a half-open interval
            text = text.replace(r"\left", "").replace(r"\right", "")
    return rf" \displaystyle {text} "


def _plain(answer: str) -> str:
    number = r"(?:\{(-?\w+)\}|(\d))"
    text = re.sub(rf"\\d?frac{number}{number}", r"(\1\2/\3\4)", answer)
    text = re.sub(r"\\sqrt\{(\w+)\}", r"(\1)^{1/2}", text)
    text = re.sub(r"\\text\{([^}]*)\}", r"\1", text)
    text = text.replace(r"\left", "").replace(r"\right", "").replace(r"^\circ", "")
    if re.fullmatch(r"-?\d+", text):
        return f"{int(text):,}" if abs(int(text)) >= 1000 else f"{text}.0"
    return text


def _not_reduced(answer: str) -> str:
    if re.search(
        r"[,=<>_]|\\pm|\\text|\\mbox|\\begin|\\in|\\le|\\ge|\\%|\\\$|\[|[A-Z]", answer
    ):
        return f"  {answer} \\quad"
    return rf"\frac{{2 \cdot \left( {answer} \right)}}{{2}}"


def boxed(name: str, answer: str, expected: str) -> Item:
    """An item whose answer is in a box at the end of a text."""
    reference = {"verifier": "math", "answer": expected}
    return Item(name, f"We find $x$, and so $\\boxed{{{answer}}}$.", reference)


def maths(workers: Iterable[int]) -> None:
    """MATH-500's answers against themselves, rewritten, and against the next one's."""
    answers = math500_answers()
    table = [("against itself", "accepted", "of", "not accepted")]
    for name in rewritings("1"):
        items = [boxed(each, rewritings(each)[name], each) for each in answers]
        statuses = judge(items, workers=1).statuses
        table.append(
            (name, *_share(statuses, "correct"), _listed(items, statuses, "correct"))
        )
    following = [*answers[1:], answers[0]]
    items = [
        boxed(f"{mine} = {other}", other, mine)
        for mine, other in zip(answers, following, strict=True)
        if mine != other
    ]
    statuses = judge(items, workers=1).statuses
    accepted = [s if s != "correct" else "accepted" for s in statuses]
    rejected = ["no" if s != "accepted" else s for s in accepted]
    table.append(
        ("the next", *_share(rejected, "accepted"), _listed(items, rejected, "no"))
    )
    _print(table)
    _throughput("maths", items, workers)


def human_eval() -> dict[str, Item]:
    """Canonical solutions and the tests of them."""
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
    """The same of a copy of sanitized-mbpp.json."""
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
    """Every operator becomes another one; without any, what is returned does."""

    def __init__(self, *, returns: bool) -> None:
        self._returns = returns
        self.swapped = 0

    def visit(self, node: ast.AST) -> ast.AST:
        """The node that stands in its place."""
        other = _SWAPS.get(type(node))
        if other is not None and not self._returns:
            self.swapped += 1
            return other()
        if self._returns and isinstance(node, ast.Return) and node.value:
            node.value = ast.Tuple([node.value, ast.Constant(0)], ast.Load())
            return node
        return self.generic_visit(node)


def mutated(item: Item) -> Item:
    """The same program with every operator swapped."""
    source = item.answer.removeprefix("```python\n").removesuffix("\n```")
    swap = _Swap(returns=False)
    tree = swap.visit(ast.parse(source))
    if not swap.swapped:
        tree = _Swap(returns=True).visit(tree)
    return item._replace(answer=f"```python\n{ast.unparse(tree)}\n```")


def code(workers: Iterable[int], sets: dict[str, dict[str, Item]]) -> None:
    """Canonical solutions pass, mutated ones fail."""
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
    """Run the sections that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", default="maths,code")
    parser.add_argument("--workers", default="1,2", help="numbers of processes")
    parser.add_argument("--mbpp", type=Path, help="a copy of sanitized-mbpp.json")
    options = parser.parse_args()
    workers = [int(each) for each in options.workers.split(",")]
    for section in options.sections.split(","):
        if section == "maths":
            maths(workers)
        elif section == "code":
            sets = {"HumanEval": human_eval()}
            if options.mbpp:
                sets["MBPP sanitized"] = mbpp(options.mbpp)
            code(workers, sets)
        else:
            raise SystemExit(f"--sections={section!r}; choose from maths, code")


if __name__ == "__main__":
    main()
