"""DraftModel: a small model that drafts tokens for the main one. Its KV pages have the main model's page ids, so that
pages are shared, found and freed once for both."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec
import torch

from engine.backends.base import LoadProgress
from engine.backends.common.torch_load_settings import draft_spec
from engine.backends.sampling.sampler import SampleRow, choose
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.sequences import Sequence
from engine.backends.torch.device_memory import DraftModelMemory
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.speculation.draft_planner import MAX_LAG_TOKENS, DraftTask
from engine.config import ModelSpec
from engine.text.tokenizer_config import refuse_other_vocabulary

OnPass = Callable[[int, float, bool], None]
"""Called after each pass with its rows, its seconds, and whether it drafted for all its sequences."""


class DraftModel:
    """A loaded draft model. Its progress with a sequence is `Sequence.drafted`; a page is in `PagePool.drafted` once
    all its tokens are computed. It computes without adapters: its drafts are verified by the model that has them."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self.runner = runner
        self._vocab_size = vocab_size
        self._computed_ahead: dict[str, int] = {}

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        main: ModelRunner,
        *,
        report: Callable[[LoadProgress], None],
        cancelled: Callable[[], bool],
    ) -> DraftModel:
        """Load the draft model of `spec` on the first device of `main`, counted in its memory.

        Raises UnsupportedModel for another vocabulary, else as ModelRunner.load.
        """
        assert spec.draft_model is not None
        refuse_other_vocabulary(spec.path, spec.draft_model)
        guest = DraftModelMemory(main.first_memory)
        draft_settings = msgspec.structs.replace(draft_spec(spec), native=main.native)
        runner = ModelRunner.load(
            spec.draft_model, draft_settings, report=report, cancelled=cancelled, devices=(guest,)
        )
        return cls(runner, main.config.vocab_size)

    @property
    def context_tokens(self) -> int:
        """Max tokens of a text that it can draft for."""
        return self.runner.config.max_model_len

    def draft(
        self,
        tasks: Mapping[Sequence, DraftTask],
        row_of: Callable[[str], SampleRow],
        pool: PagePool,
        on_pass: OnPass,
    ) -> dict[str, list[int]]:
        """Return the drafts of each sequence, from one pass for all per token. Each is sampled as its final token will
        be, with the same parameters, seed and position. All pages must be allocated."""
        self._computed_ahead.clear()
        drafts: dict[str, list[int]] = {}
        chunks = {each: self._catch_up_chunk(each, task) for each, task in tasks.items()}
        while chunks:
            started_s = time.perf_counter()
            drawn = self._pass(chunks, drafts, row_of)
            lengths = [len(chunk.token_ids) for chunk in chunks.values()]
            on_pass(sum(lengths), time.perf_counter() - started_s, max(lengths) <= MAX_LAG_TOKENS)
            for sequence, chunk in chunks.items():
                if chunk.end <= sequence.num_tokens:
                    self._mark_computed(sequence, chunk.end, pool)
                else:
                    self._computed_ahead[sequence.id] = chunk.end - sequence.num_tokens
            for sequence, token_id in drawn.items():
                drafts.setdefault(sequence.id, []).append(token_id)
            chunks = {
                each: ChunkInput(
                    [self._clamp(token_id)], each.num_tokens + len(drafts[each.id]) - 1, each.pages, sample=True
                )
                for each, token_id in drawn.items()
                if len(drafts[each.id]) < tasks[each].num_drafts
            }
        return drafts

    def record_result(self, sequence: Sequence, accepted: int, pool: PagePool) -> None:
        """Record that the first `accepted` drafts of a sequence were accepted."""
        computed = min(self._computed_ahead.pop(sequence.id, 0), accepted)
        if computed and sequence.pages:
            self._mark_computed(sequence, sequence.drafted + computed, pool)

    def _catch_up_chunk(self, sequence: Sequence, task: DraftTask) -> ChunkInput:
        start = sequence.drafted
        token_ids = [self._clamp(token_id) for token_id in sequence.token_ids[start : start + task.catch_up]]
        return ChunkInput(token_ids, start, sequence.pages, sample=task.num_drafts > 0)

    def _clamp(self, token_id: int) -> int:
        """Clamp to this model's embedding: the main model's may have more rows, which stand for no text."""
        return min(token_id, self.runner.config.vocab_size - 1)

    @torch.inference_mode()
    def _pass(
        self, chunks: Mapping[Sequence, ChunkInput], drafts: Mapping[str, list[int]], row_of: Callable[[str], SampleRow]
    ) -> dict[Sequence, int]:
        """Return the next token of each sequence that drafts, if it is in the main model's vocabulary."""
        logits = self.runner.forward(list(chunks.values()))
        drafting = [each for each, chunk in chunks.items() if chunk.sample]
        if not drafting:
            return {}
        rows = [row_of(each.id).ahead(len(drafts.get(each.id, ()))) for each in drafting]
        drawn = zip(drafting, choose(logits, rows, self.runner.best), strict=True)
        return {each: token_id for each, token_id in drawn if 0 <= token_id < self._vocab_size}

    @staticmethod
    def _mark_computed(sequence: Sequence, drafted: int, pool: PagePool) -> None:
        first, sequence.drafted = sequence.drafted // pool.page_tokens, drafted
        pool.drafted.update(sequence.pages[first : drafted // pool.page_tokens])
