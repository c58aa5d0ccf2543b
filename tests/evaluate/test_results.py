"""The page in a browser: what it shows, how one moves, and what must not run."""

import html
import json
import re
import shutil
import subprocess

import pytest

from scalerl_jax.evaluate.results import read_rows, write_page

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
ATTACK = (
    "</script><script>document.title='ran'</script><img src=x "
    "onerror=\"document.title='ran'\"><!-- <script> ]]> \" ' \u2028"
)


def sample(text, verdict, *, end="</think>"):
    """One token per letter; the first is forced, the others ever less likely."""
    begun = text.find(end)
    return {
        "completion": text,
        "answer": text[begun + len(end) :] if begun >= 0 else None,
        "verdict": verdict,
        "tokens": len(text),
        "cut_off": begun < 0,
        "interrupted": False,
        "answer_start": None if begun < 0 else begun + len(end),
        "token_texts": list(text),
        "logprobs": [None, *(-0.25 * place for place in range(len(text) - 1))],
    }


def row(number, *samples, task="sums", prompt=None):
    return {
        "id": f"{task}/{number}",
        "set": task,
        "task": task,
        "prompt": prompt or f"what is {number}?",
        "reference": str(number),
        "detail": "",
        "samples": samples,
    }


ROWS = [
    row(0, sample("hm 🙂</think>0", "correct"), sample("</think>9", "wrong")),
    row(1, sample("no end", "no_answer"), task="spelling"),
    row(
        2,
        sample(f"{ATTACK}</think>{ATTACK}", "correct"),
        sample("violet</think>2", "correct"),
        task=f"odd{ATTACK}",
        prompt=ATTACK,
    ),
]


def dump(page, *, fragment="", script="", size="1200,900"):
    """The document as it is once the page has settled, `script` run at its end."""
    if script:
        page.write_text(
            page.read_text().replace("</body>", f"<script>{script}</script></body>")
        )
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu"),
            f"--user-data-dir={page.parent / 'profile'}",
            *(f"--window-size={size}", "--virtual-time-budget=3000", "--dump-dom"),
            f"file://{page}#{fragment}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.partition("<script type=")[0]  # not what it was made from


def shown(document, name):
    """The text of the element with this id."""
    found = re.search(rf'<(\w+) [^>]*\bid="{name}"[^>]*>(.*?)</\1>', document, re.S)
    return html.unescape(re.sub(r"<[^>]*>", "", found[2])) if found else None


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "viewer.html"
    assert write_page(path, ROWS, title=f"title {ATTACK}", note=ATTACK) == 3
    return path


def test_the_page_holds_no_address_and_no_markup_of_a_model(page):
    text = page.read_text()
    assert not re.search(r"(?:https?:)?//[a-z]|\b(?:src|href)=[\"'/h]", text)
    assert "<img" not in text and text.count("<script>") == 1
    scripts = re.findall(
        r'<script type="application/json" id="\w+">(.*)</script>', text
    )
    assert json.loads(scripts[2])["prompt"] == ATTACK


def test_half_a_character_is_kept(page):
    half = row(0, sample("\ud83d</think>\ud83d", "wrong"))
    assert write_page(page, [half], title="half", note="") == 1
    (script,) = re.findall(r'id="p0">(.*)</script>', page.read_text())
    assert json.loads(script)["samples"][0]["answer"] == "\ud83d"


@needs_browser
def test_a_prompt_and_its_sample_are_shown(page):
    document = dump(page)
    assert shown(document, "prompt") == "what is 0?"
    assert shown(document, "reference") == "0"
    assert shown(document, "answer") == "0"
    assert shown(document, "badge") == "correct"
    assert shown(document, "thinking") == ""  # made when it is opened
    assert "2 of 3" not in document and "3 of 3 prompts" in document
    assert document.count('role="tab"') == 2 and "2 wrong" in document


@needs_browser
def test_tokens_have_the_colour_of_their_probability(page):
    document = dump(page, script="at('detail').querySelector('summary').click()")
    assert shown(document, "thinking") == "hm 🙂</think>"
    found = re.findall(
        r'<span class="(\w*)" data-says="([^"]*)">(.*?)</span>', document
    )
    assert html.unescape("".join(text for *_, text in found)) == "hm 🙂</think>0"
    kinds = {says.partition(":")[0]: (kind, says) for kind, says, _ in found}
    assert kinds["token 1, forced"][0] == "forced"
    # exp(-0.25) = 0.779, exp(-0.75) = 0.472, exp(-2.5) = 0.0821
    assert kinds["token 3"] == ("l1", "token 3: -0.250 nats, p = 0.779")
    assert kinds["token 5"] == ("l2", "token 5: -0.750 nats, p = 0.472")
    assert kinds["token 12"] == ("l3", "token 12: -2.500 nats, p = 0.0821")


