"""Least work of programs: FLOPs of their matmuls, and bytes to and from HBM.

Work is computed from the model's shapes, for one call on all devices of its mesh.  A
row counts as one sequence, which gives the greatest cost of causal attention.
"""

import dataclasses

from scalerl_jax.model.architecture import Architecture

# A product of float32 operands is six bfloat16 products on TPUs and, of the head, on
# GPUs (`model/products.py`): each operand is three bfloat16 terms, and the three
# smallest of the nine products are left out.  A float32 operand that was cast from
# bfloat16 is one term: three products are left, or one if both operands were cast.
HIGHEST_PASSES = 6
CAST_PASSES = 3
BOTH_CAST_PASSES = 1
# By number of cast operands.  The gradients take two terms of a float32 operand.
_PASSES = (HIGHEST_PASSES, CAST_PASSES, BOTH_CAST_PASSES)
_GRADIENT_PASSES = (3, 2, 1)
# Matmuls of queries x keys per pass of attention.  The forward pass has two, scores and
# mixing.  The backward pass has these scores, their cotangents, and three results.
FORWARD_ATTENTION = 2
BACKWARD_ATTENTION = 5
# Remat policy -> (linears are recomputed, attention is recomputed).
RECOMPUTED = {
    "none": (False, False),
    "dots": (False, False),
    "attention": (True, False),
    "full": (True, True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs of layers and of the float32 head, and bytes to and from HBM."""

    layers: float = 0.0  # FLOPs of the layers' bfloat16 products, attention included
    head: float = 0.0  # FLOPs of the head; a product counts once at any precision
    head_passes: float = 0.0  # FLOPs of the bfloat16 products that compute the head
    bytes: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of all products."""
        return self.layers + self.head

    @property
    def passes(self) -> float:
        """FLOPs of the matrix units; a float32 product is several bfloat16 ones."""
        return self.layers + self.head_passes

    def __add__(self, other: "Work") -> "Work":
        """Return the sum of two works."""
        mine, theirs = vars(self), vars(other)
        return Work(**{name: mine[name] + theirs[name] for name in mine})

    def __mul__(self, count: float) -> "Work":
        """Return the work done `count` times."""
        return Work(**{name: value * count for name, value in vars(self).items()})


def _linears(
    arch: Architecture, tokens: float, copies: int = 1, *, last: bool = True
) -> Work:
    """Return the matmuls of a layer, without the `last` one if it is False.

    Values have 2 bytes; each of `copies` copies of the weights is read.
    """
    common = _common_linears(arch, tokens, copies, last=last)
    return common + _expert_linears(arch, tokens, copies)


def _common_linears(
    arch: Architecture,
    tokens: float,
    copies: int = 1,
    *,
    last: bool = True,
    matrix_bytes: int = 2,
) -> Work:
    """Return the work of a layer's matmuls except those of routed experts.

    They belong to attention, to a dense or shared MLP, and to the router.
    """
    width, queries = arch.hidden_size, arch.num_heads * arch.head_dim
    keys, ffn = arch.num_kv_heads * arch.head_dim, arch.ffn_size
    sides = [(width, queries), (width, keys), (width, keys), (queries, width)]
    if arch.experts is None or arch.experts.shared:
        sides += [(width, ffn), (width, ffn), *[(ffn, width)] * last]
    if arch.experts is not None:
        sides.append((width, arch.experts.count))
    return Work(
        layers=sum(2 * tokens * n * k for n, k in sides),
        bytes=sum(
            2 * tokens * (n + k) + matrix_bytes * copies * n * k for n, k in sides
        ),
    )


def _expert_linears(arch: Architecture, tokens: float, copies: int = 1) -> Work:
    """Return the work of a layer's routed experts; no work in a dense model.

    A token costs the FLOPs of its own experts; the weights of every expert used by any
    token are read.  The last product always counts, since the gates' gradient needs it.
    """
    if arch.experts is None:
        return Work()
    each = 3 * arch.hidden_size * arch.ffn_size  # gate, up, down
    sides = 3 * (arch.hidden_size + arch.ffn_size)
    rows = tokens * arch.experts.top_k
    read = copies * experts_hit(arch, tokens / copies)
    return Work(layers=2 * rows * each, bytes=2 * (rows * sides + read * each))


def experts_hit(arch: Architecture, tokens: float) -> float:
    """Return the mean number of a layer's experts that `tokens` tokens use.

    Tokens are assumed to draw experts uniformly, which gives
    count * (1 - (1 - top_k / count) ^ tokens).
    """
    if arch.experts is None:
        return 0.0
    count, top_k = arch.experts.count, arch.experts.top_k
    return count * (1.0 - (1.0 - top_k / count) ** tokens)


def _attention(
    arch: Architecture, rows: float, length: float, *, matmuls: int, share: float
) -> Work:
    """Return the work of attention over causal rows, averaged over layers.

    `share` of the products is computed; all of them if layers have windows or chunks,
    which already leave out most tokens of other sequences.
    """
    seen = arch.seen_in_rows(length) / arch.num_layers
    if not arch.windows_within(int(length)) and arch.local is None:
        seen *= share
    values = rows * length * arch.head_dim
    return Work(
        layers=matmuls * 2 * rows * seen * arch.num_heads * arch.head_dim,
        bytes=2 * values * (2 * arch.num_heads + 2 * arch.num_kv_heads),
    )


def _cached(
    arch: Architecture,
    tokens: float,
    rows: float,
    context: float,
    vector_bytes: int,
    copies: int,
    matrix_bytes: int,
) -> Work:
    """Return the work of a layer whose tokens attend to `rows` sequences of `context`.

    A cached key or value of a head has `vector_bytes`.  Weights other than the experts'
    are read `copies` times.
    """
    heads = arch.head_dim * arch.num_heads
    seen = arch.seen(context) / arch.num_layers
    attention = Work(
        layers=4 * tokens * seen * heads,
        bytes=rows * seen * 2 * arch.num_kv_heads * vector_bytes,
    )
    common = _common_linears(arch, tokens, copies, matrix_bytes=matrix_bytes)
    return common + attention + _expert_linears(arch, tokens)


def _head(
    arch: Architecture,
    tokens: float,
    copies: int = 1,
    *,
    float32_head: bool,
    passes: int,
    itemsize: int = 4,
) -> Work:
    """Return the work of one product with the head.

    A float32 head takes `passes` bfloat16 products, and its operands have `itemsize`
    bytes per value in memory; otherwise it is one product of 2-byte values.
    """
    width, vocabulary = arch.hidden_size, arch.vocab_size
    flops = 2.0 * tokens * width * vocabulary
    operands = tokens * width + copies * width * vocabulary
    read, written = (itemsize, 4) if float32_head else (2, 2)
    return Work(
        head=flops,
        head_passes=flops * (passes if float32_head else 1),
        bytes=read * operands + written * tokens * vocabulary,
    )


def microbatch(
    arch: Architecture,
    *,
    rows: int,
    row_tokens: int,
    devices: int,
    tensor: int,
    remat: str,
    float32_head: bool,
    param_bytes: int,
    compute_bytes: int = 2,
    head_bytes: int = 4,
    head_once: bool = False,
    attention_share: float = 1.0,
) -> Work:
    """Return the work of a microbatch: forward, backward, and summing its gradients.

    The head has four products: the forward pass, its recomputation unless `head_once`,
    and the gradients of both operands.  With `compute_bytes` = 2 the hidden states, an
    operand of all but their own gradient, are cast from bfloat16; with `head_bytes` = 2
    so are the head's weights.  Attention computes `attention_share` of its blocks below
    the diagonal.
    """
    tokens, copies = rows * row_tokens, devices // tensor
    again, attention_again = RECOMPUTED[remat]
    layer = _linears(arch, tokens, copies) * 3
    if again:  # the backward pass does not need the last product
        layer += _linears(arch, tokens, copies, last=False)
    matmuls = FORWARD_ATTENTION * (1 + attention_again) + BACKWARD_ATTENTION
    layer += _attention(arch, rows, row_tokens, matmuls=matmuls, share=attention_share)
    head = Work()
    hidden, weights = compute_bytes == 2, head_bytes == 2
    logits = [_PASSES[hidden + weights]] * (1 if head_once else 2)
    for passes in (*logits, _GRADIENT_PASSES[hidden], _GRADIENT_PASSES[weights]):
        head += _head(arch, tokens, copies, float32_head=float32_head, passes=passes)
    # Params are read; the accumulated gradients are read and written.
    state = Work(bytes=arch.num_params * (param_bytes + 4 + 4))
    return layer * arch.num_layers + head + state


def scoring(
    arch: Architecture,
    *,
    rows: int,
    row_tokens: int,
    devices: int,
    tensor: int,
    float32_head: bool,
    compute_bytes: int = 2,
    head_bytes: int = 4,
    attention_share: float = 1.0,
) -> Work:
    """Return the work of a forward pass over a microbatch, as for `microbatch`."""
    tokens, copies = rows * row_tokens, devices // tensor
    layer = _linears(arch, tokens, copies)
    layer += _attention(
        arch, rows, row_tokens, matmuls=FORWARD_ATTENTION, share=attention_share
    )
    passes = _PASSES[(compute_bytes == 2) + (head_bytes == 2)]
    head = _head(arch, tokens, copies, float32_head=float32_head, passes=passes)
    return layer * arch.num_layers + head


def optimizer_update(arch: Architecture, *, param_bytes: int) -> Work:
    """Return the work of an update: a pass that checks it, and a pass that writes it.

    Each reads params, moments and gradients, and the gradients again for their norm.
    """
    return Work(bytes=arch.num_params * (3 * (param_bytes + 2 * 4) + 4 * 4))


def decode(
    arch: Architecture,
    *,
    rows: float,
    context: float,
    steps: int,
    itemsize: int,
    float32_head: bool,
    matrix_bytes: int = 2,
    vector_bytes: int | None = None,
    copies: int = 1,
) -> Work:
    """Return the work of `steps` tokens for `rows` sequences of `context` tokens.

    A cached key or value of a head has `vector_bytes`; None: `itemsize` per number.
    A weight of a layer, but of an expert, has `matrix_bytes`.

    Heads and experts are sharded over the devices.  Together these read all weights
    once; with more devices than kv heads they read the weights other than experts
    `copies` times, and each copy has a share of the rows.  Output head and hidden
    states are in the sampler's dtype and cast to float32: bfloat16 operands need fewer
    passes.
    """
    vector = vector_bytes or arch.head_dim * itemsize
    layer = _cached(arch, rows, rows, context, vector, copies, matrix_bytes)
    passes = BOTH_CAST_PASSES if itemsize == 2 else HIGHEST_PASSES
    head = _head(
        arch, rows, copies, float32_head=float32_head, passes=passes, itemsize=itemsize
    )
    return (layer * arch.num_layers + head) * steps


def prefill(
    arch: Architecture,
    *,
    tokens: float,
    context: float,
    itemsize: int,
    matrix_bytes: int = 2,
    vector_bytes: int | None = None,
    copies: int = 1,
) -> Work:
    """Return the work of the last `tokens` of `context` prompt tokens, without a head.

    `matrix_bytes`, `vector_bytes` and `copies` are as for `decode`.
    """
    vector = vector_bytes or arch.head_dim * itemsize
    layer = _cached(arch, tokens, 1, context, vector, copies, matrix_bytes)
    return layer * arch.num_layers
