"""llama.cpp through llama-cpp-python's low-level calls: one batch a step with all sequences, as llama.cpp's own server
makes it. The package has no such server: its own (`llama_cpp.server`) keeps each request behind a lock and decodes one
at a time.

`mode` "plain" leaves weights in the layout of their file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy

from tools.benchmarks.protocol import Given, Ready, Work, serve

_STEP_TOKENS = 2048


@dataclass
class _Sequence:
    """slot: its number for llama.cpp.  next_ids: what is not yet in its cache.  length: how much is."""

    slot: int
    next_ids: Sequence[int]
    length: int = 0
    generated: int = 0


class _Model:
    """A context with room for as many sequences as there are clients."""

    def __init__(self, given: Given) -> None:
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.use_extra_bufts = given.mode != "plain"
        self._model: Any = llama_cpp.llama_model_load_from_file(str(given.model / "model.gguf").encode(), settings)
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the model")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = given.clients * given.max_tokens
        context.n_batch = _STEP_TOKENS
        context.n_seq_max = given.clients
        context.n_threads = context.n_threads_batch = given.threads
        context.kv_unified = True  # one pool: faster from 8 sequences on
        self._context: Any = llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch: Any = llama_cpp.llama_batch_init(_STEP_TOKENS, 0, 1)

    @property
    def precision(self) -> str:
        """The precision of its linear layers: bfloat16, or weights of fewer bits with rows that are rounded to 8."""
        ftype = llama_cpp.llama_model_ftype(self._model)
        return "bf16" if ftype == llama_cpp.LLAMA_FTYPE_MOSTLY_BF16 else "int8"

    def step(self, running: Sequence[_Sequence]) -> None:
        """Each sequence gets one more token, but those whose prompts the batch has no room for."""
        batch, ends = self._batch, []
        batch.n_tokens = 0
        for sequence in running:
            if batch.n_tokens + len(sequence.next_ids) > _STEP_TOKENS:
                continue
            for token in sequence.next_ids:
                at = batch.n_tokens
                batch.token[at], batch.pos[at], batch.logits[at] = token, sequence.length, False
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence.slot
                batch.n_tokens, sequence.length = at + 1, sequence.length + 1
            batch.logits[batch.n_tokens - 1] = True
            ends.append((sequence, batch.n_tokens - 1))
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode ended with {status}")
        for sequence, end in ends:
            logits = llama_cpp.llama_get_logits_ith(self._context, end)
            token = int(numpy.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())
            sequence.next_ids, sequence.generated = (token,), sequence.generated + 1

    def forget(self, sequence: _Sequence) -> None:
        """Free its cells of the cache."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), sequence.slot, -1, -1)

    def close(self) -> None:
        """Free everything."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


@contextmanager
def loaded(given: Given) -> Iterator[Ready]:
    """Load the model."""
    model = _Model(given)

    def generate(work: Work) -> int:
        waiting = list(work.prompts)[::-1]
        running: list[_Sequence] = []
        slots = list(range(work.clients))
        tokens = 0
        while waiting or running:
            while waiting and slots:
                running.append(_Sequence(slots.pop(), waiting.pop()))
            model.step(running)
            for sequence in [sequence for sequence in running if sequence.generated == work.output_tokens]:
                model.forget(sequence)
                running.remove(sequence)
                slots.append(sequence.slot)
                tokens += sequence.generated
        return tokens

    yield Ready(generate, model.precision)
    model.close()


if __name__ == "__main__":
    serve(loaded, ["llama_cpp_python"])
