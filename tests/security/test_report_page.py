"""A page about runs runs nothing that their files say."""

import json

import numpy as np
from parsed_page import Parsed

from scalerl_jax.scaling import report, sigmoid
from scalerl_jax.scaling.__main__ import main

POISON = (
    "</pre></td></details></script><script>document.title='ran'</script>"
    "<img src=x onerror=\"document.title='ran'\"><!-- ]]> {{ 7 * 7 }} {% raw %} "
    "\" ' & \\ $\\frac{ \u2028 \u202e"
)
HALF = "\ud800"  # of a character, which UTF-8 lacks
ATTRIBUTES = {"alt", "charset", "class", "content", "href", "id", "lang", "name", "src"}
ATTRIBUTES |= {"type"}


def written(text):
    """The text with letters that move or end what is around them written out."""
    for letter, name in (("\u2028", "2028"), ("\u202e", "202e"), (HALF, "d800")):
        text = text.replace(letter, f"\\u{name}")
    return text


def poisoned_run(folder, seed):
    folder.mkdir()
    record = {
        "config": {POISON: seed, "b": {"c": [POISON, seed]}, "d": HALF},
        "seed": POISON,
        "git_revision": POISON,
        "started": POISON,
        "versions": {"jax": POISON, "scalerl_jax": HALF, POISON: POISON},
    }
    (folder / "config.json").write_text(json.dumps(record))
    (folder / "ledger.json").write_text(json.dumps({"chip": POISON}))
    x = np.arange(0, 60, 5)
    rates = sigmoid(x, initial_reward=0.2, asymptote=0.8, exponent=2.0, midpoint=9.0)
    texts = ("task", "prompt", "completion", "reference")
    rollout = {"step": 0, "status": POISON[:50]} | dict.fromkeys(texts, POISON + HALF)
    rows = {
        "evals.jsonl": [
            {"step": int(n), "tokens": int(n), "pass_rate": y, POISON: POISON}
            for n, y in zip(x, rates, strict=True)
        ],
        "metrics.jsonl": [{"step": 1, "entropy": POISON}, {"step": 2, "entropy": 0.5}],
        "rollouts.jsonl": [rollout, rollout | {"completion": "x" * 5000}],
    }
    for name, lines in rows.items():
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(folder)


def test_no_text_of_a_run_becomes_a_part_of_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MOST_IN_DETAIL", 0)
    name = POISON.replace("/", "")
    runs = [poisoned_run(tmp_path / f"{seed}{name}"[:250], seed) for seed in range(2)]
    page = tmp_path / "page.html"
    flags = ["--x=tokens", f"--out={page}", f"--title={POISON}"]
    assert main(["report", *runs, *flags]) == 0
    parsed = Parsed(page.read_text(encoding="utf-8"))
    assert parsed.open == [] and parsed.fetched == []
    assert {key for _, given in parsed.tags for key in given} <= ATTRIBUTES
    assert [given for tag, given in parsed.tags if tag == "script"] == [
        {"type": "application/json", "id": "fits"}
    ]
    names = [f"0{written(name)}", f"1{written(name)}"]
    assert list(json.loads(parsed.scripts["fits"])) == names
    said = "\n".join(parsed.texts)
    assert "\u202e" not in said and written(POISON) in parsed.texts  # the title
    assert written(POISON + HALF) in parsed.texts  # a prompt
    assert "[... 3,500 more letters ...]" in said
    assert "49" not in [each.strip() for each in parsed.texts]
