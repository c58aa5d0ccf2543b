"""Program that runs inside the sandbox: a solution, or the tests of one.

They never share a process or a sandbox.  The solution's side answers requests and
holds no secret: no test, no expected value, no verdict.  The tests' side holds those,
runs none of the solution's code, and gets only data from it: plain values, copied, and
handles to everything else.  So a solution cannot pass for right by anything that it
prints, patches, compares equal or exits with.

A bare Python runs this file alone: it imports only the standard library, and is above
400 lines.
A frame is 4 bytes of length and JSON.
"""

from __future__ import annotations  # none is evaluated

import _ctypes  # by itself: `ctypes` takes half as long as the rest of a start
import array
import atexit
import builtins
import gc
import io
import json
import operator
import os
import resource
import struct
import sys
import types

TYPE_CHECKING = False  # `typing` is not imported: that takes half of a start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MAX_FRAME = 64 * 2**20  # bytes that the tests' side reads of one reply
_OUTPUT = "/tmp/output"  # of a program, in the sandbox's own /tmp
# Of prctl, in linux/prctl.h and linux/seccomp.h.
_SET_DUMPABLE, _SET_SECCOMP, _FILTER = 4, 22, 2


class Frames:
    """Messages over two file descriptors."""

    def __init__(
        self, reading: int, writing: int, constants: dict[str, float] | None = None
    ) -> None:
        """Take both descriptors, and the values of JSON's constants (NaN, Infinity)."""
        self._constant = constants.__getitem__ if constants else None
        self._input = os.fdopen(reading, "rb")
        self._output = os.fdopen(writing, "wb")

    def send(self, message: Any) -> None:
        """Write one message."""
        body = json.dumps(message).encode()
        self._output.write(struct.pack("=I", len(body)) + body)
        self._output.flush()

    def receive(self) -> Any:
        """Read one message.

        Raises:
            EOFError: the other side has ended.
        """
        (length,) = struct.unpack("=I", self._read(4))
        if length > _MAX_FRAME:
            raise EOFError(f"a frame of {length} bytes")
        return json.loads(self._read(length), parse_constant=self._constant)

    def leave(self) -> None:
        """Point both descriptors at /dev/null, in a process that is not to use them."""
        nowhere = os.open("/dev/null", os.O_RDWR)
        for file in (self._input, self._output):
            os.dup2(nowhere, file.fileno())
        os.close(nowhere)

    def _read(self, length: int) -> bytes:
        body = self._input.read(length)
        if len(body) < length:
            raise EOFError
        return body


def encode(value: Any, handle: Callable[[Any], Any]) -> Any:
    """Return a value as JSON: plain ones by content, others as what `handle` says."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return operator.index(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [encode(each, handle) for each in value]}
    if isinstance(value, dict):
        pairs = dict.items(value)
        return {"dict": [[encode(k, handle), encode(v, handle)] for k, v in pairs]}
    return handle(value)


def decode(tree: Any, resolve: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the value that `encode` wrote; `resolve` finds those of handles."""
    if not isinstance(tree, dict):
        return tree
    ((name, content),) = tree.items()
    if name in _CONTAINERS:
        return _CONTAINERS[name](decode(each, resolve) for each in content)
    if name == "dict":
        return {decode(k, resolve): decode(v, resolve) for k, v in content}
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "complex":
        return next((part for part in content if part != part), complex(*content))
    return resolve(tree)


_CONTAINERS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
# Operations that the tests' side may ask of a value on the solution's side.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "value": lambda value: value,
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "attribute": lambda value, name: getattr(value, name),
    "item": lambda value, key: value[key],
    "list": list,
    "len": len,
    "str": str,
    "bool": bool,
}


