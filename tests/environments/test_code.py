"""Verdicts on programs: right ones pass, wrong ones fail, whatever they try."""

import time

import pytest
from small_sandbox import sandboxed

from scalerl_jax.environments.judges import code
from scalerl_jax.environments.pool import VerifierPool
from scalerl_jax.environments.verdict import Verifier

ADD_ASSERTS = {
    "kind": "asserts",
    "entry_point": "add",
    "tests": "assert add(1, 2) == 3\nassert add(2, 2) == 4\nassert add('a', '') == 'a'",
}
ADD_CALLS = {
    "kind": "calls",
    "entry_point": "add",
    "inputs": [[1, 2], [2, 2], ["a", ""]],
    "outputs": [3, 4, "a"],
}
ADD_STDIN = {"kind": "stdin", "inputs": ["1 2\n", "2 2\n"], "outputs": ["3\n", "4\n"]}


def judge(source, tests, *, wall_s=20.0, fenced=True):
    answer = f"Here it is:\n```python\n{source}\n```\nDone." if fenced else source
    return code.judge(
        "any", answer, {"tests": tests}, cpu_s=20, wall_s=wall_s, memory_mib=512
    ).status


@pytest.mark.parametrize(
    "output, expected, same",
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("\n 1  2 \n3\n\n", "1 2\n3", True),
        ("1.0", "1", True),
        ("1e3", "1000", True),
        ("yes", "yes", True),
        ("yes", "Yes", False),
        ("1\n2", "1 2", False),
        ("1 2", "1 2 3", False),
        ("1 2 3", "1 2", False),
        ("0.1", "0.10000001", False),
        ("nan", "1", False),
        ("", "", True),
        ("", "1", False),
    ],
)
def test_outputs_are_compared_word_by_word(output, expected, same):
    assert code.same_output(output, expected) is same


@pytest.mark.parametrize(
    "tests, message",
    [
        (None, "needs 'tests'"),
        ({"kind": "guess"}, "'kind' of asserts, calls or stdin"),
        ({"kind": "stdin", "inputs": ["1"], "outputs": []}, "need lists of inputs"),
        (
            {"kind": "stdin", "inputs": [], "outputs": []},
            "outputs, and have \\[\\]",
        ),
        ({"kind": "stdin", "inputs": [1], "outputs": ["1"]}, "must be of str"),
        ({"kind": "stdin", "inputs": ["1"], "outputs": [1]}, "must be of str"),
        ({"kind": "stdin", "inputs": "1", "outputs": "1"}, "need lists of inputs"),
        ({"kind": "stdin"}, "need lists of inputs"),
        ({"kind": "calls", "inputs": [[1]], "outputs": [1]}, "need an 'entry_point'"),
        (ADD_CALLS | {"entry_point": ["add"]}, "no text"),
        ({"kind": "asserts", "tests": "assert ("}, "not Python"),
        ({"kind": "asserts", "tests": " "}, "any solution passes"),
        ({"kind": "asserts", "code": "assert 1"}, r"unknown fields \['code'\]"),
    ],
)
def test_tests_that_cannot_be_run_are_refused(tests, message):
    with pytest.raises(ValueError, match=message):
        code.read_tests({"tests": tests})


@sandboxed
@pytest.mark.parametrize(
    "tests, right, wrong",
    [
        (ADD_ASSERTS, "def add(a, b): return a + b", "def add(a, b): return 3"),
        (ADD_CALLS, "def add(a, b): return a + b", "def add(a, b): return 3"),
        (
            ADD_CALLS | {"entry_point": "Solution().add"},
            "class Solution:\n  def add(self, a, b): return a + b",
            "class Solution:\n  def add(self, a, b): return b + b",
        ),
        (ADD_STDIN, "print(sum(map(int, input().split())))", "print(3)"),
    ],
    ids=["asserts", "calls", "a method", "stdin"],
)
def test_a_right_program_passes_and_a_wrong_one_does_not(tests, right, wrong):
    assert judge(right, tests) == "correct"
    assert judge(wrong, tests) == "wrong"
    assert judge("def add(a, b: return", tests) == "unparsable"
    assert judge(right, tests, fenced=False) == "no_answer"


