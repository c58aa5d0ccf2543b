"""A teacher behind HTTP: what it is asked, what becomes of its answers and failures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_teacher
from small_model import SMALL
from small_tokenizers import byte_level
from test_stream_packing import SHAPE, make_sequences

from scalerl_jax.batching.packing import pack
from scalerl_jax.batching.stream_packing import pack_shared
from scalerl_jax.config import TeacherConfig
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.formats import http_json
from scalerl_jax.learner.endpoint_teacher import make_endpoint, probe_of, unpacked
from scalerl_jax.learner.forward import Forward
from scalerl_jax.learner.window_scores import Scorer, of_params
from scalerl_jax.model.transformer import (
    head_logits,
    head_weights,
    hidden_states,
    init_params,
)
from scalerl_jax.parallel.mesh import make_mesh

GROUPS = [(3, (2, 5, 4)), (1, (6, 3)), (4, (7,))]
LONGEST = 4 + 7


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(http_json, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setenv("TEACHER_KEY", "sesame")
    with small_teacher.serving() as made:
        yield made


def teacher(server, **changes):
    settings = {"endpoint": server.url, "key_variable": "TEACHER_KEY", "retries": 2}
    return make_endpoint(TeacherConfig(**settings | changes))


def batches():
    """The same sequences in rows, and in streams that share prompts."""
    sequences = make_sequences(GROUPS)
    rows = pack(sequences, row_tokens=20, rows_per_microbatch=2)
    return sequences, {
        "rows": rows,
        "streams": pack_shared(sequences, SHAPE, streams=2),
    }


@pytest.mark.parametrize("layout", ["rows", "streams"])
def test_every_sequence_is_asked_as_ids_and_scores_stand_at_their_targets(
    server, layout
):
    sequences, packed = batches()
    batch, places = packed[layout]
    found = teacher(server)(None, batch)
    whole = [each.tokens.tolist() for each in sequences]
    assert sorted(body["prompt"] for _, body, _ in server.asked) == sorted(whole)
    for path, body, key in server.asked:
        assert (path, key) == ("/v1/completions", "Bearer sesame")
        assert (body["model"], body["max_tokens"], body["echo"]) == ("large", 0, True)
    for number, each in enumerate(sequences):
        here = places == number
        n = np.arange(each.prompt_length, len(each.tokens))
        expected = -each.tokens[each.prompt_length :] / 10 - n
        np.testing.assert_allclose(found[here], expected, rtol=1e-6)
    assert not found[places < 0].any()


@functools.cache
def policy():
    """Random params, and the scorer that a teacher.checkpoint has."""
    forward = Forward(arch=SMALL, dtype=jnp.float32)
    return forward, init_params(SMALL, jax.random.key(3), dtype=jnp.float32)


@jax.jit
def whole_rows(params, tokens):
    """Log-probabilities of all tokens behind each, in one row."""
    states, _ = hidden_states(
        params,
        SMALL,
        tokens,
        positions=jnp.arange(tokens.shape[1])[None],
        segment_ids=jnp.ones_like(tokens),
        dtype=jnp.float32,
    )
    logits = head_logits(states, head_weights(params), float32_head=True)
    return jax.nn.log_softmax(logits[0])


@pytest.mark.parametrize("layout", ["rows", "streams"])
def test_it_scores_as_the_same_weights_do_as_a_checkpoint(server, layout):
    forward, params = policy()

    def score(ids):
        """Each token behind those before it, without rows, segments or packing."""
        tokens = np.zeros(LONGEST, np.int32)  # what comes later is not seen
        tokens[: len(ids)] = ids
        logprobs = np.asarray(whole_rows(params, tokens[None]))
        return [float(logprobs[n, each]) for n, each in enumerate(ids[1:])]

    server.score = score
    batch = batches()[1][layout].batch
    microbatch = jax.tree.map(lambda leaf: leaf[0], batch)
    mesh = make_mesh(jax.devices()[:1])
    scorer = Scorer(
        lambda params, batch: forward.logprobs(params, batch)[0],
        params=jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.P())),
        batch=microbatch,
        mesh=mesh,
    )
    mask = batch.sequence_ids > 0
    expected = of_params(params, scorer)(None, batch)
    found = teacher(server, concurrent=1)(None, batch)
    np.testing.assert_allclose(found[mask], expected[mask], atol=1e-5)
    assert np.ptp(found[mask]) > 0.1


def test_vllm_s_whole_answer_is_read_and_its_number_for_minus_infinity_is_none(server):
    server.form = small_teacher.vllm
    ids = np.array([7, 3, 9, 3], np.int32)
    found = teacher(server).logprobs(ids)
    np.testing.assert_allclose(found, [-1.3, -2.9, -3.3], rtol=1e-6)
    server.score = lambda ids: [-1.0, -9999.0, -2.0]
    with pytest.raises(RuntimeError, match=r"of 4 tokens .* 2 log-prob.* -9999"):
        teacher(server).logprobs(ids)


@pytest.mark.parametrize(
    "values, count",
    [
        pytest.param([-0.5, -1.0, -2.0, -3.0], 3, id="one for the first, too"),
        pytest.param([None, 0.3, 0.9, 0.99], 0, id="probabilities"),
        pytest.param([None, True, False, -1.0], 1, id="truth values"),
        pytest.param([None, "-1", "-2", "-3"], 0, id="texts"),
        pytest.param([None, [-1.0], [-2.0], [-3.0]], 0, id="lists"),
        pytest.param([None, -1.0, -2.0], 2, id="too few"),
        pytest.param([None, -1.0, -2.0, -(10**400)], 2, id="beyond any number"),
    ],
)
def test_an_answer_of_other_things_than_log_probabilities_is_refused(
    server, values, count
):
    server.form = lambda body, scores: {
        "choices": [{"logprobs": {"token_logprobs": values}}]
    }
    first = "null" if values[0] is None else "not null"
    with pytest.raises(
        RuntimeError, match=f"of 4 tokens the answer has {first} .* {count} log-prob"
    ):
        teacher(server).logprobs(np.arange(4, dtype=np.int32))


def test_a_failure_that_passes_is_asked_again_and_one_that_stays_ends_the_batch(server):
    batch = batches()[1]["rows"].batch
    server.failures = [503, 429]
    assert teacher(server)(None, batch).any()
    server.failures = [500] * 100
    with pytest.raises(
        RuntimeError, match=r"teacher\.endpoint = .*completions failed 3 times: .* 500"
    ):
        teacher(server, concurrent=1)(None, batch)
    server.failures = [400]
    with pytest.raises(RuntimeError, match="/completions answered with status 400"):
        teacher(server, concurrent=1)(None, batch)
    server.failures = []
    for wrong in ([], [None] * 30, [-1.0], [float("nan")] * 7):
        server.score = lambda ids, wrong=wrong: wrong
        with pytest.raises(RuntimeError, match="teacher.endpoint = .*log"):
            teacher(server, concurrent=1)(None, batch)


def test_an_endpoint_of_another_tokenizer_or_none_is_refused(server, monkeypatch):
    backend = byte_level()
    tokenizer = Tokenizer(backend=backend, eos_ids=(0,))
    probe = probe_of(tokenizer)
    assert all(name in probe for name in ("<|end|>", "[/THINK]"))
    server.tokenize = lambda text: tokenizer.encode(text)
    teacher(server).check(tokenizer)
    assert server.asked[0][0] == "/tokenize"  # beside /v1, as vLLM has it
    server.tokenize = lambda text: [1, *tokenizer.encode(text)]  # BOS
    teacher(server).check(tokenizer)
    server.tokenize = lambda text: [*tokenizer.encode(text)[:-1], 7]
    with pytest.raises(ValueError, match="has another tokenizer than the policy"):
        teacher(server).check(tokenizer)
    server.failures = [404]
    with pytest.raises(ValueError, match=r"/tokenize answered with status 404"):
        teacher(server).check(tokenizer)
    server.tokenize = lambda text: tokenizer.encode(text)
    server.score = lambda ids: []
    with pytest.raises(ValueError, match=r"of 8 tokens .* 0 log-prob"):
        teacher(server).check(tokenizer)
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(ValueError, match="wants a key, and TEACHER_KEY of the"):
        teacher(server)


def test_a_batch_of_nothing_has_no_sequences():
    assert not list(unpacked(pack([], row_tokens=8, rows_per_microbatch=1).batch))
