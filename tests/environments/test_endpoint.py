"""A judge over HTTP, against a server that answers as it is told."""

import asyncio
import contextlib
import http.server
import json
import threading

import pytest
import small_server

from scalerl_jax.config import RewardConfig
from scalerl_jax.environments.endpoint import Judge, JudgeError, rubric
from scalerl_jax.environments.own_file import read_own
from scalerl_jax.environments.run_verifiers import make_pool
from scalerl_jax.environments.verdict import Done
from scalerl_jax.formats import http_json

SILENCE = -1  # of a server that takes a question and says nothing


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the server's `replies`, the last of them again and again."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers["Authorization"]))
        replies = self.server.replies
        status, content = replies.pop(0) if len(replies) > 1 else replies[0]
        if status == SILENCE:
            self.server.over.wait()
            return
        if status == 0:
            text = body["messages"][0]["content"]
            content, status = said(content[text.split("|")[0]]), 200
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:9/other")
        if status == 429:
            self.send_header("Retry-After", "\u00b2")  # a digit, and no number
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def said(text, ended="stop"):
    choice = {"message": {"content": text}, "finish_reason": ended}
    return json.dumps({"choices": [choice]}).encode()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(http_json, "_FIRST_PAUSE_S", 0.001)
    over = threading.Event()
    with small_server.answering(Handler, replies=[], asked=[], over=over) as made:
        yield made
        over.set()


def make_judge(server, **changes):
    given = {
        "url": f"http://127.0.0.1:{server.server_address[1]}/v1",
        "model": "m",
        "template": "rate {completion} for {prompt} by {reference}",
        "best": 10.0,
        "timeout_s": 5.0,
    }
    return Judge(**given | changes)


def ask(judge, completion="{prompt}"):
    call = judge(completion=completion, prompt="p", reference={"a": 1})
    return asyncio.run(call)


def test_the_last_number_is_the_score_and_the_key_is_sent(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k")
    server.replies = [(200, said("First 3, but in the end: 7.5\n"))]
    assert ask(make_judge(server, key="JUDGE_KEY"), "{x}") == 0.75
    ((path, body, key),) = server.asked
    assert (path, body["model"], key) == ("/v1/chat/completions", "m", "Bearer k")
    assert body["messages"][0]["content"] == 'rate {x} for p by {"a": 1}'


def test_a_completion_fills_no_places(server):
    server.replies = [(200, said("1"))]
    ask(
        make_judge(server, template="{prompt}: {completion} {x}"), "{reference}{prompt}"
    )
    ((_, body, _),) = server.asked
    assert body["messages"][0]["content"] == "p: {reference}{prompt} {x}"


def test_what_is_judged_is_shown_to_the_judge(server):
    server.replies = [(200, said("1"))]
    judge = make_judge(server, template="{reference} or {completion}?")
    asyncio.run(judge(completion="c", reference=["数", None]))
    ((_, body, _),) = server.asked
    assert body["messages"][0]["content"] == '["数", null] or c?'
    with pytest.raises(ValueError, match="has no {criterion}, so that each criterion"):
        asyncio.run(rubric(judge, {"short": 1.0}, completion="c"))
    with pytest.raises(ValueError, match="has no {completion}"):
        ask(make_judge(server, template="Is {prompt} well answered?"), "c")
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "reply, score",
    [
        ("Score: 3/10", 0.3),
        ("**Score: 3**/10.", 0.3),
        ("I give it 3 out of 10", 0.3),
        ("2.5 of 10.0", 0.25),
        ("**8**", 0.8),
        ("8.", 0.8),
        ("Score: `8`", 0.8),
        ("I give it a score of 10", 1.0),
        ("Score - 8", 0.8),
    ],
)
def test_a_score_may_say_of_what_it_is(server, reply, score):
    server.replies = [(200, said(reply))]
    assert ask(make_judge(server)) == score


def test_a_pattern_may_be_the_users(server):
    server.replies = [(200, said("SCORE=4 of 5 SCORE=6 stars"))]
    assert ask(make_judge(server, pattern=r"SCORE=(\d+)( of)?")) == 0.6


