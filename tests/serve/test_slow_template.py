"""A chat template and a compiler that take their time, and who waits for them."""

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax
import numpy as np
import pytest
from small_server import BASE

from scalerl_jax.data.tokenizer import load_tokenizer
from scalerl_jax.sampler.requests import Completion, SamplerStats
from scalerl_jax.sampler.scoring import ScoredTokens
from scalerl_jax.serve import app, rendering
from scalerl_jax.serve.access import Connections
from scalerl_jax.serve.orders import Served
from scalerl_jax.serve.replica import HttpReplica, SamplingThread
from scalerl_jax.serve.service import Service

TOKENIZER = load_tokenizer(BASE)
CHAT = {"messages": [{"role": "user", "content": "word"}]}
PLAIN = {"prompt": "word"}
SCORED = PLAIN | {"max_tokens": 0, "echo": True, "logprobs": 0}
LONG = 60.0  # the test has failed by then


class HeldTemplate:
    """A template that writes nothing before it may, and says that it has begun."""

    def __init__(self):
        self.begun, self.may_write = threading.Event(), threading.Event()

    def render(self, messages, *, options, tools=None):
        self.begun.set()
        assert self.may_write.wait(LONG)
        return messages[0]["content"]


class OneToken:
    """A sampler all of whose completions are the end of the text."""

    def __init__(self):
        self.stats, self._open = SamplerStats(), []

    @property
    def free_slots(self):
        return 4 - len(self._open)

    @property
    def busy(self):
        return bool(self._open)

    def load(self, params, version):
        raise AssertionError("these completions need no params")

    def resume(self, request, turn, appended):
        raise AssertionError("every completion has one turn")

    def cancel(self, request_id):
        raise AssertionError("nobody gives up")

    def close(self):
        raise AssertionError("no request ends the sampler")

    def submit(self, request):
        self._open += [(request.request_id, n) for n in range(request.num_samples)]

    def step(self):
        ended, self._open = self._open, []
        zeros, nothing = np.zeros(1, np.float32), np.zeros((1, 0))
        return [
            Completion(
                request_id=request_id,
                sample=number,
                tokens=np.array([TOKENIZER.eos_ids[0]], np.int32),
                mask=np.array([True]),
                logprobs=zeros,
                full_logprobs=zeros,
                top_tokens=nothing.astype(np.int32),
                top_logprobs=nothing,
                versions=np.zeros(1, np.int32),
                cut_off=False,
                interrupted=False,
            )
            for request_id, number in ended
        ]


class NoScorer:
    """Of prompts that nobody has scored."""

    room = 0


class HeldCompiler:
    """A scorer whose program is compiled no sooner than it may be."""

    room = 0

    def __init__(self):
        self.begun, self.may_compile = threading.Event(), threading.Event()

    def has(self, tokens):
        return tokens <= self.room

    def compile(self, tokens):
        self.begun.set()
        assert self.may_compile.wait(LONG)
        self.room = 64

    def __call__(self, sequences):
        counts = [len(each.tokens) - 1 for each in sequences]
        return [
            ScoredTokens(
                logprobs=np.zeros(count, np.float32),
                top_tokens=np.zeros((count, 0), np.int32),
                top_logprobs=np.zeros((count, 0), np.float32),
            )
            for count in counts
        ]


@contextlib.asynccontextmanager
async def client_of(template, scorer=None):
    """A client of a server with this template, in this process."""
    served = Served(
        name="m",
        policy_version=0,
        tokenizer=TOKENIZER,
        template=template,
        enable_thinking=True,
        vocab_size=72,
        max_prompt_tokens=32,
        max_completion_tokens=64,
        max_samples=4,
        max_body_bytes=1000,
        slots=4,
        max_waiting=9,
    )
    sampler = SamplingThread(
        HttpReplica(OneToken(), scorer or NoScorer()), on_death=lambda: None
    )
    connections = Connections(max_connections=9, header_s=LONG, body_s=LONG)
    made = app.make_app(Service(served, [sampler]), connections, key="", hosts=None)
    sampler.start()
    transport = httpx.ASGITransport(made)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://m") as ask:
            yield ask
    finally:
        template.may_write.set()
        sampler.stop()


