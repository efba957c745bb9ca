"""DecodeGraphs: steps of few tokens, recorded at load once per size and replayed with one launch (CUDA graphs).

A recording has fixed kernels, sizes and addresses, so each token is a row by itself: a decode over the tokens before
it. Keys and values of all rows are written before any row attends, so the tokens of one sequence, be they a prompt's or
drafts, see each other. One recording of N rows so serves every step of up to N tokens, whatever its chunks are: it is
padded, and its indices are written to the buffer that the recordings read. Any other step is computed without one. Only
`CudaRecorder` needs CUDA; it was not yet run on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.backends.common.step_memory import graph_bytes, max_recorded_rows
from engine.backends.paged_attention.interface import PagedAttention
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.cuda.adapter_slots import AdapterSlots, adapters_problem
from engine.backends.torch.cuda.step_transfer import Uploader, fill_pending_ids, offsets, view
from engine.backends.torch.device_memory import DeviceMemory
from engine.backends.torch.kv.page_tensors import KvPool
from engine.backends.torch.model.decoder import Decoder, Stage
from engine.backends.torch.model.lora import LoraAdapter
from engine.backends.torch.model.step_plan import PagedPlan, StepPlan, block_tables
from engine.backends.torch_device import clear_workspaces, failure_reason, is_device_lost, is_out_of_memory

MAX_REREAD_BYTES = 2 << 30
"""Keys and values that the rows of a replayed step may read again, which one call per chunk reads once: well under a
millisecond of an H100, where launching each kernel of a step takes several."""

_logger = logging.getLogger(__name__)


class Recording(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Run it again on the current contents of its input buffer."""


class Recorder(Protocol):
    """Records work of a device."""

    def record(self, compute: Callable[[], None]) -> Recording:
        """Run `compute` to warm up, and record it. It must neither wait nor depend on values of tensors."""


class CudaRecorder:
    """Records work on one device. All recordings share their working memory and cuBLAS's workspace: no two run at
    once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run `work` twice on a stream of its own, so that kernels are compiled and libraries ready, then capture it.

        An existing cuBLAS workspace belongs to all work of its stream, a new one to the capture. So there must be none
        when a capture begins, and none is left when it has ended.
        """
        with torch.cuda.device(self._device):
            current, stream, graph = torch.cuda.current_stream(), self._stream, torch.cuda.CUDAGraph()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):  # restores the stream also where the end of a capture fails
                    work()
                    work()
                    clear_workspaces()
                    with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                        work()
            finally:
                clear_workspaces()
            current.wait_stream(stream)
        return graph


def recorder_for(device: torch.device) -> Recorder | None:
    """Return the recorder of `device`; None where it has none."""
    return CudaRecorder(device) if device.type == "cuda" else None