@sandboxed
@pytest.mark.parametrize(
    "source", ["x = '\ud800'", "\x00", "(" * 10_000, "x" * 2_000_000 + "("]
)
def test_what_is_no_python_is_unparsable(source):
    assert judge(source, ADD_CALLS) == "unparsable"


VALUES = """
import collections, dataclasses, math
Point = collections.namedtuple("Point", "x y")
@dataclasses.dataclass
class Pair:
    a: int
    b: int
class Odd(Exception): pass
def same(x): return x
def point(): return Point(1, 2)
def count(text): return collections.Counter(text)
def pair(a, b): return Pair(a, b)
def total(pairs): return sum(each.a + each.b for each in pairs)
def squares(n): return (i * i for i in range(n))
def root(x):
    if x < 0: raise ValueError("negative")
    return math.sqrt(x)
def sort(values): values.sort()
def fail(): raise Odd("odd")
"""


@sandboxed
@pytest.mark.parametrize(
    "tests",
    [
        "for x in [None, True, 1, -2**70, 1.5, float('inf'), 'a\\ud800', b'x', 1j, [],"
        " (1, [2]), {1, 2}, frozenset([1]), {1: {'a': (1,)}}]:\n"
        "  assert same(x) == x and type(same(x)) is type(x), x",
        "assert point() == (1, 2)",
        "assert count('aab') == {'a': 2, 'b': 1}",
        "assert total([pair(1, 2), Pair(3, 4)]) == 10 and pair(1, 2).b == 2",
        "assert list(squares(4)) == [0, 1, 4, 9] and 9 in squares(4)",
        "try:\n  root(-1)\n  assert False\nexcept ValueError as error:\n"
        "  assert str(error) == 'negative'",
        "x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]",
        "def helper(f): return f(9)\nassert helper(root) == 3",
        "assert root(x=16) == 4 and math.pi > 3",
        "try:\n  fail()\n  assert False\nexcept RuntimeError as error:\n"
        "  assert 'Odd: odd' in str(error)",
    ],
)
def test_values_cross_between_solution_and_tests(tests):
    assert judge(VALUES, {"kind": "asserts", "tests": tests}) == "correct"


@sandboxed
@pytest.mark.parametrize(
    "tests, passes",
    [
        ("self.assertEqual(add(1, 2), 3)", True),
        ("self.assertEqual(add(1, 2), 4)", False),
        ("self.assertTrue(add)\n\n  def test_other(self): self.fail()", False),
    ],
)
def test_unittest_can_be_the_last_line_of_tests(tests, passes):
    head = "import unittest\nclass Sums(unittest.TestCase):\n"
    tests = f"{head}  def test_add(self):\n    {tests}\n"
    for end in ("unittest.main()", "if __name__ == '__main__':\n  unittest.main()"):
        found = judge(
            "def add(a, b): return a + b", {"kind": "asserts", "tests": tests + end}
        )
        assert found == ("correct" if passes else "wrong")


@sandboxed
def test_a_solution_cannot_end_the_iterations_of_tests():
    tests = "assert all(map(lambda pair: add(*pair) == 3, [(1, 2), (2, 1)]))"
    tests = {"kind": "asserts", "tests": tests}
    assert judge("def add(a, b): return a + b", tests) == "correct"
    assert judge("def add(a, b): raise StopIteration", tests) == "wrong"


NOT_A_NUMBER = """
def check(f):
    for x in (1.0, 2.0):
        difference = abs(EXPRESSION - x)
        if difference > 1e-6:
            raise AssertionError
check(root)
"""


@sandboxed
@pytest.mark.parametrize(
    "expression",
    ["f(x * x)", "round(f(x * x), 9)", "sum([f(x * x)])", "2 * f(x * x) / 2"],
)
def test_a_nan_is_in_no_order_with_other_numbers(expression):
    tests = NOT_A_NUMBER.replace("EXPRESSION", expression)
    tests = {"kind": "asserts", "tests": tests}
    assert judge("def root(x): return x ** 0.5", tests) == "correct"
    for value in ("float('nan')", "complex('nan')", "[float('nan')][0]"):
        assert judge(f"def root(x): return {value}", tests) == "wrong"


