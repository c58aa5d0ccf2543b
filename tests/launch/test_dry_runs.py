"""The page of dry runs is what the commands print today.

PYTHONPATH=. python tests/launch/test_dry_runs.py > docs/dry-runs.md
"""

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

from scalerl_jax.launch import __main__ as launch

pytestmark = pytest.mark.filterwarnings("ignore:the load_module")  # ml_collections'
PAGE = Path(__file__).parents[2] / "docs" / "dry-runs.md"
COMMON = "--name=run-1 --project=project --zone=us-east5-b"
FILES = (
    "-- --config.model.checkpoint=gs://bucket/models/Llama-3.1-8B "
    "--config.data.directory=gs://bucket/data"
)
PLACES = {
    "tpu_vm": "--topology=v6e:2x4 "
    "--config=configs/smollm2.py:HuggingFaceTB/SmolLM2-135M-Instruct",
    "queued_resource": f"--topology=v6e:4x4 --config=configs/8b.py --spot {FILES}",
    "ray_tpu": f"--topology=2*v6e:4x4 --config=configs/8b.py --spot {FILES}",
    "gke": "--topology=v6e:4x4 --config=configs/8b.py --cluster=c --image=image "
    f"--storage=runs {FILES}",
}
HEAD = """# Dry runs

What `launch run --dry-run` prints for each place: every command of another program,
and no call of one. A line that begins with `#` is a step; while the run goes on, the
loop repeats those from `outcome` to `start`, and after a run that failed the commands
of `launch logs` come before `end`. CODE stands for the SHA-256 of the code's
archive. [`pods.md`](pods.md) says what all of it means.
"""


def transcript(place):
    bucket = f"--bucket=gs://bucket{'' if place == 'gke' else '/runs'}"
    command = f"run --dry-run --place={place} {COMMON} {bucket} {PLACES[place]}"
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        launch.main(command.split())
    text = written.getvalue().replace(sys.executable, "python")
    text = re.sub(r"\b[0-9a-f]{64}\b|\b[0-9a-f]{16}(?=\.tar\.gz)", "CODE", text)
    return f"python -m scalerl_jax.launch {command}", text


def page():
    parts = [HEAD]
    for place in PLACES:
        command, text = transcript(place)
        parts.append(f"\n## {place}\n\n```\n$ {command}\n{text}```\n")
    return "".join(parts)


@pytest.mark.slow
def test_the_page_is_what_they_print():
    assert PAGE.read_text() == page(), __doc__


def test_flags_change_what_is_printed_as_they_change_what_is_run(capsys):
    def printed(command, place="tpu_vm", more=""):
        where = f"--place={place} {COMMON} --bucket=gs://bucket/runs {PLACES[place]}"
        words = f"{command} --dry-run {where} {more}".split()
        assert launch.main(words) == 0
        return capsys.readouterr().out

    assert "--lines=7 " in printed("logs --lines=7")
    told = printed("run --preflight=skip --keep-machines --no-fit")
    steps = [line[2:] for line in told.splitlines() if line.startswith("# ")]
    assert steps == ["check", "outcome", "machines", "create", "start", "fetch"]
    assert "preflight" not in told and "tpu-vm delete" not in told
    with pytest.raises(ValueError, match="no such setting: 'grup_size'"):
        printed("create", more="-- --config.batch.grup_size=3")


if __name__ == "__main__":
    sys.stdout.write(page())
