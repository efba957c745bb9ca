"""The contract every backend fulfils: requests in, token ids out, one `step` at a time.

A backend knows nothing of text, queues or other workers. It runs on one thread: the worker loop's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from engine.config import AdapterSpec, DeviceShare, ModelSpec, SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
LoadPhase = Literal["download", "inspect", "kernels", "wait", "weights", "kv_cache", "warm_up"]


class BackendRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as a backend sees it.

    generated: ids already produced (a request that lost its worker goes on from them); never empty prompt_ids.
    params.seed and params.max_tokens are resolved, never None; max_tokens counts `generated` in.
    end_token_ids: the model's end tokens (unless ignore_eos) and stop_token_ids, masked before min_tokens.
    banned_next: ids that the very next token must not be (a rewound banned string); they bind that token alone.
    adapter: key of an attached LoRA adapter to compute with, as in AdapterSpec; "" is the model as it was loaded.
    cache_scope: whose requests may find its pages in the prefix cache: those of the same scope.
    shared_tokens: leading tokens of the prompt whose full pages are of the scope "", where the requests of every scope
        look for them. A backend may share fewer, never more.
    continues: the answer goes on with the text of its prompt; else it is a text of its own, a turn of a chat say.
    params.max_tokens 0: it ends with "length" once its prompt is computed, without a token.
    embed: it ends then with "stop" and a vector instead; max_tokens is 0.
    client: a number of its client, the same for all its requests: clients share the prompt tokens of a step.
    """

    id: str
    prompt_ids: list[int]
    generated: list[int] = []
    params: SamplingParams
    end_token_ids: tuple[int, ...] = ()
    banned_next: tuple[int, ...] = ()
    adapter: str = ""
    cache_scope: str = ""
    shared_tokens: int = 0
    continues: bool = False
    embed: bool = False
    client: int = 0

    @property
    def resumed(self) -> bool:
        """Not the first try: tokens were taken back, or another worker had it. Its prompt was counted already."""
        return bool(self.generated or self.banned_next)


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Log-probability (natural log, of the model's own distribution before any sampling knob) of a token,
    with the `top` most likely alternatives as (id, logprob), best first.

    rank: 1 for the likeliest token of the vocabulary; for a prompt's tokens alone, 0 for others.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


TokenLogprobs = tuple[TokenLogprob | None, ...]
"""Those of a prompt's tokens, None of the first."""

_LOGPROBS = msgspec.msgpack.Decoder(TokenLogprobs)


def pack_logprobs(logprobs: TokenLogprobs) -> bytes:
    """Log-probabilities of a prompt as they are handed on: a hundred thousand objects take an event loop 100 ms."""
    return msgspec.msgpack.encode(logprobs) if logprobs else b""


def unpack_logprobs(packed: bytes) -> TokenLogprobs:
    """Decode `pack_logprobs`."""
    return _LOGPROBS.decode(packed) if packed else ()


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One produced token, or the end of a request that the backend itself had to end.

    token_id is None only where finish is set. finish: "length" when KV pages ran out for the only running
    request, "error" when the backend failed it (message says why). cached_tokens: prompt tokens that were
    found in the prefix cache; sent with the first token of a request.
    prompt_logprobs: of each of the prompt's tokens, None of the first, which nothing came before; sent with the first
    token, or with the end of a request that is to have none. () where they are not asked for.
    vector: of a request to embed, with its end: the mean of the model's final hidden states (after its last norm) over
    the prompt, of length 1, as float32 in the machine's byte order.
    """

    request_id: str
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None
    message: str = ""
    cached_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    vector: bytes = b""


class TokenMask(Protocol):
    """Constraint on the tokens of one answer. It gets every token of the answer, and depends on nothing else.

    is_complete: whether nothing may come but the answer's end.  error: why nothing at all may come any more; "" while
    anything may.
    """

    @property
    def is_complete(self) -> bool: ...

    @property
    def error(self) -> str: ...

    def bitmask(self) -> bytes:
        """The tokens that may come now: a bit for each of the model's, from the lowest of the first byte on, filled up
        to whole words of 32. None after an error."""

    def accept(self, token_id: int) -> None:
        """This token was chosen."""

    def restart(self, generated: Sequence[int]) -> None:
        """The answer stands after these tokens: some were taken back, or were computed elsewhere."""


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a load stands: done of total, in bytes for weights and kv_cache, in steps otherwise; total is 0 where that
    is not known. wait: another worker on this machine makes the weights that this one will share.
    slow_bytes_per_s: rate at which weights come, where the load waits for a slow disk; None where it does not."""

    phase: LoadPhase
    done: int
    total: int
    unit: Literal["bytes", "steps", "files"] = "bytes"
    slow_bytes_per_s: float | None = None


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a loaded model. kv_tokens: tokens that the worker's KV pages hold together.

    attention, attention_reason: which attention computes, and why that one, in a few words.
    linear: what multiplies by the weights: "native avx512-bf16", "native avx2", "triton from the file's codes", "fbgemm
        float16", "onednn" or "plain"; "" where unknown.
    native: whether our own kernels for a CPU compute, as far as they can; None where they are not for such devices.
    shares: what was really allocated on each device, working memory as the warm-up measured it.
    adapters_per_request: whether each request may name a LoRA adapter of its own.
    shared_bytes: how much of weights_bytes all workers of this machine have once, in one mapping.
    active_parameters: those that one token is computed with, fewer than all in a mixture of experts; 0 is all.
    hidden_size: numbers in a vector of a request to embed; 0 where the backend embeds nothing.
    step_s: what a step of the largest size takes, in seconds, as the warm-up showed; 0 where it was not timed.
    rank_pids: processes that compute parts of the model for the worker's.
    """

    backend: str
    architecture: str
    dtype: str
    devices: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    kv_tokens: int
    page_tokens: int
    weights_bytes: int
    kv_bytes: int
    parameters: int
    attention: str = ""
    attention_reason: str = ""
    linear: str = ""
    native: bool | None = None
    shares: tuple[DeviceShare, ...] = ()
    adapters_per_request: bool = False
    shared_bytes: int = 0
    active_parameters: int = 0
    hidden_size: int = 0
    step_s: float = 0.0
    rank_pids: tuple[int, ...] = ()


class SequenceStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """How far one live request is: tokens whose KV is computed, of the tokens known. cached_tokens: those of the
    computed ones that were found in the prefix cache."""

    request_id: str
    computed_tokens: int
    known_tokens: int
    cached_tokens: int = 0


class DraftPosition(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Tokens drafted at one position ahead (the first is that after the next token), and how many were accepted."""

    drafted: int = 0
    accepted: int = 0


StepLimit = Literal["none", "max_prompts", "kv_pages", "step_tokens"]
"""What kept a step from doing more: a knob, the KV pages, or that there was no more work."""


class TimeLost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds that a request lost on its worker, by cause: "slot", "pages", "step_tokens" and "grammar" before its
    prompt is computed, "prefill_prompts" and "prompts" to other requests' prompts in its steps, before its first token
    and after it, and "preempted". behind: the request whose prompt took most of it, "" for none."""

    seconds: dict[str, float] = {}
    behind: str = ""


class KvTierStats(msgspec.Struct, frozen=True, kw_only=True):
    """A tier of KV pages outside the device: "host" or "disk".

    used_bytes, pages: of all models and processes that share it, as last measured.  restored_pages: read back.
    damaged_pages: removed as their checksum was wrong.  skipped_pages: not written, for want of room or time.
    problem: one sentence where it does not work now, else "".
    """

    name: str
    used_bytes: int = 0
    limit_bytes: int = 0
    pages: int = 0
    restored_pages: int = 0
    damaged_pages: int = 0
    skipped_pages: int = 0
    problem: str = ""


class ItlReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker keeps a time between tokens. Seconds.

    floor_s: what a step of the answers alone takes, at the pace that 99 of 100 steps keep.  answers: how many it had.
    error: how far a step is from what was expected of it, the median, as a share of it; None before enough were
    measured.
    """

    target_s: float
    floor_s: float = 0.0
    answers: int = 0
    error: float | None = None


class BackendStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and gauges of one backend. Counters only grow; pages_free counts cached pages that can be reused.

    prefix_query_tokens, prefix_hit_tokens: of each prompt once, whatever resumes its request, what was looked up in the
    prefix cache and what of it was found.

    draft_tokens, draft_accepted: tokens drafted, and those of them that were accepted.  drafts: the same by
    position, where the backend counts them so.
    prompts_limit: how many requests it can work on at once, found when a step ran out of memory; 0: none found.
    oom_steps: steps that ran out of memory.
    limited: steps by what limited them, {} where that is not known.
    itl: how a target is kept; None without one, or where the library decides.
    kv_tiers: where KV pages are kept outside the device, the fastest first.  restored_tokens: read back from there.
    """

    waiting: int = 0
    prefilling: int = 0
    decoding: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens_computed: int = 0
    preemptions: int = 0
    steps: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    draft_tokens: int = 0
    draft_accepted: int = 0
    drafts: tuple[DraftPosition, ...] = ()
    prompts_limit: int = 0
    oom_steps: int = 0
    sequences: tuple[SequenceStats, ...] = ()
    limited: dict[StepLimit, int] = {}
    itl: ItlReport | None = None
    kv_tiers: tuple[KvTierStats, ...] = ()
    restored_tokens: int = 0


class PrefixChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Full KV pages that became findable, and that ceased to be, since the last time. A page is known by the first 8
    bytes of its key: `engine.backends.common.page_keys.page_keys` gives the same for a prompt, the salt being the
    same."""

    added: tuple[bytes, ...] = ()
    dropped: tuple[bytes, ...] = ()


class Backend(Protocol):
    """How tokens are computed. Not thread-safe: one thread drives it; `report` and `cancelled` are called on it."""

    def load(
        self,
        spec: ModelSpec,
        *,
        max_prompts: int,
        step_tokens: int,
        page_tokens: int,
        report: Callable[[LoadProgress], None],
        cancelled: Callable[[], bool],
    ) -> LoadedModel:
        """Load `spec`; raises ModelLoadFailed or a child of it (LoadCancelled when `cancelled()` turned true)
        and leaves nothing allocated then."""

    def submit(self, request: BackendRequest, mask: TokenMask | None = None) -> None:
        """Take a request. Raises ContextLengthExceeded with the numbers where it can never fit.

        mask: what its tokens are held to, at where `request.generated` ends; the backend's own from here on. It decides
        on end tokens, and the answer ends with "stop" by the token after which it has `ended`.
        """

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its pages: cancelled, or ended by the output processor. Unknown ids are fine."""

    def set_max_prompts(self, max_prompts: int) -> None:
        """How many requests to work on at once; running ones beyond it finish."""

    def set_step_tokens(self, step_tokens: int) -> None:
        """How many tokens to compute in a step, prompts and answers together; nothing where a library has its own."""

    def set_itl_target(self, target_s: float | None) -> None:
        """Give each step as many prompt tokens as keep its answers within this time between tokens, from the next step
        on; None for no such target. Nothing where a library decides."""

    def step(self) -> Sequence[TokenEvent]:
        """Do one step for everybody; events in order, several tokens of one request allowed. Empty when idle.

        Raises WorkerFailed where no later step can work either: the worker is to leave, and its requests, none of which
        has ended, go on elsewhere.
        """

    def has_work(self) -> bool:
        """Return whether `step` would do anything."""

    def stats(self) -> BackendStats:
        """Counters and gauges now."""

    def time_lost(self, request_id: str) -> TimeLost:
        """Return what a live request has lost so far, or one that has ended, once; nothing where that is not known."""

    def prefix_changes(self) -> PrefixChanges:
        """Return changes of the prefix cache since the last call; none where the backend does not track them."""

    def attach(self, adapter: AdapterSpec) -> int:
        """Make a LoRA adapter usable by requests from the next step on, under its key; the bytes it takes. Raises
        InvalidRequest or ModelLoadFailed with nothing changed, where it does not fit the model, its files are not those
        of its version any more, or the backend cannot change adapters."""

    def detach(self, key: str) -> None:
        """Forget an adapter that no live request uses; unknown keys are fine."""

    def check(self) -> None:
        """Prove the accounts (pages free + held = total); raises AssertionError with the numbers. Run when idle."""

    def unload(self) -> None:
        """Give all memory back; idempotent."""
