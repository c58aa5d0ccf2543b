"""Completions over HTTP, in OpenAI's form, from the sampler of this package."""