class Solution:
    """The solution's side: its code, and answers to requests."""

    def __init__(self, frames: Frames, job: dict[str, Any], alone: bytes) -> None:
        """Compile the code; the requests say how it is run, behind a filter.

        Raises:
            SyntaxError: it is not Python.
        """
        self._frames, self._alone = frames, alone
        self._code = compile(job["source"], "solution.py", "exec")
        self._namespace: dict[str, Any] = {}
        self._handles: list[Any] = []

    def serve(self) -> None:
        """Answer until the other side ends."""
        while True:
            request = self._frames.receive()
            try:
                answer = getattr(self, f"_{request.pop('do')}")(**request)
            except BaseException as error:  # noqa: BLE001  the other side judges it
                answer = {"raised": [type(error).__name__, str(error)[:200]]}
            self._frames.send(answer)

    def _define(self) -> dict[str, Any]:
        """Run the code as a module, for its functions."""
        refuse_processes(self._alone)
        module = types.ModuleType("solution")
        sys.modules["solution"] = module  # where a dataclass looks for its types
        self._namespace = module.__dict__
        # As builtins: the code has not defined them, and tests cannot ask for them.
        self._namespace["__builtins__"] = builtins.__dict__ | given_names(self._code)
        exec(self._code, self._namespace)
        return {"value": None}

    def _perform(
        self, operation: str, arguments: Any, named: Any, changes: bool = True
    ) -> dict[str, Any]:
        """Perform an operation; return its value, and its arguments if they changed."""
        given = decode(arguments, self._find)
        value = _OPERATIONS[operation](*given, **decode(named, self._find))
        answer = {"value": encode(value, self._keep)}
        if not changes:
            return answer
        after = encode(given, self._keep_known)
        return answer if after == arguments else answer | {"arguments": after}

    def _run(self, stdin: str) -> dict[str, Any]:
        """Run the code as a program, in a process of its own."""
        with open("/tmp/input", "w", encoding="utf-8") as file:
            file.write(stdin)
        gc.freeze()  # the garbage collector skips what is older than the program
        child = os.fork()
        if child == 0:
            self._be_program()
        _, status = os.waitpid(child, 0)
        with open(_OUTPUT, encoding="utf-8", errors="replace") as file:
            return {"value": [os.waitstatus_to_exitcode(status), file.read()]}

    def _be_program(self) -> None:
        """Run the code as the main module of this process, which is its own."""
        code = 1
        try:
            refuse_processes(self._alone)
            self._frames.leave()
            for number, path, mode in (
                (0, "/tmp/input", os.O_RDONLY),
                (1, _OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            ):
                opened = os.open(path, mode)
                os.dup2(opened, number)
                os.close(opened)
            sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False))
            sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False))
            module = sys.modules["__main__"] = types.ModuleType("__main__")
            code = run_main(self._code, module)
        finally:
            os._exit(code & 0xFF)

    def _keep(self, value: Any) -> dict[str, Any]:
        self._handles.append(value)
        return {"handle": len(self._handles) - 1}

    def _keep_known(self, value: Any) -> dict[str, Any]:
        for place, known in enumerate(self._handles):
            if known is value:
                return {"handle": place}
        return self._keep(value)

    def _find(self, tree: dict[str, Any]) -> Any:
        if "expression" in tree:
            names = self._namespace | {"__builtins__": builtins}
            return eval(tree["expression"], names)
        return self._handles[tree["handle"]]