async def blocked_by_chats(ask, template, path):
    """Eight chats, of which one holds the template."""
    chats = [asyncio.create_task(ask.post(path, json=CHAT)) for _ in range(8)]
    assert await asyncio.to_thread(template.begun.wait, LONG)
    return chats


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_needs_no_template_is_answered_while_chats_wait_for_it(path):
    async def run():
        template = HeldTemplate()
        async with client_of(template) as ask, asyncio.timeout(LONG):
            chats = await blocked_by_chats(ask, template, path)
            for other in ("/v1/completions", "/tokenize"):
                for _ in range(8):
                    assert (await ask.post(other, json=PLAIN)).status_code == 200
            assert not any(chat.done() for chat in chats)
            template.may_write.set()
            answers = await asyncio.gather(*chats)
            assert [each.status_code for each in answers] == [200] * 8

    asyncio.run(run())


def test_a_chat_that_waits_too_long_for_others_is_refused(monkeypatch):
    monkeypatch.setattr(app, "_CHAT_WAIT_S", 0.01)

    async def run():
        template = HeldTemplate()
        async with client_of(template) as ask, asyncio.timeout(LONG):
            first, *others = await blocked_by_chats(
                ask, template, "/v1/chat/completions"
            )
            answers = await asyncio.gather(*others)
            assert {each.status_code for each in answers} == {503}
            for each in answers:
                error = each.json()["error"]
                assert error["code"] == "chat_template_busy"
                assert "\n" not in error["message"]
                assert "try again later" in error["message"]
            template.may_write.set()
            assert (await first).status_code == 200

    asyncio.run(run())


def test_who_waits_for_the_compiler_takes_no_threads_from_others():
    async def run():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        scorer = HeldCompiler()
        async with client_of(HeldTemplate(), scorer) as ask, asyncio.timeout(LONG):
            scored = [
                asyncio.create_task(ask.post("/v1/completions", json=SCORED))
                for _ in range(8)
            ]
            assert await asyncio.to_thread(scorer.begun.wait, LONG)
            for _ in range(8):
                answer = await ask.post("/v1/completions", json=PLAIN)
                assert answer.status_code == 200
            assert not any(each.done() for each in scored)
            scorer.may_compile.set()
            answers = await asyncio.gather(*scored)
            assert [each.status_code for each in answers] == [200] * 8

    asyncio.run(run())


def test_no_number_of_samples_is_compiled_for_while_others_wait(caplog):
    async def run():
        async with client_of(HeldTemplate()) as ask, asyncio.timeout(LONG):
            with jax.log_compiles(), caplog.at_level(logging.WARNING):
                for count in (1, 2, 3):
                    answer = await ask.post(
                        "/v1/completions", json=PLAIN | {"n": count}
                    )
                    assert len(answer.json()["choices"]) == count
            assert not [each for each in caplog.messages if "ompil" in each]

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_an_answer_is_sent_in_pieces(monkeypatch, path):
    """A client that takes it slowly is given time for each."""
    monkeypatch.setattr(rendering, "PIECE", 16)
    sizes = []

    async def run():
        async with client_of(HeldTemplate()) as ask, asyncio.timeout(LONG):
            whole = ask._transport.app

            async def heard(scope, receive, send):
                async def sent(message):
                    sizes.append(len(message.get("body", b"")))
                    await send(message)

                await whole(scope, receive, sent)

            ask._transport.app = heard
            answer = await ask.post(path, json=PLAIN)
            assert answer.json()
            assert int(answer.headers["content-length"]) == sum(sizes)
            assert len(sizes) > 2 and max(sizes) == 16

    asyncio.run(run())