@sandboxed
def test_a_nan_that_is_right_passes():
    tests = "import math\nx = nan(1.0)\nassert math.isnan(x) and x != x and f'{x}'"
    source = "def nan(x): return float('nan') if x > 0 else x"
    assert judge(source, {"kind": "asserts", "tests": tests}) == "correct"


COLLIDING = """
import __main__, gc
def add(a, b):
    numbers = [number * (2**61 - 1) for number in range(60_000)]
    VALUE
    frames = [each for each in gc.get_objects() if type(each) is __main__.Frames][0]
    frames.send({"value": value})
    return 3
"""


@sandboxed
@pytest.mark.parametrize(
    "value",
    ["{'set': numbers}", "{'dict': [[each, 0] for each in numbers]}", "numbers"],
)
def test_what_is_decoded_of_a_reply_costs_little(value):
    """That many colliding numbers in a set would take half a minute."""
    expected = {"outputs": [list(range(1000)), 4, "a"]}
    start = time.process_time()
    source = COLLIDING.replace("VALUE", f"value = {value}")
    assert judge(source, ADD_CALLS) == "wrong"
    assert judge(source, ADD_CALLS | expected) == "wrong"
    assert not code._holds({"set": [1, 2]}, [1, 2], 0.0)
    assert time.process_time() - start < 1.0


DEMO = "```python\nprint(add(1, 2))\n```\nIt prints:\n```\n3\n```"


@sandboxed
@pytest.mark.parametrize(
    "tests, program",
    [
        (ADD_CALLS, "def add(a, b): return a + b"),
        (ADD_ASSERTS, "def add(a, b): return a + b"),
        (ADD_ASSERTS | {"entry_point": ""}, "add = lambda a, b: a + b"),
        (ADD_STDIN, "print(sum(map(int, input().split())))"),
        (
            ADD_CALLS | {"entry_point": "Solution().add"},
            "class Solution:\n  def add(self, a, b): return a + b",
        ),
    ],
)
def test_a_demonstration_is_not_the_program(tests, program):
    program = f"```python\n{program}\n```"
    for answer in (program + "\n" + DEMO, DEMO + "\n" + program):
        assert judge(answer, tests, fenced=False) == "correct"
    assert judge(DEMO, tests, fenced=False) == "wrong"


ENDS = {
    "atexit": "import atexit\natexit.register(print, 15)",
    "atexit, unbuffered": "import atexit, os\natexit.register(os.write, 1, b'15')",
    "atexit of what comes later": "import atexit\nx = []\n"
    "atexit.register(lambda: print(*x))\nx.append(15)",
    "atexit after an exit": "import atexit\natexit.register(print, 15)\nexit()",
    "a thread": "import threading, time\ndef late():\n  time.sleep(0.1)\n  print(15)\n"
    "threading.Thread(target=late).start()",
    "a thread with a large stack": "import sys, threading\n"
    "sys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
    "def deep(n): return deep(n - 1) + 1 if n else 0\n"
    "def main(): print(deep(15_000) // 1000)\nthreading.Thread(target=main).start()",
    "a file that is left open": "out = open(1, 'w')\nout.write('15')",
    "a standard output of its own": "import io, sys\nsys.stdout = io.StringIO()\n"
    "import atexit, os\nprint(15)\nsys.__stdout__ = None\n"
    "atexit.register(lambda: os.write(1, sys.stdout.getvalue().encode()))",
    "an object that is let go": "import os\nclass A:\n"
    "  def __del__(self): print(15)\na = A()\na.itself = a",
    "a callback that fails": "import atexit\natexit.register(print, 15)\n"
    "atexit.register(int, 'x')\natexit.register(exit, 3)",
    "an own class in pickle": "import pickle\nclass A: x = 15\n"
    "print(pickle.loads(pickle.dumps(A())).x)",
    "an own dataclass": "import dataclasses\n@dataclasses.dataclass\nclass A:\n"
    "  x: 'int' = 15\nprint(A().x)",
    "itself as a module": "import __main__\nx = 15\nprint(__main__.x, end='')",
    "its main function": "def main(): print(15)\nif __name__ == '__main__': main()",
}


