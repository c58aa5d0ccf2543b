"""One reader of JSON from outside: a value, or a short reason."""

import ast
import collections
import json
import os
import re
from pathlib import Path

import pytest

import scalerl_jax
from scalerl_jax.formats.bounded import (
    check_regular,
    last_lines,
    read_bytes,
    read_lines,
)
from scalerl_jax.formats.reading import MAX_DEPTH, Fields, parse_json, read_json


def nested(depth):
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("text", [nested(MAX_DEPTH), b"\xef\xbb\xbf{}", '"[[["', "1e5"])
def test_usual_json_is_read(text):
    plain = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    assert parse_json(text) == json.loads(plain)


def test_brackets_in_texts_nest_nothing():
    value = {"code": "[" * 500, "more": [[{}]] * 200}
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        (b"\xff\xfe", "not UTF-8"),
        (nested(MAX_DEPTH + 1), "deeper than 100"),
        ('{"a":' * 101 + "1" + "}" * 101, "deeper than 100"),
        (nested(10**6), "deeper than 100"),
        ("1" * 5000, "thousands of digits"),
    ],
)
def test_other_texts_are_a_reason(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_only_regular_files_are_read(tmp_path):
    for path in ("/dev/zero", tmp_path):
        with pytest.raises(ValueError, match="no regular file"):
            check_regular(type(tmp_path)(path))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match=r"list\.json must hold a JSON object"):
        read_json(tmp_path / "list.json")


def test_what_is_too_large_or_has_no_end_is_refused(tmp_path):
    sparse, pipe, zero = (tmp_path / name for name in ("sparse", "pipe", "zero"))
    with open(sparse, "wb") as file:
        file.truncate(1 << 40)
    os.mkfifo(pipe)
    zero.symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match="sparse has 1,099,511,627,776 bytes"):
        read_bytes(sparse, most=9)
    with pytest.raises(ValueError, match="a line of more than 1 MiB, line 1"):
        list(read_lines(sparse, most=2**20))
    with pytest.raises(ValueError, match="a last line of more than 1 MiB"):
        last_lines(sparse, most=2**20)
    for path in (pipe, zero, tmp_path):
        for read in (read_bytes, read_json, last_lines, lambda p: list(read_lines(p))):
            with pytest.raises(ValueError, match="is no regular file"):
                read(path)
    with pytest.raises(ValueError, match="loop: there is no such file"):
        read_bytes(tmp_path / "loop")
    # A file of the kernel's says that it has no bytes, and has more.
    with pytest.raises(ValueError, match="has 5 bytes, and 4 are read"):
        read_bytes(Path("/proc/self/cmdline"), most=4)
    (tmp_path / "nine").write_bytes(b"9" * 9)
    assert read_bytes(tmp_path / "nine", most=9) == b"9" * 9


@pytest.mark.parametrize("longest", [1, 100, 70_000, 300_000])
def test_last_lines_are_those_that_are_whole(tmp_path, longest):
    lines = [b"%d:" % number + b"x" * longest + b"\n" for number in range(5)]
    file = tmp_path / "rows.jsonl"
    for torn in (b"", b"torn"):
        file.write_bytes(b"".join(lines) + torn)
        for count in (1, 3, 9):
            assert last_lines(file, count) == lines[-count:]
    file.write_bytes(b"torn")
    assert last_lines(file) == []


# What reads a whole file, or a text whose depth nobody has looked at.
_METHODS = {"read_text", "read_bytes", "readlines"}
_FUNCTIONS = {
    *("json.load", "json.loads", "np.load", "np.loadtxt", "np.genfromtxt"),
    *("np.fromfile", "np.memmap", "pickle.load", "pickle.loads", "gzip.open"),
    *("tomllib.load", "tomllib.loads", "yaml.safe_load", "open", "os.open"),
}
_LAST = {name.rpartition(".")[2] for name in _FUNCTIONS} | _METHODS | {"read"}


