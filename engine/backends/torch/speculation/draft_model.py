"""A small model that guesses for the main one. It has KV pages of its own under the main model's page numbers, so that
what shares, finds and frees pages is decided once for both."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec
import torch

from engine.backends.base import LoadProgress
from engine.backends.common.torch_load_settings import draft_spec
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.sequences import Sequence
from engine.backends.torch.device_memory import GuestMemory
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.sampling.sampler import SampleRow, choose
from engine.backends.torch.speculation.draft_planner import NEAR, DraftTurn
from engine.config import ModelSpec
from engine.text.tokenizer_config import refuse_other_vocabulary

Passed = Callable[[int, float, bool], None]
"""Told of each pass: its rows, its seconds, and whether all that it computed was to guess behind it."""


class DraftModel:
    """A loaded draft model. How far it is with a sequence is `Sequence.drafted`; a page is in `PagePool.drafted` once
    all its tokens are computed. It computes without adapters: its guesses are checked by the model that has them."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self.runner = runner
        self._vocab_size = vocab_size
        self._ahead: dict[str, int] = {}

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        main: ModelRunner,
        *,
        report: Callable[[LoadProgress], None],
        cancelled: Callable[[], bool],
    ) -> DraftModel:
        """Load the draft model of `spec` on the first device of `main`, in whose account it is.

        Raises UnsupportedModel for one of another vocabulary, else what ModelRunner.load raises.
        """
        assert spec.draft_model is not None
        refuse_other_vocabulary(spec.path, spec.draft_model)
        guest = GuestMemory(main.first_memory)
        alike = msgspec.structs.replace(draft_spec(spec), native=main.native)
        runner = ModelRunner.load(spec.draft_model, alike, report=report, cancelled=cancelled, devices=(guest,))
        return cls(runner, main.config.vocab_size)

    @property
    def context_tokens(self) -> int:
        """Tokens of a text behind which it can still guess."""
        return self.runner.config.max_model_len

    def guess(
        self,
        turns: Mapping[Sequence, DraftTurn],
        row_of: Callable[[str], SampleRow],
        pool: PagePool,
        passed: Passed,
    ) -> dict[str, list[int]]:
        """The guesses of each sequence, in one pass for all per token ahead: each is drawn as the token that it
        stands for will be, by the same parameters, seed and position. Pages are there for all that is computed."""
        self._ahead.clear()
        found: dict[str, list[int]] = {}
        chunks = {each: self._known_chunk(each, turn) for each, turn in turns.items()}
        while chunks:
            began_s = time.perf_counter()
            drawn = self._pass(chunks, found, row_of)
            fed = [len(chunk.token_ids) for chunk in chunks.values()]
            passed(sum(fed), time.perf_counter() - began_s, max(fed) <= NEAR)
            for sequence, chunk in chunks.items():
                if chunk.end <= sequence.known:
                    self._note(sequence, chunk.end, pool)
                else:
                    self._ahead[sequence.id] = chunk.end - sequence.known
            for sequence, token_id in drawn.items():
                found.setdefault(sequence.id, []).append(token_id)
            chunks = {
                each: ChunkInput([self._fed(token_id)], each.known + len(found[each.id]) - 1, each.pages, sample=True)
                for each, token_id in drawn.items()
                if len(found[each.id]) < turns[each].guesses
            }
        return found

    def came(self, sequence: Sequence, held: int, pool: PagePool) -> None:
        """A sequence has got new tokens, of which the first `held` are those that were guessed."""
        ahead = min(self._ahead.pop(sequence.id, 0), held)
        if ahead and sequence.pages:
            self._note(sequence, sequence.drafted + ahead, pool)

    def _known_chunk(self, sequence: Sequence, turn: DraftTurn) -> ChunkInput:
        start = sequence.drafted
        fed = [self._fed(token_id) for token_id in sequence.token_ids[start : start + turn.fed]]
        return ChunkInput(fed, start, sequence.pages, sample=turn.guesses > 0)

    def _fed(self, token_id: int) -> int:
        """The main model may have more rows in its embedding, none of which stands for any text."""
        return min(token_id, self.runner.config.vocab_size - 1)

    @torch.inference_mode()
    def _pass(
        self, chunks: Mapping[Sequence, ChunkInput], found: Mapping[str, list[int]], row_of: Callable[[str], SampleRow]
    ) -> dict[Sequence, int]:
        """The next token of each that guesses, where there is one that the main model knows."""
        logits = self.runner.forward(list(chunks.values()))
        guessing = [each for each, chunk in chunks.items() if chunk.sample]
        if not guessing:
            return {}
        rows = [row_of(each.id).ahead(len(found.get(each.id, ()))) for each in guessing]
        drawn = zip(guessing, choose(logits, rows), strict=True)
        return {each: token_id for each, token_id in drawn if 0 <= token_id < self._vocab_size}

    @staticmethod
    def _note(sequence: Sequence, drafted: int, pool: PagePool) -> None:
        first, sequence.drafted = sequence.drafted // pool.page_tokens, drafted
        pool.drafted.update(sequence.pages[first : drafted // pool.page_tokens])
