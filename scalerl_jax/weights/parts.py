"""The receiving of a part of the params on a replica that holds the others.

What is published are the trained params; those that are frozen were read by the replica
itself, and a digest says whether they are the learner's.
"""

from collections.abc import Callable
from typing import Any

import jax

from scalerl_jax.types import PyTree
from scalerl_jax.weights.channels import Channel
from scalerl_jax.weights.manifest import Manifest
from scalerl_jax.weights.receiving import LayOut, NotReceivedError, PublishedFrom


class PublishedParts(PublishedFrom):
    """A `PublishedFrom` that makes all params of the part that is published."""

    def __init__(
        self,
        channel: Channel,
        abstract: PyTree,
        *,
        complete: Callable[[PyTree], PyTree],
        frozen_digest: str,
        **how: Any,
    ) -> None:
        """Fetch a part like `abstract`, and `complete` it; `how` is as in the base.

        `frozen_digest` is of the params that `complete` adds.
        """
        super().__init__(channel, abstract, **how)
        self._complete, self._frozen_digest = complete, frozen_digest

    def fetch(self, manifest: Manifest, *, apart: bool = False) -> LayOut:
        """Fetch a version to the host; return a function that lays it out whole.

        Raises:
            NotReceivedError: the learner's frozen params are others, or as in the base.
        """
        if manifest.frozen_digest != self._frozen_digest:
            raise NotReceivedError(
                f"the params of version {manifest.policy_version} were trained beside "
                f"frozen ones of digest {manifest.frozen_digest[:16] or None}, and "
                f"those here have {self._frozen_digest[:16]}: model.checkpoint is "
                f"another one on this machine"
            )
        lay_out = super().fetch(manifest, apart=apart)

        def whole(before: PyTree | None) -> PyTree:
            for leaf in jax.tree.leaves(before):
                leaf.delete()
            return self._complete(lay_out(None))

        return whole
