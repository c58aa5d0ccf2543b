"""Names of outside that lead out of the directory that they belong to."""

import json
import os

import pytest
import small_bucket
import small_commands
import small_run
from small_cloud import cloud  # noqa: F401  a fixture

from scalerl_jax import status
from scalerl_jax.config.bases import based_on
from scalerl_jax.data import sources
from scalerl_jax.data.catalog import VERSION
from scalerl_jax.data.preparing import open_dataset, prepare
from scalerl_jax.formats.paths import inside
from scalerl_jax.formats.remote import copies, copy_of, files_of_run
from scalerl_jax.learner.places import BucketPlace
from scalerl_jax.model.weights import read_tensors
from scalerl_jax.process import ending
from scalerl_jax.run.files import RunFiles

CONFIG = small_run.ROOT / "configs" / "tiny.py"
# From the copy of gs://bucket/runs/x to the home directory, and to the root.
OUT = "../../../../../../"
NAMES = [f"{OUT}evil/config.json", "a/../../y/config.json", "/evil/config.json"]
COMMANDS = [
    f"main --config={CONFIG} --workdir=gs://bucket/runs/x",
    f"evaluate --config={CONFIG} --checkpoint=gs://bucket/runs/x",
    "serve --checkpoint=gs://bucket/runs/x",
    "export --checkpoint=gs://bucket/runs/x --out=exported",
    "data prepare --dataset=jsonl:gs://bucket/runs/x",
    "scaling fit gs://bucket/runs/x",
    "scaling watch gs://bucket/runs/x --once",
    "scaling report gs://bucket/runs/x",
    "status gs://bucket/runs/x",
]


@pytest.mark.parametrize("name", ["a", "a/b", ".hidden/b", "a..b/...", "a\\b", "ä\n"])
def test_a_plain_name_is_joined(tmp_path, name):
    assert inside(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "/", "/etc/passwd", "../a", "a/../b", "a/..", "a/./b"),
        *("a//b", "a/", "//host/a", "a\0b", *NAMES),
    ],
)
def test_a_name_that_is_not_plain_is_refused(tmp_path, name):
    with pytest.raises(ValueError) as refusal:
        inside(tmp_path, name, called="gs://bucket/x")
    message = str(refusal.value)
    assert repr(name) in message and "gs://bucket/x" in message
    assert "\n" not in message and "\0" not in message


def test_a_link_that_leads_out_is_refused(tmp_path):
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "in").symlink_to(root / "deep")
    (root / "loop").symlink_to(root / "loop")
    (tmp_path / "root2").symlink_to(root)  # the root itself may be one
    for name in ("out", "out/new", "deep/../out"):
        with pytest.raises(ValueError, match="is no path below"):
            inside(root, name)
    assert inside(root, "in/new") == root / "in/new"
    assert inside(root, "out/new", follow_links=True) == root / "out/new"
    assert inside(tmp_path / "root2", "deep/new") == tmp_path / "root2/deep/new"
    with pytest.raises(ValueError, match=r"root leads to '.*outside/new'"):
        inside(root, "out/new")


@pytest.fixture
def home(tmp_path, monkeypatch):
    found = tmp_path / "deep" / "home"  # so that names which lead out stay in tmp_path
    found.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(found))
    monkeypatch.chdir(found)
    return found


@pytest.fixture
def bucket(home):
    """A run's directory, whose config.json is what lets commands look at the rest."""
    found = small_bucket.empty()
    found.write("runs/x/config.json", b"{}")
    return found


