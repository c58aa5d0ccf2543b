"""One engine over several processes: a leader, and followers that repeat its calls.

Every process that has a part of a mesh must dispatch the same programs in the same
order.  Only the leader has a scheduler, and each call of its engine is sent to the
followers: NumPy arguments by value, params, pages and rows by number.  With the next
call followers drop the objects that the leader no longer holds.
"""

import collections
import contextlib
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax

from scalerl_jax.sampler.decoding import DecodedTokens, DecodeState, SlotRows
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineCall:
    """The message to followers about a call of the leader's engine."""

    method: str  # name in `Engine`; empty: only drop the objects in `gone`
    # Numbers of the pages and the rows that it takes and returns, or of those it makes.
    state: tuple[int, ...] = ()
    params: int | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gone: tuple[int, ...] = ()  # numbers of params, pages and rows to drop


class LeadingEngine(Engine):
    """An `Engine` that sends every call to the followers before it makes the call."""

    def lead(self, tell: Callable[[EngineCall], None]) -> None:
        """Start to send calls to the followers by `tell`, in the order of dispatch."""
        self._tell = tell
        self._order = threading.Lock()  # keeps sending and dispatching in one order
        self._numbers: dict[int, int] = {}  # `id` of a live object -> its number
        self._count = itertools.count()
        self._gone: collections.deque[int] = collections.deque()

    def new_number(self) -> int:
        """Return an unused number."""
        return next(self._count)

    def know(self, params: PyTree, number: int) -> None:
        """Register params of which the followers hold their parts under this number."""
        self._watch(params, number)

    def forget(self, number: int) -> None:
        """Make the followers drop an object that this process does not hold."""
        self._gone.append(number)

    def let_go(self) -> EngineCall:
        """Return a call that only drops objects no longer held here."""
        gone: list[int] = []
        with contextlib.suppress(IndexError):  # two threads may call this
            while True:
                gone.append(self._gone.popleft())
        return EngineCall(method="", gone=tuple(gone))

    def init_pages(self) -> tuple[Any, ...]:
        """Send the call, then make `Engine.init_pages`."""
        with self._order:
            number = self.new_number()
            self._told("init_pages", (number,))
            pages = super().init_pages()
            self._watch(pages, number)
        return pages

    def init_rows(self) -> SlotRows:
        """Send the call, then make `Engine.init_rows`."""
        with self._order:
            number = self.new_number()
            self._told("init_rows", (number,))
            rows = super().init_rows()
            self._watch(rows, number)
        return rows

    def prefill(
        self, params: PyTree, state: DecodeState, chunk: Any
    ) -> tuple[DecodeState, Any]:
        """Send the call, then make `Engine.prefill`."""
        return self._made("prefill", self._usable(params), state=state, chunk=chunk)

    def insert(self, state: DecodeState, **arguments: Any) -> DecodeState:
        """Send the call, then make `Engine.insert`."""
        return self._made("insert", state=state, **arguments)

    def free_resource(self, state: DecodeState, **arguments: Any) -> DecodeState:
        """Send the call, then make `Engine.free_resource`."""
        return self._made("free_resource", state=state, **arguments)

    def generate(
        self, params: PyTree, state: DecodeState, **arguments: Any
    ) -> tuple[DecodeState, DecodedTokens]:
        """Send the call, then make `Engine.generate`."""
        return self._made("generate", self._usable(params), state=state, **arguments)

    def _made(
        self, name: str, *params: PyTree, state: DecodeState, **arguments: Any
    ) -> Any:
        """Call a method of `Engine` on a state; pages and rows keep their numbers."""
        with self._order:
            parts = state.pages, state.rows  # donated
            numbers = tuple(self._numbers.pop(id(_anchor(each))) for each in parts)
            self._told(name, numbers, *params, **arguments)
            made = getattr(super(), name)(*params, state, **arguments)
            new = made[0] if isinstance(made, tuple) else made
            for part, number in zip((new.pages, new.rows), numbers, strict=True):
                self._watch(part, number)
        return made

    def _usable(self, params: PyTree) -> PyTree:
        """Return params in the programs' layout, before the call is sent.

        Raises:
            RuntimeError: the params were deleted to make room for others.
        """
        if _anchor(params).is_deleted():  # the first array to be deleted
            raise RuntimeError("these params were deleted to make room for others")
        return self.load_params(params)

    def _told(
        self,
        method: str,
        state: tuple[int, ...],
        params: PyTree = None,
        **arguments: Any,
    ) -> None:
        number = None if params is None else self._numbers[id(_anchor(params))]
        call = dataclasses.replace(
            self.let_go(),
            method=method,
            state=state,
            params=number,
            arguments=arguments,
        )
        self._tell(call)

    def _watch(self, tree: PyTree, number: int) -> None:
        """Keep the number of params, pages or rows until they are deleted."""
        # A dict or tuple has no weak references, so the first array stands for it.
        held = _anchor(tree)
        self._numbers[id(held)] = number
        end = weakref.finalize(held, self._ended, id(held), number)
        end.atexit = False

    def _ended(self, held: int, number: int) -> None:
        """Record that an object is deleted, unless another one got its number."""
        if self._numbers.get(held) == number:
            del self._numbers[held]
            self._gone.append(number)


class Followed:
    """A follower's engine and its objects, by the leader's numbers."""

    def __init__(self, engine: Engine) -> None:
        """Repeat the leader's calls on this engine, which is like the leader's."""
        self._engine = engine
        self._held: dict[int, Any] = {}

    def know(self, params: PyTree, number: int) -> None:
        """Hold this process's part of params under the leader's number."""
        self._held[number] = params

    def obey(self, call: EngineCall) -> None:
        """Repeat a call of the leader.

        Raises:
            KeyError: the call names a number that is unknown here.
        """
        for number in call.gone:
            self._held.pop(number, None)
        if not call.method:
            return
        method = getattr(self._engine, call.method)
        if call.method in ("init_pages", "init_rows"):
            (made,) = call.state
            self._held[made] = method()
            return
        given = () if call.params is None else (self._held[call.params],)
        pages, rows = call.state
        state = DecodeState(pages=self._held.pop(pages), rows=self._held.pop(rows))
        result = method(*given, state, **call.arguments)
        state = result[0] if isinstance(result, tuple) else result
        self._held[pages], self._held[rows] = state.pages, state.rows


def _anchor(tree: PyTree) -> jax.Array:
    """Return the first array of a tree, whose lifetime is that of the tree."""
    return jax.tree.leaves(tree)[0]
