"""Files that others bring, read within bounds: JSON, buckets, GGUF, hubs."""
