"""Which steps are recorded, in which sizes, and what is written to where recordings look for it."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.base import LoadProgress
from engine.backends.common.model_config import read_model_config
from engine.backends.common.step_memory import graph_bytes, max_recorded_rows
from engine.backends.paged_attention import gathered
from engine.backends.scheduler.batch import ChunkInput, pending_token_id
from engine.backends.torch.cuda.decode_graphs import DecodeGraphs, StepLayout, recorded_sizes
from engine.backends.torch.cuda.step_transfer import BlockingUploader
from engine.backends.torch.model.step_plan import HeadCounts, StepPlan, StepPlanner, block_tables
from engine.errors import LoadCancelled
from tests.fakes.recording import FakeRecorder
from tests.fakes.tiny_models import make_tiny_model

PAGE_TOKENS = 16
CPU = torch.device("cpu")


def chunk(start: int, tokens: int = 1, first_page: int = 0, **changes: Any) -> ChunkInput:
    """So many tokens after the first `start`, whose pages are numbered from `first_page` on."""
    pages = array("i", range(first_page, first_page + (start + tokens - 1) // PAGE_TOKENS + 1))
    return replace(ChunkInput([(start + at) % 7 for at in range(tokens)], start, pages, sample=True), **changes)


@given(st.integers(1, 900))
def test_every_number_of_rows_has_a_size_that_is_not_much_larger(most: int) -> None:
    sizes = recorded_sizes(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    for rows in range(1, most + 1):
        found = next(size for size in sizes if size >= rows)
        assert found < 2 * rows
        assert rows < 64 or found <= 1.25 * rows


def test_sizes_are_few() -> None:
    assert recorded_sizes(128) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
    assert recorded_sizes(512)[13:] == (160, 192, 224, 256, 320, 384, 448, 512)


class ShowsLengths:
    """A model whose logits are the tokens before and in each sampled row, and its magnitudes the rows' ids."""

    def __init__(self, recorder: FakeRecorder, *, max_rows: int = 32, max_sampled: int = 8, room: int = 999) -> None:
        self.recorder = recorder
        self.graphs = DecodeGraphs(
            max_rows=max_rows,
            max_sampled=max_sampled,
            max_pages=64,
            max_reread_tokens=4000,
            vocab_size=3,
            page_tokens=PAGE_TOKENS,
            hidden_size=4,
            dtype=torch.float32,
            attention=gathered.paged_attention,
            parts=[(CPU, recorder, self.compute)],
            uploader=BlockingUploader(CPU),
            has_room=lambda rows: rows <= room,
        )

    def compute(self, plan: StepPlan, states: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        assert states is None
        assert plan.paged is not None
        self.plan = plan
        lengths = plan.paged.lengths.index_select(0, plan.sampled_rows)
        return lengths.float()[:, None].expand(-1, 3), plan.ids.float()

    def lengths(self, *chunks: ChunkInput) -> list[float] | None:
        """The logits of a step, recorded before."""
        step = self.graphs.replay(chunks)
        return None if step is None else step.logits[:, 0].tolist()


@pytest.fixture
def model() -> ShowsLengths:
    made = ShowsLengths(FakeRecorder())
    made.graphs.record()
    return made


def test_all_sizes_are_recorded_at_load_and_nothing_is_while_serving(model: ShowsLengths) -> None:
    assert model.graphs.recorded == recorded_sizes(32) == (1, 2, 4, 8, 16, 24, 32)
    assert model.lengths(chunk(5), chunk(1000), chunk(7)) == [6, 1001, 8]
    assert model.lengths(chunk(1023)) == [1024]
    assert model.lengths(*[chunk(9, 2)] * 8) == [11] * 8
    assert (model.recorder.recorded, model.recorder.replayed) == (7, 3)


STEPS: dict[str, list[ChunkInput]] = {
    "decodes": [chunk(5), chunk(40)],
    "a prompt": [chunk(0, 30)],
    "the middle of a prompt": [chunk(17, 20, sample=False)],
    "a prompt between decodes": [chunk(5), chunk(16, 9), chunk(40)],
    "drafts": [chunk(5, 3, num_drafts=2), chunk(40), chunk(15, 4, num_drafts=3)],
}


@pytest.mark.parametrize("name", STEPS)
def test_each_token_is_a_row_that_sees_those_before_it(name: str, model: ShowsLengths) -> None:
    chunks = [replace(each, pages=[3 * at + page for page in each.pages]) for at, each in enumerate(STEPS[name])]
    chunks.sort(key=lambda each: len(each.token_ids))
    planned = StepPlanner(
        frozenset({None}),
        HeadCounts(1, 1, 16),
        PAGE_TOKENS,
        dtype=torch.float32,
        device=CPU,
        paged=gathered.paged_attention,
    ).plan(chunks)
    step = model.graphs.replay(chunks)
    assert step is not None and model.plan.paged is not None and planned.paged is not None
    group, ours, theirs, paged, rows = model.plan.paged, model.plan, planned, planned.paged, len(planned.ids)
    for field in ("ids", "positions", "slots"):
        assert getattr(ours, field)[:rows].tolist() == getattr(theirs, field).tolist()
    assert ours.sampled_rows[: len(step.logits)].tolist() == theirs.sampled_rows.tolist()
    assert (group.chunks, group.lengths[:rows].tolist()) == (None, [at + 1 for at in theirs.positions.tolist()])
    tables = paged.block_table.repeat_interleave(torch.tensor([len(each.token_ids) for each in chunks]), 0)
    assert group.block_table[:rows, : tables.shape[1]].tolist() == tables.tolist()
    assert step.magnitudes.tolist() == theirs.ids.float().tolist()


@given(st.lists(st.tuples(st.integers(0, 700), st.integers(1, 5)), min_size=1, max_size=12))
def test_padding_repeats_the_row_with_the_fewest_tokens_before_it(sizes: list[tuple[int, int]]) -> None:
    chunks = [chunk(start, tokens, 50 * at) for at, (start, tokens) in enumerate(sizes)]
    rows = sum(tokens for _, tokens in sizes)
    layout = StepLayout.of_size(64, 16)
    buffer = torch.full((layout.size_bytes + 99,), 77, dtype=torch.uint8)
    layout.fill(buffer.numpy(), chunks, PAGE_TOKENS)
    inputs = layout.inputs(buffer)
    least = min(range(rows), key=lambda row: int(inputs.positions[row]))
    for part in (inputs.ids, inputs.positions, inputs.slots, inputs.owners, inputs.lengths):
        assert part[rows:].tolist() == [int(part[least])] * (64 - rows)
    assert inputs.sampled[len(chunks) :].tolist() == [0] * (16 - len(chunks))


@pytest.mark.parametrize("kind", [list, tuple, lambda pages: array("i", pages)], ids=["list", "tuple", "array"])
def test_block_tables_are_padded_and_leave_out_pages_that_no_token_is_in(kind: Any) -> None:
    chunks = [ChunkInput([1], start, kind(pages), sample=True) for start, pages in ((0, (9, 8)), (40, (5, 6, 7, 4)))]
    assert block_tables(chunks, 3).tolist() == [[9, 8, 0], [5, 6, 7]]


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [chunk(5), chunk(5, adapter="a")],
        [chunk(5), chunk(0, 4, prompt_states=range(2))],
        [chunk(0, 33)],
        [chunk(5)] * 9,
        [chunk(5, 4, num_drafts=3)] * 3,
        [chunk(1024)],
        [chunk(200, 21)],
    ],
    ids=[
        "nothing",
        "an adapter",
        "output about a prompt",
        "too many tokens",
        "too many sequences",
        "too many logits",
        "too long a sequence",
        "too much to read again",
    ],
)
def test_steps_without_a_recording(chunks: list[ChunkInput], model: ShowsLengths) -> None:
    assert model.lengths(*chunks) is None
    assert model.recorder.replayed == 0