@sandboxed
@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_python_ends_one(end):
    tests = {"kind": "stdin", "inputs": ["", "5\n"], "outputs": ["15\n"] * 2}
    assert judge(ENDS[end], tests) == "correct"


@sandboxed
@pytest.mark.parametrize(
    "source",
    [
        "import atexit, time\nprint(15)\natexit.register(time.sleep, 600)",
        "import threading, time\nprint(15)\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()",
        "import threading, time\ndef late():\n  time.sleep(0.1)\n  print(15)\n"
        "threading.Thread(target=late, daemon=True).start()",
        "import atexit\natexit.register(print, 16)\nprint(15)",
        "import atexit\natexit.register(print, 15)\n1 / 0",
        "print(15)\ninput()",
        "import os\nprint(15, flush=True)\nos.kill(os.getpid(), 9)",
    ],
    ids=[
        *("an endless callback", "an endless thread", "a daemon", "a line too much"),
        *("an error", "the end of the input", "a signal"),
    ],
)
def test_a_program_that_does_not_end_well_is_wrong(source):
    tests = {"kind": "stdin", "inputs": [""], "outputs": ["15\n"]}
    assert judge(source, tests, wall_s=1.5) == "wrong"


# What one input's process could do to the verdict on it or on the next one.
@sandboxed
@pytest.mark.parametrize(
    "source",
    [
        """
import atexit, json, os, struct
body = json.dumps({"value": [0, "15"]}).encode()
def forge():
    for number in range(64):
        try: os.write(number, struct.pack("=I", len(body)) + body)
        except OSError: pass
atexit.register(forge)
""",
        """
import gc, sys
frame = sys._getframe()
while frame:
    for value in frame.f_locals.values():
        if type(value).__name__ == "Frames":
            for _ in range(3): value.send({"value": [0, "15"]})
    frame = frame.f_back
""",
        """
import os, threading
def outlive():
    while True:
        try: open("/tmp/output", "w").write("15")
        except OSError: pass
threading.Thread(target=outlive, daemon=True).start()
os._exit(3)
""",
    ],
    ids=["every descriptor at the end", "the harness's own channel", "outliving"],
)
def test_a_program_has_no_say_in_its_verdict(source):
    for outputs in (["15"], ["15", "15"]):
        tests = {"kind": "stdin", "inputs": [""] * len(outputs), "outputs": outputs}
        assert judge(source, tests, wall_s=5.0) == "wrong"


GIVEN = """
class Solution:
    def f(self, a: List[int], b: Optional[str] = None) -> Dict[str, int]:
        seen, best = defaultdict(int), -inf
        @cache
        def g(k): return 1 if k < 2 else g(k - 1) + g(k - 2)
        heapq.heapify(a)
        while a: best = max(best, heappop(a))
        return [best, g(10), bisect.bisect([1, 2], 1), math.gcd(4, 6), deque([7])[0]]
"""


@sandboxed
@pytest.mark.parametrize(
    "tests",
    [
        {"kind": "calls", "inputs": [[[3, 1]]], "outputs": [[3, 89, 1, 2, 7]]},
        {"kind": "asserts", "tests": "assert candidate([3, 1]) == [3, 89, 1, 2, 7]"},
    ],
    ids=["calls", "asserts"],
)
def test_solutions_have_the_names_that_judges_give(tests):
    tests |= {"entry_point": "Solution().f"}
    assert judge(GIVEN, tests) == "correct"
    assert judge(GIVEN.replace("cache", "cached"), tests) == "wrong"
    own = "def defaultdict(x): raise KeyError"
    assert judge(f"{own}\n{GIVEN}", tests) == "wrong"


