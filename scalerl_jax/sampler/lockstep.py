"""One engine over several processes: a leader, and followers that repeat its calls.

Every process that has a part of a mesh must dispatch the same programs in the same
order.  Only the leader has a scheduler, and each call of its engine is sent to the
followers: NumPy arguments by value, params and decode states by number.  With the next
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

from scalerl_jax.sampler.decoding import DecodedTokens, DecodeState
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineCall:
    """The message to followers about a call of the leader's engine."""

    method: str  # name in `Engine`; empty: only drop the objects in `gone`
    state: int = 0  # number of the decode state that it takes and returns, or makes
    params: int | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gone: tuple[int, ...] = ()  # numbers of params and states to drop


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
        # A dict has no weak references, so the first array stands for it.
        self._watch(_anchor(params), number)

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

    def init_decode_state(self) -> DecodeState:
        """Send the call, then make `Engine.init_decode_state`."""
        with self._order:
            number = self.new_number()
            self._told("init_decode_state", number)
            state = super().init_decode_state()
            self._watch(state, number)
        return state

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
        """Call a method of `Engine` on a state; the new state keeps its number."""
        with self._order:
            number = self._numbers.pop(id(state))  # it is donated
            self._told(name, number, *params, **arguments)
            made = getattr(super(), name)(*params, state, **arguments)
            self._watch(made[0] if isinstance(made, tuple) else made, number)
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
        self, method: str, state: int, params: PyTree = None, **arguments: Any
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

    def _watch(self, held: Any, number: int) -> None:
        """Keep the number of an object until the object is deleted."""
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
        given = () if call.params is None else (self._held[call.params],)
        if call.method != "init_decode_state":
            given += (self._held.pop(call.state),)
        made = getattr(self._engine, call.method)(*given, **call.arguments)
        self._held[call.state] = made[0] if isinstance(made, tuple) else made


def _anchor(params: PyTree) -> jax.Array:
    """Return the params' first array, whose lifetime is that of the params."""
    return jax.tree.leaves(params)[0]
