"""JetStream's own orchestrator on our engine, with its real threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from drive import REQUESTS
from small_jetstream import SETTINGS, expected, key_of, make_tokenizer, random_params

HERE = Path(__file__).parent


def drive(mode, out):
    """The answers of a process that ran to its end."""
    result = subprocess.run(
        [sys.executable, str(HERE / "drive.py"), mode, str(out)],
        env=os.environ | {"PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    printed = result.stdout[-4000:] + result.stderr[-4000:]
    assert result.returncode == 0, f"{result.returncode}\n{printed}"
    return json.loads(out.read_text())


@pytest.mark.parametrize("mode", ["interleaved", "disaggregated"])
def test_the_driver_answers_as_the_slow_sampler(mode, tmp_path):
    params, tokenizer = random_params(), make_tokenizer()
    answers = drive(mode, tmp_path / "answers.json")
    assert len(answers) == len(REQUESTS)
    lengths = set()
    for number, ((content, limit), (ids, text)) in enumerate(
        zip(REQUESTS, answers, strict=True)
    ):
        of_text = isinstance(content, str)
        prompt = tokenizer.encode(content) if of_text else content
        longest = min(limit, SETTINGS.max_completion_tokens)
        theirs = expected(params, prompt, key_of(number), max_tokens=longest)
        wanted = theirs.tokens.tolist()
        if not theirs.cut_off:
            wanted = wanted[:-1]  # the driver keeps EOS to itself
        assert ids == wanted, number
        assert text == "".join(f"t{each}" for each in ids if of_text), number
        lengths.add(len(ids))
    assert len(lengths) > 3, "the requests end at different times"
