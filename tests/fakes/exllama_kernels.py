"""The library's own generator and sampler on a CPU: the real package over stubbed kernels and a model that reads its
tokens back from the pages that it was told to write them to.

So what the generator really does with pages, prefixes, guesses and jobs is run, and a page table that goes wrong
gives other tokens. What is stubbed: the C++ sampler's functions, as far as tests need them, and the model.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.fakes.exllama_generator import PADDED_TO, Logits, hash_logits
from tests.fakes.exllama_job import PAGE, distribution, draw, penalise
from tests.fakes.exllamav2_wheel import wheel_folder

_PACKAGE = "exllamav2"
_KERNELS = "exllamav2_ext"


@cache
def real_modules() -> SimpleNamespace:
    """The package's `dynamic` and `sampler` modules. Nothing of it stays importable: other tests look for it."""
    sys.path.insert(0, str(wheel_folder()))
    stubs = {_KERNELS: _kernels()} | _pictures()
    sys.modules.update(stubs)
    try:
        dynamic = importlib.import_module(f"{_PACKAGE}.generator.dynamic")
        sampler = importlib.import_module(f"{_PACKAGE}.generator.sampler")
        importlib.import_module(f"{_PACKAGE}.attn").has_flash_attn_with_paged = True  # type: ignore[attr-defined]
    finally:
        sys.path.remove(str(wheel_folder()))
        for name in [name for name in sys.modules if name.split(".")[0] == _PACKAGE or name in stubs]:
            del sys.modules[name]
    return SimpleNamespace(dynamic=dynamic, sampler=sampler)


class PagedTokens:
    """A cache whose "keys and values" are the token ids themselves: int64 [1, tokens, 1, 1]."""

    def __init__(self, tokens: int) -> None:
        self.batch_size = 1
        self.max_seq_len = tokens
        self.ids = torch.full((1, tokens, 1, 1), -1)

    def all_tensors(self) -> list[Tensor]:
        """What the generator moves when it tidies pages up."""
        return [self.ids]

    def copy_states(self, target: PagedTokens, start: int, count: int, to: int, to_count: int, *rows: int) -> None:
        """Copy `count` positions."""
        assert count == to_count
        target.ids[:, to : to + count] = self.ids[:, start : start + count].clone()


class TokenModel:
    """A model that appends token ids to pages, and answers with the hash of all that the pages then hold.

    forwarded: sequences and tokens of each step that gave logits.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_seq_len: int,
        max_input_len: int,
        logits: Logits = hash_logits,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = SimpleNamespace(
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            max_input_len=max_input_len,
            max_batch_size=1,
            no_flash_attn=False,
            arch=SimpleNamespace(lm=SimpleNamespace(mrope=False)),
        )
        self.logits = logits
        self.dtype = dtype
        self.forwarded: list[tuple[int, int]] = []

    def forward_chunk(
        self, *, input_ids: Tensor, attn_params: Any, cache: PagedTokens, preprocess_only: bool = False, **rest: object
    ) -> dict[str, Tensor]:
        """Logits [sequences, tokens, padded vocab] for ids [sequences, tokens]; with preprocess_only none."""
        rows = [
            self._row(ids.tolist(), int(start), blocks.tolist(), cache, preprocess_only)
            for ids, start, blocks in zip(input_ids, attn_params.cache_seqlens, attn_params.block_index, strict=True)
        ]
        if preprocess_only:
            return {}
        self.forwarded.append((input_ids.shape[0], input_ids.shape[1]))
        return {"logits": torch.stack(rows).to(self.dtype)}

    def unload(self) -> None:
        """Nothing to free."""

    def _row(self, ids: list[int], start: int, blocks: list[int], cache: PagedTokens, blind: bool) -> Tensor:
        vocab_size = self.config.vocab_size
        width = -(-vocab_size // PADDED_TO) * PADDED_TO
        logits = torch.zeros(len(ids), width)
        places = [blocks[place // PAGE] * PAGE + place % PAGE for place in range(start + len(ids))]
        for index, token_id in enumerate(ids):
            cache.ids[0, places[start + index], 0, 0] = token_id
            if not blind:
                known = cache.ids[0, places[: start + index + 1], 0, 0].tolist()
                logits[index, :vocab_size] = self.logits(known, vocab_size)
        return logits


class ByteTokenizer:
    """Pieces and sizes, which is all that the generator asks a tokenizer for."""

    def __init__(self, vocab_size: int) -> None:
        self._pieces = [chr(token_id) if token_id < 128 else "\ufffd" for token_id in range(vocab_size)]

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """The text of each id."""
        return self._pieces

    def get_vocab_size(self) -> int:
        """How many ids there are."""
        return len(self._pieces)

    def decode(self, ids: Tensor, decode_special_tokens: bool = False) -> list[str]:
        """The text of each row of ids."""
        return ["".join(self._pieces[token_id] for token_id in row) for row in ids.tolist()]


def _kernels() -> ModuleType:
    kernels = ModuleType(_KERNELS)
    for function in (apply_rep_penalty, fast_fadd_cpu, sample_basic, count_match, cache_rotate):
        setattr(kernels, function.__name__, function)
    return kernels


def _pictures() -> dict[str, ModuleType]:
    """Stands in for Pillow, which the package imports for its vision models, where that is not installed."""
    if importlib.util.find_spec("PIL") is not None:
        return {}
    pillow = ModuleType("PIL")
    pillow.Image = ModuleType("PIL.Image")  # type: ignore[attr-defined]
    pillow.Image.Image = object  # type: ignore[attr-defined]
    return {"PIL": pillow, "PIL.Image": pillow.Image}


def apply_rep_penalty(ids: Tensor, penalty: float, reach: int, decay: int, *rest: Any) -> None:
    """The repetition penalty over all tokens; frequency and presence are not asked for."""
    frequency, presence, logits = rest
    assert (frequency, presence, reach) == (0.0, 0.0, -1)
    penalise(logits[0, 0], ids[0], penalty)


def fast_fadd_cpu(logits: Tensor, bias: Tensor) -> None:
    """Add in place."""
    assert logits.dtype == bias.dtype == torch.float32
    assert logits.shape[-1] == bias.numel()
    logits += bias


def sample_basic(logits: Tensor, temperature: float, top_k: int, *rest: Any) -> list[float]:
    """Temperature, top_k and the draw; other filters are off in these tests."""
    random, tokens, probs, k_probs, k_tokens, _, mirostat, mu, tau, eta, last_temperature, *_ = rest[5:]
    chances = distribution(logits[0, 0], temperature=temperature, top_k=top_k, last_temperature=last_temperature)
    top = 0 if k_probs.is_meta else k_probs.shape[-1]
    token, best, best_probs, probability = draw(chances, random, top)
    tokens.copy_(token)
    probs.copy_(probability)
    if top:
        k_tokens.copy_(best)
        k_probs.copy_(best_probs)
    return [tau - eta] if mirostat else list(mu)


def count_match(left: Tensor, right: Tensor, most: int) -> int:
    """How many leading ids of two [1, n] tensors are equal."""
    length = min(left.shape[-1], right.shape[-1], most)
    differing = (left[0, :length] != right[0, :length]).nonzero()
    return int(differing[0]) if len(differing) else length


def cache_rotate(pages: Tensor, order: Tensor, buffer: Tensor) -> None:
    """Each page of `order` gets what the next one holds, the last what the first held."""
    first = pages[order[0]].clone()
    for target, source in zip(order[:-1].tolist(), order[1:].tolist(), strict=True):
        pages[target] = pages[source]
    pages[order[-1]] = first
