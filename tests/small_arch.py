"""A decoder whose weights can be counted by hand."""

from scalerl_jax.model.architecture import Architecture

SMALL = Architecture(
    family="llama",
    vocab_size=100,
    hidden_size=8,
    ffn_size=16,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rope_theta=1e4,
    rms_eps=1e-6,
    tied_embeddings=False,
    max_positions=64,
)
# query 8x8, key and value 8x4, output 8x8, gate and up 8x16, down 16x8.
WEIGHTS = 64 + 32 + 32 + 64 + 128 + 128 + 128
