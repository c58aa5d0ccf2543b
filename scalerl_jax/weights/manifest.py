"""The manifest of published params: the shards of a version and their locations.

It describes params on their way from the learner to samplers in other processes.  Each
process of the learner makes a manifest of its own shards, `merge` combines them, and a
replica fetches the objects that the result names.

A manifest is sent between processes as JSON, pickled or not, and is checked where it is
read: types, ranges, sizes, and that the shards of all ranks cover each leaf exactly
once.  So a `Manifest` object need not be checked again.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from scalerl_jax.formats.reading import parse_json
from scalerl_jax.weights.channels import Reference
from scalerl_jax.weights.shards import Region

FORMAT = 3  # of JSON and bytes; increased with each incompatible change
# Name of a dtype -> bytes of a value.
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
FORMS = ("full", "delta")
_MAX_JSON_BYTES = 1 << 28  # a thousand processes' shards of a large model take 10 MB
_MAX_DIMENSIONS = 8
_MAX_EXTENT = 1 << 40
_MAX_RANKS = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManifestShard:
    """One shard: its leaf and box, the location of its bytes, and their checksum."""

    leaf: str  # path in the sampler's tree
    shape: tuple[int, ...]  # of the whole leaf
    dtype: str
    start: tuple[int, ...]  # the first element along each dimension
    stop: tuple[int, ...]  # the one after the last
    checksum: int  # of the shard's values; for a delta, of the result
    form: Literal["full", "delta"]
    reference: Reference  # of the channel's object with its bytes
    buffer: int  # index of its buffer in the object
    num_bytes: int  # of that buffer

    @property
    def box(self) -> Region:
        """The elements that the shard covers."""
        return Region(leaf=self.leaf, start=self.start, stop=self.stop)

    @property
    def full_bytes(self) -> int:
        """Bytes of the shard's values."""
        return math.prod(self.box.shape) * WIDTHS[self.dtype]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Shards of one version, published by some ranks of the learner."""

    ranks: tuple[int, ...]  # that published these shards
    num_ranks: int  # of the learner
    policy_version: int  # optimizer steps behind the params
    base_version: int | None  # of the deltas; None: no shard is a delta
    # `publication.digest_of` the frozen params, which are not published; empty: all
    # params are published.
    frozen_digest: str
    shards: tuple[ManifestShard, ...]
    # Handles of objects that cannot be fetched by a reference alone; not in the JSON.
    handles: Mapping[Reference, Any] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def is_whole(self) -> bool:
        """True if the manifest has the shards of all ranks."""
        return len(self.ranks) == self.num_ranks

    @functools.cached_property
    def objects(self) -> dict[Reference, list[ManifestShard]]:
        """The shards of each object, in the order of its buffers."""
        found: dict[Reference, list[ManifestShard]] = collections.defaultdict(list)
        for shard in self.shards:
            found[shard.reference].append(shard)
        return {
            reference: sorted(shards, key=lambda shard: shard.buffer)
            for reference, shards in found.items()
        }

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest's fields as JSON."""
        return hashlib.sha256(
            json.dumps(self._said, sort_keys=True).encode()
        ).hexdigest()

    @functools.cached_property
    def _json(self) -> str:
        return json.dumps({"format": FORMAT, "digest": self.digest} | self._said)

    @property
    def _said(self) -> dict[str, Any]:
        said: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        said["shards"] = [
            {name: getattr(shard, name) for name in _SHARD_FIELDS}
            for shard in self.shards
        ]
        return said

    def to_json(self) -> str:
        """Return the manifest as JSON."""
        return self._json

    @staticmethod
    def from_json(text: str | bytes) -> "Manifest":
        """Parse and check a manifest.

        Raises:
            ValueError: the text is no manifest, or one of another format, or
                contradicts itself; the message says how.
        """
        value = _object(text)
        digest = value.pop("digest", None)
        found = _manifest(value)
        if digest != found.digest:
            raise ValueError(
                f"the manifest of version {found.policy_version} has digest "
                f"{found.digest} and says {str(digest)[:64]!r}"
            )
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as JSON, so that the receiving process checks the manifest."""
        return _arrived, (self.to_json(), dict(self.handles))


_FIELDS = tuple(
    field.name for field in dataclasses.fields(Manifest) if field.name != "handles"
)
_SHARD_FIELDS = tuple(field.name for field in dataclasses.fields(ManifestShard))


def _arrived(text: str, handles: Mapping[Reference, Any]) -> Manifest:
    return dataclasses.replace(Manifest.from_json(text), handles=handles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishReport:
    """Bytes and seconds in which one process sent or received a version."""

    policy_version: int
    base_version: int | None  # None: no deltas
    num_bytes: int  # through the channel
    full_bytes: int  # the same without deltas
    seconds: float
    changed_share: float | None  # of values, from the base; None: not compared

    @staticmethod
    def of(
        manifest: Manifest,
        shards: Sequence[ManifestShard],
        *,
        seconds: float,
        changed_share: float | None = None,
    ) -> "PublishReport":
        """Return the report on some shards of a version."""
        return PublishReport(
            policy_version=manifest.policy_version,
            base_version=manifest.base_version,
            num_bytes=sum(shard.num_bytes for shard in shards),
            full_bytes=sum(shard.full_bytes for shard in shards),
            seconds=seconds,
            changed_share=changed_share,
        )


def merge(parts: Sequence[Manifest]) -> Manifest:
    """Merge the manifests of all ranks into one.

    Raises:
        ValueError: they have different versions or bases, a rank is missing or occurs
            twice, or a leaf is not covered exactly once; the message says which.
    """
    if not parts:
        raise ValueError("the manifest of at least one rank is needed")
    for name in ("policy_version", "base_version", "frozen_digest", "num_ranks"):
        by_value = collections.defaultdict(list)
        for part in parts:
            by_value[getattr(part, name)] += part.ranks
        if len(by_value) > 1:
            raise ValueError(
                f"the ranks publish different things: {name} by ranks is "
                f"{dict(by_value)}; have all of them send(..., full=True) again"
            )
    ranks = sorted(rank for part in parts for rank in part.ranks)
    if ranks != list(range(parts[0].num_ranks)):
        raise ValueError(
            f"version {parts[0].policy_version} is published by ranks {ranks} and not "
            f"by each of {parts[0].num_ranks} once"
        )
    ordered = sorted(parts, key=lambda part: part.ranks)
    handles = {name: each for part in parts for name, each in part.handles.items()}
    merged = dataclasses.replace(
        parts[0],
        ranks=tuple(ranks),
        shards=tuple(shard for part in ordered for shard in part.shards),
        handles=handles,
    )
    _check_buffers(merged)
    _check_cover(merged.shards)
    return merged


def _check_cover(shards: Iterable[ManifestShard]) -> None:
    """Check that each leaf has one shape and dtype and is covered exactly once."""
    leaves: dict[str, list[ManifestShard]] = collections.defaultdict(list)
    for shard in shards:
        leaves[shard.leaf].append(shard)
    for leaf, its_own in leaves.items():
        kinds = {(shard.shape, shard.dtype) for shard in its_own}
        if len(kinds) > 1:
            raise ValueError(f"leaf {leaf} is published as all of {sorted(kinds)}")
        _check_grid(leaf, its_own)


def _check_grid(leaf: str, shards: list[ManifestShard]) -> None:
    """Check that shards are the cells of a grid, as on a mesh, each exactly once."""
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
                f"leaf {leaf} has a gap: nothing is published between {shard.box} and "
                f"{list(until)}"
            )
        found.add(shard.start)
    missing = next((at for at in itertools.product(*starts) if at not in found), None)
    if missing is not None or any(firsts[0] for firsts in starts):
        at = list(missing or (0,) * len(shape))
        raise ValueError(f"leaf {leaf} has a gap: no shard of it holds element {at}")


def _object(text: str | bytes) -> dict[str, Any]:
    """Return the fields of a JSON text of our format."""
    if len(text) > _MAX_JSON_BYTES:
        raise ValueError(
            f"a manifest is {len(text)} bytes of JSON; at most {_MAX_JSON_BYTES} are "
            f"read"
        )
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError("a manifest must be a JSON object")
    found = value.pop("format", None)
    if type(found) is not int or found != FORMAT:
        raise ValueError(
            f"a manifest is of format {str(found)[:30]} and this code reads format "
            f"{FORMAT}; run the same version of scalerl_jax in all processes"
        )
    return value


def _manifest(value: Any) -> Manifest:
    fields = _fields(value, _FIELDS, "a manifest")
    policy_version = _integer(fields["policy_version"], "policy_version")
    num_ranks = _integer(fields["num_ranks"], "num_ranks", least=1, most=_MAX_RANKS)
    ranks = tuple(
        _integer(rank, "rank", most=num_ranks - 1)
        for rank in _list(fields["ranks"], "ranks")
    )
    if not ranks or list(ranks) != sorted(set(ranks)):
        raise ValueError(f"ranks = {str(list(ranks))[:60]} must be different, in order")
    base = fields["base_version"]
    manifest = Manifest(
        ranks=ranks,
        num_ranks=num_ranks,
        policy_version=policy_version,
        base_version=None
        if base is None
        else _integer(base, "base_version", most=policy_version - 1),
        frozen_digest=_digest(fields["frozen_digest"]),
        shards=tuple(map(_shard, _list(fields["shards"], "shards"))),
    )
    _check_buffers(manifest)
    if manifest.is_whole:
        _check_cover(manifest.shards)
    return manifest


def _check_buffers(manifest: Manifest) -> None:
    """Check that each buffer of an object belongs to exactly one shard."""
    for reference, shards in manifest.objects.items():
        for place, shard in enumerate(shards):
            if shard.buffer != place:
                raise ValueError(
                    f"buffer {min(place, shard.buffer)} of object {reference} is not "
                    f"that of one shard"
                )
            if shard.form == "delta" and manifest.base_version is None:
                raise ValueError(f"shard {shard.box} is a delta against no version")


def _shard(value: Any) -> ManifestShard:
    fields = _fields(value, _SHARD_FIELDS, "a shard")
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
    shard = ManifestShard(
        leaf=leaf,
        shape=shape,
        dtype=_choice(fields["dtype"], WIDTHS, "dtype"),
        start=start,
        stop=stop,
        checksum=_integer(fields["checksum"], "checksum", most=2**64 - 1),
        form=_choice(fields["form"], FORMS, "form"),
        reference=_text(fields["reference"], "reference"),
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


def _fields(value: Any, names: Sequence[str], what: str) -> dict[str, Any]:
    """Return a JSON object; raise ValueError unless its fields have these names."""
    if not isinstance(value, dict) or value.keys() != set(names):
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


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch("([0-9a-f]{64})?", value):
        raise ValueError(
            f"frozen_digest = {str(value)[:70]!r} must be a SHA-256 in hex, or empty"
        )
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
        raise ValueError(
            f"{what} has {len(numbers)} numbers; {_MAX_DIMENSIONS} at most"
        )
    return tuple(_integer(number, what, most=_MAX_EXTENT) for number in numbers)
