"""Data sets prepared from small files, and opened again."""

import bz2
import concurrent.futures
import dataclasses
import gzip
import hashlib
import http.server
import json
import lzma
import re

import pyarrow
import pyarrow.parquet
import pytest
import small_server
from small_sandbox import sandboxed

from scalerl_jax.data import catalog, files, preparing, records
from scalerl_jax.data.__main__ import main
from scalerl_jax.data.catalog import find, is_own_file, split_of, with_columns
from scalerl_jax.data.preparing import open_dataset, prepare
from scalerl_jax.data.sources import Web

SUMS = [{"id": f"sum-{n}", "question": f"{n} + 1?", "answer": n + 1} for n in range(9)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_file(path):
    return f"jsonl:{path}"


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "prepared"


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """A data set that tests only read."""
    home = tmp_path_factory.mktemp("sums")
    name = as_file(write_lines(home / "sums.jsonl", SUMS))
    return open_dataset(name, split=None, directory=home / "prepared")


def left_in(directory):
    return sorted(path.name for path in directory.rglob("*"))


def test_questions_come_in_their_order_with_their_references(sums):
    assert len(sums) == 9
    for row, question in zip(SUMS, sums, strict=True):
        assert question.text == row["question"]
        assert question.reference == {
            "verifier": "math",
            "answer": str(row["answer"]),
            "id": row["id"],
        }
        assert question.task == sums.name


def test_a_source_is_indexed_as_a_sequence(sums):
    texts = [row["question"] for row in SUMS]
    assert [question.text for question in sums[2:7:2]] == texts[2:7:2]
    assert sums[-1].text == texts[-1]
    assert [each.text for each in sums.read([5, 0, 5])] == [
        texts[5],
        texts[0],
        texts[5],
    ]
    assert sums[3:3] == []
    for place in (9, -10):
        with pytest.raises(IndexError, match="for 9 members"):
            sums[place]


def test_records_in_several_files_are_one_sequence(tmp_path, directory, monkeypatch):
    monkeypatch.setattr(records, "_SHARD", 4)  # records in a file
    name = as_file(write_lines(tmp_path / "sums.jsonl", SUMS))
    source = open_dataset(name, split=None, directory=directory)
    assert len(list(directory.rglob("*.array_record-*"))) == 3
    assert [question.text for question in source] == [row["question"] for row in SUMS]
    assert source[7].text == SUMS[7]["question"]


def test_callers_that_prepare_the_same_at_once_get_the_same(tmp_path, directory):
    name = as_file(write_lines(tmp_path / "sums.jsonl", SUMS * 20))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        sources = list(
            pool.map(
                lambda _: open_dataset(name, split=None, directory=directory), range(3)
            )
        )
    assert [len(source) for source in sources] == [9, 9, 9]
    assert [path.name for path in directory.iterdir()] == ["jsonl"]


def test_the_report_says_what_was_dropped_and_where(tmp_path, directory):
    lines = [json.dumps(row).encode() for row in SUMS[:3]]
    lines += [
        b'{"question": "2 + 2?", "answer": ',
        b'{"question": "\xff?", "answer": 1}',
        b"[1, 2]",
        b"",
        b'{"question": "3 + 3?"}',
        b'{"id": "sum-1", "question": "1 + 1 again?", "answer": 2}',
        b'{"question": "", "answer": 2}',
        b'{"question": "?", "answer": ""}',
        b'{"question": "\\ud800?", "answer": 2}',
        b'{"question": "Last?", "answer": 2}',
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\n".join(lines))
    source = open_dataset(as_file(path), split="train", directory=directory)
    assert [each.text for each in source] == ["0 + 1?", "1 + 1?", "2 + 1?", "Last?"]
    report = source.report
    assert (report.rows, report.kept) == (12, 4)
    assert {reason: each["count"] for reason, each in report.dropped.items()} == {
        "its id is repeated": 1,
        "the question is empty": 1,
        "the answer is empty": 1,
        "it holds half a character of UTF-16": 1,
    }
    assert report.bad == {
        "broken JSON": {"count": 1, "first": "mixed.jsonl, line 4"},
        "invalid UTF-8": {"count": 1, "first": "mixed.jsonl, line 5"},
        "not a JSON object": {"count": 1, "first": "mixed.jsonl, line 6"},
        "field 'answer' or 'tests' is missing, and so is 'reference' (null where a "
        "reward function of your own needs none)": {
            "count": 1,
            "first": "mixed.jsonl, line 8",
        },
    }
    (file,) = report.files
    assert file["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_answers_that_the_verifier_cannot_read_are_dropped(tmp_path, directory):
    rows = [
        {"question": "A?", "answer": r"\frac{1}{2}"},
        {"question": "B?", "answer": "}{"},
        {"question": "C?", "answer": "7"},
    ]
    path = write_lines(tmp_path / "answers.jsonl", rows)
    source = open_dataset(as_file(path), split=None, directory=directory)
    assert [question.text for question in source] == ["A?", "C?"]
    assert source.report.dropped == {
        "the answer cannot be read": {"count": 1, "first": "answers.jsonl, line 2"}
    }


@sandboxed
def test_tests_that_cannot_be_run_are_dropped(tmp_path, directory):
    asserts = {"kind": "asserts", "tests": "assert f() == 1"}
    rows = [
        {"question": "A?", "tests": asserts},
        {"question": "B?", "tests": asserts | {"tests": "assert f( == 1"}},
    ]
    path = write_lines(tmp_path / "code.jsonl", rows)
    source = open_dataset(as_file(path), split=None, directory=directory)
    assert [question.reference["tests"] for question in source] == [asserts]
    assert source.report.dropped["the tests cannot be run"]["count"] == 1


@pytest.mark.parametrize(
    "bad_rows, limit, refused",
    [(10, None, False), (11, None, True), (1, 1, False), (1, 0, True)],
)
def test_too_many_bad_rows_are_refused(tmp_path, directory, bad_rows, limit, refused):
    path = write_lines(tmp_path / "sums.jsonl", SUMS)
    with path.open("a") as file:
        file.write("{\n" * bad_rows)
    name = as_file(path)
    options = {"split": None, "directory": directory, "max_bad_rows": limit}
    if not refused:
        assert prepare(name, **options).kept == 9
        return
    with pytest.raises(ValueError, match="sums.jsonl, line 10: "):
        prepare(name, **options)
    assert left_in(directory) == []


def test_a_file_without_a_question_is_refused_and_leaves_nothing(tmp_path, directory):
    path = write_lines(tmp_path / "none.jsonl", [{"question": "?", "answer": ""}] * 3)
    with pytest.raises(ValueError, match="is left(.|\n)*answer is empty"):
        open_dataset(as_file(path), split=None, directory=directory)
    assert left_in(directory) == []


def test_what_is_there_is_overwritten_only_on_demand(tmp_path, directory):
    rows = [{"question": "2 + 2?", "answer": "so\n#### 4"}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    options = {"split": "test", "directory": directory, "paths": [path]}
    prepare("gsm8k", **options)
    write_lines(path, [*rows, {"question": "2 + 3?", "answer": "#### 5"}])
    with pytest.raises(ValueError, match="is already prepared"):
        prepare("gsm8k", **options)
    assert len(open_dataset("gsm8k", split="test", directory=directory)) == 1
    prepare("gsm8k", **options, overwrite=True)
    assert len(open_dataset("gsm8k", split="test", directory=directory)) == 2
    path.write_text("{\n" * 20)
    with pytest.raises(ValueError, match="broken JSON"):
        prepare("gsm8k", **options, overwrite=True)
    assert len(open_dataset("gsm8k", split="test", directory=directory)) == 2


def test_a_changed_file_is_another_data_set(tmp_path, directory):
    name = as_file(write_lines(tmp_path / "sums.jsonl", SUMS))
    assert len(open_dataset(name, split=None, directory=directory)) == 9
    write_lines(tmp_path / "sums.jsonl", SUMS[:4])
    assert len(open_dataset(name, split=None, directory=directory)) == 4


def test_all_forms_of_a_file_hold_the_same_questions(tmp_path, directory, sums):
    lines = write_lines(tmp_path / "sums.jsonl", SUMS).read_bytes()
    (tmp_path / "zipped").write_bytes(gzip.compress(lines, mtime=0))
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf\r\n" + lines)
    (tmp_path / "array").write_text(json.dumps(SUMS, indent=2))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(SUMS), tmp_path / "table", row_group_size=2
    )
    write_arrow(tmp_path / "stream", SUMS, pyarrow.ipc.new_stream)
    write_arrow(tmp_path / "file", SUMS, pyarrow.ipc.new_file)
    for form in ("zipped", "marked", "array", "table", "stream", "file"):
        found = [each.row for each in files.read_rows(tmp_path / form)]
        assert found == SUMS, form


def write_arrow(path, rows, form):
    table = pyarrow.Table.from_pylist(rows)
    with form(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("name, sign", [("a.csv", ","), ("a.TSV", "\t")])
@pytest.mark.parametrize("zipped", [False, True])
def test_tables_of_texts(tmp_path, name, sign, zipped):
    lines = ["id,question,answer", 'a,"1 + 1, or\n""two""?",2', "b,2 + 2?,", "c,3"]
    content = "\r\n".join(line.replace(",", sign) for line in lines)
    content = ("\ufeff" + content.replace(f"1{sign}", "1,")).encode()
    path = tmp_path / (f"{name}.gz" if zipped else name)
    path.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    first, second, third = files.read_rows(path)
    assert first.row == {"id": "a", "question": '1 + 1, or\n"two"?', "answer": "2"}
    assert second.row == {"id": "b", "question": "2 + 2?", "answer": None}
    assert (third.row, third.reason) == (None, "not as many cells as the header")
    assert third.place == f"{path.name}, line 5"


def save(folder, rows, **more):
    """Write what `datasets` writes by save_to_disk()."""
    folder.mkdir(parents=True)
    write_arrow(folder / "data-00000-of-00001.arrow", rows, pyarrow.ipc.new_stream)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], **more}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_folder_that_datasets_saved(tmp_path, directory):
    one = save(tmp_path / "one", SUMS)
    assert len(open_dataset(f"arrow:{one}", split=None, directory=directory)) == 9
    both = tmp_path / "both"
    for split, count in (("test", 2), ("train", 3)):
        save(both / split, SUMS[:count])
    (both / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    for split, count in ((None, 3), ("train", 3), ("test", 2)):
        source = open_dataset(f"arrow:{both}", split=split, directory=directory)
        assert (len(source), source.report.split) == (count, split or "train")
    assert split_of(f"arrow:{both}@test") == (f"arrow:{both}", "test")
    save(tmp_path / "both@test", SUMS)
    assert split_of(f"arrow:{both}@test") == (f"arrow:{both}@test", "")


@pytest.mark.parametrize(
    "state, why",
    [
        ({"_data_files": [{"filename": "../one/state.json"}]}, "is no path below"),
        ({"_data_files": [{"filename": "none.arrow"}]}, "not all in its folder"),
        ({"_data_files": []}, "not all in its folder"),
        ({"_indices_files": [{"filename": "i.arrow"}]}, "flatten_indices"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(tmp_path, directory, state, why):
    folder = save(tmp_path / "one", SUMS, **state)
    with pytest.raises(ValueError, match=why):
        open_dataset(f"arrow:{folder}", split=None, directory=directory)
    (folder / "state.json").unlink()
    with pytest.raises(ValueError, match="neither state.json nor dataset_dict.json"):
        open_dataset(f"arrow:{folder}", split=None, directory=directory)


def test_a_name_says_the_columns(tmp_path, directory):
    rows = [{"text": f"{n} + 1?", "gold": n + 1, "of": {"x": 1}} for n in range(3)]
    name = as_file(write_lines(tmp_path / "other.jsonl", rows))
    with pytest.raises(ValueError, match=r"columns 'text', 'gold', 'of\.x': say which"):
        open_dataset(name, split=None, directory=directory)
    name = with_columns(name, ["prompt=text", "reference=gold"])
    assert split_of(name) == (name, "") and is_own_file(name)
    source = open_dataset(name, split=None, directory=directory)
    assert [each.text for each in source] == ["0 + 1?", "1 + 1?", "2 + 1?"]
    assert source[2].reference["answer"] == "3"
    hub = "owner/name?prompt=text"
    assert split_of(f"{hub}@test") == (hub, "test")
    assert find(hub).homepage.endswith("/owner/name")


@pytest.mark.parametrize(
    "name, columns, why",
    [
        ("jsonl:a", ["text"], "write PART=COLUMN"),
        ("jsonl:a", ["prompt=a/../b"], "write PART=COLUMN"),
        ("jsonl:a", ["prompt="], "no column is named for 'prompt'"),
        ("jsonl:a", ["question=text"], "choose from"),
        ("jsonl:a", ["prompt=a", "prompt=b"], "several columns are named"),
        ("jsonl:a", ["tools=t"], "tools cannot be given"),
        ("gsm8k", ["prompt=text"], "read by its own columns"),
    ],
)
def test_columns_that_cannot_be_named(name, columns, why):
    with pytest.raises(ValueError, match=why):
        find(with_columns(name, columns))


def test_rows_of_parquet_that_are_no_utf_8_are_told_apart(tmp_path):
    raw = pyarrow.array([b"good", b"\xff", b"also"], pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    path = tmp_path / "table.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": column}), path)
    found = list(files.read_rows(path))
    assert [each.reason for each in found] == ["", "invalid UTF-8", ""]
    assert found[1].place == "table.parquet, row 2"


@pytest.mark.parametrize("said", ["classes", "{", '{"info": {"features": [1]}}'])
def test_numbers_of_classes_are_read_as_their_names(tmp_path, said):
    """As `datasets` stores them: the number is no answer to any question."""
    features = {
        "label": {"names": ["no", "yes"], "_type": "ClassLabel"},
        "gone": {"names": ["no", "yes"], "_type": "ClassLabel"},
        "others": [{"dtype": "int32", "_type": "Value"}],
    }
    classes = said == "classes"
    said = json.dumps({"info": {"features": features}}) if classes else said
    table = pyarrow.table({"label": [1, 0, -1, 2, None], "others": [[1]] * 5})
    path = tmp_path / "table.parquet"
    pyarrow.parquet.write_table(
        table.replace_schema_metadata({"huggingface": said}), path
    )
    found = [each.row["label"] for each in files.read_rows(path)]
    assert found == (["yes", "no", *[None] * 3] if classes else [1, 0, -1, 2, None])


def test_a_reference_that_could_not_be_read_again_is_dropped(tmp_path, directory):
    deep = "[" * 99 + "]" * 99
    tests = json.dumps({"fn_name": "f", "inputs": [deep], "outputs": ["1"]})
    rows = [{"question": "1?", "tests": tests}, {"question": "2?", "answer": 2}]
    name = as_file(write_lines(tmp_path / "deep.jsonl", rows))
    source = open_dataset(name, split=None, directory=directory)
    assert [question.text for question in source] == ["2?"]
    assert [*source.report.dropped] == ["its reference nests deeper than 100"]


def test_a_reference_that_json_lacks_is_dropped(tmp_path, directory):
    rows = [{"question": "1?", "reference": {"gold": b"1"}}, {"question": "2?"}]
    path = tmp_path / "table.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    source = open_dataset(f"parquet:{path}", split=None, directory=directory)
    assert [question.text for question in source] == ["2?"]
    (reason,) = source.report.dropped
    assert "a value that JSON lacks" in reason


@pytest.mark.parametrize(
    "content, why",
    [
        (b"[1, 2", "JSON array and is not one"),
        (b"PAR1 nothing else", "not a Parquet file"),
        (b"ARROW1 nothing else", "not an Arrow file"),
        (b"\xff\xff\xff\xff\x10\x00\x00\x00 and less", "not an Arrow file"),
        (gzip.compress(b'{"question": 1}', mtime=0)[:-9], "cannot be read"),
        (b"(\xb5/\xfd\x04", "is compressed by zstd, which is not read"),
        (bz2.compress(b"{}"), "is compressed by bzip2"),
        (lzma.compress(b"{}"), "is compressed by xz"),
        (b'PK\x03\x04\n{"question": 1}\n', "is a ZIP archive"),
        ("{}".encode("utf-16"), "is UTF-16"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(tmp_path, content, why):
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        list(files.read_rows(path))


@pytest.mark.parametrize(
    "content, why",
    [
        ("answer,question,answer\n1,a,2\n", "has several columns 'answer'"),
        ('question,,\n"a,,\nb"c,,\n', "after '\"', line 3; quotes in a quoted cell"),
        ("question\na\n\xff\n", "line 3 is not UTF-8"),
    ],
)
def test_a_table_of_texts_that_is_none_is_refused(tmp_path, content, why):
    path = tmp_path / "table.csv"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=why):
        list(files.read_rows(path))


def test_columns_of_one_name_and_times_beyond_python_s(tmp_path):
    path = tmp_path / "table.parquet"
    columns = [pyarrow.array(["1?"]), pyarrow.array([2**30], pyarrow.date32())]
    table = pyarrow.table(columns, names=["question", "at"])
    pyarrow.parquet.write_table(table, path)
    (found,) = files.read_rows(path)
    assert found.row == {"question": "1?", "at": None}
    table = pyarrow.table(columns[:1] * 2, names=["question", "question"])
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(ValueError, match="has several columns 'question'"):
        list(files.read_rows(path))


@sandboxed
def test_splits_in_one_file_are_told_apart(tmp_path, directory):
    row = {
        "prompt": "Write f.",
        "code": "def f(): return 1",
        "test_imports": [],
        "test_list": ["assert f() == 1"],
    }
    path = tmp_path / "mbpp.json"
    numbers = (3, 11, 510, 511, 601, 700)
    path.write_text(json.dumps([row | {"task_id": number} for number in numbers]))
    for split, expected in (("test", ["11", "510"]), ("train", ["601", "700"])):
        prepare("mbpp", split=split, directory=directory, paths=[path])
        source = open_dataset("mbpp", split=split, directory=directory)
        assert [question.reference["id"] for question in source] == expected
        assert source.report.rows == 2


FUNCTION_ONLY = "def check(candidate):\n  assert candidate(1) == 2"
WITHOUT_SOLUTION = {
    "never called": FUNCTION_ONLY,
    "every exception caught": "try:\n  assert f(1) == 2\nexcept Exception: pass",
    "None is right": "assert f(1) is None",
    "emptied": "xs = [3, 1]\nassert f(xs) == sorted(xs)",
    "emptied, and none left to look at": "xs = [3, 1]\nf(xs)\nfor x in xs: assert x",
    "a NaN as a float": "import math\nif math.fabs(f(2.0)) > 3: raise ValueError",
    "no class is tested": "stack = Stack()\nstack.push(1)",
}
WITH_SOLUTION = {
    "called": f"{FUNCTION_ONLY}\ncheck(f)",
    "a class": "stack = Stack()\nstack.push(1)\nassert stack.pop() == 1",
    "mapped": "assert all(map(lambda x: f(x) == 2, [1]))",
    "a NaN": "if abs(f(2.0) - 3) > 1e-6: raise ValueError",
    "a module that may be there": "import numpy\nassert f(numpy.zeros(2)) == 0",
}


@sandboxed
def test_tests_that_pass_without_a_solution_are_refused(tmp_path, directory):
    tests = {**WITHOUT_SOLUTION, **WITH_SOLUTION}
    rows = [{"id": name, "kind": "asserts", "tests": tests[name]} for name in tests]
    rows += [
        {"id": "no output", "kind": "stdin", "inputs": ["1"], "outputs": [" "]},
        {"id": "output", "kind": "stdin", "inputs": ["1"], "outputs": ["2"]},
    ]
    calls = {"kind": "calls", "entry_point": "f", "inputs": [[1]]}
    rows += [
        calls | {"id": "no value", "outputs": [None]},
        calls | {"id": "value", "outputs": [0]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"question": "Write f.", "id": row.pop("id"), "tests": row})
            for row in rows
        )
    )
    name = f"jsonl:{path}"
    report = prepare(name, split=None, directory=directory)
    found = [
        each.reference["id"]
        for each in open_dataset(name, split=None, directory=directory)
    ]
    assert found == [*WITH_SOLUTION, "output", "value"]
    reason = "the tests pass without a solution"
    assert report.dropped == {reason: {"count": 9, "first": "rows.jsonl, line 1"}}
    untried = prepare(
        name, split=None, directory=directory, overwrite=True, try_tests=False
    )
    assert untried.kept == len(rows)


def test_without_a_sandbox_tests_are_kept_untried_only_if_asked(
    tmp_path, directory, monkeypatch
):
    monkeypatch.setenv("PATH", "/nonexistent")
    path = tmp_path / "rows.jsonl"
    tests = {"kind": "asserts", "tests": FUNCTION_ONLY}
    path.write_text(json.dumps({"question": "Write f.", "tests": tests}))
    with pytest.raises(ValueError, match="install bubblewrap .* by --no-check"):
        prepare(f"jsonl:{path}", split=None, directory=directory)
    flags = f"prepare --dataset=jsonl:{path} --directory={directory} --no-check"
    assert main(flags.split()) == 0


def test_what_is_not_there_is_said_with_the_way_to_get_it(
    tmp_path, directory, monkeypatch
):
    with pytest.raises(ValueError, match="choose from polaris_53k, .*, humaneval"):
        open_dataset("gsm9k", split=None, directory=directory)
    with pytest.raises(ValueError, match="no split 'dev', but train, test"):
        open_dataset("gsm8k", split="dev", directory=directory)
    with pytest.raises(ValueError, match="prepare --dataset=math500 --split=test"):
        open_dataset("math500", split=None, directory=directory)
    with pytest.raises(ValueError, match="no such file(?!.*looked for)"):
        open_dataset(f"jsonl:{tmp_path / 'none'}", split=None, directory=directory)
    there = re.escape(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"no such file; it was looked for in {there}"):
        open_dataset("jsonl:none", split=None, directory=directory)


def test_records_that_do_not_fit_their_report_are_refused(tmp_path, directory):
    path = write_lines(tmp_path / "sums.jsonl", SUMS)
    open_dataset(as_file(path), split=None, directory=directory)
    (report,) = directory.rglob("report.json")
    report.write_text(report.read_text().replace('"kept": 9', '"kept": 8'))
    with pytest.raises(ValueError, match="holds 9 records, and its report says 8"):
        open_dataset(as_file(path), split=None, directory=directory)


def test_damaged_records_are_said_and_incomplete_ones_are_made_again(
    tmp_path, directory
):
    name = as_file(write_lines(tmp_path / "sums.jsonl", SUMS))
    open_dataset(name, split=None, directory=directory)
    (info,) = directory.rglob("dataset_info.json")
    content = info.read_bytes()
    info.write_bytes(content[:99])
    with pytest.raises(ValueError, match="is damaged .*; remove it and prepare it ag"):
        open_dataset(name, split=None, directory=directory)
    info.write_bytes(content)
    (shard,) = directory.rglob("*.array_record-*")
    content = shard.read_bytes()
    shard.write_bytes(content[:100] + bytes(100) + content[200:])
    source = open_dataset(name, split=None, directory=directory)
    with pytest.raises(ValueError, match="is damaged .*hash"):
        list(source)
    (info.parent / records.REPORT).unlink()
    assert len(list(open_dataset(name, split=None, directory=directory))) == 9
    assert [path.name for path in directory.iterdir()] == ["jsonl"]


class _Files(http.server.BaseHTTPRequestHandler):
    """Gives out what the server holds by path; a list of bytes ends too early."""

    def do_GET(self):
        content = self.server.contents.get(self.path)
        if content is None:
            self.send_error(404)
            return
        whole = content[0] if isinstance(content, list) else content
        self.send_response(200)
        self.send_header("Content-Length", str(len(whole)))
        self.end_headers()
        self.wfile.write(whole[:-1] if isinstance(content, list) else whole)

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture
def server():
    with small_server.answering(_Files, contents={}) as made:
        yield made


def url_of(server, path=""):
    return f"http://127.0.0.1:{server.server_port}{path}"


def test_a_download_that_fails_leaves_nothing(server, directory, monkeypatch):
    source = Web(url_of(server, "/train.jsonl"), "0" * 64)
    data_set = dataclasses.replace(catalog.find("gsm8k"), sources={"train": source})
    monkeypatch.setitem(catalog.DATA_SETS, "gsm8k", data_set)
    for content, error in ((None, OSError), (b"{}", ValueError)):
        server.contents = {"/train.jsonl": content}
        with pytest.raises(error, match="--path"):
            prepare("gsm8k", split=None, directory=directory)
        assert left_in(directory) == []


@pytest.mark.parametrize(
    "content, sha256, error, why",
    [
        (b"hello", "0" * 64, ValueError, "has the SHA-256 2cf24dba.*--path"),
        ([b"hello"], "", OSError, "4 of 5 bytes|IncompleteRead"),
        (None, "", OSError, "404"),
    ],
)
def test_a_damaged_download_is_refused(server, tmp_path, content, sha256, error, why):
    server.contents = {"/file": content}
    with pytest.raises(error, match=why):
        Web(url_of(server, "/file"), sha256).fetch(tmp_path)


def test_a_whole_download_has_the_known_checksum(server, tmp_path):
    server.contents = {"/file": b"hello"}
    sha256 = hashlib.sha256(b"hello").hexdigest()
    (file,) = Web(url_of(server, "/file"), sha256).fetch(tmp_path)
    assert file == (tmp_path / "file", url_of(server, "/file"), sha256)
    assert file.path.read_bytes() == b"hello"


def test_a_server_that_cannot_be_reached_is_said(tmp_path):
    with http.server.HTTPServer(("127.0.0.1", 0), _Files) as closed:
        url = url_of(closed, "/file")
    with pytest.raises(OSError, match="cannot be fetched"):
        Web(url).fetch(tmp_path)


def test_every_data_set_has_a_source_for_each_split():
    for name in catalog.DATA_SETS:
        data_set = catalog.find(name)
        assert data_set.splits
        for split in data_set.splits:
            assert preparing.choose_split(data_set, split) == split
