"""A custom reward: 1 for the right answer, and partial credit for its letters."""


def score(prompt: str, completion: str, reference: str) -> float:
    """Return 1 for the right answer, up to a half for one with letters in place."""
    _, thought, answer = completion.rpartition("</think>")
    answer = answer.strip()
    if thought and answer == reference:
        return 1.0
    right = sum(a == b for a, b in zip(answer, reference, strict=False))
    return 0.5 * right / max(len(answer), len(reference)) if thought else 0.0
