"""From prompts to batches: the worker, the queue, and what a batch is made of."""