@sandboxed
@pytest.mark.parametrize("kind", ["calls", "asserts"])
def test_a_given_name_is_no_solution(kind):
    tests = {
        "calls": {"kind": "calls", "inputs": [[4, 6]], "outputs": [2]},
        "asserts": {"kind": "asserts", "tests": "assert gcd(4, 6) == 2"},
    }[kind] | {"entry_point": "gcd"}
    assert judge("def f(a, b): return gcd(a, b)", tests) == "wrong"
    assert judge("from math import gcd", tests) == "correct"
    assert judge("def f(a, b): return gcd(a, b)\ngcd = math.gcd", tests) == "correct"


@sandboxed
def test_whole_numbers_have_any_number_of_digits():
    nines, power = "9" * 5000, "1" + "0" * 5000
    stdin = {"kind": "stdin", "inputs": [nines], "outputs": [power]}
    assert judge("print(int(input()) + 1)", stdin) == "correct"
    assert judge("print(int(input()) + 2)", stdin) == "wrong"
    for expected in ("10**5000", f"int('{power}')", power):
        tests = {"kind": "asserts", "tests": f"assert f({nines}) == {expected}"}
        assert judge("def f(x): return x + 1", tests) == "correct"
        assert judge("def f(x): return x + 2", tests) == "wrong"
    calls = {"kind": "calls", "entry_point": "f", "inputs": [[]], "outputs": [[1]]}
    assert judge(f"def f(): return [{power}]", calls) == "wrong"
    assert judge(f"def f(): return [len(str({power})) - 5000]", calls) == "correct"


# What a solution may try that does not add.  Each is a whole program.
CHEATS = {
    "exit at import": "import sys; sys.exit(0)",
    "hard exit at import": "import os; os._exit(0)",
    "exit when called": "import sys\ndef add(a, b): sys.exit(0)",
    "hard exit when called": "import os\ndef add(a, b): os._exit(0)",
    "exit handlers": "import atexit, os\natexit.register(os._exit, 0)\n1 / 0",
    "print success": "def add(a, b): print('{\"why\": \"\"}'); print('correct', 'OK')",
    "success on every descriptor": """
import os, struct
for body in (b'{"why": ""}', b'{"value": null}', b'{"readable": true}'):
    for number in range(64):
        try: os.write(number, struct.pack("=I", len(body)) + body)
        except OSError: pass
def add(a, b): return None
""",
    "equal to everything": """
class Same(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def add(a, b): return Same(0)
""",
    "equal to everything and no number": """
class Same:
    def __eq__(self, other): return True
    def __req__(self, other): return True
    def __bool__(self): return True
def add(a, b): return Same()
""",
    "patched builtins": """
import builtins, operator
builtins.AssertionError = type("Never", (Exception,), {})
builtins.all = builtins.any = builtins.isinstance = lambda *_: True
operator.eq = lambda *_: True
def add(a, b): return None
""",
    "patched harness": """
import sys
harness = sys.modules["__main__"]
harness.run_tests = lambda *_: ""
harness.encode = lambda *_: True
for name in ("Solution", "Remote", "Frames"):
    for method in ("_perform", "_ask", "__eq__", "receive"):
        setattr(getattr(harness, name), method, lambda *_, **__: {"why": ""})
def add(a, b): return None
""",
    "looking for the tests": """
import gc, os, sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        frame.f_locals.update(why="")
        frame = frame.f_back
    for each in gc.get_objects():
        if isinstance(each, dict) and "tests" in each: return 3 if a == 1 else 4
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ", "fd/0", "fd/3", "fd/4"):
            try:
                if b"assert" in open(f"/proc/{pid}/{name}", "rb").read(0): return 3
            except OSError: pass
""",
    "killing all others": """
import os, signal
try: os.kill(-1, signal.SIGKILL)
except OSError: pass
try: os.kill(os.getppid(), signal.SIGKILL)
except OSError: pass
def add(a, b): return None
""",
    "endless": "def add(a, b):\n  while True: pass",
    "endless import": "while True: pass",
    "sleeping": "import time\ndef add(a, b): time.sleep(600)",
    "endless value": "def add(a, b):\n  x = []\n  x.append(x)\n  return x",
    "deep value": "def add(a, b):\n  x = 0\n  for _ in range(9**6): x = x,\n  return x",
    "huge value": "def add(a, b): return 'x' * 10**8",
    "stdin swallowed": "import sys\nsys.stdin.read()\ndef add(a, b): return None",
}


