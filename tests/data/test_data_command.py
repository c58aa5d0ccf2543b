"""The command line of the data package, as a user runs it."""

import json
from pathlib import Path

import pytest
import small_bucket

import scalerl_jax
from scalerl_jax.data.__main__ import main
from scalerl_jax.data.preparing import open_dataset

TOKENIZER = Path(scalerl_jax.__file__).parent / "assets/tiny_base"


@pytest.fixture
def gsm8k(tmp_path):
    rows = [
        {"question": f"{n} + 1 = ?", "answer": f"So.\n#### {n + 1}"} for n in range(3)
    ]
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(capsys, *arguments):
    status = main(list(map(str, arguments)))
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_data_set_is_prepared_listed_and_looked_at(capsys, tmp_path, gsm8k):
    where = f"--directory={tmp_path / 'prepared'}"
    which = ("--dataset=gsm8k", "--split=test", where)
    status, said, _ = run(capsys, "prepare", *which, f"--path={gsm8k}")
    assert status == 0
    assert said.splitlines()[1:] == [
        "gsm8k, test",
        "  rows         3",
        "  kept         3",
    ]
    status, said, _ = run(capsys, "prepare", *which, f"--path={gsm8k}")
    assert status == 0 and "Already prepared; --overwrite" in said
    _, said, _ = run(capsys, "list", where)
    assert "  test: 3 questions in" in said and "  train: not prepared" in said
    assert "licence: CC-BY-4.0" in said

    status, said, _ = run(
        capsys,
        "inspect",
        *which,
        f"--tokenizer={TOKENIZER}",
        "--rows=1",
        "--start=2",
        "--ids",
    )
    assert status == 0
    assert said.startswith("gsm8k, test\n  rows         3\n  kept         3\n\n")
    lines = said.splitlines()[4:]
    assert lines[0].startswith("--- 2: test/2, 10 tokens ---")
    assert lines[1] == "2 + 1 = ?<think>"
    assert json.loads(lines[3]) == {"verifier": "math", "answer": "3", "id": "test/2"}
    assert len(lines[5].split()) == 10
    assert "3 questions; tokens of a prompt:" in lines
    assert lines[-1].split() == ["math", "3"]


@small_bucket.NEEDS_EXTRA
def test_a_data_set_is_uploaded_and_read_from_the_bucket(
    capsys, tmp_path, gsm8k, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path / "other machine"))
    bucket = small_bucket.empty()
    which = ("--dataset=gsm8k", "--split=test", f"--directory={tmp_path / 'prepared'}")
    upload = ("--upload=gs://bucket/data/",)
    with pytest.raises(ValueError, match="gs://.* --upload=gs://buck"):
        open_dataset("gsm8k", split="test", directory="gs://bucket/data")
    status, said, _ = run(capsys, "prepare", *which, *upload, f"--path={gsm8k}")
    assert status == 0 and "Uploaded: gs://bucket/data/gsm8k/test/" in said
    assert bucket.written[-1].endswith("/report.json")  # without it, it is none
    here = open_dataset("gsm8k", split="test", directory=tmp_path / "prepared")
    there = open_dataset("gsm8k", split="test", directory="gs://bucket/data")
    assert list(there) == list(here) and len(there) == 3

    status, said, _ = run(capsys, "prepare", *which, "--upload=gs://nowhere/x")
    assert status == 2 and not said  # before anything is prepared
    with pytest.raises(SystemExit, match="2"):
        main(["prepare", "--dataset=gsm8k", "--directory=gs://bucket/data"])
    assert "prepare --upload=gs://bucket/data copies" in capsys.readouterr().err


@small_bucket.NEEDS_EXTRA
def test_a_file_of_ones_own_is_uploaded_as_it_is(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    bucket = small_bucket.empty()
    file = tmp_path / "sums.jsonl"
    file.write_text('{"question": "1 + 1", "answer": 2}\n')
    named = f"--dataset=jsonl:{file}"
    status, said, _ = run(capsys, "prepare", named, "--upload=gs://bucket/data")
    assert status == 0
    assert "data.tasks=\"('jsonl:gs://bucket/data/sums.jsonl',)\"" in said
    assert bucket.objects["data/sums.jsonl"][0] == file.read_bytes()
    name = "jsonl:gs://bucket/data/sums.jsonl"
    (question,) = open_dataset(name, split=None, directory="gs://bucket/data")
    assert question.text == "1 + 1"


def test_a_local_file_is_looked_at_without_being_prepared(capsys, tmp_path, gsm8k):
    where = tmp_path / "prepared"
    status, said, _ = run(
        capsys,
        "inspect",
        "--dataset=gsm8k",
        f"--path={gsm8k}",
        f"--directory={where}",
        "--rows=1",
    )
    assert status == 0 and "0 + 1 = ?" in said
    assert "3 questions; characters of a prompt:" in said
    assert not where.exists()


def test_what_prepare_would_drop_is_shown_and_duplicates_are_counted(capsys, tmp_path):
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in (1, 1, 2, 1)]
    rows[3]["answer"] = "7"
    rows += [{"prompt": " ", "answer": "3"}] + [{"answer": "4"}] * 11
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    which = (f"--dataset=jsonl:{file}", f"--directory={tmp_path / 'prepared'}")
    tokenizer = tmp_path / "alone" / "tokenizer.json"  # without a config beside it
    tokenizer.parent.mkdir()
    tokenizer.write_bytes((TOKENIZER / "tokenizer.json").read_bytes())
    status, said, _ = run(capsys, "inspect", *which, f"--tokenizer={tokenizer}")
    table = [line.split("  first:")[0] for line in said.splitlines()]
    counts = {row.rpartition(" ")[0].strip(): row.rpartition(" ")[2] for row in table}
    assert status == 0 and "4 questions; tokens of a prompt:" in said
    assert counts["kept"] == "4" and counts["dropped: the question is empty"] == "1"
    assert counts["kept, doubtful: an exact duplicate"] == "1"
    assert counts["kept, doubtful: asked before, with another answer"] == "1"
    assert "prepare would refuse it: it skips 10 bad rows" in said
    status, _, error = run(capsys, "prepare", *which)
    assert status == 2 and "11 of the first 16 rows" in error


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["prepare", "--dataset=gsm9k"], "no data set is called 'gsm9k'"),
        (["prepare", "--dataset=gsm8k", "--path=none"], "say which one"),
        (
            ["prepare", "--dataset=gsm8k", "--split=test", "--path=none"],
            "--path=none: there is no such file",
        ),
        (
            ["prepare", f"--dataset=jsonl:{__file__}", "--path=none"],
            "test_data_command.py is a file already",
        ),
        (["inspect", f"--dataset=csv:{__file__}"], "a CSV is called .csv"),
        (["inspect", "--dataset=gsm8k"], "prepare --dataset=gsm8k --split=train"),
    ],
)
def test_what_cannot_be_used_is_one_message_and_status_2(
    capsys, tmp_path, arguments, why
):
    status, said, error = run(capsys, *arguments, f"--directory={tmp_path}")
    assert (status, said) == (2, "")
    assert error.startswith("error: ") and why in error


@pytest.mark.parametrize(
    "option, why",
    [
        ("--template=chat", "needs --tokenizer"),
        ("--system-prompt=Hm.", "are for --template=chat"),
        ("--template=none", "{question}"),
        ("--start=3", "there are 3 questions"),
    ],
)
def test_options_that_do_not_fit_are_said(capsys, gsm8k, option, why):
    status, _, error = run(
        capsys, "inspect", "--dataset=gsm8k", f"--path={gsm8k}", option
    )
    assert status == 2 and why in error
