"""How much memory a step takes on a device beyond weights and KV pages, at most: what a CPU's allocator cannot be asked
and a simulated device's must be known before. Integers only; nothing here imports torch.

Counts the tensors of `model/decoder.py`, `attention.py` and `sampler.py` that live at the same time, as if each
operation that may copy its input did; held against torch's own record of allocations by a test.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.backends.common.families.experts import Experts
from engine.backends.common.kv_format import HeadFormat
from engine.backends.common.model_config import ModelConfig
from engine.config import ModelSpec

_FLOAT32, _INT32, _INT64 = 4, 4, 8

MAX_SCORES_BYTES = 32 << 20
"""About what soft-capped scores may take at once, in float32; more queries than that attend in turns."""

SLACK_PAIRS = 2048
"""Query-key pairs of padding that cost about as much as one more attention call."""

_SAMPLING_BYTES = 72
"""Per logit: float32 logits, an edited copy, and what sorting and filtering make of it."""

_PROMPT_LOGPROBS_BYTES = 36
"""Per logit of a prompt's token: float32 logits, their log-probabilities, and what ranking them takes."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a step that its memory depends on.

    rows: tokens fed.  sampled: rows whose logits are wanted.  padded: query rows of the largest attention call, padding
    included.  gathered: tokens whose keys and values the largest call copies out of pages: those that lie apart, or all
    where they are kept as codes.  masked: elements of all masks.  prompt_states: rows of a prompt whose
    log-probabilities are made at once.  native: whether attention is, which makes nothing but its output.  fused:
    whether blocks are, which make nothing between their products.
    """

    rows: int
    sampled: int
    padded: int = 0
    gathered: int = 0
    masked: int = 0
    prompt_states: int = 0
    native: bool = False
    fused: bool = False


MAX_DRAFTS = 7
"""Draft tokens per step and request, where `draft_tokens` is not set."""


def max_answer_rows(spec: ModelSpec, max_prompts: int) -> int:
    """Rows that a step may sample: one of each prompt, and with speculation no fewer than an answer with its drafts."""
    if not spec.ngram_draft and spec.draft_model is None:
        return max_prompts
    return max(max_prompts, 1 + (MAX_DRAFTS if spec.draft_tokens is None else spec.draft_tokens))


def logits_rows_at_once(sampled: int) -> int:
    """Rows of a prompt whose log-probabilities take no more than drawing from `sampled` rows does."""
    return max(1, sampled * _SAMPLING_BYTES // (_PROMPT_LOGPROBS_BYTES + _FLOAT32))


def largest_step(*, step_tokens: int, max_prompts: int, context: int, page_tokens: int = 16) -> StepSizes:
    """The step that a load is tried with, or one that takes more: `step_tokens` of prompt, and `max_prompts` answers,
    each over as many tokens or over `context` where that is less."""
    longest = min(step_tokens, context)
    prompts = max(1, step_tokens // longest)
    rows = step_tokens + max_prompts
    return StepSizes(
        rows=rows,
        sampled=max_prompts + prompts,
        padded=3 * rows // 2 + SLACK_PAIRS // longest,
        gathered=(max_prompts + prompts) * -(-longest // page_tokens) * page_tokens,
    )


def step_bytes(config: ModelConfig, sizes: StepSizes, heads: HeadFormat, *, layers: bool, head: bool) -> int:
    """The most that a step takes on one device. heads: of the KV pages.  layers, head: whether the device has any
    layer, and the head."""
    itemsize = heads.itemsize
    hidden = sizes.rows * config.hidden_size * itemsize
    indices = (3 * sizes.rows + sizes.sampled + sizes.gathered) * _INT64 + sizes.masked * itemsize
    angles = sizes.rows * config.head_dim * (2 * itemsize + 4 * _FLOAT32)
    phases = [hidden]
    if layers:
        phases += [_attention_bytes(config, sizes, heads), _mlp_bytes(config, sizes, itemsize)]
        if config.traits.experts is not None:
            phases.append(_mixture_bytes(config, config.traits.experts, sizes.rows, itemsize))
    if head:
        phases.append(_head_bytes(config, sizes, itemsize))
    scratch = sizes.gathered * 2 * config.kv_heads * heads.copied_bytes if layers else 0
    return 2 * hidden + indices + angles + scratch + max(phases)


MAX_RECORDED_ROWS = 512
"""Tokens of the largest recorded step: by estimate above where, on one GPU, computing a step begins to take longer than
launching its kernels."""


MAX_RECORDED_RANK = 512
"""Largest rank of a linear layer's adapter in a recorded step, that of its fused parts together: 170 for each of
queries, keys and values."""

ADAPTER_SHARES = 4
"""Parts that the inputs of an adapted linear layer are split into, with sums of their own."""


def max_recorded_rows(max_sequences: int, step_tokens: int) -> int:
    """Return the tokens of the largest recorded step: one of each sequence at least, and no more than a step has."""
    return max(max_sequences, min(step_tokens, MAX_RECORDED_ROWS))


def graph_bytes(config: ModelConfig, rows: int, max_sampled: int, itemsize: int, page_tokens: int) -> int:
    """Return the memory of recorded steps of up to `rows` tokens: working memory of their own, which all recordings
    share, sums of adapters, logits of up to `max_sampled` rows, and block tables of rows and of as many sequences."""
    sampled = min(rows, max_sampled)
    sizes = StepSizes(rows=rows, sampled=sampled, padded=rows)
    heads = HeadFormat(config.head_dim, 16, itemsize)
    logits = sampled * config.vocab_size * (2 * _FLOAT32 + itemsize)
    tables = (rows + max_sampled) * -(-config.max_model_len // page_tokens) * _INT32
    adapters = ADAPTER_SHARES * rows * MAX_RECORDED_RANK * _FLOAT32
    return step_bytes(config, sizes, heads, layers=True, head=False) + adapters + logits + tables


MULTIPROCESSORS = 132
"""Of an H100 or H200, for a card whose number is not known. Cards have 20 to 188."""

SPLIT_PROGRAMS = 2
"""Programs of attention with Triton that are wanted for each multiprocessor: keys are split until there are as many."""


def max_query_block(head_dim: int, *, turing: bool = False) -> int:
    """Return the most query rows of a program of attention with Triton."""
    return (64 if turing else 128) // (2 if head_dim > 128 else 1)


def split_keys_bytes(head_dim: int, processors: int = MULTIPROCESSORS, *, turing: bool = False) -> int:
    """Return what attention with Triton keeps for each stream that it runs on: results of parts of the keys and the
    logarithms of their sums, in float32, of all programs that there are where keys are split."""
    rows = processors * SPLIT_PROGRAMS * max_query_block(head_dim, turing=turing)
    return rows * (head_dim + 1) * _FLOAT32


def _norm_bytes(elements: int, itemsize: int) -> int:
    """RMS norm: in float32, with the square, the product and the result."""
    return elements * (3 * _FLOAT32 + itemsize)


def _attention_bytes(config: ModelConfig, sizes: StepSizes, heads: HeadFormat) -> int:
    itemsize = heads.itemsize
    qk_elements = (config.heads + config.kv_heads) * config.head_dim
    keys_values = 2 * config.kv_heads * config.head_dim
    fused = sizes.rows * (config.heads * config.head_dim + keys_values) * itemsize
    before = _norm_bytes(sizes.rows * config.hidden_size, itemsize)
    if config.traits.qk_norm:
        before = max(before, _norm_bytes(sizes.rows * qk_elements, itemsize))
    if sizes.native:
        return fused + max(before, sizes.rows * config.heads * config.head_dim * itemsize)
    queries = max(sizes.padded, sizes.rows) * config.heads * config.head_dim * itemsize
    attending = 5 * queries + _capped_bytes(config, sizes) + _arranged_bytes(config, sizes, itemsize)
    phases = [before, sizes.rows * qk_elements * itemsize, attending]
    if heads.is_quantised:
        phases = [phase + queries for phase in phases]
        phases.append(sizes.rows * keys_values * (4 * _FLOAT32))  # encoding, in float32
        phases.append(queries // itemsize * (2 * _FLOAT32 + 2 * itemsize))  # rotating the output back
    return fused + max(phases)


def _capped_bytes(config: ModelConfig, sizes: StepSizes) -> int:
    """Soft-capped scores, which no fused kernel makes: keys and values in float32, the scores and what they become."""
    if not config.traits.attn_softcap:
        return 0
    scores = config.heads * (sizes.masked + sizes.gathered) * _FLOAT32
    keys_values = 2 * config.kv_heads * config.head_dim * max(sizes.gathered, sizes.rows) * _FLOAT32
    return keys_values + 2 * min(scores, MAX_SCORES_BYTES)


def _arranged_bytes(config: ModelConfig, sizes: StepSizes, itemsize: int) -> int:
    """Keys and values of 16 bits that torch's attention copies into the order that a CPU's AMX multiplies."""
    return 2 * config.kv_heads * config.head_dim * max(sizes.gathered, sizes.rows) * itemsize if itemsize == 2 else 0


def _mlp_bytes(config: ModelConfig, sizes: StepSizes, itemsize: int) -> int:
    inner = sizes.rows * config.intermediate_size * itemsize
    return _norm_bytes(sizes.rows * config.hidden_size, itemsize) + (inner if sizes.fused else 4 * inner)


def _mixture_bytes(config: ModelConfig, experts: Experts, rows: int, itemsize: int) -> int:
    """As if all rows went to the same experts, one by one, or as if all experts were computed at once, from codes with
    gates and ups apart from what they become. Each row is gathered and answered once per expert of it, then summed up
    in float32."""
    hidden, chosen = rows * config.hidden_size, rows * experts.per_token
    routing = rows * experts.count * (itemsize + 2 * _FLOAT32) + chosen * 8 * _INT64
    gathered = 2 * chosen * config.hidden_size * itemsize
    inner = max(4 * experts.inner, 3 * experts.per_token * experts.inner, 4 * experts.shared_inner)
    computed = rows * inner * itemsize + hidden * itemsize
    summed = hidden * (2 * _FLOAT32 + 2 * itemsize)
    return _norm_bytes(hidden, itemsize) + routing + gathered + max(computed, summed)


def _head_bytes(config: ModelConfig, sizes: StepSizes, itemsize: int) -> int:
    """Return the memory of the head. Logprobs of prompts are done before the rows that sample begin."""
    return max(
        _norm_bytes(rows * config.hidden_size, itemsize) + rows * config.vocab_size * (itemsize + each)
        for rows, each in ((sizes.sampled, _SAMPLING_BYTES), (sizes.prompt_states, _PROMPT_LOGPROBS_BYTES))
    )
