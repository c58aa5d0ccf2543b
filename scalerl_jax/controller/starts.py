"""The number of groups in process: how many may be running or finished at a time.

If the learner is the bottleneck, sampling has to start groups at the learner's rate.
A rule that looks only at finished groups, "start all you can while few wait, and none
while many do", does so in waves: groups that start together finish together, the time
of a completion later, and between two waves the learner waits, although the generators
are faster.  A constant number of groups in process makes no waves; it is a factory's
CONWIP rule (Spearman, Woodruff and Hopp, 1990,
https://doi.org/10.1080/00207549008942761).  By Little's law that number is the
learner's rate times the seconds of a group, and what shall wait.  Both change in a run,
so an integral controller finds it.  With the judged groups that are left when the
learner takes a window:

    limit <- limit + (W * N / 4 - left) / 10,   at least N, at most in process + 2 N

If nothing is left, the learner may have waited, and the limit rises by N / 2 more: soon
above all groups in process, so that without spare generators it denies nothing, and
replicas that have just joined get groups at once.  The loop's delay is the seconds of a
group, d windows; an integrator with a delay of d oscillates from a gain of
2 sin(pi / (4 d + 2)) on, which is above 1 / 10 up to d = 15.
"""

_PARTS = 40  # of a group, in which the limit is counted: it stays an integer


class StartLimit:
    """The most groups in process; until the first window is taken there is no limit."""

    def __init__(self, *, num_prompts: int, max_waiting: int) -> None:
        """Aim at `max_waiting` / 4 batches of `num_prompts` groups that are left."""
        self._num_prompts, self._max_waiting = num_prompts, max_waiting
        self._limit: int | None = None  # in parts

    def denies(self, in_process: int) -> bool:
        """Return whether no further group may start beside those in process."""
        return self._limit is not None and in_process * _PARTS >= self._limit

    def note_taken(self, *, in_process: int, left: int) -> None:
        """Move the limit, after a window is taken.

        `left` of the groups `in_process` are judged.
        """
        size, limit = self._num_prompts, self._limit
        if limit is None:
            limit = (in_process + size) * _PARTS
        limit += self._max_waiting * size - 4 * left
        if not left:
            limit += size * _PARTS // 2
        most = (in_process + 2 * size) * _PARTS
        self._limit = max(size * _PARTS, min(limit, most))
