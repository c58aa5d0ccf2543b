"""Stop strings: where in a completion's new tokens its text first holds one."""

from collections.abc import Callable

import numpy as np

from scalerl_jax.sampler.requests import Sample


def end_of_stop(
    sample: Sample, new: np.ndarray, decode: Callable[[list[int]], str] | None
) -> int | None:
    """How many of the `new` tokens it takes to complete a stop string; None: none.

    Only the last tokens before the new ones are decoded with them: a stop string that
    was complete before has ended the sample, and a character takes four at most.
    """
    stops = sample.request.stop
    if not stops or decode is None or not len(new):
        return None
    reach = 4 * max(map(len, stops))
    before: list[int] = []
    for piece in reversed(sample.pieces):
        before = piece[0].tolist() + before
        if len(before) >= reach:
            break
    before = before[-reach:]
    for count in range(1, len(new) + 1):
        text = decode(before + new[:count].tolist())
        if any(stop in text for stop in stops):
            return count
    return None
