"""What stands before the turns of an episode, by hand."""

import numpy as np

from scalerl_jax.generation.turns import opened_request, shared_length
from scalerl_jax.sampler.decoding import NEVER
from scalerl_jax.sampler.requests import Request, Samples


def ids(*values):
    return np.array(values, np.int32)


def test_sequences_have_so_much_in_common():
    assert shared_length([ids(1, 2, 3)]) == 3
    assert shared_length([ids(1, 2, 3), ids(1, 2), ids(1, 2, 3, 4)]) == 2
    assert shared_length([ids(1, 2), ids(2, 2)]) == 0


def test_a_request_is_opened_behind_what_all_have_in_common():
    samples = Samples(
        keys=np.zeros((3, 2), np.uint32), thinking_limits=ids(5, NEVER, NEVER - 1)
    )
    request = Request(request_id=1, tokens=ids(1, 2, 3), samples=samples)
    opened = opened_request(
        request, [ids(1, 2, 9, 3), ids(1, 2, 3), ids(1, 2, 3, 7, 7)]
    )
    assert opened.tokens.tolist() == [1, 2]
    found = opened.samples.openings
    assert [each.tolist() for each in found] == [[9, 3], [3], [3, 7, 7]]
    # A thinking begins behind the opening, and one without a limit has none.
    assert opened.samples.thinking_limits.tolist() == [7, NEVER, NEVER]
    assert opened_request(request, [request.tokens] * 3) is request
