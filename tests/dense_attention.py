"""Causal attention within segments as one float64 softmax over all pairs, in NumPy."""

import numpy as np


def rows_of_segments(rng, rows, length):
    """Segment ids [R, S]: some segments of random lengths, then padding (0)."""
    ids = np.zeros((rows, length), np.int32)
    for row in ids:
        filled = rng.integers(0, length + 1)
        cuts = np.sort(rng.integers(0, filled + 1, rng.integers(0, 4)))
        ends = [*cuts, filled]
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            if end > start:
                row[start:end] = row.max() + 1
    return ids


def random_inputs(rng, *, rows, length, heads, kv_heads, dim):
    """q, k, v and a cotangent, float32."""
    counts = (heads, kv_heads, kv_heads, heads)
    return [
        rng.normal(size=(rows, length, count, dim)).astype(np.float32)
        for count in counts
    ]


def seen(segment_ids, window=None):
    """[R, S, S]: key of the query's segment, not later, and of its last `window`."""
    length = segment_ids.shape[1]
    causal = np.tril(np.ones((length, length), bool))
    if window is not None:
        causal = np.triu(causal, 1 - window)
    return (segment_ids[:, :, None] == segment_ids[:, None, :]) & causal


def attend(q, k, v, segment_ids, cotangent, *, window=None, sinks=None, cap=0.0):
    """What queries find, and the gradients of (found * cotangent).sum() by q, k, v.

    With `sinks` [heads], scores of no token, theirs too.  With `cap` a score s is
    cap * tanh(s / cap).
    """
    q, k, v, cotangent = (np.asarray(x, np.float64) for x in (q, k, v, cotangent))
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    wide_k, wide_v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("rqhd,rshd->rhqs", q, wide_k) * scale
    slope = 1.0
    if cap:
        slope, scores = np.cosh(scores / cap) ** -2.0, cap * np.tanh(scores / cap)
    scores = np.where(seen(segment_ids, window)[:, None], scores, -np.inf)
    shares = np.exp(scores)
    sink = (
        0.0 if sinks is None else np.exp(np.asarray(sinks, np.float64))[:, None, None]
    )
    total = shares.sum(axis=-1, keepdims=True) + sink
    shares /= total
    found = np.einsum("rhqs,rshd->rqhd", shares, wide_v)

    of_shares = np.einsum("rqhd,rshd->rhqs", cotangent, wide_v)
    inner = (of_shares * shares).sum(axis=-1, keepdims=True)
    of_scores = shares * (of_shares - inner) * scale * slope
    of_q = np.einsum("rhqs,rshd->rqhd", of_scores, wide_k)
    of_k = np.einsum("rhqs,rqhd->rshd", of_scores, q)
    of_v = np.einsum("rhqs,rqhd->rshd", shares, cotangent)

    def narrow(x):
        rows, length, heads, dim = x.shape
        return x.reshape(rows, length, heads // group, group, dim).sum(axis=3)

    gradients = (of_q, narrow(of_k), narrow(of_v))
    if sinks is None:
        return found, gradients
    return found, (*gradients, -(sink / total * inner).sum(axis=(0, 2, 3)))
