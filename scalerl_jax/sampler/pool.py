"""One KV cache for all schedulers of an engine, such as training's and evaluations'.

A `PagePool` has the pages on the devices and the ledgers of their owners.  Each
scheduler has slots, rows and params of its own.  They make their steps in turns, in one
thread, so that the pages always have one owner to donate them.

Every user, a scheduler with something to sample, has an equal share of the pages:

- A user takes free pages, also beyond its share.
- A user within its share gets the pages that it lacks from users beyond theirs, which
  suspend their youngest samples.
- Beyond its share a user places no sample while another one, still within its own, has
  a sample that waits.  So samples are not placed only to be suspended.
- A user's only sequence gets pages from all others, if they have to be.  So every step
  samples some tokens, whatever the others hold: nothing waits for ever.
- A user without a step since this one's last step stands still, such as training during
  an evaluation for which it waits.  It has no share, until it goes on.
"""

import dataclasses
import weakref
from typing import Any, Protocol, runtime_checkable

from scalerl_jax.sampler.decoding import DecodeState
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.pages import Need, PageLedger, SequencePages


@runtime_checkable
class PoolUser(Protocol):
    """A scheduler as the pool sees it."""

    pages: SequencePages  # of its sequences

    @property
    def busy(self) -> bool:
        """Return whether it has anything to sample."""
        ...

    @property
    def wants_pages(self) -> bool:
        """Return whether a sample waits for pages, with a slot that is free."""
        ...

    def reserved(self) -> Need:
        """Return a page for each running sample."""
        ...

    def give_way(self) -> bool:
        """Do one thing that may free pages; return whether there was one to do."""
        ...


@dataclasses.dataclass(eq=False)
class _Seat:
    """A user, and the times of its last two steps, in steps of all users."""

    user: weakref.ref[PoolUser]  # weak: an unused pool's pages are free at once
    last: int = -1
    before: int = -1


class PagePool:
    """The pages of an engine, on the devices and in the books."""

    def __init__(self, engine: Engine, *, prefix_cache: bool = True) -> None:
        """Make the engine's pages, all of them free.

        `prefix_cache`: sequences of a scheduler that begin alike share pages.  Not in
        rings, nor if experts are reported, which pages do not hold.
        """
        settings = engine.settings
        self.engine = engine
        self.prefix_cache = (
            prefix_cache and not settings.ring_pages and not settings.report_experts
        )
        self.pages: tuple[Any, ...] = engine.init_pages()
        self._rings = PageLedger(settings.pages_in_rings)
        self._whole = PageLedger(settings.num_pages, first=settings.pages_in_rings)
        self._seats: list[_Seat] = []
        self._steps = 0  # of all users

    def new_pages(self) -> SequencePages:
        """Return empty records of a new user's sequences."""
        ring = self.engine.settings.ring_pages
        return SequencePages(self._rings, self._whole, ring=ring)

    def join(self, user: PoolUser) -> None:
        """Share the pages with another user from now on."""
        self._seats.append(_Seat(weakref.ref(user)))

    def leave(self, user: PoolUser) -> None:
        """Forget a user, which holds no pages any more."""
        assert user.pages.held == Need(), "its pages would be lost"
        self._seats = [each for each in self._seats if each.user() is not user]

    def begin_step(self, user: PoolUser) -> None:
        """Note that a user makes a step now."""
        seat = self._seat(user)
        seat.before, seat.last = seat.last, self._steps
        self._steps += 1

    def _seat(self, user: PoolUser) -> _Seat:
        return next(each for each in self._seats if each.user() is user)

    def state(self, rows: Any) -> DecodeState:
        """Return these rows with the pages, for one call, which donates them."""
        return DecodeState(pages=self.pages, rows=rows)

    def find(
        self, user: PoolUser, need: Need, *, new: bool = False, alone: bool = False
    ) -> bool:
        """Make a need's pages free as far as the rules allow; return whether they are.

        Args:
            user: whose need it is.
            need: pages.
            new: they are for a sample that is not placed yet.
            alone: they are for the user's only sequence.
        """
        if not new and self._fit(need):
            return True
        moving, still = self._others(user)
        share = self._share(1 + len(moving))
        within = (user.pages.held + need).within(share)
        free = need  # pages that must be free
        if new and not alone:
            if not within and any(_waits(each, share) for each in moving):
                return False
            free = sum((each.reserved() for each in moving), need)
        while not self._fit(free):
            beyond = [each for each in moving if not each.pages.held.within(share)]
            beyond.sort(key=lambda each: -each.pages.in_use)
            giving = [*still, *(beyond if within else ()), *(moving if alone else ())]
            if not any(each.give_way() for each in giving):
                return False
        return True

    def _others(self, user: PoolUser) -> tuple[list[PoolUser], list[PoolUser]]:
        """Return the others with something to sample: those that move, and not."""
        moving, still = [], []
        since = self._seat(user).before
        for seat in self._seats:
            other = seat.user()
            if other is not None and other is not user and other.busy:
                (still if seat.last < since else moving).append(other)
        return moving, still

    def _fit(self, need: Need) -> bool:
        return need.within(Need(self._rings.free, self._whole.free))

    def _share(self, users: int) -> Need:
        """Return an equal part of all pages."""
        ledgers = self._rings, self._whole
        rings, whole = (each.free + each.in_use for each in ledgers)
        return Need(rings // users, whole // users)


def _waits(user: PoolUser, share: Need) -> bool:
    """Return whether a user within its share has a sample that waits."""
    return user.wants_pages and user.pages.held.within(share)
