"""The real exllamav2 answers over its packed caches, its kernels stubbed: what it asks of them, and what comes out.

Its own generator, page table, caches and attention layer are run as they are, over a model of one layer whose queries,
keys and values are drawn for each token. Run as `python -m tests.fakes.exllamav2_packed_on_cpu 8 6 4`; prints what it
found as one JSON object.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.backends.exllama.package import environment
from engine.backends.exllamav2 import attention, library, packed_cache
from engine.backends.exllamav2.attention import FlashAttention
from engine.backends.paged_attention import gathered
from engine.backends.paged_attention.triton_attention import TritonAttention
from tests.fakes.exllama_kernels import (
    ByteTokenizer,
    TokenModel,
    apply_rep_penalty,
    cache_rotate,
    count_match,
    fast_fadd_cpu,
    sample_basic,
)
from tests.fakes.exllamav2_codes import BITS, CacheKernels, unpacked
from tests.fakes.exllamav2_on_cpu import PAGE, SCALE, layer_of, stub_what_needs_a_gpu
from tests.gpu import check_attention

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 256
TOKENS, VOCAB, CHUNK = 8 * PAGE, 64, 512
PROMPTS = (60, 250, 9)
"""Their lengths; the last one is the longest to answer, and is alone then."""


def main(all_bits: Sequence[int]) -> None:
    """Import, and then engage and generate with each cache."""
    stub_what_needs_a_gpu()
    kernels = CacheKernels()
    stubs = (apply_rep_penalty, fast_fadd_cpu, sample_basic, count_match, cache_rotate)
    for function in (*stubs, kernels.fp16_to_q_kv, kernels.q_to_fp16_kv):
        setattr(sys.modules["exllamav2_ext"], function.__name__, function)
    with environment(**library.NO_ATTENTION):
        library.PACKAGE.load_modules()
    import exllamav2.attn as attn
    import exllamav2.model as model
    from exllamav2 import attn_params

    attn_params.safe_move_tensor = lambda tensor, *_, **__: tensor
    packed_cache._TRIAL_TOKENS = 250  # the interpreter is slow
    classes = library.library_of_modules()
    found = {}
    for bits in all_bits:
        paged = TritonAttention()
        installed = attention.install(attn, model, paged)
        found[bits] = findings(classes, AttendingModel(attn, kernels, bits), paged, installed)
    print(json.dumps(found))


def findings(
    classes: library.Library, attending: AttendingModel, paged: TritonAttention, installed: FlashAttention
) -> dict[str, Any]:
    """What is logged and registered where the trial fails and where it does not; the answers before it and after."""
    cache = attending.new_cache(classes)
    decoded = answers(classes, attending, cache)
    whole, packed_cache.rotation = packed_cache.rotation, lambda head_dim, bits: torch.eye(head_dim)
    refused = tried(cache, paged, installed)
    packed_cache.rotation = whole
    engaged, before = tried(cache, paged, installed), paged.variants
    packed = answers(classes, attending, cache)
    unprepared = len(paged.variants - before)
    del cache
    rows = check_attention.packed_cache_rows(
        classes, attending.bits, torch.device("cpu"), (HEADS, KV_HEADS, HEAD_DIM), decodings(attending), [(2, 300)]
    )
    gc.collect()
    return {
        "refused": refused,
        "engaged": engaged,
        "decoded": decoded,
        "packed": packed,
        "unprepared": unprepared,
        "rows": [(row.verdict, row.value) for row in rows],
        "left": len(installed.packed),
    }


def decodings(attending: AttendingModel) -> Callable[[Callable[[], object]], float]:
    """What stands for a call's time: how often it has the library decode."""

    def count(call: Callable[[], object]) -> float:
        before = attending.kernels.decoded
        call()
        return attending.kernels.decoded - before

    return count


def tried(cache: Any, paged: TritonAttention, installed: FlashAttention) -> dict[str, Any]:
    """`read_packed`: what it logs, and how many caches are registered then."""
    messages: list[str] = []
    logged = logging.Handler()
    logged.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(packed_cache.__name__)
    logger.addHandler(logged)
    packed_cache.read_packed(cache, paged, HEADS, {None}, 0.0, installed.register)
    logger.removeHandler(logged)
    return {"messages": messages, "registered": len(installed.packed)}