def test_pending_ids_are_filled_in_on_the_device(model: ShowsLengths) -> None:
    chunks = [chunk(5, token_ids=[pending_token_id(1)]), chunk(8, token_ids=[4]), chunk(6, token_ids=[-1])]
    step = model.graphs.replay(chunks, torch.tensor([30, 31]))
    assert step is not None and step.magnitudes.tolist() == [31, 4, 30]


def test_progress_is_reported_and_a_load_can_be_cancelled_between_two_sizes() -> None:
    made, reports = ShowsLengths(FakeRecorder()), list[LoadProgress]()

    def proceed() -> None:
        if len(reports) == 3:
            raise LoadCancelled("the load was cancelled")

    with pytest.raises(LoadCancelled):
        made.graphs.record(reports.append, proceed)
    assert [(each.done, each.total) for each in reports] == [(0, 7), (1, 7), (2, 7)]
    assert made.recorder.recorded == 3


def test_room_is_needed_for_the_first_recording_only_as_the_others_share_its_memory() -> None:
    made = ShowsLengths(FakeRecorder())
    made.graphs._has_room = lambda rows: not made.recorder.recorded
    made.graphs.record()
    assert made.graphs.recorded == recorded_sizes(32)


def test_where_memory_is_short_smaller_steps_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    made = ShowsLengths(FakeRecorder(), room=4)
    made.graphs.record()
    assert made.graphs.recorded == (1, 2, 4)
    assert made.lengths(*[chunk(5)] * 5) is None
    assert made.lengths(*[chunk(5)] * 3) == [6, 6, 6]
    assert caplog.text.count("3 of 7 sizes are recorded, up to 4 tokens") == 1


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: operation not permitted when stream is capturing",
        "CUDA error: operation failed due to a previous error during capture",
    ],
)
def test_after_a_recording_that_the_device_refuses_no_more_are_tried(
    message: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = ShowsLengths(FakeRecorder(1, torch.AcceleratorError(message)))
    made.graphs.record()
    assert made.graphs.recorded == (32,)
    assert made.lengths(chunk(5)) == [6]
    assert caplog.text.count("1 of 7 sizes") == 1


def test_memory_that_ends_in_the_driver_is_memory() -> None:
    made = ShowsLengths(FakeRecorder(0, torch.AcceleratorError("CUDA error: out of memory")))
    made.graphs.record()
    assert made.graphs.recorded == ()
    assert made.lengths(chunk(5)) is None


def test_a_device_that_is_lost_while_it_records_is_lost() -> None:
    made = ShowsLengths(FakeRecorder(1, torch.AcceleratorError("CUDA error: unspecified launch failure")))
    with pytest.raises(torch.AcceleratorError, match="launch failure"):
        made.graphs.record()


@pytest.mark.parametrize(
    ("max_sequences", "step_tokens", "rows"), [(16, 512, 512), (64, 2048, 512), (8, 128, 128), (600, 2048, 600)]
)
def test_recorded_steps_have_a_token_of_each_sequence_and_no_more_than_a_step(
    max_sequences: int, step_tokens: int, rows: int
) -> None:
    assert max_recorded_rows(max_sequences, step_tokens) == rows


def test_memory_of_recordings_counts_rows_logits_and_block_tables(tmp_path: Path) -> None:
    config = read_model_config(make_tiny_model(tmp_path, with_tokenizer=False, max_position_embeddings=4096))
    least = graph_bytes(config, 8, 8, 2, 16)
    assert graph_bytes(config, 8, 16, 2, 16) == least + 8 * 256 * 4  # lines of more sequences
    assert graph_bytes(config, 8, 8, 2, 8) == least + 16 * 256 * 4  # pages half as long
    logits = 8 * config.vocab_size * (2 * 4 + 2)
    assert graph_bytes(config, 16, 16, 2, 16) > least + logits + 16 * 256 * 4
