"""The library's sampler settings, sampler and job as documented, for `exllama_generator`."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PAGE = 256
"""Tokens per page."""


def page_hash(ids: Tensor, before: bytes | None) -> bytes:
    """The library's: of a page's ids [1, PAGE] and of the page before it, None before the first."""
    return hashlib.blake2b((before or b"") + ids.numpy().tobytes(), digest_size=16).digest()


HOLDING = 0xFF
"""The one token whose text is a stray \ufffd."""


@dataclass
class FakeSettings:
    """The sampler's settings with the library's defaults, which are not neutral."""

    token_repetition_penalty: float = 1.025
    token_repetition_range: int = -1
    token_repetition_decay: int = 0
    token_frequency_penalty: float = 0.0
    token_presence_penalty: float = 0.0
    temperature: float = 0.8
    smoothing_factor: float = 0.0
    min_temp: float = 0
    max_temp: float = 0.0
    temp_exponent: float = 1.0
    top_k: int = 50
    top_p: float = 0.8
    top_a: float = 0.0
    min_p: float = 0
    tfs: float = 0
    typical: float = 0
    skew: float = 0
    temperature_last: bool = False
    mirostat: bool = False
    mirostat_tau: float = 1.5
    mirostat_eta: float = 0.1
    mirostat_mu: Any = None
    token_bias: Tensor | None = None
    cfg_scale: float | None = None
    post_sampling_hooks: list[Any] = field(default_factory=list)
    dry_allowed_length: int = 2
    dry_base: float = 1.75
    dry_multiplier: float = 0.0
    dry_sequence_breakers: set[int] | None = None
    dry_range: int = 0
    dry_max_ngram: int = 20
    ngram_trie: Any = None
    ngram_index: int = 0
    ngram_history: Any = field(default_factory=list)
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_ignore_tokens: frozenset[int] | None = None


def draw(probs: Tensor, random: float, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The token at `random` of the distribution [vocab], the `top` best and theirs, and its own probability."""
    ordered = probs.sort(descending=True, stable=True)
    place = min(int((ordered.values.cumsum(0) < random * 0.9998).sum()), len(probs) - 1)
    token = ordered.indices[place].view(1, 1)
    return token, ordered.indices[:top].view(1, 1, -1), ordered.values[:top].view(1, 1, -1), probs[token]


def distribution(row: Tensor, *, temperature: float, top_k: int, last_temperature: float) -> Tensor:
    """Probabilities [vocab] for logits [vocab]; below 0.01 the temperature is greedy."""
    if temperature < 0.01:
        temperature, top_k = 1.0, 1
    probs = (row / temperature).softmax(-1)
    if 0 < top_k < len(probs):
        kept = probs.topk(top_k)
        probs = torch.zeros_like(probs).scatter_(0, kept.indices, kept.values / kept.values.sum())
    if last_temperature != 1.0 and top_k != 1:
        probs = probs ** (1 / last_temperature)
        probs = probs / probs.sum()
    return probs


def penalise(row: Tensor, ids: Tensor, penalty: float) -> None:
    """The repetition penalty on logits [vocab], in place."""
    seen = ids.unique()
    row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)


def sample(logits: Tensor, settings: FakeSettings, ids: Tensor, random: float, top: int) -> tuple[Any, ...]:
    """A token for float32 logits [sequences, 1, vocab], written to in place as the library's sampler does.

    Repetition penalty, bias, temperature, top_k and that mirostat has a state are the library's; other filters are
    not needed to tell whether they were asked for.
    """
    if settings.cfg_scale is not None:
        assert logits.shape[0] == 2, "CFG requires logits to be bsz 2"
        both = logits.log_softmax(-1)
        logits = (settings.cfg_scale * both[0] + (1 - settings.cfg_scale) * both[1]).unsqueeze(0)
    row = logits[0, 0]
    penalise(row, ids, settings.token_repetition_penalty)
    if settings.token_bias is not None:
        assert settings.token_bias.shape == row.shape, "a and b are incompatible sizes"
        row += settings.token_bias
    if settings.mirostat:
        settings.mirostat_mu = [(settings.mirostat_mu or [0.0])[0] + 1.0]
    probs = distribution(
        row,
        temperature=1.0 if settings.temperature_last else settings.temperature,
        top_k=settings.top_k,
        last_temperature=settings.temperature if settings.temperature_last else 1.0,
    )
    return *draw(probs, random, top), False