def files(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def outcome(line):
    if not line.startswith("status "):
        return small_commands.run(line)
    return ending.answer(lambda: status.main(line.split()[1:])), None


@small_bucket.NEEDS_EXTRA
@pytest.mark.parametrize("line", COMMANDS)
def test_no_object_of_a_bucket_is_written_outside_its_copy(
    bucket, tmp_path, line, capsys
):
    for name in NAMES:
        bucket.objects.clear()
        bucket.write("runs/x/config.json", b"{}")
        bucket.write(f"runs/x/{name}", b"written by somebody else")
        found, said = outcome(line)
        said = said or capsys.readouterr().err.splitlines()
        errors = [each for each in said if each.startswith("error: ")]
        assert found == 2 and len(errors) == 1, said
        assert f"{name!r} is no path below gs://bucket/runs/x: " in errors[0]
        wrong = [each for each in files(tmp_path) if b"somebody" in each.read_bytes()]
        assert not wrong and not os.path.exists("/evil")


@small_bucket.NEEDS_EXTRA
def test_a_prepared_data_set_of_a_bucket_stays_in_its_copy(bucket, tmp_path):
    url = "gs://bucket/data"
    bucket.write(f"data/gsm8k/test/{VERSION}/report.json", b"{}")
    bucket.write(f"data/gsm8k/test/{VERSION}/{OUT}evil", b"x")
    with pytest.raises(ValueError, match="evil' .*gs://bucket/data/gsm"):
        open_dataset("gsm8k", split="test", directory=url)
    assert not [each for each in tmp_path.rglob("evil")]


@small_bucket.NEEDS_EXTRA
def test_copies_are_not_written_through_links(bucket, home):
    (home / "secret").write_text("mine")
    for url in ("gs://bucket/runs/x", "gs://bucket/linked/x"):
        bucket.write(f"{url.removeprefix('gs://bucket/')}/status.json", b"{}")
    copies().mkdir(parents=True)
    (copies() / "bucket").symlink_to(home)  # a copy elsewhere
    with pytest.raises(ValueError, match="leads to"):
        RunFiles("gs://bucket/runs/x")
    (copies() / "bucket").unlink()
    looked_at = files_of_run("gs://bucket/runs/x")
    (looked_at / "status.json").unlink()
    (looked_at / "status.json").symlink_to(home / "secret")
    with pytest.raises(ValueError, match="'status.json' .*gs://bucket"):
        files_of_run("gs://bucket/runs/x")
    assert (home / "secret").read_text() == "mine"


@small_bucket.NEEDS_EXTRA
def test_what_a_link_leads_to_is_not_uploaded(bucket, home):
    (home / "secret").write_text("mine")
    with RunFiles("gs://bucket/runs/x") as run:
        (run.path / "metrics.jsonl").write_text("{}\n")
        (run.path / "rollouts.jsonl").symlink_to(home / "secret")
        (run.path / "folder").symlink_to(home)
    assert bucket.names("runs/x/") == ["runs/x/config.json", "runs/x/metrics.jsonl"]


@small_bucket.NEEDS_EXTRA
def test_marks_of_folders_are_no_files(bucket):
    bucket.write("runs/x/", b"")
    bucket.write("runs/x/tensorboard/", b"")
    bucket.write("runs/x/tensorboard/events", b"1")
    with RunFiles("gs://bucket/runs/x") as run:
        assert (run.path / "tensorboard" / "events").read_bytes() == b"1"


@small_bucket.NEEDS_EXTRA
def test_only_checkpoints_are_removed_from_a_bucket(bucket):
    place = BucketPlace("gs://bucket/runs/x/checkpoints")
    kept = ["step_00000001/../../../y/a", "../y/b", "/step_00000001/c", "steps"]
    for name in (*kept, "step_00000002/state"):
        bucket.write(f"runs/x/checkpoints/{name}", b"1")
    assert place.found() == []
    place.prune(1, ())
    left = bucket.names("runs/x/checkpoints/")
    assert not any("step_00000002" in name for name in left)
    assert {f"runs/x/checkpoints/{name}" for name in kept[1:]} <= {*left}


@pytest.mark.parametrize("url", ["gs://bucket/../../x", "gs://..", "gs://bucket//x"])
def test_a_url_has_no_copy_elsewhere(home, url):
    with pytest.raises(ValueError, match="is no path below gs|nor one in a bucket"):
        copy_of(url)


@small_bucket.NEEDS_EXTRA
def test_launch_fetches_no_object_that_leads_out(cloud):  # noqa: F811
    cloud.bucket.write("runs/run-1/metrics.jsonl", b"1")
    assert cloud.launch("fetch").returncode == 0
    run = cloud.folder / "laptop" / "runs" / "run-1"
    assert (run / "metrics.jsonl").read_bytes() == b"1"
    cloud.bucket.write("runs/run-1/a/../../../../evil", b"x")
    done = cloud.launch("fetch")
    (said,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "'a/../../../../evil' is no path below gs://bucket/runs/run-1/" in said
    assert not [*cloud.folder.rglob("evil")] and len(cloud.calls("rsync")) == 1


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", ""])
def test_an_index_names_only_files_of_its_checkpoint(tmp_path, name):
    index = tmp_path / "base" / "model.safetensors.index.json"
    index.parent.mkdir()
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ValueError, match=r"is no path below .*/base: "):
        read_tensors(index.parent)


def test_shards_of_the_hubs_cache_are_links(tmp_path):
    blob = small_run.ROOT / "scalerl_jax/assets/tiny_base/model.safetensors"
    (tmp_path / "model-1.safetensors").symlink_to(blob)
    names = read_tensors(blob.parent)
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_tensors(tmp_path).keys() == names.keys()


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "link.arrow"])
def test_a_saved_folder_names_only_its_own_files(tmp_path, name):
    (tmp_path / "secret.arrow").write_text("mine")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "link.arrow").symlink_to(tmp_path / "secret.arrow")
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name}]})
    )
    with pytest.raises(ValueError, match=r"is no path below .*/saved: "):
        sources.Saved(folder).fetch(folder)


@pytest.mark.parametrize("base", ["../security/evil", "/tmp/evil", ".."])
def test_the_base_of_a_recipe_is_one_of_its_folder(tmp_path, base):
    recipe = tmp_path / "configs" / "recipes" / "x.py"
    (tmp_path / "configs").mkdir()
    (tmp_path / "security").mkdir()
    (tmp_path / "security" / "evil.py").write_text("raise SystemExit(1)")
    with pytest.raises(ValueError, match=r"choose from \[\]"):
        based_on(base, str(recipe))


def test_a_prepared_data_set_reads_only_its_own_files_and_classes(tmp_path):
    """TFDS joins what dataset_info.json says, and imports what features.json says."""
    rows = tmp_path / "sums.jsonl"
    rows.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    name = f"jsonl:{rows}"
    directory = tmp_path / "prepared"
    prepare(name, split=None, directory=directory)
    (info,) = directory.rglob("dataset_info.json")
    good = json.loads(info.read_text())
    for template in ("../../{SPLIT}.{FILEFORMAT}", "/etc/{SPLIT}.{FILEFORMAT}"):
        good["splits"][0]["filepathTemplate"] = template
        info.write_text(json.dumps(good))
        with pytest.raises(ValueError, match="is no path below"):
            open_dataset(name, split=None, directory=directory)
    features = info.with_name("features.json")
    text = features.read_text()
    features.write_text(text.replace("tensorflow_datasets.core", "antigravity", 1))
    with pytest.raises(ValueError, match="features.json .*'antigravity"):
        open_dataset(name, split=None, directory=directory)
