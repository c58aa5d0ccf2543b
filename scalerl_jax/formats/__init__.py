"""Read files from users and other sources within bounds: JSON, buckets, GGUF, hub."""