def recorded_sizes(most: int) -> tuple[int, ...]:
    """Return sizes of up to `most` rows, ascending: 1, 2, 4, then multiples of 8, of 16 from 32, of 32 from 128 and of
    64 from 256 on, so that less than half of a step is padding, and little of a large one."""
    sizes = [size for size in (1, 2, 4) if size < most]
    while not sizes or sizes[-1] < most:
        last = sizes[-1] if sizes else 0
        step = next(step for step, limit in ((8, 32), (16, 128), (32, 256), (64, most + last)) if last < limit)
        sizes.append(min(most, last + step - last % step))
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Index tensors of a step, in one buffer of bytes. See StepPlan and PagedPlan.

    ids, positions, slots int64 [rows], lengths int32 [rows].  owners int64 [rows]: the chunk of each row, by whose line
    of the block tables it reads.  sampled int64: rows whose logits are needed.  adapters int32 [rows]: slots of their
    LoRA adapters, see `AdapterSlots`.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    owners: Tensor
    sampled: Tensor
    lengths: Tensor
    adapters: Tensor


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the index tensors of a step of `rows` rows and `sampled` logits begin in their buffer of `size_bytes`."""

    rows: int
    sampled: int
    starts: tuple[int, ...]
    size_bytes: int

    @classmethod
    def of_size(cls, rows: int, sampled: int) -> StepLayout:
        """Return the layout of a size."""
        starts, size_bytes = offsets([*[8 * rows] * 4, 8 * sampled, 4 * rows, 4 * rows])
        return cls(rows, sampled, tuple(starts), size_bytes)

    def inputs(self, buffer: Tensor) -> StepInputs:
        """Return the tensors at the start of `buffer`."""
        dtypes, lengths = [*[torch.int64] * 5, *[torch.int32] * 2], [*[self.rows] * 4, self.sampled, *[self.rows] * 2]
        parts = zip(self.starts, dtypes, lengths, strict=True)
        return StepInputs(*(view(buffer, start, dtype, (length,)) for start, dtype, length in parts))

    def fill(
        self,
        buffer: NDArray[np.uint8],
        chunks: Sequence[ChunkInput],
        page_tokens: int,
        adapters: Mapping[str, int] | None = None,
    ) -> None:
        """Write the indices of a step to `buffer`; rows are in the order of the chunks. adapters: slots by key; None in
        a step without adapters, which leaves theirs as they are.

        Padding repeats the row with the fewest tokens before it: it writes the same to the same place, and needs no
        page of its own.
        """
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        owners: list[int] = []
        sampled: list[int] = []
        for owner, chunk in enumerate(chunks):
            pages, start, count = chunk.pages, chunk.start, len(chunk.token_ids)
            ids += chunk.token_ids
            if count == 1:
                positions.append(start)
                slots.append(pages[start // page_tokens] * page_tokens + start % page_tokens)
                owners.append(owner)
                if chunk.sample:
                    sampled.append(len(ids) - 1)
                continue
            spanned = range(start, start + count)
            positions += spanned
            slots += [pages[at // page_tokens] * page_tokens + at % page_tokens for at in spanned]
            owners += repeat(owner, count)
            sampled += range(len(ids) - chunk.num_sampled, len(ids))
        if padding := self.rows - len(ids):
            shortest = positions.index(min(positions))
            for values in (ids, positions, slots, owners):
                values += repeat(values[shortest], padding)
        sampled += repeat(0, self.sampled - len(sampled))
        lengths, slots_of_adapters = self.starts[-2:]
        for start, values in zip(self.starts[:-2], (ids, positions, slots, owners, sampled), strict=True):
            buffer[start : start + 8 * len(values)].view(np.int64)[:] = values
        np.add(positions, 1, out=buffer[lengths : lengths + 4 * self.rows].view(np.int32), casting="unsafe")
        if adapters is not None:
            by_owner = np.array([adapters[chunk.adapter] for chunk in chunks], dtype=np.int32)
            buffer[slots_of_adapters : slots_of_adapters + 4 * self.rows].view(np.int32)[:] = by_owner[owners]


class ComputeStage(Protocol):
    """Computes the part of a step that is on one device."""

    def __call__(self, plan: StepPlan, states: Tensor | None) -> tuple[Tensor, ...]:
        """Return the states [rows, hidden] for the next device; on the last one the logits [sampled rows, vocab], and
        the largest magnitude of each row's states. states: of the device before; None on the first."""


@dataclass(frozen=True, slots=True)
class GraphStage:
    """The part of a model's steps that is on one device. All its recordings share its buffers, as they never run at
    once.

    inputs uint8: index tensors and block tables of the chunks.  tables int32 [rows, pages]: block tables of rows.
    states [rows, hidden]: from the device before, which `compute` may overwrite; None on the first.  outputs: what
    `compute` returns.
    """

    recorder: Recorder
    compute: ComputeStage
    inputs: Tensor
    tables: Tensor
    states: Tensor | None
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded size: its recording and the index tensors of each stage."""

    layout: StepLayout
    inputs: tuple[StepInputs, ...]
    recordings: tuple[Recording, ...]


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """Result of a replayed step, valid until the next one. logits: float32 [sampled rows, vocab], in order.
    magnitudes [rows]: largest magnitude in each row's states; rows are in the order of the chunks."""

    logits: Tensor
    magnitudes: Tensor