@sandboxed
@pytest.mark.parametrize("tests", [ADD_ASSERTS, ADD_CALLS], ids=["asserts", "calls"])
@pytest.mark.parametrize("cheat", CHEATS)
def test_no_cheat_passes(cheat, tests):
    assert judge(CHEATS[cheat], tests, wall_s=1.5) == "wrong"


@sandboxed
@pytest.mark.parametrize("cheat", ["exit at import", "success on every descriptor"])
def test_no_program_passes_without_the_right_output(cheat):
    assert judge(CHEATS[cheat], ADD_STDIN) == "wrong"


@sandboxed
def test_right_output_of_a_program_that_fails_is_wrong():
    right = "print(sum(map(int, input().split())))"
    assert judge(right + "\nexit(1)", ADD_STDIN) == "wrong"
    assert judge(right + "\nexit()", ADD_STDIN) == "correct"


@sandboxed
def test_helpers_of_the_tests_are_not_the_solution_s_to_replace():
    tests = {
        "kind": "asserts",
        "entry_point": "root",
        "setup": "def square(x): return x * x\ndef root(x): pass",
        "tests": "def check(candidate):\n  assert abs(square(candidate(9)) - 9) < 1e-6"
        "\ncheck(candidate)",
    }
    assert judge("def root(x): return x ** 0.5", tests) == "correct"
    cheat = "def square(x): return 9\ndef abs(x): return 0\ndef root(x): return 0"
    assert judge(cheat, tests) == "wrong"


def verdicts_of(pool, tests, answers):
    pool.submit(0, "any", answers, {"verifier": "code", "tests": tests})
    while True:
        pool.wait(60.0)
        if found := pool.poll():
            return found[0]


@pytest.fixture
def pool(monkeypatch, request):
    if request.param == "without bubblewrap":
        monkeypatch.setenv("PATH", "/nonexistent")
    settings = {"cpu_s": 5, "wall_s": 5.0, "memory_mib": 512}
    made = VerifierPool(
        score="math:exp",
        named={
            "code": Verifier("scalerl_jax.environments.judges.code:judge", settings)
        },
        timeout_s=20.0,
        num_workers=2,
    )
    yield made
    made.close()


@sandboxed
@pytest.mark.parametrize("pool", ["as it is"], indirect=True)
def test_the_pool_judges_the_programs_of_a_group(pool):
    blocks = [f"```\n{body}\n```" for body in ("print(1)", "print(2)", "print(")]
    tests = {"kind": "stdin", "inputs": [""], "outputs": ["1"]}
    found = verdicts_of(pool, tests, [*blocks, "no block", None])
    expected = ["correct", "wrong", "unparsable", "no_answer", "no_answer"]
    assert (found.statuses, found.detail) == (expected, "")


@pytest.mark.parametrize("pool", ["without bubblewrap"], indirect=True)
def test_without_a_sandbox_a_program_is_refused_and_not_run(pool, tmp_path):
    marker = tmp_path / "ran"
    answer = f"```\nopen({str(marker)!r}, 'w')\n```"
    tests = {"kind": "stdin", "inputs": [""], "outputs": [""]}
    found = verdicts_of(pool, tests, [answer])
    assert found.statuses == ["verifier_error"]
    assert "apt-get install bubblewrap" in found.detail
    assert not marker.exists()


def verdict(source, tests, **settings):
    limits = dict(cpu_s=20, wall_s=20.0, memory_mib=512) | settings
    answer = f"```python\n{source}\n```"
    return code.judge("any", answer, {"tests": tests}, **limits)


