"""Training and held-out questions of generated tasks, as a run has them."""

from scalerl_jax.data.tasks import draw_questions, equal_shares


def make_splits(names, *, train_prompts, eval_prompts, seed):
    """Training questions, and those held out first, in equal parts per task."""
    used = set()
    held_out = draw_questions(equal_shares(names, eval_prompts), used=used)
    shares = equal_shares(names, train_prompts)
    return draw_questions(shares, seed=seed, used=used), held_out
