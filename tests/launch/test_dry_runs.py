"""The page of dry runs is what the commands print today.

PYTHONPATH=. python tests/launch/test_dry_runs.py > docs/dry-runs.md
"""

import contextlib
import io
import re
import sys
from pathlib import Path

from scalerl_jax.launch import __main__ as launch

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
loop repeats those from `outcome` to `start`. CODE stands for the SHA-256 of the code's
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


def test_the_page_is_what_they_print():
    assert PAGE.read_text() == page(), __doc__


if __name__ == "__main__":
    sys.stdout.write(page())