def run_main(code: types.CodeType, module: types.ModuleType) -> int:
    """Run code as a program, end it as Python would, and return the exit code.

    This waits for threads, calls the functions of `atexit`, and releases the module's
    values, which closes its files.  Python's own end would free everything else too,
    and takes ten times as long as all the rest of a short program.
    """
    status = 0
    try:
        exec(code, module.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  the exit code reports it
        status = 1

    def wait_for_threads() -> None:
        if threading := sys.modules.get("threading"):
            threading._shutdown()

    def let_go() -> None:
        kept = "__builtins__"  # of its functions
        module.__dict__.update(dict.fromkeys(module.__dict__.keys() - {kept}))
        gc.collect()

    def flush() -> None:
        sys.stdout.flush()

    for part in (wait_for_threads, atexit._run_exitfuncs, flush, let_go, flush):
        try:
            part()
        except BaseException:  # noqa: BLE001  Python prints and ignores these
            status = status or 120 * (part is flush)  # Python's own exit code
    return status


# Names that judges like LeetCode's define for a solution: the part of LiveCodeBench's
# `import_string` (lcb_runner/evaluation/testing_util.py) that solutions use.  As there,
# a module takes precedence over its member of the same name.
_GIVEN = {
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Generic "
    "Hashable Iterable Iterator List Literal Mapping NamedTuple NoReturn Optional "
    "Sequence Set Tuple Type TypeVar Union",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest "
    "nsmallest",
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce "
    "singledispatch total_ordering wraps",
    "itertools": "accumulate chain combinations combinations_with_replacement compress "
    "count cycle dropwhile filterfalse groupby islice pairwise permutations product "
    "repeat starmap takewhile tee zip_longest",
    "math": "acos asin atan atan2 cbrt ceil comb copysign cos degrees dist e exp fabs "
    "factorial floor fmod frexp fsum gcd hypot inf isclose isfinite isinf isnan isqrt "
    "lcm log log10 log1p log2 modf nan perm pi prod radians sin sqrt tan tau trunc",
    "operator": "add and_ attrgetter concat contains eq floordiv ge getitem gt iadd "
    "itemgetter le lshift lt methodcaller mod mul ne neg or_ rshift sub truediv xor",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits hexdigits "
    "octdigits printable punctuation whitespace",
    "copy": "deepcopy",
    "random": "choice choices randint randrange sample shuffle uniform",
    "statistics": "fmean mean median mode pstdev stdev variance",
    "datetime": "date timedelta",
    "io": "StringIO",
    "sys": "maxsize",
    "re": "findall finditer fullmatch match search split",
    "json": "",
}


def given_names(code: types.CodeType) -> dict[str, Any]:
    """Return the names and modules of `_GIVEN` that `code` uses, also as attributes.

    Modules of other names are not imported: some take longer than the rest of a start.
    """
    codes, used = [code], set[str]()
    while codes:
        each = codes.pop()
        used.update(each.co_names)
        codes += [part for part in each.co_consts if isinstance(part, types.CodeType)]
    given = {
        member: getattr(__import__(name), member)
        for name, members in _GIVEN.items()
        for member in used.intersection(members.split())
    }
    return given | {name: __import__(name) for name in used.intersection(_GIVEN)}


class NotANumber(float):
    """A NaN from the solution on the tests' side; ordering it raises AssertionError.

    `abs(found - expected) > limit` is False for a NaN, which no test means to pass.
    """

    # ruff: noqa: D102, D105  Python's own operations

    def _itself(self, *_: Any) -> NotANumber:
        return self

    def _refuse(self, other: Any) -> bool:
        raise AssertionError(f"a NaN of the solution is compared with {other!r:.80}")

    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = _itself
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _itself
    __pow__ = __rpow__ = __abs__ = __neg__ = __pos__ = __round__ = _itself  # type: ignore[assignment]
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


_CONSTANTS = {
    "NaN": NotANumber("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}


class Remote:
    """The tests' handle to a name of the solution, or to its value that is not plain.

    Its operations run on the solution's side, except comparisons, which run here.
    """

    def __init__(self, frames: Frames, tree: dict[str, Any]) -> None:
        """Make the handle to what `encode` wrote as `tree`."""
        object.__setattr__(self, "_frames", frames)
        object.__setattr__(self, "_tree", tree)

    def _ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        given = (self, *arguments)
        self._frames.send(
            {
                "do": "perform",
                "operation": operation,
                "arguments": encode(list(given), _tree_of),
                "named": encode(named, _tree_of),
            }
        )
        reply = self._frames.receive()
        if "raised" in reply:
            raise _exception(*reply["raised"])
        if "arguments" in reply:
            _update(given, decode(reply["arguments"], self._resolve))
        return decode(reply["value"], self._resolve)

    def _resolve(self, tree: dict[str, Any]) -> Remote:
        return Remote(self._frames, tree)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("attribute", name)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __iter__(self) -> Any:
        return iter(self._ask("list"))

    def __len__(self) -> int:
        return self._ask("len")

    def __str__(self) -> str:
        return self._ask("str")

    def __bool__(self) -> bool:
        return self._ask("bool")

    def __contains__(self, member: Any) -> bool:
        return member in self._ask("list")  # not the solution's to decide

    def __eq__(self, other: object) -> bool:
        """Compare plain values by content; any other value equals only itself."""
        if "expression" not in self._tree:
            return isinstance(other, Remote) and self._tree == other._tree
        value = self._ask("value")
        return value == other

    def __hash__(self) -> int:
        return hash(str(self._tree))


def _tree_of(value: Any) -> dict[str, Any]:
    if isinstance(value, Remote):
        return value._tree
    raise TypeError(f"a solution cannot be given a {type(value).__name__}")


def _exception(name: Any, text: Any) -> Exception:
    kind = getattr(builtins, str(name), None)
    # StopIteration would end the loops of `all(map(...))`, which then holds.
    stops = kind in (StopIteration, StopAsyncIteration)
    if isinstance(kind, type) and issubclass(kind, Exception) and not stops:
        try:
            return kind(str(text))
        except TypeError:  # UnicodeDecodeError and others need more arguments
            pass
    return RuntimeError(f"{name}: {text}")


def _update(given: tuple[Any, ...], after: list[Any]) -> None:
    """Change lists, sets and dictionaries as the solution has changed its copies."""
    for mine, theirs in zip(given, after, strict=True):
        if type(mine) is not type(theirs) or isinstance(mine, Remote):
            continue
        if isinstance(mine, list):
            mine[:] = theirs
        elif isinstance(mine, set | dict):
            mine.clear()
            mine.update(theirs)


def run_tests(job: dict[str, Any], solution: Frames) -> str:
    """Run tests; return why they failed, "" if they passed.

    Names that neither Python nor `job["setup"]` defines are the solution's, and so are
    `candidate` and its own name, `job["entry_point"]`.  Tests are a program whose exit
    status counts: `unittest.main()` is one way to end them.
    """
    import ast  # takes longer than all that the solution's side imports

    module = sys.modules["__main__"] = types.ModuleType("__main__")
    names: dict[str, Any] = module.__dict__
    tree = ast.parse(job["tests"])
    exec(compile(job["setup"], "setup.py", "exec"), names)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name in used - names.keys() - set(dir(builtins)):
        names[name] = Remote(solution, {"expression": name})
    if job["entry_point"]:
        entry = Remote(solution, {"expression": job["entry_point"]})
        names |= {"candidate": entry, job["entry_point"]: entry}
    try:
        exec(compile(tree, "tests.py", "exec"), names)
    except SystemExit as end:
        return f"SystemExit: {end.code}"[:200] if end.code else ""
    except BaseException as error:  # noqa: BLE001  returned to the caller
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def confine(limits: dict[str, int], user: int) -> None:
    """Set resource limits, and a user if root made the sandbox, for good."""
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, name), (most, most))
    # Else a program could write into the memory of the harness, which may fork.
    _prctl(_SET_DUMPABLE, 0, 0)


def refuse_processes(program: bytes) -> None:
    """Set a filter of system calls for good; b"": the machine has none."""
    if not program:
        return
    kept = array.array("B", program)
    described = struct.pack("HP", len(program) // 8, kept.buffer_info()[0])
    _prctl(_SET_SECCOMP, _FILTER, described)


def _prctl(option: int, *values: int | bytes) -> None:
    own: Any = None  # None: the process itself, which has loaded the C library
    prctl: Any = _ctypes.dlsym(_ctypes.dlopen(own, 0), "prctl")
    if _ctypes.call_function(prctl, (option, *values)):
        raise OSError(f"prctl refuses option {option}")


def main(arguments: list[str]) -> None:
    """Run as `harness.py SIDE OPTIONS`, and do the job that stdin brings."""
    side, options = arguments[1], json.loads(arguments[2])
    alone = bytes.fromhex(options["filter"])
    del sys.argv[1:]  # the harness's arguments, which no program gets
    frames = Frames(os.dup(0), os.dup(1))
    # Python's `site` defines these; it would take longer than all else here.
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)
    sys.set_int_max_str_digits(0)  # CPU time is limited, and judges lift it too
    sys.path.append("/packages")  # the sandbox's packages, if it has any
    confine(options["limits"], options["user"])
    nowhere = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    frames.send({"ready": True})
    job = frames.receive()
    if side == "tests":
        refuse_processes(alone)
        reading, writing = options["solution"]
        other = Frames(reading, writing, _CONSTANTS)
        frames.send({"why": run_tests(job, other)})
        return
    try:
        solution = Solution(frames, job, alone)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        frames.send({"unreadable": f"{type(error).__name__}: {error}"[:200]})
        return
    frames.send({"readable": True})
    try:
        solution.serve()
    except EOFError:
        os._exit(0)  # does not wait for the solution's threads


if __name__ == "__main__":
    main(list(sys.argv))
