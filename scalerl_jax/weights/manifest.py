"""The manifest of published params: what each process offers, and all of it together.

A manifest crosses machines as JSON.  Nothing of it is believed before it is checked:
types, ranges, sizes, and that the shards cover each leaf exactly once.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from scalerl_jax.formats.reading import parse_json
from scalerl_jax.weights.shards import Region

FORMAT = 1  # of the JSON and of the bytes; raised with each change that others misread
# Bytes of a value, by the name of its dtype.
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
FORMS = ("full", "delta")
_MAX_JSON_BYTES = 1 << 28  # a thousand processes' shards of a large model take 10 MB
_MAX_DIMENSIONS = 8
_MAX_EXTENT = 1 << 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfferedObject:
    """One object of a channel."""

    reference: str
    num_bytes: int  # of all its buffers
    num_buffers: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfferedShard:
    """One shard: its leaf and box, the place of its bytes, and their checksum."""

    leaf: str  # path in the sampler's tree
    shape: tuple[int, ...]  # of the whole leaf
    dtype: str
    start: tuple[int, ...]  # the first element along each dimension
    stop: tuple[int, ...]  # the one after the last
    crc32: int  # of the shard's values; for a delta, of those that result
    form: Literal["full", "delta"]
    object: int  # place in the objects of the offer
    buffer: int  # place in the buffers of the object
    num_bytes: int  # of that buffer

    @property
    def box(self) -> Region:
        """The elements that it covers."""
        return Region(leaf=self.leaf, start=self.start, stop=self.stop)

    @property
    def full_bytes(self) -> int:
        """Bytes that its values take."""
        return math.prod(self.box.shape) * WIDTHS[self.dtype]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """The part of one version that one process offers."""

    rank: int
    num_ranks: int
    policy_version: int
    base_version: int | None  # of the shards that are deltas; None: there are none
    objects: tuple[OfferedObject, ...]
    shards: tuple[OfferedShard, ...]

    def to_json(self) -> str:
        """The offer as a text."""
        return json.dumps({"format": FORMAT} | dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "Offer":
        """The offer that a text holds.

        Raises:
            ValueError: it is none; says what is wrong with it.
        """
        return _offer(_object(text, "an offer"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Publication:
    """The parts of one version: together they cover each leaf exactly once."""

    parts: tuple[Offer, ...]  # by rank
    digest: str  # SHA-256 of the parts

    @property
    def policy_version(self) -> int:
        """Optimizer steps behind the params."""
        return self.parts[0].policy_version

    @property
    def base_version(self) -> int | None:
        """Version that its deltas are against; None: there are none."""
        return self.parts[0].base_version

    @property
    def shards(self) -> Iterable[tuple[Offer, OfferedShard]]:
        """The shards, each with the offer that it stands in."""
        return ((part, shard) for part in self.parts for shard in part.shards)

    def to_json(self) -> str:
        """The publication as a text."""
        parts = [dataclasses.asdict(part) for part in self.parts]
        return json.dumps({"format": FORMAT, "digest": self.digest, "parts": parts})

    @staticmethod
    def from_json(text: str | bytes) -> "Publication":
        """The publication that a text holds.

        Raises:
            ValueError: it is none, or no whole one; says what is wrong with it.
        """
        value = _object(text, "a publication")
        parts = _list(value.get("parts"), "its parts")
        found = merge([_offer(part) for part in parts])
        if value.get("digest") != found.digest:
            raise ValueError(
                f"the publication of version {found.policy_version} has digest "
                f"{found.digest} and says {str(value.get('digest'))[:64]!r}"
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishReport:
    """Bytes and time of one version, as one process sent or received it."""

    policy_version: int
    base_version: int | None  # None: in full
    num_bytes: int  # that went through the channel
    full_bytes: int  # that they would have been without deltas
    seconds: float
    changed_share: float | None  # of values, against the base; None: not compared

    @staticmethod
    def of(
        version: "Offer | Publication",
        shards: Sequence[OfferedShard],
        *,
        seconds: float,
        changed_share: float | None = None,
    ) -> "PublishReport":
        """Report on some shards of a version."""
        return PublishReport(
            policy_version=version.policy_version,
            base_version=version.base_version,
            num_bytes=sum(shard.num_bytes for shard in shards),
            full_bytes=sum(shard.full_bytes for shard in shards),
            seconds=seconds,
            changed_share=changed_share,
        )


def merge(parts: Sequence[Offer]) -> Publication:
    """Return the publication that all ranks' offers make.

    Raises:
        ValueError: they are of several versions or bases, a rank is missing or there
            twice, or a leaf is not covered exactly once; says which.
    """
    if not parts:
        raise ValueError("a publication needs the offer of at least one rank")
    for name in ("policy_version", "base_version", "num_ranks"):
        by_value = collections.defaultdict(list)
        for part in parts:
            by_value[getattr(part, name)].append(part.rank)
        if len(by_value) > 1:
            raise ValueError(
                f"the ranks offer different things: {name} by ranks is "
                f"{dict(by_value)}; have all of them send(..., full=True) again"
            )
    ranks = sorted(part.rank for part in parts)
    if ranks != list(range(parts[0].num_ranks)):
        raise ValueError(
            f"version {parts[0].policy_version} is offered by ranks {ranks} and not "
            f"by each of {parts[0].num_ranks} once"
        )
    ordered = tuple(sorted(parts, key=lambda part: part.rank))
    _check_cover(ordered)
    texts = json.dumps([dataclasses.asdict(part) for part in ordered], sort_keys=True)
    return Publication(parts=ordered, digest=hashlib.sha256(texts.encode()).hexdigest())


def _check_cover(parts: tuple[Offer, ...]) -> None:
    """Refuse leaves that are not covered exactly once, or said in two ways."""
    leaves: dict[str, list[OfferedShard]] = collections.defaultdict(list)
    for part in parts:
        for shard in part.shards:
            leaves[shard.leaf].append(shard)
    for leaf, shards in leaves.items():
        kinds = {(shard.shape, shard.dtype) for shard in shards}
        if len(kinds) > 1:
            raise ValueError(f"leaf {leaf} is said to be all of {sorted(kinds)}")
        _check_grid(leaf, shards)


def _check_grid(leaf: str, shards: list[OfferedShard]) -> None:
    """Refuse shards that are not each cell of a grid, which is how meshes cut, once."""
    shape = shards[0].shape
    starts = [sorted({shard.start[d] for shard in shards}) for d in range(len(shape))]
    ends = [
        dict(zip(firsts, [*firsts[1:], extent], strict=True))
        for firsts, extent in zip(starts, shape, strict=True)
    ]
    found = set()
    for shard in shards:
        until = tuple(end[at] for end, at in zip(ends, shard.start, strict=True))
        if shard.start in found or any(map(int.__gt__, shard.stop, until)):
            raise ValueError(f"shard {shard.box} overlaps another of the leaf")
        if shard.stop != until:
            raise ValueError(
                f"leaf {leaf} has a gap: nothing is offered between {shard.box} and "
                f"{list(until)}"
            )
        found.add(shard.start)
    missing = next((at for at in itertools.product(*starts) if at not in found), None)
    if missing is not None or any(firsts[0] for firsts in starts):
        at = list(missing or (0,) * len(shape))
        raise ValueError(f"leaf {leaf} has a gap: no shard of it holds element {at}")


def _object(text: str | bytes, what: str) -> dict[str, Any]:
    """The fields of a JSON text of our format."""
    if len(text) > _MAX_JSON_BYTES:
        raise ValueError(
            f"{what} is {len(text)} bytes of JSON; at most {_MAX_JSON_BYTES} are read"
        )
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object")
    if value.pop("format", None) != FORMAT:
        raise ValueError(
            f"{what} is not of format {FORMAT}; run the same code in all processes"
        )
    return value


def _offer(value: Any) -> Offer:
    fields = _fields(value, Offer, "an offer")
    policy_version = _integer(fields["policy_version"], "policy_version")
    rank = _integer(fields["rank"], "rank")
    base = fields["base_version"]
    objects = [_offered_object(each) for each in _list(fields["objects"], "objects")]
    shards = [_offered_shard(each) for each in _list(fields["shards"], "shards")]
    offer = Offer(
        rank=rank,
        num_ranks=_integer(fields["num_ranks"], "num_ranks", least=rank + 1),
        policy_version=policy_version,
        base_version=None
        if base is None
        else _integer(base, "base_version", most=policy_version - 1),
        objects=tuple(objects),
        shards=tuple(shards),
    )
    _check_buffers(offer)
    return offer


def _check_buffers(offer: Offer) -> None:
    """Refuse an offer whose shards are not each buffer of its objects once."""
    buffers = collections.Counter((each.object, each.buffer) for each in offer.shards)
    wanted = {
        (number, buffer)
        for number, each in enumerate(offer.objects)
        for buffer in range(min(each.num_buffers, len(offer.shards) + 1))
    }
    twice = [buffer for buffer, count in buffers.items() if count > 1]
    wrong = sorted(wanted ^ buffers.keys()) + twice
    if wrong:
        raise ValueError(
            f"buffer {wrong[0][1]} of object {wrong[0][0]} of rank {offer.rank} is "
            f"not that of one shard"
        )
    sizes = collections.Counter[int]()
    for shard in offer.shards:
        sizes[shard.object] += shard.num_bytes
        if shard.form == "delta" and offer.base_version is None:
            raise ValueError(f"shard {shard.box} is a delta against no version")
    for number, each in enumerate(offer.objects):
        if sizes[number] != each.num_bytes:
            raise ValueError(
                f"object {number} of rank {offer.rank} has {each.num_bytes} bytes and "
                f"its shards {sizes[number]}"
            )


def _offered_object(value: Any) -> OfferedObject:
    fields = _fields(value, OfferedObject, "an object")
    return OfferedObject(
        reference=_text(fields["reference"], "reference"),
        num_bytes=_integer(fields["num_bytes"], "num_bytes"),
        num_buffers=_integer(fields["num_buffers"], "num_buffers", least=1),
    )


def _offered_shard(value: Any) -> OfferedShard:
    fields = _fields(value, OfferedShard, "a shard")
    shape, start, stop = (
        _integers(fields[name], name) for name in ("shape", "start", "stop")
    )
    leaf = _text(fields["leaf"], "leaf")
    ordered = all(
        first < last <= extent
        for first, last, extent in zip(start, stop, shape, strict=False)
    )
    if not len(shape) == len(start) == len(stop) or not ordered:
        raise ValueError(
            f"a shard of {leaf} is from {list(start)} to {list(stop)} of {list(shape)}"
        )
    shard = OfferedShard(
        leaf=leaf,
        shape=shape,
        dtype=_choice(fields["dtype"], WIDTHS, "dtype"),
        start=start,
        stop=stop,
        crc32=_integer(fields["crc32"], "crc32", most=2**32 - 1),
        form=_choice(fields["form"], FORMS, "form"),
        object=_integer(fields["object"], "object"),
        buffer=_integer(fields["buffer"], "buffer"),
        num_bytes=_integer(fields["num_bytes"], "num_bytes"),
    )
    full, size = shard.full_bytes, shard.num_bytes
    if size != full if shard.form == "full" else size >= full:
        raise ValueError(
            f"shard {shard.box} is {shard.form} with {size} bytes; its "
            f"values take {full}"
        )
    return shard


def _fields(value: Any, of: type, what: str) -> dict[str, Any]:
    """The fields of a JSON object, if they are those of a dataclass."""
    names = {field.name for field in dataclasses.fields(of)}
    if not isinstance(value, dict) or value.keys() != names:
        raise ValueError(f"{what} must have exactly the fields {sorted(names)}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} must be a list")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 1000:
        raise ValueError(f"{what} must be a text of 1 to 1000 characters")
    return value


def _choice(value: Any, choices: Iterable[str], what: str) -> Any:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{what} = {str(value)[:30]!r}; known are {sorted(choices)}")
    return value


def _integer(value: Any, what: str, *, least: int = 0, most: int = 2**53) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"{what} = {str(value)[:30]} must be an integer from {least} to {most}"
        )
    return value


def _integers(value: Any, what: str) -> tuple[int, ...]:
    numbers = _list(value, what)
    if len(numbers) > _MAX_DIMENSIONS:
        raise ValueError(f"{what} has {len(numbers)} numbers, not {_MAX_DIMENSIONS}")
    return tuple(_integer(number, what, most=_MAX_EXTENT) for number in numbers)