class DecodeGraphs:
    """Recordings of a model's steps, by their number of rows: one on each of its devices, replayed one after the other,
    with a copy of the states between two, for which each device waits in its queue and the host does not.

    max_rows, max_sampled: of a step.  max_pages: of a sequence; all recordings have block tables of that width.
    max_reread_tokens: tokens that rows may read again, which one call per chunk would read once.
    parts: device, recorder and computation of each stage, in order.  dtype: of states [rows, hidden_size].
    has_room: returns whether the device has memory for a first recording, of a number of rows.
    adapters: those of the model's requests; None where steps with some are not recorded. Every second size is recorded
        with adapters, too.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_sampled: int,
        max_pages: int,
        max_reread_tokens: int,
        vocab_size: int,
        page_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        attention: PagedAttention,
        parts: Sequence[tuple[torch.device, Recorder, ComputeStage]],
        uploader: Uploader,
        has_room: Callable[[int], bool],
        adapters: AdapterSlots | None = None,
    ) -> None:
        """Allocate the buffers. Raises torch.OutOfMemoryError."""
        self.sizes = recorded_sizes(max_rows)
        self._max_sampled, self._max_pages, self._max_reread_tokens = max_sampled, max_pages, max_reread_tokens
        self._page_tokens, self._attention = page_tokens, attention
        self._uploader, self._has_room = uploader, has_room
        largest = StepLayout.of_size(max_rows, max_sampled).size_bytes + 4 * max_sampled * max_pages
        self._stages: list[GraphStage] = []
        for number, (device, recorder, compute) in enumerate(parts):
            outputs = [torch.zeros(max_rows, hidden_size, dtype=dtype, device=device)]
            if number == len(parts) - 1:
                outputs = [torch.empty(max_sampled, vocab_size, dtype=torch.float32, device=device)]
                outputs.append(torch.empty(max_rows, dtype=torch.float32, device=device))
            self._stages.append(
                GraphStage(
                    recorder=recorder,
                    compute=compute,
                    inputs=torch.zeros(largest, dtype=torch.uint8, device=device),
                    tables=torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device),
                    states=torch.zeros(max_rows, hidden_size, dtype=dtype, device=device) if number else None,
                    outputs=tuple(outputs),
                )
            )
        self._adapters = adapters
        self._steps: dict[int, RecordedStep] = {}
        self._adapted_steps: dict[int, RecordedStep] = {}

    @property
    def recorded(self) -> tuple[int, ...]:
        """The recorded sizes, ascending."""
        return tuple(self._steps)

    def record(
        self, report: Callable[[LoadProgress], None] = lambda progress: None, proceed: Callable[[], None] = lambda: None
    ) -> None:
        """Record all sizes, the largest first, whose memory the others share; page 0 must be unused. Where memory does
        not suffice for a size, smaller ones are tried; after another failure no more are.

        report: called with the progress.  proceed: called before each size; may raise.
        """
        adapted_sizes = self.sizes[::-2] if self._adapters is not None else ()
        total = len(self.sizes) + len(adapted_sizes)

        def record_all(sizes: Sequence[int], before: int, *, adapted: bool) -> dict[int, RecordedStep]:
            failure: Exception | None = None
            recorded: dict[int, RecordedStep] = {}
            for done, rows in enumerate(sizes, before):
                proceed()
                report(LoadProgress(phase="warm_up", done=done, total=total, unit="steps"))
                try:
                    if not recorded and not self._has_room(rows):
                        raise torch.OutOfMemoryError("the device is out of memory")
                    recorded[rows] = self._record(rows, adapted=adapted)
                except Exception as error:
                    if is_device_lost(error):
                        raise
                    failure = error
                    if not is_out_of_memory(error):
                        break
            if failure is not None:
                _logger.warning(
                    "decode graphs%s: %d of %d sizes are recorded, up to %d tokens: %s",
                    " with LoRA adapters" if adapted else "",
                    len(recorded),
                    len(sizes),
                    max(recorded, default=0),
                    failure_reason(failure),
                )
            return dict(sorted(recorded.items()))

        self._steps = record_all(self.sizes[::-1], 0, adapted=False)
        if self._steps and adapted_sizes:
            self._adapted_steps = record_all(adapted_sizes, len(self.sizes), adapted=True)

    def replay(self, chunks: Sequence[ChunkInput], drawn: Tensor | None = None) -> ReplayedStep | None:
        """Run a step; None for one that has no recording, needs what a recording does not give, or would read too much
        again. drawn: ids that the previous step sampled, in place of pending ones."""
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        slots: Mapping[str, int] | None = None
        steps = self._steps
        if self._adapters is not None and any(chunk.adapter for chunk in chunks):
            steps = self._adapted_steps
        size = next((size for size in steps if size >= rows), None)
        if not rows or size is None or not self._fits(chunks):
            return None
        if steps is self._adapted_steps and self._adapters is not None:
            slots = self._adapters.assign([chunk.adapter for chunk in chunks])
            if slots is None:
                return None
        step = steps[size]
        self._send(chunks, step, slots)
        if drawn is not None:
            fill_pending_ids(step.inputs[0].ids, drawn)
        states: Tensor | None = None
        for stage, recording in zip(self._stages, step.recordings, strict=True):
            if states is not None and stage.states is not None:
                stage.states[:size].copy_(states[:size], non_blocking=True)  # padding writes to pages, too
            recording.replay()
            states = stage.outputs[0]
        logits, magnitudes = self._stages[-1].outputs
        count = sum(chunk.num_sampled for chunk in chunks)
        return ReplayedStep(logits[:count], magnitudes[:rows])

    def _fits(self, chunks: Sequence[ChunkInput]) -> bool:
        sampled = reread = longest = 0
        for chunk in chunks:
            if chunk.prompt_states or (chunk.adapter and self._adapters is None):
                return False
            count = len(chunk.token_ids)
            end = chunk.start + count
            sampled += chunk.num_sampled
            longest = max(longest, end)
            if count > 1:
                reread += (count - 1) * (chunk.start + end) // 2
        fits = sampled <= self._max_sampled and longest <= self._max_pages * self._page_tokens
        return fits and len(chunks) <= self._max_sampled and reread <= self._max_reread_tokens

    def _send(
        self, chunks: Sequence[ChunkInput], step: RecordedStep, adapters: Mapping[str, int] | None = None
    ) -> None:
        """Copy the indices to the devices, then the line of its chunk into each row's block table."""
        layout, width = step.layout, -(-max([chunk.end for chunk in chunks]) // self._page_tokens)
        start, shape = layout.size_bytes, (len(chunks), width)
        buffer = self._uploader.buffer(start + 4 * len(chunks) * width)
        numbers = buffer.numpy()
        layout.fill(numbers, chunks, self._page_tokens, adapters)
        numbers[start:].view(np.int32).reshape(shape)[:] = block_tables(chunks, width)
        first = self._stages[0].inputs
        self._uploader.send(buffer, first)
        for stage, inputs in zip(self._stages, step.inputs, strict=True):
            if stage.inputs is not first:
                stage.inputs[: len(numbers)].copy_(first[: len(numbers)], non_blocking=True)
            lines = view(stage.inputs, start, torch.int32, shape)
            torch.index_select(lines, 0, inputs.owners, out=stage.tables[: layout.rows, :width])

    def _record(self, rows: int, *, adapted: bool) -> RecordedStep:
        layout = StepLayout.of_size(rows, min(rows, self._max_sampled))
        inputs = tuple(layout.inputs(stage.inputs) for stage in self._stages)
        recordings: list[Recording] = []
        self._send([ChunkInput([0], 0, [0], sample=True)], RecordedStep(layout, inputs, ()), {"": -1})
        for stage, indices in zip(self._stages, inputs, strict=True):
            recordings.append(self._record_stage(stage, indices, rows, adapted=adapted))
        return RecordedStep(layout, inputs, tuple(recordings))

    def _record_stage(self, stage: GraphStage, inputs: StepInputs, rows: int, *, adapted: bool) -> Recording:
        plan = StepPlan(
            ids=inputs.ids,
            positions=inputs.positions,
            slots=inputs.slots,
            sampled_rows=inputs.sampled,
            groups=(),
            paged=PagedPlan(self._attention, inputs.lengths, stage.tables[:rows]),
            adapted=(self._adapters.rows(inputs.adapters),) if adapted and self._adapters is not None else (),
        )
        states = stage.states[:rows] if stage.states is not None else None

        def compute() -> None:
            for output, computed in zip(stage.outputs, stage.compute(plan, states), strict=True):
                output[: len(computed)].copy_(computed)

        return stage.recorder.record(compute)


def record_decode_graphs(
    decoder: Decoder,
    kv: KvPool,
    max_sequences: int,
    step_tokens: int,
    *,
    attention: PagedAttention,
    memories: Sequence[DeviceMemory],
    recorders: Sequence[Recorder],
    uploader: Uploader,
    adapters: Mapping[str, LoraAdapter] | None,
    report: Callable[[LoadProgress], None],
    proceed: Callable[[], None],
) -> DecodeGraphs | None:
    """Record steps of `decoder` with up to `max_sequences` sequences and `max_recorded_rows` tokens over the pages of
    `kv`, page 0 of which must be unused; None where it cannot be recorded, or memory does not suffice.

    memories, recorders: of the device of each stage; `uploader` sends to the first.  adapters: those in memory, by key;
    None where requests have none.  report, proceed: see `DecodeGraphs.record`.
    """
    config = decoder.config
    if decoder.needs_host or not decoder.stages[-1].blocks:
        return None
    num_pages, page_tokens = kv.layers[0].shape[:2]
    dtype = decoder.embedding.dtype

    def stage_of(stage: Stage) -> ComputeStage:
        def compute(plan: StepPlan, states: Tensor | None) -> tuple[Tensor, ...]:
            hidden = decoder.embed(plan.ids) if states is None else states
            if stage is not decoder.stages[-1]:
                return (decoder.run_stage(stage, plan, hidden, kv),)
            magnitudes: list[Tensor] = []

            def check(states: Tensor) -> None:
                magnitudes.append(torch.linalg.vector_norm(states, torch.inf, dim=-1))

            hidden = decoder.run_stage(stage, plan, hidden, kv, plan.sampled_rows, check)
            return decoder.logits(hidden), magnitudes[0]

        return compute

    def has_room(rows: int) -> bool:
        sampled = [*[0] * (len(memories) - 1), max_sequences]
        needed = [graph_bytes(config, rows, each, dtype.itemsize, page_tokens) for each in sampled]
        return all(memory.free_bytes() >= each for memory, each in zip(memories, needed, strict=True))

    try:
        devices = [stage.device for stage in decoder.stages]
        slots = (
            None if adapters is None else adapter_slots(adapters, config.layers, list(dict.fromkeys(devices)), dtype)
        )
        graphs = DecodeGraphs(
            max_rows=max_recorded_rows(max_sequences, step_tokens),
            max_sampled=max_sequences,
            max_pages=-(-min(config.max_model_len, num_pages * page_tokens) // page_tokens),
            max_reread_tokens=MAX_REREAD_BYTES // (kv.total_bytes // (num_pages * page_tokens)),
            vocab_size=config.vocab_size,
            page_tokens=page_tokens,
            hidden_size=config.hidden_size,
            dtype=dtype,
            attention=attention,
            parts=list(zip(devices, recorders, map(stage_of, decoder.stages), strict=True)),
            uploader=uploader,
            has_room=has_room,
            adapters=slots,
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        _logger.warning("decode graphs are off: %s", failure_reason(error))
        return None
    graphs.record(report, proceed)
    return graphs


def adapter_slots(
    by_key: Mapping[str, LoraAdapter], layers: int, devices: Sequence[torch.device], dtype: torch.dtype
) -> AdapterSlots | None:
    """Return the slots of adapters, whose kernels are tried first; None, with a warning, where they cannot be used."""
    if problem := adapters_problem(devices, dtype):
        _logger.warning("steps with LoRA adapters are not recorded: %s", problem)
        return None
    return AdapterSlots(by_key, layers, devices)