class AttendingModel(TokenModel):
    """One attention layer of the library's, and the hash of nothing: logits are products of what it attended."""

    def __init__(self, attn: Any, kernels: CacheKernels, bits: int) -> None:
        super().__init__(vocab_size=VOCAB, max_seq_len=TOKENS, max_input_len=CHUNK)
        for name, value in (("num_key_value_heads", KV_HEADS), ("num_hidden_layers", 1), ("head_dim", HEAD_DIM)):
            setattr(self.config, name, value)
        self.cache_map = {0: "cpu"}
        self.attn, self.kernels, self.bits = attn, kernels, bits
        self.layer = layer_of(attn, 0, None, (HEADS, KV_HEADS, HEAD_DIM))
        drawn = torch.Generator().manual_seed(bits)
        self.states = torch.randn(VOCAB, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=drawn).half()
        self.head = torch.randn(HEADS * HEAD_DIM, VOCAB, generator=drawn)
        self.steps: list[tuple[int, int, bool, int, float]] = []

    def get_cache_devices(self) -> list[str]:
        """As the library's model has it."""
        return ["cpu"]

    @torch.inference_mode()
    def new_cache(self, classes: library.Library) -> Any:
        """One of the library's, made as it makes them while it loads."""
        return classes.caches[self.bits](self, batch_size=1, max_seq_len=TOKENS)

    def forward_chunk(
        self, *, input_ids: Tensor, attn_params: Any, cache: Any, preprocess_only: bool = False, **rest: object
    ) -> dict[str, Tensor]:
        """Logits [sequences, tokens, vocab], and in `steps` what the step was: sequences, tokens, whether the library
        took them for sequential, calls of its decoding, and how far the result is from that of decoded pages."""
        before = self.kernels.decoded
        states = self.states[input_ids]
        out = self.attn.ExLlamaV2Attention.forward_paged(self.layer, states, cache, attn_params)
        decoded = self.kernels.decoded - before
        error = self.error(states, out, cache, attn_params)
        self.steps.append((*input_ids.shape, attn_params.is_sequential, decoded, error))
        return {} if preprocess_only else {"logits": (out.float() @ self.head)}

    def error(self, states: Tensor, out: Tensor, cache: Any, params: Any) -> float:
        """The largest difference from attention over all that the packed pages hold."""
        pages: list[Tensor] = []
        for codes, scales, bits in zip(
            (cache.key_states[0], cache.value_states[0]),
            (cache.key_scales[0], cache.value_scales[0]),
            BITS[self.bits],
            strict=True,
        ):
            plain = unpacked(codes[0].flatten(1).numpy(), scales[0].flatten(1).numpy(), bits)
            pages.append(torch.from_numpy(plain).float().view(-1, PAGE, KV_HEADS, HEAD_DIM))
        q = states.view(*states.shape[:2], -1, HEAD_DIM)[:, :, :HEADS].float()
        totals = params.cache_seqlens + q.shape[1]
        expected = gathered.paged_attention(q, None, None, pages[0], pages[1], totals, params.block_index, scale=SCALE)
        return float((out.view(expected.shape).float() - expected).abs().max())


def answers(classes: library.Library, attending: AttendingModel, cache: Any) -> dict[str, Any]:
    """The steps in which the library's generator answers all prompts over `cache`, and their tokens."""
    attending.steps.clear()
    generator = classes.generator(
        model=attending,
        cache=cache,
        tokenizer=ByteTokenizer(VOCAB),
        max_batch_size=8,
        max_chunk_size=CHUNK,
        paged=True,
    )
    tokens: dict[int, list[int]] = {}
    for number, length in enumerate(PROMPTS):
        ids = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(number))
        settings = classes.settings(temperature=0.0, token_repetition_penalty=1.0, top_k=1, top_p=0.0)
        job = classes.job(
            input_ids=ids, max_new_tokens=4 + number, gen_settings=settings, identifier=number, stop_conditions=[]
        )
        generator.enqueue(job)
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            tokens.setdefault(result["identifier"], []).extend(result.get("token_ids", torch.zeros(1, 0))[0].tolist())
    return {"steps": list(attending.steps), "tokens": [len(tokens[number]) for number in range(len(PROMPTS))]}


if __name__ == "__main__":
    main(list(map(int, sys.argv[1:])))
