"""What is kept of decodes from step to step: only ever what their pages hold, in bounded memory, without padding to the
longest."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.common.step_memory import SLACK_PAIRS
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.kv.staging import MIN_ROW_TOKENS, ContiguousKvStaging, group_rows, row_tokens, staging_tokens
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec
from tests.fakes.oracle import ignore_progress, never
from tests.fakes.tiny_models import make_tiny_model

PAGE_TOKENS, PAGES = 16, 400
LEAST = MIN_ROW_TOKENS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def load(folder: Path, max_sequences: int, **settings: object) -> ModelRunner:
    spec = ModelSpec(**{"path": folder, "name": "m", "dtype": "float32", "attention": "gathered"} | settings)
    runner = ModelRunner.load(folder, spec, report=ignore_progress, cancelled=never)
    runner.allocate_kv(PAGES, PAGE_TOKENS, report=ignore_progress, max_sequences=max_sequences)
    return runner


def mirror_of(runner: ModelRunner) -> ContiguousKvStaging:
    mirror = runner._kv_staging
    assert mirror is not None
    return mirror


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[ModelRunner, ModelRunner]:
    """The same model twice: one gathers alone, the other keeps what decodes side by side."""
    return load(folder, 0), load(folder, 8)


class Twin:
    """Feeds the same chunks to both, and demands the same logits."""

    def __init__(self, pair: tuple[ModelRunner, ModelRunner]) -> None:
        self.plain, self.kept = pair
        mirror_of(self.kept).forget()

    def feed(self, *chunks: ChunkInput) -> Tensor:
        expected = self.plain.forward(chunks)
        torch.testing.assert_close(self.kept.forward(chunks), expected, atol=1e-4, rtol=1e-4)
        return expected


def chunk(start: int, count: int, pages: list[int], residency: int, salt: int = 0) -> ChunkInput:
    ids = [(7 * (start + index) + 13 * salt) % 250 + 3 for index in range(count)]
    return ChunkInput(ids, start, pages, sample=True, residency=residency)


def test_a_page_that_changed_hands_is_never_seen_through_its_old_copy(pair: tuple[ModelRunner, ModelRunner]) -> None:
    twin = Twin(pair)
    pages = list(range(8))
    twin.feed(chunk(0, 60, pages, residency=1))
    twin.feed(chunk(60, 1, pages, residency=1))
    twin.feed(chunk(0, 60, pages, residency=2, salt=5))  # preempted or cancelled meanwhile: another sequence's now
    twin.feed(chunk(60, 1, pages, residency=2, salt=5))


def test_a_sequence_that_comes_back_at_the_same_length_is_copied_anew(pair: tuple[ModelRunner, ModelRunner]) -> None:
    twin = Twin(pair)
    twin.feed(chunk(0, 40, [1, 2, 3], residency=1))
    twin.feed(chunk(40, 1, [1, 2, 3], residency=1))
    twin.feed(chunk(0, 41, [9, 8, 7], residency=2, salt=3))
    twin.feed(chunk(41, 1, [9, 8, 7], residency=2, salt=3))


def test_tokens_computed_otherwise_and_rolled_back_ones_are_not_missed(pair: tuple[ModelRunner, ModelRunner]) -> None:
    twin = Twin(pair)
    pages = [5, 11, 2, 7]
    twin.feed(chunk(0, 20, pages, residency=1))
    twin.feed(chunk(20, 1, pages, residency=1))
    twin.feed(chunk(21, 4, pages, residency=1))  # guesses, which only the pages get
    twin.feed(chunk(22, 1, pages, residency=1, salt=9))  # and of which one held
    twin.feed(chunk(23, 1, pages, residency=1))


def test_a_step_that_failed_leaves_nothing_to_trust(
    pair: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin(pair)
    pages = [1, 2, 3]
    twin.feed(chunk(0, 30, pages, residency=1))
    twin.feed(chunk(30, 1, pages, residency=1))
    with monkeypatch.context() as patch:
        patch.setattr("engine.backends.torch.model.decoder.attend", lambda *_: pytest.fail("out of memory"))
        with pytest.raises(BaseException, match="out of memory"):
            twin.kept.forward([chunk(31, 1, pages, residency=1)])
    twin.plain.forward([chunk(31, 1, pages, residency=1, salt=4)])
    twin.kept.forward([ChunkInput(chunk(31, 1, pages, residency=1, salt=4).token_ids, 31, pages, sample=True)])
    twin.feed(chunk(32, 1, pages, residency=1))


def test_another_sequences_nan_stays_its_own(pair: tuple[ModelRunner, ModelRunner]) -> None:
    twin = Twin(pair)
    mirror = mirror_of(twin.kept)
    twin.feed(chunk(0, 30, [1, 2], residency=1))
    twin.feed(chunk(30, 1, [1, 2], residency=1))
    with torch.inference_mode():
        mirror.rows(0)[0, :, :31] = torch.nan
    twin.feed(chunk(0, 3, [3], residency=2), chunk(0, 9, [4], residency=3))
    twin.feed(chunk(3, 1, [3], residency=2), chunk(9, 1, [4], residency=3))
    twin.feed(chunk(0, 1, [5], residency=4))


def test_a_row_that_takes_the_place_of_a_longer_one_sees_nothing_of_it(pair: tuple[ModelRunner, ModelRunner]) -> None:
    twin = Twin(pair)
    twin.feed(
        chunk(0, 60, [1, 2, 3, 4], residency=1), chunk(0, 5, [5], residency=2), chunk(0, 40, [6, 7, 8], residency=3)
    )
    twin.feed(
        chunk(60, 1, [1, 2, 3, 4], residency=1), chunk(5, 1, [5], residency=2), chunk(40, 1, [6, 7, 8], residency=3)
    )
    with torch.inference_mode():
        mirror_of(twin.kept).rows(0)[0, :, :61] = torch.nan
    twin.feed(chunk(6, 1, [5], residency=2), chunk(41, 1, [6, 7, 8], residency=3))
    twin.feed(chunk(7, 1, [5], residency=2), chunk(0, 2, [1], residency=4))
    twin.feed(chunk(8, 1, [5], residency=2), chunk(2, 1, [1], residency=4))


def test_any_coming_and_going_computes_what_gathering_does(pair: tuple[ModelRunner, ModelRunner]) -> None:
    """More sequences than rows, longer ones than rows, and rows cut anew."""
    twin = Twin(pair)
    draw = random.Random(1)
    free = draw.sample(range(PAGES), PAGES)
    live: dict[int, tuple[list[int], int, list[int]]] = {}
    for residency in range(1, 60):
        if len(live) < 8:
            live[residency] = (free[:25], 0, [5] * draw.choice([1, 30, 120, 240, 300]))
            del free[:25]
        chunks = [
            ChunkInput(ids, done, pages, sample=True, residency=name) for name, (pages, done, ids) in live.items()
        ]
        logits = twin.feed(*chunks)
        for each, row in zip(chunks, logits, strict=True):
            live[each.residency] = (live[each.residency][0], each.end, [int(row.argmax())])
            if draw.random() < 0.1 or each.end > 390:
                free += live.pop(each.residency)[0]


def test_its_memory_is_bounded_by_the_pages_and_entered_into_the_account(
    pair: tuple[ModelRunner, ModelRunner],
) -> None:
    plain, kept = pair
    size = mirror_of(kept).size_bytes
    assert 0 < size <= plain.kv_bytes // 4
    for runner in pair:
        runner.forward([chunk(0, 600, list(range(40)), residency=0)])
    assert kept.shares[0].working_bytes >= size + plain.config.hidden_size
    assert kept.kv_bytes == plain.kv_bytes


@pytest.mark.parametrize("settings", [{"cache_bits": 8}, {"attention": "auto"}])
def test_where_pages_are_not_gathered_plainly_nothing_is_kept(folder: Path, settings: dict[str, object]) -> None:
    runner = load(folder, 8, **settings)
    assert (runner._kv_staging is None) == (settings.get("cache_bits") == 8 or runner.attention.name != "gathered")


def test_a_model_with_windows_keeps_nothing(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "MistralForCausalLM", sliding_window=64, max_position_embeddings=2048)
    assert load(model, 8)._kv_staging is None


def test_too_little_memory_or_nobody_to_serve_means_no_mirror() -> None:
    sizes = {"pool_tokens": 4 * LEAST, "bytes_per_token": 100}
    assert staging_tokens(max_sequences=1, free_bytes=1 << 40, **sizes) == LEAST
    assert staging_tokens(max_sequences=0, free_bytes=1 << 40, **sizes) == 0
    assert staging_tokens(max_sequences=1, free_bytes=8 * 100 * (LEAST - 1), **sizes) == 0


def test_rows_are_as_long_as_lets_most_tokens_fit() -> None:
    room = 16 * LEAST
    assert row_tokens([100] * 16, room, LEAST) == LEAST
    assert row_tokens([LEAST + 1] * 8, room, LEAST) == 3 * LEAST // 2
    assert row_tokens([1000], room, LEAST) == 4 * LEAST
    assert row_tokens([1000] + [200] * 16, room, LEAST) == LEAST
    assert row_tokens([10 * room], room, LEAST) == LEAST


def test_rows_are_not_cut_anew_for_little() -> None:
    assert row_tokens([LEAST] * 7 + [LEAST + 1], 16 * LEAST, LEAST) == LEAST
    assert row_tokens([100], 16 * LEAST, 4 * LEAST) == 4 * LEAST


def test_mixed_lengths_do_not_pay_for_the_longest() -> None:
    ends = [20] * 30 + [8000] + [25] * 30
    found = group_rows(ends)
    padded = sum(len(run) * max(ends[run.start : run.stop]) for run in found)
    assert [row for run in found for row in run] == list(range(61))
    assert padded <= 1.5 * sum(ends) + SLACK_PAIRS * len(found)
    assert group_rows([100 + index for index in range(32)]) == [range(32)]
