"""Names on the Hugging Face hub: out of its cache alone, as where no network is."""

import hashlib
import json
import shutil

import huggingface_hub
import huggingface_hub.constants
import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import small_run
from huggingface_hub.utils import filter_repo_objects

from scalerl_jax.data.__main__ import main
from scalerl_jax.data.preparing import open_dataset, prepare
from scalerl_jax.data.sources import HubSplit
from scalerl_jax.formats.model_files import local_path
from scalerl_jax.formats.reading import is_hub_id
from scalerl_jax.formats.remote import fetch_repository
from scalerl_jax.wiring.loading import load_model

BASE = small_run.make_config().model.checkpoint
COMMIT, EARLIER = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with one model and one data set, as `hf download` leaves them."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model = add(tmp_path, "models--owner--tiny", COMMIT)
    shutil.copytree(BASE, model, dirs_exist_ok=True)
    other = add(tmp_path, "models--owner--tiny", EARLIER, name="v1")
    shutil.copytree(BASE, other, dirs_exist_ok=True)
    sums = add(tmp_path, "datasets--owner--sums", COMMIT)
    for split, count in (("train", 3), ("test", 2)):
        rows = [
            {"prompt": f"{n} + 1 = ?", "completion": f"\\boxed{{{n + 1}}}"}
            for n in range(count)
        ]
        file = sums / "data" / f"{split}-00000-of-00001.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield tmp_path
    fetch_repository.cache_clear()


def add(cache, repository, commit, name="main"):
    """The folder of a commit, to which a name points."""
    refs, folder = cache / repository / "refs", cache / repository / "snapshots"
    refs.mkdir(parents=True, exist_ok=True)
    (refs / name).write_text(commit)
    (folder / commit).mkdir(parents=True)
    return folder / commit


def test_a_model_of_the_cache_is_loaded_by_its_id(cache):
    found, same = load_model("owner/tiny"), load_model(BASE)
    assert found.tokenizer.eos_ids == same.tokenizer.eos_ids
    jax.tree.map(np.testing.assert_array_equal, found.params, same.params)


def test_a_revision_can_be_named(cache):
    assert local_path("owner/tiny").name == COMMIT
    assert local_path("owner/tiny@v1").name == EARLIER


def test_weights_are_not_downloaded_twice(cache, monkeypatch):
    """As of Mistral 7B and gpt-oss, whose weights are there in two formats."""
    there = ["config.json", "model-00001-of-00002.safetensors", "README.md"]
    copies = ["consolidated.safetensors", "original/model.safetensors", "a/b.json"]
    asked = {}

    def download(name, *, repo_type, revision, **patterns):
        asked[name] = sorted(filter_repo_objects(there + copies, **patterns))
        return cache

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    local_path("owner/twice", weights=True)
    assert asked == {"owner/twice": there[:2]}


def test_what_lies_here_is_no_id(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "tiny").mkdir(parents=True)
    assert not is_hub_id("owner/tiny") and is_hub_id("owner/other")
    assert str(local_path("owner/tiny")) == "owner/tiny"
    for name in ("runs", "/runs/x", "./x", "../x", "a/b/c", "jsonl:a/b"):
        assert not is_hub_id(name)


def test_what_the_cache_lacks_is_one_line(cache):
    with pytest.raises(ValueError, match=r"owner/other is no file here.*hf download"):
        load_model("owner/other")


def test_a_data_set_of_the_cache_is_prepared_by_its_id(cache, tmp_path, capsys):
    where = f"--directory={tmp_path / 'prepared'}"
    assert not main(["prepare", "--dataset=owner/sums", "--split=test", where])
    assert "  kept         2" in capsys.readouterr().out.splitlines()
    assert not main(["inspect", "--dataset=owner/sums", "--split=test", where])
    assert "1 + 1 = ?" in capsys.readouterr().out
    assert main(["prepare", "--dataset=owner/sums", "--split=validation", where]) == 2
    assert "no file of a split 'validation'" in capsys.readouterr().err


