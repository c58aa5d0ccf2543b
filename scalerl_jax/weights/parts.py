"""Receive the trained part of the params on a replica that has the frozen part.

Only trained params are published.  The replica has read the frozen ones itself, and a
digest shows whether they equal the learner's.
"""

from collections.abc import Callable
from typing import Any

import jax

from scalerl_jax.types import PyTree
from scalerl_jax.weights.channels import Channel
from scalerl_jax.weights.manifest import Manifest
from scalerl_jax.weights.receiving import LayOut, NotReceivedError, PublishedFrom


class PublishedParts(PublishedFrom):
    """A `PublishedFrom` that completes the published part of the params."""

    def __init__(
        self,
        channel: Channel,
        abstract: PyTree,
        *,
        complete: Callable[[PyTree], PyTree],
        frozen_digest: str,
        **how: Any,
    ) -> None:
        """Store the arguments.

        Args:
            channel: the channel of the senders.
            abstract: shapes and shardings of the published part.
            complete: returns all params, given the published part.
            frozen_digest: digest of the params that `complete` adds.
            how: further arguments of `PublishedFrom`.
        """
        super().__init__(channel, abstract, **how)
        self._complete, self._frozen_digest = complete, frozen_digest

    def fetch(self, manifest: Manifest, *, apart: bool = False) -> LayOut:
        """Fetch a version to the host; return a function that lays out all params.

        Raises:
            NotReceivedError: the learner's frozen params differ, or the version did not
                arrive whole.
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
