"""Steps of nothing but single tokens, recorded once per size and done again with one launch (CUDA graphs).

What a recording does is fixed: its kernels, their sizes and the addresses they read. So a step is padded up to a size
that there is a recording of, and its indices are written to where the recordings look for them. Any other step is
computed as ever. Nothing here asks for CUDA: a `Recorder` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.common.step_memory import graph_bytes
from engine.backends.paged_attention.interface import PagedAttention
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.cuda.step_transfer import Staging, fill_pending_ids, offsets, view
from engine.backends.torch.device_memory import DeviceMemory
from engine.backends.torch.kv.page_tensors import KvPool
from engine.backends.torch.model.decoder import Decoder
from engine.backends.torch.model.step_plan import PagedGroup, PagedPlan, StepPlan
from engine.backends.torch_common.errors import failure_reason, is_device_lost, is_out_of_memory

LEAST_TOKENS = 2048
"""Tokens of each sequence that the narrowest block tables have room for; wider ones double."""

_logger = logging.getLogger(__name__)


class Recording(Protocol):
    """Work that was recorded."""

    def replay(self) -> None:
        """Have it done again, on what lies now in the memory that it reads."""


class Recorder(Protocol):
    """A device that can record its work."""

    def record(self, work: Callable[[], None]) -> Recording:
        """Do `work` to get everything ready, and record it. It must wait for nothing and decide by no tensor."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A size that decodes are recorded for: so many sequences, block tables so wide."""

    batch: int
    pages: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """The sizes there are, each kind ascending."""

    batches: tuple[int, ...]
    pages: tuple[int, ...]

    @classmethod
    def up_to(cls, sequences: int, tokens: int, page_tokens: int) -> Buckets:
        """For up to `sequences` of up to `tokens` each: 1, 2, 4, 8 and multiples of 8, of 16 from 32 and of 32 from 128
        on, so that less than a half of a step is padding, and little of a large one; tables by doubling."""
        batches = [size for size in (1, 2, 4) if size < sequences]
        while not batches or batches[-1] < sequences:
            last = batches[-1] if batches else 0
            batches.append(min(sequences, last + (8 - last % 8 if last < 32 else 16 if last < 128 else 32)))
        widest = -(-tokens // page_tokens)
        pages = [min(widest, -(-LEAST_TOKENS // page_tokens))]
        while pages[-1] < widest:
            pages.append(min(widest, 2 * pages[-1]))
        return cls(tuple(batches), tuple(pages))

    def of(self, chunks: Sequence[ChunkInput], page_tokens: int) -> Bucket | None:
        """The smallest that these fit into; None where they are more than single tokens of plain sequences, or too
        many, or too long."""
        if not all(_is_plain_decode(chunk) for chunk in chunks):
            return None
        longest = max((chunk.end for chunk in chunks), default=0)
        batch = next((size for size in self.batches if size >= len(chunks)), None)
        pages = next((size for size in self.pages if size * page_tokens >= longest), None)
        return None if not chunks or batch is None or pages is None else Bucket(batch, pages)


def _is_plain_decode(chunk: ChunkInput) -> bool:
    return len(chunk.token_ids) == 1 and chunk.sample and not (chunk.adapter or chunk.guessed or chunk.told)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The indices of a step of one size, as parts of one buffer of bytes. See StepPlan and PagedGroup."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    block_table: Tensor

    @classmethod
    def over(cls, buffer: Tensor, bucket: Bucket) -> StepInputs:
        """Those that lie in `buffer`, which may be longer."""
        kinds = _kinds(bucket)
        starts, _ = offsets([_nbytes(*kind) for kind in kinds])
        return cls(*(view(buffer, start, *kind) for start, kind in zip(starts, kinds, strict=True)))

    @staticmethod
    def size_bytes(bucket: Bucket) -> int:
        """What such a buffer takes."""
        return offsets([_nbytes(*kind) for kind in _kinds(bucket)])[1]

    def fill(self, chunks: Sequence[ChunkInput], page_tokens: int) -> None:
        """Write the indices of single tokens. Padding is the shortest sequence again: it writes what that one writes
        to where that one writes it, and so needs no page of its own."""
        shortest = min(range(len(chunks)), key=lambda index: chunks[index].end)
        rows = [*chunks, *[chunks[shortest]] * (len(self.ids) - len(chunks))]
        at = [(chunk.pages[chunk.start // page_tokens], chunk.start % page_tokens) for chunk in rows]
        self.ids.copy_(torch.tensor([chunk.token_ids[0] for chunk in rows]))
        self.positions.copy_(torch.tensor([chunk.start for chunk in rows]))
        self.slots.copy_(torch.tensor([page * page_tokens + offset for page, offset in at]))
        self.lengths.copy_(torch.tensor([chunk.end for chunk in rows]))
        self.block_table.zero_()
        for row, chunk in zip(self.block_table, rows, strict=True):
            count = -(-chunk.end // page_tokens)
            row[:count] = torch.tensor(chunk.pages[:count], dtype=torch.int32)

    def plan(self, attention: PagedAttention) -> StepPlan:
        """The step that they describe. All rows' logits are wanted, in order."""
        rows = len(self.ids)
        group = PagedGroup(0, rows, 1, self.lengths, self.block_table)
        return StepPlan(
            ids=self.ids,
            positions=self.positions,
            slots=self.slots,
            sampled_rows=self.slots[:0],
            groups=(),
            paged=PagedPlan(attention, (group,)),
        )


def _kinds(bucket: Bucket) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    row, table = (bucket.batch,), (bucket.batch, bucket.pages)
    return [(torch.int64, row)] * 3 + [(torch.int32, row), (torch.int32, table)]


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return torch.empty(shape, dtype=dtype, device="meta").nbytes


class DecodeGraphs:
    """Recordings of a model's decodes. All read one buffer of indices and write one of logits, as they never run at
    once.

    compute: logits [rows, vocab] of a step all of whose rows are wanted.  has_room: whether the device has memory for
    one more recording.
    """

    def __init__(
        self,
        buckets: Buckets,
        *,
        vocab_size: int,
        page_tokens: int,
        device: torch.device,
        attention: PagedAttention,
        compute: Callable[[StepPlan], Tensor],
        recorder: Recorder,
        staging: Staging,
        has_room: Callable[[], bool],
    ) -> None:
        """Takes the memory of both buffers; raises torch.OutOfMemoryError where there is too little."""
        largest = Bucket(buckets.batches[-1], buckets.pages[-1])
        self.buckets = buckets
        self._page_tokens, self._attention, self._compute = page_tokens, attention, compute
        self._recorder, self._staging, self._has_room = recorder, staging, has_room
        self._inputs = torch.zeros(StepInputs.size_bytes(largest), dtype=torch.uint8, device=device)
        self._logits = torch.empty(largest.batch, vocab_size, dtype=torch.float32, device=device)
        self._recordings: dict[Bucket, Recording] = {}
        self._full = False

    @property
    def recorded(self) -> frozenset[Bucket]:
        """The sizes that there are recordings of."""
        return frozenset(self._recordings)

    def prepare(self) -> None:
        """Record the steps of each number of sequences over the narrowest tables; page 0 must be nobody's."""
        for batch in self.buckets.batches:
            self.logits([ChunkInput([0], 0, [0], sample=True)] * batch)

    def logits(self, chunks: Sequence[ChunkInput], drawn: Tensor | None = None) -> Tensor | None:
        """Float32 logits [len(chunks), vocab] of a step, good until the next one; None for a step that is none of
        these, or is not recorded and cannot be. drawn: what the step before drew, for ids that are unread."""
        bucket = self.buckets.of(chunks, self._page_tokens)
        if bucket is None or (self._full and bucket not in self._recordings):
            return None
        host = self._staging.host(StepInputs.size_bytes(bucket))
        StepInputs.over(host, bucket).fill(chunks, self._page_tokens)
        self._staging.send(host, self._inputs)
        if drawn is not None:
            fill_pending_ids(StepInputs.over(self._inputs, bucket).ids, drawn)
        recording = self._recordings.get(bucket) or self._record(bucket)
        if recording is None:
            return None
        recording.replay()
        return self._logits[: len(chunks)]

    def _record(self, bucket: Bucket) -> Recording | None:
        """Record a size. One that fails is the last: steps are computed as ever then."""
        plan = StepInputs.over(self._inputs, bucket).plan(self._attention)
        out = self._logits[: bucket.batch]

        def work() -> None:
            out.copy_(self._compute(plan))

        try:
            if not self._has_room():
                raise torch.OutOfMemoryError("the device has no memory left for it")
            self._recordings[bucket] = self._recorder.record(work)
        except Exception as error:
            if is_device_lost(error):
                raise
            self._full = True
            _logger.warning("no more decodes are recorded (%d sequences): %s", bucket.batch, failure_reason(error))
        return self._recordings.get(bucket)


def recorded_decodes(
    decoder: Decoder,
    kv: KvPool,
    most_sequences: int,
    *,
    attention: PagedAttention,
    home: DeviceMemory,
    recorder: Recorder,
    staging: Staging,
) -> DecodeGraphs | None:
    """Recordings of what `decoder` does with up to so many sequences over the pages of `kv`, page 0 of which must be
    nobody's; None where it cannot be recorded, or there is no memory for it. home: where all of it lies."""
    config = decoder.config
    if config.traits.experts is not None:  # which experts a step needs is decided on the host
        return None
    num_pages, page_tokens = kv.layers[0].shape[:2]
    buckets = Buckets.up_to(most_sequences, min(config.max_model_len, num_pages * page_tokens), page_tokens)
    needed_bytes = graph_bytes(config, buckets.batches[-1], decoder.embedding.dtype.itemsize)
    try:
        graphs = DecodeGraphs(
            buckets,
            vocab_size=config.vocab_size,
            page_tokens=page_tokens,
            device=home.device,
            attention=attention,
            compute=lambda plan: decoder.logits(decoder.hidden(plan, kv)),
            recorder=recorder,
            staging=staging,
            has_room=lambda: home.free_bytes() >= needed_bytes,
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        _logger.warning("decodes are not recorded: %s", failure_reason(error))
        return None
    graphs.prepare()
    return graphs