def unbounded_reads(source):
    """The calls of a module that read without a bound, as it writes them."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if not isinstance(node.func, ast.Name | ast.Attribute):
            continue
        last = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        if last not in _LAST:
            continue
        name = ast.unparse(node.func)
        given = [*node.args, *(each.value for each in node.keywords)]
        texts = [each.value for each in given if isinstance(each, ast.Constant)]
        writes = any(re.fullmatch("[rb]*[wax+][bt+]*", str(each)) for each in texts)
        if name in _FUNCTIONS and not (last == "open" and writes):
            yield name
        elif (
            isinstance(node.func, ast.Attribute)
            and not name.startswith("bounded.")
            and (
                last in _METHODS
                or (
                    last == "open"
                    and not writes
                    and (not node.args or texts[:1] == ["rb"])
                )
                or (last == "read" and not given)
            )
        ):
            yield f".{last}"


_OWN = "a file of this package"
_CHECKPOINT = "of a checkpoint, whose size and checksum its manifest has"
_KERNEL = "a small file of the kernel's"
_SANDBOX = "a message of bounded length, or a file within the sandbox"
_WRITTEN = "JSON that this package has just written itself"
_UPLOADED = "a file that this package wrote, on its way to a bucket"
# Module and call -> how often it may stand there, and why it needs no bound.
UNBOUNDED = {
    ("formats/bounded.py", ".read_bytes"): (1, "made from a file of a bounded head"),
    ("formats/reading.py", "json.loads"): (
        1,
        "the one reader, which looks at the depth",
    ),
    ("formats/bounded.py", "os.open"): (1, "the one that opens"),
    ("cluster/kept_batches.py", "json.loads"): (1, "what this process has written"),
    ("cluster/session.py", ".read_bytes"): (1, _OWN),
    ("cluster/slice_hosts.py", ".read"): (1, "a file of a host's last words"),
    ("config/__init__.py", "json.loads"): (1, _WRITTEN),
    ("config/bases.py", ".read_text"): (1, _OWN),
    ("data/chat_process.py", "json.loads"): (2, "between a process and its parent"),
    ("data/gym.py", "json.loads"): (1, _WRITTEN),
    ("data/observations.py", "json.loads"): (1, _WRITTEN),
    ("evaluate/results.py", ".read_text"): (1, _OWN),
    ("scaling/live_page.py", ".read_bytes"): (1, _OWN),
    ("launch/job.py", "tomllib.loads"): (1, "a text within bounds"),
    ("learner/checkpoint.py", "json.loads"): (1, _WRITTEN),
    ("learner/contents.py", ".read_bytes"): (1, _CHECKPOINT),
    ("learner/contents.py", "np.load"): (1, _CHECKPOINT),
    ("learner/places.py", "json.loads"): (1, _WRITTEN),
    ("learner/places.py", "open"): (1, "for a checksum, in parts"),
    ("learner/places.py", "os.open"): (1, "to wait for the disk"),
    ("model/weights.py", "np.memmap"): (1, "mapped, within the size that was checked"),
    ("weights/channels.py", ".open"): (1, "buffers of the size that is expected"),
    ("environments/harness.py", "json.loads"): (2, _SANDBOX),
    ("environments/harness.py", "open"): (2, _SANDBOX),
    ("environments/harness.py", "os.open"): (3, _SANDBOX),
    ("environments/harness.py", ".read"): (1, _SANDBOX),
    ("environments/process.py", "open"): (1, _KERNEL),
    ("environments/process.py", ".read"): (1, _KERNEL),
    ("environments/sandbox.py", "json.loads"): (2, _SANDBOX),
    ("environments/sandbox.py", ".read"): (1, _SANDBOX),
    ("environments/judges/values.py", ".read"): (1, "no file: a reader of notation"),
    ("scaling/report.py", ".read_text"): (1, _OWN),
    ("serve/app.py", ".read_bytes"): (1, _OWN),
    ("study/design.py", ".read_text"): (1, _OWN),
    ("study/runs.py", ".read_bytes"): (1, _OWN),
    ("process/ending.py", "os.open"): (1, "/dev/null"),
    ("formats/gguf.py", "np.memmap"): (1, "mapped, within the size that was checked"),
    ("formats/gguf.py", ".read_bytes"): (1, "made from a bounded head"),
    ("formats/gguf_head.py", ".read"): (1, "the reader of a head itself"),
    ("machines/platforms.py", ".read_text"): (1, _KERNEL),
    ("machines/ray_access.py", ".open"): (
        1,
        "a regular file, of which a token is read",
    ),
    ("machines/ray_access.py", "os.open"): (2, "to write, and to lock a directory"),
    ("formats/remote.py", ".read_bytes"): (1, _UPLOADED),
    ("run/directory.py", "json.loads"): (1, _WRITTEN),
    ("run/files.py", ".read_bytes"): (1, _UPLOADED),
    ("run/files.py", ".read_text"): (1, _KERNEL),
    ("run/progress.py", "os.open"): (1, "to write"),
    ("run/writing.py", "os.open"): (2, "to write"),
    ("parallel/xla.py", ".read_bytes"): (
        1,
        "an entry of JAX's cache, which it reads so",
    ),
    ("parallel/xla.py", ".read_text"): (1, _KERNEL),
    ("wiring/paper_table.py", ".read_text"): (1, _OWN),
    ("wiring/teacher.py", "json.loads"): (1, "what a tokenizer that was read writes"),
}


def test_files_are_read_by_the_functions_that_have_bounds():
    package = Path(scalerl_jax.__file__).parent
    found = collections.Counter(
        (file.relative_to(package).as_posix(), call)
        for file in package.rglob("*.py")
        for call in unbounded_reads(file.read_text())
    )
    assert found == {place: count for place, (count, _) in UNBOUNDED.items()}


@pytest.mark.parametrize(
    "source, calls",
    [
        ("Path(x).read_text()", [".read_text"]),
        ("json.load(file)", ["json.load"]),
        ("open(x)", ["open"]),
        ("open(x, encoding='utf-8')", ["open"]),
        ("open(x, 'rb')", ["open"]),
        ("path.open('rb')", [".open"]),
        ("file.read()", [".read"]),
        ("file.readlines()", [".readlines"]),
        ("np.load(x)", ["np.load"]),
        ("open(x, 'w')", []),
        ("path.open('ab')", []),
        ("file.read(9)", []),
        ("bounded.read_text(path)", []),
    ],
)
def test_a_read_without_bounds_is_found(source, calls):
    assert list(unbounded_reads(source)) == calls


@pytest.mark.parametrize("value", [0, 0.0, 1, 2.5])
def test_a_field_may_be_zero_where_it_is_said_so(value):
    fields = Fields("file", {"rate": value})
    assert fields.number("rate", zero=True) == value
    if value == 0:
        with pytest.raises(ValueError, match=r"file: rate = 0(\.0)? .* above 0"):
            fields.number("rate")


@pytest.mark.parametrize(
    "value", [-1, float("nan"), float("inf"), True, "1", None, [1], 10**400]
)
def test_a_field_that_is_no_number_is_refused_in_one_short_line(value):
    fields = Fields("file", {"rate": value, "pairs": [[1, value]]})
    for read in (
        lambda: fields.number("rate", zero=True),
        lambda: fields.pairs("pairs", "[count, seconds]"),
    ):
        with pytest.raises(ValueError, match=r"^file: (rate|pairs) .{,320}$"):
            read()


def test_pairs_and_names_of_fields_are_held_to_their_form():
    assert Fields("file", {"a": [[1, 0], [2.5, 3]]}).pairs("a", "") == (
        (1.0, 0.0),
        (2.5, 3.0),
    )
    for other in ([1, 2], {}, [[1]], [[1, 2, 3]]):
        with pytest.raises(ValueError, match="must be a list of pairs"):
            Fields("file", {"a": other}).pairs("a", "")
    Fields("file", {"a": 1}).known(["a", "b"], what="field")
    with pytest.raises(ValueError, match=r"'c' is no field; choose from \['a', 'b'\]"):
        Fields("file", {"c": 1}).known(["a", "b"], what="field")
