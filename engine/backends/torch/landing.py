"""Token ids that are drawn on a device: taken by the next step there before the host has read them, and on their way
to the host meanwhile."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.backends.torch.step_upload import Wait


class Landing(Protocol):
    """The way from a device back to the host, in the order of the device's work."""

    def fetch(self, tensor: Tensor) -> Tensor:
        """Memory of the host that `tensor` is copied to, without waiting; good after the wait of a later `mark`."""

    def mark(self) -> Wait:
        """A wait for all that was queued so far."""


def fill_unread(ids: Tensor, drawn: Tensor) -> None:
    """Put the ids that the step before drew, `drawn` [R], into `ids` [T] on their device, where `batch.unread` stands.

    A row that nothing could be drawn for (-1) gives token 0: what is computed with it is dropped when that is read.
    """
    if not len(drawn):
        return
    rows = (-1 - ids).clamp_(min=0)
    ids.copy_(drawn.clamp(min=0).index_select(0, rows).where(ids < 0, ids))
