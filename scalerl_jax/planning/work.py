"""The least that programs cost: FLOPs of their products, bytes to and from HBM.

Work is counted by hand from the model's shapes, for one call and all devices of its
mesh.  A row is taken to be one sequence, the most that causal attention can cost.
"""

import dataclasses

from scalerl_jax.model.architecture import Architecture

# A product of float32 operands at the highest precision is six bfloat16 products on a
# TPU: each operand is three bfloat16 terms, and of the nine products the three
# smallest are left out.  A float32 operand that is a cast bfloat16 is one term, and the
# compiler sees it: three are left, and one where both operands are.
HIGHEST_PASSES = 6
CAST_PASSES = 3
BOTH_CAST_PASSES = 1
# Matmuls of queries x keys in each pass of attention: scores and mixing; of the
# backward pass, a kernel that makes the scores once, and the TPU's two kernels.
FORWARD_ATTENTION = 2
BACKWARD_ATTENTION = {"blockwise": 5, "cudnn": 5, "splash": 7}
# Remat policy -> whether (the linears, the attention) of a layer are made again.
RECOMPUTED = {
    "none": (False, False),
    "dots": (False, False),
    "attention": (True, False),
    "full": (True, True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs, those of float32 products apart, and bytes to and from HBM."""

    layers: float = 0.0  # bfloat16 products of the layers, attention included
    head: float = 0.0  # counted once, whatever its precision
    head_passes: float = 0.0  # the same, each bfloat16 product that makes it counted
    bytes: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of all products."""
        return self.layers + self.head

    @property
    def passes(self) -> float:
        """FLOPs of the matrix units: a float32 product is several."""
        return self.layers + self.head_passes

    def __add__(self, other: "Work") -> "Work":
        """Return both."""
        mine, theirs = vars(self), vars(other)
        return Work(**{name: mine[name] + theirs[name] for name in mine})

    def __mul__(self, count: float) -> "Work":
        """Return the work done several times."""
        return Work(**{name: value * count for name, value in vars(self).items()})


def _linears(
    arch: Architecture, tokens: float, copies: int = 1, *, last: bool = True
) -> Work:
    """Return the matmuls of a layer, without the `last` one if it is False.

    A value has 2 bytes; each of `copies` replicas reads the weights.
    """
    common = _common_linears(arch, tokens, copies, last=last)
    return common + _expert_linears(arch, tokens, copies)


def _common_linears(
    arch: Architecture, tokens: float, copies: int = 1, *, last: bool = True
) -> Work:
    """Return the work of a layer's matmuls but for those of routed experts.

    They are attention's, those of a dense or shared MLP, and the router's.
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
        bytes=sum(2 * (tokens * (n + k) + copies * n * k) for n, k in sides),
    )


def _expert_linears(arch: Architecture, tokens: float, copies: int = 1) -> Work:
    """Return the work of a layer's routed experts; none in a dense model.

    A token costs the FLOPs of its own experts; the weights of every expert that any
    token takes are read.  The last product is always counted: the gates need it too.
    """
    if arch.experts is None:
        return Work()
    each = 3 * arch.hidden_size * arch.ffn_size  # gate, up, down
    sides = 3 * (arch.hidden_size + arch.ffn_size)
    rows = tokens * arch.experts.top_k
    read = copies * experts_hit(arch, tokens / copies)
    return Work(layers=2 * rows * each, bytes=2 * (rows * sides + read * each))


def experts_hit(arch: Architecture, tokens: float) -> float:
    """Return the mean number of a layer's experts that so many tokens use.

    As if each token drew its own evenly: count * (1 - (1 - top_k / count) ^ tokens).
    """
    if arch.experts is None:
        return 0.0
    count, top_k = arch.experts.count, arch.experts.top_k
    return count * (1.0 - (1.0 - top_k / count) ** tokens)


def _attention(arch: Architecture, rows: float, length: float, matmuls: int) -> Work:
    """Return the attention of a mean layer over whole causal rows."""
    seen = arch.seen_in_rows(length) / arch.num_layers
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
    itemsize: int,
    copies: int,
) -> Work:
    """Return a layer of tokens that attend to `rows` cached sequences of `context`.

    The weights of all but the experts are read `copies` times.
    """
    heads = arch.head_dim * arch.num_heads
    seen = arch.seen(context) / arch.num_layers
    attention = Work(
        layers=4 * tokens * seen * heads,
        bytes=rows * seen * 2 * arch.num_kv_heads * arch.head_dim * itemsize,
    )
    common = _common_linears(arch, tokens, copies) + attention
    return common + _expert_linears(arch, tokens)


def _head(
    arch: Architecture,
    tokens: float,
    copies: int = 1,
    *,
    float32_head: bool,
    passes: int,
    itemsize: int = 4,
) -> Work:
    """Return one product with the head, of so many passes if it is float32.

    Its operands have `itemsize` bytes a value in memory if it is, else 2.
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
    attention: str,
    float32_head: bool,
    param_bytes: int,
    compute_bytes: int = 2,
) -> Work:
    """Return the forward and backward pass of a microbatch, and its gradients added up.

    The head is multiplied four times: forward, again for the backward pass, and for
    the gradients of its two operands.  With `compute_bytes` = 2 the hidden states are
    cast bfloat16 ones, which are an operand of all but the gradient of themselves.
    """
    tokens, copies = rows * row_tokens, devices // tensor
    again, attention_again = RECOMPUTED[remat]
    layer = _linears(arch, tokens, copies) * 3
    if again:  # nobody needs the last product again
        layer += _linears(arch, tokens, copies, last=False)
    matmuls = FORWARD_ATTENTION * (1 + attention_again) + BACKWARD_ATTENTION[attention]
    layer += _attention(arch, rows, row_tokens, matmuls)
    cast = CAST_PASSES if compute_bytes == 2 else HIGHEST_PASSES
    head = Work()
    for passes in (cast, cast, cast, HIGHEST_PASSES):
        head += _head(arch, tokens, copies, float32_head=float32_head, passes=passes)
    # Params are read, the gradients so far are read and written.
    state = Work(bytes=arch.num_params * (param_bytes + 4 + 4))
    return layer * arch.num_layers + head + state


def optimizer_update(arch: Architecture, *, param_bytes: int) -> Work:
    """Return an update: a pass that checks it, and one that writes it.

    Both read params, both moments and gradients, and these also for their norm.
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
    copies: int = 1,
) -> Work:
    """Return `steps` tokens in each of `rows` sequences that hold `context` tokens.

    Heads and experts are cut over the devices: together they read everything once, or,
    where they are more than kv heads, all weights but the experts' `copies` times: each
    copy has a share of the rows.  The output head and the hidden states are in the
    sampler's dtype, and made float32 on their way: the sums are exact to float32 in
    fewer passes, for bfloat16 operands.
    """
    layer = _cached(arch, rows, rows, context, itemsize, copies)
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
    copies: int = 1,
) -> Work:
    """Return a chunk of prompt tokens, the last of `context`; it has no head.

    `copies` is as for `decode`.
    """
    return _cached(arch, tokens, 1, context, itemsize, copies) * arch.num_layers