@pytest.mark.parametrize(
    "output, expected, same",
    [
        ("0.10000001", "0.1", True),
        ("0.1001", "0.1", False),
        ("1000000.5", "1000000.0", True),  # relative above 1
        ("1000002.0", "1000000.0", False),
        ("3", "3.0000001", True),
        ("1000001", "1000000", False),  # whole numbers are no approximations
        ("nan", "1.0", False),
        ("inf", "1.0", False),
        ("yes 0.5", "no 0.5", False),
        ("0.5 0.5", "0.5", False),
    ],
)
def test_a_tolerance_is_for_numbers_with_a_decimal_point(output, expected, same):
    assert code.same_output(output, expected, 1e-6) is same
    assert not code.same_output(output, expected)


@pytest.mark.parametrize(
    "value, expected, same",
    [
        (0.1 + 0.2, 0.3, True),
        ([1, (0.1 + 0.2,)], [1, [0.3]], True),
        ({1: 0.1 + 0.2}, {"1": 0.3}, True),
        (3, 3.0000001, True),
        (3.1, 3, False),
        (1_000_001, 1_000_000, False),
        (True, 1.0000001, False),
        (float("nan"), 1.0, False),
        (10**400, 1.5, False),
        ("0.1", 0.1, False),
        ([0.3], [0.3, 0.3], False),
    ],
)
def test_a_tolerance_is_for_returned_floats(value, expected, same):
    assert code.same_value(value, expected, 1e-6) is same
    assert not code.same_value(value, expected)


@sandboxed
def test_the_tolerance_is_off_unless_it_is_set():
    stdin = {"kind": "stdin", "inputs": [""], "outputs": ["0.3"]}
    calls = {"kind": "calls", "entry_point": "f", "inputs": [[]], "outputs": [0.3]}
    for source, tests in (
        ("print(0.1 + 0.2)", stdin),
        ("def f(): return 0.1 + 0.2", calls),
    ):
        assert verdict(source, tests).status == "wrong"
        assert verdict(source, tests, float_tolerance=1e-9).status == "correct"


@sandboxed
@pytest.mark.parametrize("tests", [ADD_ASSERTS, ADD_CALLS, ADD_STDIN])
def test_a_missing_module_is_the_verifier_s_failure(tests, tmp_path):
    right = "def add(a, b): return a + b\nif __name__ == '__main__':\n"
    right += "    print(add(*map(int, input().split())))"
    source = f"import numpy as np\n{right}"
    found = verdict(source, tests)
    assert found.status == "verifier_error"
    assert (
        "the solution imports 'numpy', which the sandbox does not have" in found.detail
    )
    (tmp_path / "numpy.py").write_text("")
    tmp_path.chmod(0o755)
    assert verdict(source, tests, packages=str(tmp_path)).status == "correct"


@sandboxed
@pytest.mark.parametrize(
    "source",
    [
        "import no_such_module",
        "import math, no_such_module\nimport numpyy",
        "raise ModuleNotFoundError(\"No module named 'numpy'\")",
        "text = '''\n import numpy\n'''\nraise ModuleNotFoundError('numpy')",
        "try:\n    import numpy\nexcept ImportError:\n    pass\nprint(4)",
        "def add(a, b):\n    import numpy\n    return 4",
        "print(4)\nif 0:\n    import numpy",
        "def add(a, b): return 4\nprint(4)",
    ],
)
def test_a_solution_cannot_claim_that_a_module_is_missing(source):
    for tests in (ADD_ASSERTS, ADD_CALLS, ADD_STDIN):
        assert verdict(source, tests)[:2] == ("wrong", "")


@sandboxed
@pytest.mark.parametrize("part", ["setup", "tests"])
def test_a_module_that_the_tests_miss_fails_no_solution(part, tmp_path):
    tests = {"kind": "asserts", "setup": "", "tests": "assert add(1, 2) == 3"}
    tests[part] = f"import some_package.part\n{tests[part]}"
    found = verdict("def add(a, b): return a + b", tests)
    assert found.status == "verifier_error"
    assert "the tests import 'some_package.part', which the sandbox" in found.detail
    assert verdict("def add(a, b): return 4", tests).status == "verifier_error"
    tests[part] = "try:\n  import some_package\nexcept ImportError: pass\nassert True"
    assert verdict("def add(a, b): return a + b", tests).status == "correct"