def test_what_may_pass_is_tried_again(server):
    server.replies = [(429, b""), (503, b""), (529, b""), (200, said("4"))]
    assert ask(make_judge(server)) == 0.4
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    "reply, times, words",
    [
        ((429, b""), 3, "failed 3 times: status 429"),
        ((401, b""), 1, "answered with status 401"),
        ((501, b""), 1, "answered with status 501"),
        ((302, b""), 1, "answered with status 302"),
        ((200, b"<html>"), 1, "answered with no JSON: b'<html>'"),
        ((200, b"[]"), 1, "answered what is no completion"),
        ((200, said(None)), 1, "answered with no text"),
        ((200, said("")), 1, "answer '' has no match of"),
        ((200, said("I like it")), 1, "answer 'I like it' has no match of"),
        ((200, said("11")), 1, "score 11 is not in 0..10"),
        ((200, said("3/5")), 1, "score is 3 of 5, and not of 10"),
        ((200, said("1/2/10")), 1, "has no match of"),
        ((200, said("1,000")), 1, "has no match of"),
        ((200, said("as good as GPT4")), 1, "has no match of"),
        ((200, said("3 points out of **10**")), 1, "ends with a scale or a range"),
        ((200, said("a 3, on a scale of 10")), 1, "ends with a scale or a range"),
        ((200, said("3 on a scale from 0 to 10.")), 1, "ends with a scale or a range"),
        ((200, said("Score: 7-8")), 1, "ends with a scale or a range"),
        ((200, said("It has 2", "length")), 1, "was cut at max_tokens=256"),
    ],
)
def test_no_failure_is_a_score(server, reply, times, words):
    server.replies = [reply]
    with pytest.raises(JudgeError, match=words):
        ask(make_judge(server, retries=2))
    assert len(server.asked) == times


def test_a_server_that_is_not_there_is_named(server):
    judge = make_judge(server, url="http://127.0.0.1:9/v1", retries=1)
    with pytest.raises(JudgeError, match=r"127.0.0.1:9/v1 failed 2 times: .*refused"):
        ask(judge)


def test_a_key_that_was_not_asked_for_is_named(server):
    with pytest.raises(JudgeError, match=r"NO_KEY is not .* name it in reward.variabl"):
        ask(make_judge(server, key="NO_KEY"))


def test_the_same_question_is_asked_once(server, tmp_path):
    server.replies = [(200, said("5"))]
    judge = make_judge(server, cache=str(tmp_path / "cache"))
    assert [ask(judge, each) for each in ("a", "a", "b")] == [0.5] * 3
    assert len(server.asked) == 2
    other = make_judge(server, cache=judge.cache, model="other")
    assert ask(other, "a") == 0.5
    assert len(server.asked) == 3


def test_a_rubric_is_a_weighted_mean_and_its_scores_are_parts(server):
    server.replies = [(0, {"short": "2", "clear": "10"})]
    judge = make_judge(server, template="{criterion}|{completion}")
    done = asyncio.run(rubric(judge, {"short": 1.0, "clear": 3.0}, completion="c"))
    assert done == Done((1.0 * 0.2 + 3.0 * 1.0) / 4.0, {"short": 0.2, "clear": 1.0})


class Together(Handler):
    """Answers nobody before everybody has asked."""

    def do_POST(self):
        self.server.everybody.wait(30.0)
        super().do_POST()


def test_a_judge_is_asked_by_all_that_wait_for_it():
    """By 40 at once, of which the threads of an event loop are 32 at most."""
    everybody = threading.Barrier(40)
    known = {"replies": [(200, said("5"))], "asked": [], "everybody": everybody}

    async def all_of_them(judge):
        return await asyncio.gather(*(judge(completion=str(i)) for i in range(40)))

    with small_server.answering(Together, **known) as server:
        judge = make_judge(server, retries=0, timeout_s=20.0)
        assert asyncio.run(all_of_them(judge)) == [0.5] * 40


JUDGING = """
from scalerl_jax.environments.endpoint import Judge

JUDGE = Judge(url={url!r}, model="m", template="{{completion}}", key="MY_KEY",
              best=10.0, retries=1, timeout_s=0.3)

async def score(prompt, completion, reference):
    return await JUDGE(completion=completion)
"""


@pytest.mark.parametrize(
    "reply, words",
    [
        ((200, said("Good: 7")), ""),
        ((200, said("I like it")), "JudgeError: the judge's answer 'I like it' has no"),
        ((200, said("")), "JudgeError: the judge's answer '' has no match"),
        ((200, b"<html>"), "answered with no JSON: b'<html>'"),
        ((429, b""), "failed 2 times: status 429"),
        ((SILENCE, b""), "failed 2 times: timed out"),
    ],
)
def test_a_judge_that_fails_leaves_its_completion_unjudged(
    server, tmp_path, monkeypatch, reply, words
):
    monkeypatch.setenv("MY_KEY", "k")
    server.replies = [reply]
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    file = tmp_path / "mine.py"
    file.write_text(JUDGING.format(url=url))
    reward = RewardConfig(timeout_s=60.0, num_workers=1, variables=("MY_KEY",))
    own = read_own(f"{file}:score", reward)
    with contextlib.closing(make_pool(reward, unnamed="math", own=own)) as pool:
        pool.submit(0, "any", ["a"], {"answer": None})
        pool.wait(120.0)
        ((_, (verdict,)),) = pool.poll()
    assert server.asked[0][2] == "Bearer k"
    assert words in verdict.detail and "\n" not in verdict.detail
    status, value = ("verifier_error", None) if words else ("wrong", 0.7)
    assert (verdict.status, verdict.reward) == (status, value)