def add_maths(cache, *, known):
    """MATH as the hub's cache has it: large files are links to what they are called."""
    folder = add(cache, "datasets--EleutherAI--hendrycks_math", COMMIT)
    for subject in ("geometry", "algebra"):
        (folder / subject).mkdir()
        for split in ("test", "train"):
            row = {"problem": f"{subject}, {split}?", "solution": r"\boxed{1}"}
            sink = pyarrow.BufferOutputStream()
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), sink)
            content = sink.getvalue().to_pybytes()
            blob = cache / (known or hashlib.sha256(content).hexdigest())
            blob.write_bytes(content)
            (folder / subject / f"{split}-00000-of-00001.parquet").symlink_to(blob)


def test_a_known_data_set_comes_from_the_hub(cache, tmp_path):
    add_maths(cache, known="")
    prepare("math", split="test", directory=tmp_path / "prepared")
    source = open_dataset("math", split="test", directory=tmp_path / "prepared")
    assert [each.text for each in source] == ["algebra, test?", "geometry, test?"]
    assert [file["origin"] for file in source.report.files] == [
        f"hf://datasets/EleutherAI/hendrycks_math@{COMMIT}/{subject}/"
        "test-00000-of-00001.parquet"
        for subject in ("algebra", "geometry")
    ]


def test_a_damaged_file_of_the_hub_is_refused(cache, tmp_path):
    add_maths(cache, known="0" * 64)
    with pytest.raises(ValueError, match="has the SHA-256 .* and not 0{64}"):
        prepare("math", split="test", directory=tmp_path / "prepared")
    assert list((tmp_path / "prepared").iterdir()) == []


def test_what_the_hub_does_not_have_is_said_with_the_way_out(cache, tmp_path):
    add(cache, "datasets--math-ai--aime25", COMMIT)
    for name, why in (("aime25", "matches 'test.jsonl'"), ("math500", "cannot be r")):
        with pytest.raises(ValueError, match=f"{why}.*; .*--path"):
            prepare(name, split=None, directory=tmp_path / "prepared")


def test_subsets_of_a_data_set_are_told_apart(cache, tmp_path, capsys):
    folder = add(cache, "datasets--owner--parts", COMMIT)
    for subset in ("main", "socratic"):
        (folder / subset).mkdir()
        row = {"question": f"Of {subset}?", "answer": "So.\n#### 7"}
        (folder / subset / "train-0.jsonl").write_text(json.dumps(row) + "\n")
    where = [f"--directory={tmp_path / 'prepared'}", "--split=train"]
    assert main(["prepare", "--dataset=owner/parts", *where]) == 2
    assert "name one, as owner/parts/main: main, socratic" in capsys.readouterr().err
    assert not main(["prepare", "--dataset=owner/parts/socratic", *where])
    assert not main(["inspect", "--dataset=owner/parts/socratic", *where])
    said = capsys.readouterr().out
    assert "Of socratic?" in said and '"answer": "7"' in said


def split_of_hub(cache, split, *paths):
    """The files of a split, of a data set that has these."""
    folder = add(cache, "datasets--owner--named", COMMIT)
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    found = HubSplit("owner/named", split).fetch(cache)
    return [str(each.path.relative_to(folder)) for each in found]


@pytest.mark.parametrize(
    "paths, train",
    [
        (["gsm_test.jsonl", "gsm_train.jsonl"], [1]),
        (["TEST.jsonl", "Train.jsonl"], [1]),
        (["data/extra_train.jsonl", "data/test-0.jsonl", "data/train-0.jsonl"], [0, 2]),
        (["train/test.jsonl", "train/train.jsonl"], [1]),
        (["train/a/0.jsonl", "train/a/1.jsonl", "train/test/0.jsonl"], [0, 1]),
        (["latest_test.jsonl", "pretrain.jsonl", "train.jsonl"], [2]),
        (["part-0-of-2.jsonl", "part-1-of-2.jsonl"], [0, 1]),
    ],
)
def test_a_file_is_of_the_split_that_it_or_its_folder_names(cache, paths, train):
    assert split_of_hub(cache, "train", *paths) == [paths[each] for each in train]


def test_several_files_that_name_no_split_are_refused_by_name(cache):
    with pytest.raises(
        ValueError, match=r"by its split: held\.jsonl, rest\.jsonl; .*-"
    ):
        split_of_hub(cache, "train", "held.jsonl", "rest.jsonl")