@needs_browser
def test_what_a_model_wrote_never_runs(page):
    document = dump(page, script="step(1); step(1); turn(1); turn(-1)")
    title = re.search(r"<title>(.*?)</title>", document, re.S)[1]
    assert html.unescape(title).startswith("title </script>")
    assert "<img" not in document and document.count("<script") == 0
    assert shown(document, "prompt").startswith("</script><script>document.title")
    assert shown(document, "answer").startswith("</script><script>document.title")


@needs_browser
def test_a_completion_that_never_answers_is_open(page):
    document = dump(page, fragment="prompt=spelling/1")
    assert shown(document, "thinking") == "no end"
    assert "Completion without an end of thinking" in document
    assert "no answer" in document and "cut off" in document


@needs_browser
def test_filters_and_search_leave_what_they_name(page):
    def listed(**fragment):
        document = dump(
            page, fragment="&".join(f"{k}={v}" for k, v in fragment.items())
        )
        return re.findall(r'data-place="(\d+)"', document)

    assert listed(verdict="no_answer") == ["1"]
    assert listed(verdict="all") == ["2"]
    assert listed(set="sums") == ["0"]
    assert listed(search="VIOLET") == ["2"]
    assert listed(search="nowhere") == []


@needs_browser
def test_the_turns_of_an_episode_stand_apart(tmp_path):
    texts = ["a🙂", ATTACK, "42"]
    ends = [sum(map(len, texts[: count + 1])) for count in range(3)]
    turns = [
        {"end": end, "sampled": place != 1, **({} if place else {"reward": 0.25})}
        for place, end in enumerate(ends)
    ]
    parts = {"near": 0.5, "short": None}
    told = {"turns": turns, "reward": 0.1 + 0.2, "reward_parts": parts}
    path = tmp_path / "viewer.html"
    write_page(
        path,
        [row(0, sample("".join(texts), "no_end") | told | {"detail": "it went on"})],
        title="t",
        note="",
    )
    document = dump(path)
    assert shown(document, "turns") == "2 turns"
    assert shown(document, "reward") == "reward 0.3"
    assert "near 0.5" in document and "short unjudged" in document
    assert "<pre>it went on</pre>" in document
    found = re.findall(
        r'<details open="" class="(\w+)"><summary>(.*?)</summary><pre>(.*?)</pre>',
        document,
        re.S,
    )
    plain = [
        (kind, head, html.unescape(re.sub("<[^>]*>", "", text)))
        for kind, head, text in found
    ]
    assert plain == [
        ("turn", "Turn 1, reward 0.25", texts[0]),
        ("said", "Environment", texts[1]),
        ("turn", "Turn 2", texts[2]),
    ]
    assert "<img" not in document and document.count("<script") == 0


KEYS = """
setTimeout(() => ["j", "k", "j", "j", "ArrowRight"].forEach(
  (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key }))), 500);
"""


@needs_browser
def test_keys_go_to_other_prompts_and_samples(page):
    document = dump(page, script=KEYS)
    assert "3 of 3<" in document and shown(document, "answer") == "2"


@needs_browser
def test_a_page_of_many_long_rollouts_is_soon_there(tmp_path):
    text = "a thought </think>7"
    rows = [row(number, *[sample(text, "correct")] * 16) for number in range(500)]
    path = tmp_path / "viewer.html"
    write_page(path, rows, title="many", note="")
    document = dump(path)
    assert document.count("data-place=") == 500
    assert document.count("data-says=") == 1  # of one sample, its thinking closed


def test_the_rollouts_of_a_run_are_grouped_by_prompt(tmp_path):
    file = tmp_path / "rollouts.jsonl"
    common = {"task": "sums", "reference": "3", "tokens": 2, "policy_version": 0}
    common |= {"interrupted": False, "cut_off": False}
    common |= {"turns": [{"end": 1, "sampled": True}], "reward": 0.5}
    names = ("step", "prompt", "completion", "status", "answer_start")
    rows = [
        dict(zip(names, values, strict=True))
        for values in (
            (0, "1+2", "a#4", "wrong", 2),
            (0, "1+1", "b", "no_answer", None),
            (5, "1+2", "c#3", "correct", 2),
        )
    ]
    file.write_text("".join(json.dumps(common | each) + "\n" for each in rows))
    first, second = read_rows(file)
    assert [each["label"] for each in first["samples"]] == ["step 0", "step 5"]
    assert [each["answer"] for each in first["samples"]] == ["4", "3"]
    assert second["samples"][0]["answer_start"] is None
    assert second["samples"][0]["turns"] == common["turns"]
    assert second["samples"][0]["reward"] == 0.5
    assert write_page(tmp_path / "page.html", [first, second], title="t", note="") == 2


@pytest.mark.parametrize("text", ["", "not JSON\n", '{"step": 1}\n', "[1]\n"])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    file = tmp_path / "rollouts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match="holds no rollouts"):
        list(read_rows(file))