class FakeIds:
    """A sequence's token ids as the library keeps them."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids[0].tolist()

    def __len__(self) -> int:
        return len(self.ids)

    def torch(self) -> Tensor:
        """[1, tokens]."""
        return torch.tensor([self.ids])

    def torch_slice(self, a: int, b: int) -> Tensor:
        """[1, b - a]."""
        return torch.tensor([self.ids[a:b]])


@dataclass(eq=False)
class FakePage:
    """One KV page: the hash of what it holds and of the page before it, who holds it, and how much is computed."""

    generator: Any
    phash: object
    access_serial: int
    prev_hash: object = None
    ref_count: int = 0
    kv_position: int = 0

    def update_hash(self, newhash: bytes) -> None:
        """Be found by another hash; held and full."""
        assert self.ref_count > 0
        assert self.kv_position == PAGE
        del self.generator.referenced_pages[self.phash]
        assert newhash not in self.generator.referenced_pages
        self.phash = newhash
        self.generator.referenced_pages[newhash] = self

    def clear(self) -> None:
        """Forget what it holds; free."""
        assert self.ref_count == 0
        del self.generator.unreferenced_pages[self.phash]
        self.phash, self.prev_hash, self.kv_position = object(), None, 0
        self.generator.unreferenced_pages[self.phash] = self


@dataclass(eq=False)
class FakeSequence:
    """One sequence of a job."""

    sequence_ids: FakeIds
    kv_position: int = 0
    allocated_pages: list[FakePage] | None = None
    page_hashes: list[bytes] = field(default_factory=list)


class FakeJob:
    """A job. Its arguments are the library's own."""

    def __init__(
        self,
        input_ids: Tensor | list[Tensor],
        max_new_tokens: int,
        min_new_tokens: int = 0,
        max_skips: int = 4,
        gen_settings: FakeSettings | None = None,
        seed: int | None = None,
        stop_conditions: Sequence[int | str] | None = None,
        return_top_tokens: int = 0,
        identifier: object = None,
    ) -> None:
        prompts = input_ids if isinstance(input_ids, list) else [input_ids]
        for ids in prompts:
            assert ids.shape[-1] > 0, "Input IDs cannot be empty."
        assert not stop_conditions, "end tokens are not the library's to find"
        assert not min_new_tokens, "nor to mask"
        self.sequences = [FakeSequence(FakeIds(ids)) for ids in prompts]
        self.max_new_tokens = max_new_tokens
        self.max_skips = max_skips
        self.gen_settings = gen_settings or FakeSettings()
        self.rng: Any = random.Random(seed)
        self.return_top_tokens = return_top_tokens
        self.identifier = identifier
        self.generator: Any = None
        self.all_unique_hashes: list[bytes] = []
        self.skips = 0
        self.new_tokens = 0
        self.held_text = ""
        self.held_ids: list[int] = []
        self.cached_pages = self.cached_tokens = 0
        self.accepted_draft_tokens = self.rejected_draft_tokens = 0

    def prepare_for_queue(self, generator: Any, serial_number: int) -> None:
        """Hash the full pages of all tokens but the last."""
        self.generator = generator
        for seq in self.sequences:
            seq.page_hashes, before = [], None
            for page in range((len(seq.sequence_ids) - 1) // PAGE):
                before = page_hash(seq.sequence_ids.torch_slice(page * PAGE, (page + 1) * PAGE), before)
                seq.page_hashes.append(before)
        self.all_unique_hashes = list({each for seq in self.sequences for each in seq.page_hashes})

    def allocate_pages(self) -> None:
        """Take pages, found ones first."""
        self.generator.allocate(self)

    def prefill(self, results: list[dict[str, Any]]) -> None:
        """Compute a chunk of what is known."""
        self.generator.prefill(self, results)

    def is_prefill_done(self) -> bool:
        """Whether all but the last token is computed."""
        return all(seq.kv_position == len(seq.sequence_ids) - 1 for seq in self.sequences)

    def receive_logits(self, logits: Tensor) -> tuple[Any, ...]:
        """Sample the next token."""
        assert logits.shape[0] == len(self.sequences) == (2 if self.gen_settings.cfg_scale is not None else 1)
        ids = self.sequences[0].sequence_ids.torch()[0]
        return sample(logits, self.gen_settings, ids, self.rng.random(), self.return_top_tokens)

    def receive_sample(
        self,
        logits: Tensor | None,
        next_token: Tensor | None,
        next_k_tokens: Tensor | None,
        next_k_probs: Tensor | None,
        next_prob: Tensor | None,
        filter_eos: bool | None,
        results: list[dict[str, Any]],
        first_sample_in_sd_batch: bool = True,
    ) -> tuple[bool, Tensor]:
        """Take the token [1, 1] in; whether the job ends with it, and the token."""
        assert next_token is not None
        token = int(next_token.item())
        self.new_tokens += 1
        for seq in self.sequences:
            seq.sequence_ids.ids.append(token)
            seq.kv_position += 1
            self.generator.page_filled(seq)
        self.held_ids.append(token)
        self.held_text += "\ufffd" if token == HOLDING else chr(token)
        eos = self.new_tokens >= self.max_new_tokens - self.generator.num_draft_tokens
        result = self.result("streaming", eos=eos)
        if eos or not 1 <= self.held_text.count("\ufffd") < 5:
            result |= {"text": self.held_text, "token_ids": torch.tensor([self.held_ids])}
            self.held_text, self.held_ids = "", []
        if eos:
            result |= {"eos_reason": "max_new_tokens", "new_tokens": self.new_tokens}
        results.append(result)
        return eos, next_token

    def result(self, stage: str, *, eos: bool = False, **fields: object) -> dict[str, Any]:
        """A result of this job."""
        named = {} if self.identifier is None else {"identifier": self.identifier}
        return {"job": self, "stage": stage, "eos": eos} | named | fields
