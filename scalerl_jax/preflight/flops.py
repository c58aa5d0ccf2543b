"""What the programs compute and move at least, counted by hand from the model's shapes.

All of it is for one call and for all devices of its mesh.  A row is taken to be one
sequence, the most that causal attention can cost.
"""

import dataclasses
from collections.abc import Iterator

from scalerl_jax.model.architecture import Architecture

# A product of float32 operands at the highest precision is six bfloat16 products on a
# TPU: each operand is three bfloat16 terms, and of the nine products the three
# smallest are left out.
HIGHEST_PASSES = 6
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
    bytes: float = 0.0

    @property
    def flops(self) -> float:
        """Of all products."""
        return self.layers + self.head

    def passes(self, *, float32_head: bool) -> float:
        """FLOPs that the matrix units do: a float32 product is several."""
        return self.layers + self.head * (HIGHEST_PASSES if float32_head else 1)

    def __add__(self, other: "Work") -> "Work":
        """Both."""
        return Work(
            layers=self.layers + other.layers,
            head=self.head + other.head,
            bytes=self.bytes + other.bytes,
        )

    def times(self, count: float) -> "Work":
        """The same several times."""
        return Work(
            layers=self.layers * count,
            head=self.head * count,
            bytes=self.bytes * count,
        )


def linears(arch: Architecture) -> Iterator[tuple[str, int, int]]:
    """Name, inputs and outputs of each matmul of a layer."""
    width, queries = arch.hidden_size, arch.num_heads * arch.head_dim
    keys = arch.num_kv_heads * arch.head_dim
    yield "query", width, queries
    yield "key", width, keys
    yield "value", width, keys
    yield "output", queries, width
    yield "gate", width, arch.ffn_size
    yield "up", width, arch.ffn_size
    yield "down", arch.ffn_size, width


def _linears(arch: Architecture, tokens: float, copies: int, *, last: bool) -> Work:
    """Of one layer, 2 bytes per value; each of `copies` replicas reads the weights."""
    sides = [(n, k) for name, n, k in linears(arch) if last or name != "down"]
    return Work(
        layers=sum(2 * tokens * n * k for n, k in sides),
        bytes=sum(2 * (tokens * (n + k) + copies * n * k) for n, k in sides),
    )


def _attention(arch: Architecture, rows: float, length: float, matmuls: int) -> Work:
    """Of one layer over whole causal rows."""
    seen = length * (length + 1) / 2
    values = rows * length * arch.head_dim
    return Work(
        layers=matmuls * 2 * rows * seen * arch.num_heads * arch.head_dim,
        bytes=2 * values * (2 * arch.num_heads + 2 * arch.num_kv_heads),
    )


def _head(arch: Architecture, tokens: float, copies: int, itemsize: int) -> Work:
    """One product with the head."""
    width, vocabulary = arch.hidden_size, arch.vocab_size
    return Work(
        head=2 * tokens * width * vocabulary,
        bytes=itemsize * (tokens * (width + vocabulary) + copies * width * vocabulary),
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
) -> Work:
    """Forward and backward pass of a microbatch, and its gradients added up.

    The head is multiplied four times: forward, again for the backward pass, and for
    the gradients of its two operands.
    """
    tokens, copies = rows * row_tokens, devices // tensor
    again, attention_again = RECOMPUTED[remat]
    forward = _linears(arch, tokens, copies, last=True)
    layer = forward.times(3)
    if again:  # nobody needs the last product again
        layer += _linears(arch, tokens, copies, last=False)
    layer += _attention(
        arch,
        rows,
        row_tokens,
        FORWARD_ATTENTION * (1 + attention_again) + BACKWARD_ATTENTION[attention],
    )
    head = _head(arch, tokens, copies, 4 if float32_head else 2).times(4)
    # Params are read, the gradients so far are read and written.
    state = Work(bytes=arch.num_params * (param_bytes + 4 + 4))
    return layer.times(arch.num_layers) + head + state


def optimizer_update(arch: Architecture, *, param_bytes: int) -> Work:
    """Params and both moments read and written, gradients read twice for their norm."""
    return Work(bytes=arch.num_params * (2 * param_bytes + 4 * 4 + 2 * 4))


def decode(
    arch: Architecture,
    *,
    rows: int,
    context: float,
    steps: int,
    itemsize: int,
    float32_head: bool,
) -> Work:
    """`steps` tokens in each of `rows` sequences that hold `context` tokens."""
    cached = 2 * arch.num_kv_heads * arch.head_dim * itemsize
    layer = _linears(arch, rows, 1, last=True) + Work(
        layers=4 * rows * context * arch.num_heads * arch.head_dim,
        bytes=rows * context * cached,
    )
    # Heads are cut over the devices: together they read everything once.
    head = _head(arch, rows, 1, 4 if float32_head else 2)
    # The head is kept in the sampler's dtype, and made float32 on its way.
    return (layer.times(arch.num_layers) + head).times(steps)


def prefill(arch: Architecture, *, tokens: int, context: float, itemsize: int) -> Work:
    """A chunk of prompt tokens, the last of a sequence of `context`; without a head."""
    cached = 2 * arch.num_kv_heads * arch.head_dim * itemsize
    layer = _linears(arch, tokens, 1, last=True) + Work(
        layers=4 * tokens * context * arch.num_heads * arch.head_dim,
        bytes=context * cached,
    )
    return layer.times(arch.num_layers)
