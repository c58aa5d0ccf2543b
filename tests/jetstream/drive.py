"""Several requests through JetStream's own orchestrator; a process of its own.

The driver kills its process when one of its threads fails.  Run as

    python tests/jetstream/drive.py interleaved answers.json
"""

import asyncio
import json
import logging
import sys
from pathlib import Path

import jax
from small_jetstream import make_engine, random_params

from scalerl_jax.sampler.jetstream import load_orchestrator

# More than there are slots; as ids or as text, and how many tokens at most.
REQUESTS = (
    ([5, 1, 9, 2, 7], 30),
    ([4], 30),
    ([12, 0, 6, 6, 1, 2, 8, 9, 10, 5, 4, 7, 1, 0, 2, 6], 30),
    ("t8 t9 t10", 30),
    ([6, 6, 2], 3),
    ([0, 2, 4], 30),
    ("t1 t2", 1),
    ([7, 7, 7, 7], 18),
)


def make_driver(orchestrator, mode):
    params = random_params()
    if mode == "interleaved":
        prefiller = generator = make_engine()
        prefiller_params = generator_params = params
    else:
        devices = jax.devices()
        prefiller, generator = make_engine(devices[:1]), make_engine(devices[1:2])
        prefiller_params, generator_params = jax.device_put(
            (params, params), (devices[0], devices[1])
        )
    return orchestrator.Driver(
        prefill_engines=[prefiller],
        generate_engines=[generator],
        prefill_params=[prefiller.load_params(prefiller_params)],
        generate_params=[generator.load_params(generator_params)],
        interleaved_mode=mode == "interleaved",
    )


def request_of(content, max_tokens):
    from jetstream.core.proto import jetstream_pb2

    kinds = jetstream_pb2.DecodeRequest
    if isinstance(content, str):
        parts = {"text_content": kinds.TextContent(text=content)}
    else:
        parts = {"token_content": kinds.TokenContent(token_ids=content)}
    return kinds(session_cache="", priority=1, max_tokens=max_tokens, **parts)


async def answer(client, content, max_tokens):
    ids, text = [], ""
    async for response in client.Decode(request_of(content, max_tokens)):
        (sample,) = response.stream_content.samples
        ids += sample.token_ids
        text += sample.text
    return ids, text


async def answer_all(orchestrator, driver):
    client = orchestrator.LLMOrchestrator(driver=driver)
    answers = await asyncio.gather(*(answer(client, *each) for each in REQUESTS))
    driver.stop()  # its threads must not find this loop closed
    return answers


def main(mode, out):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    orchestrator = load_orchestrator()
    assert (root.level, root.handlers) == before
    assert not hasattr(jax, "tree_map")
    driver = make_driver(orchestrator, mode)
    answers = asyncio.run(answer_all(orchestrator, driver))
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
