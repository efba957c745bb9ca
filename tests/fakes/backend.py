"""FakeBackend: a Backend without torch whose every token can be foretold, paced by the test that owns it."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Collection, Sequence
from zlib import crc32

from engine.backends.base import (
    BackendRequest,
    BackendStats,
    LoadedModel,
    LoadProgress,
    PrefixChanges,
    SequenceStats,
    TimeLost,
    TokenEvent,
    TokenLogprob,
    TokenMask,
)
from engine.config import AdapterSpec, ModelSpec
from engine.errors import ContextLengthExceeded, LoadCancelled
from tests.fakes.model import VOCAB_SIZE

PATIENCE_S = 60.0
WEIGHTS_BYTES = 4000
HIDDEN_SIZE = 64

Reply = Callable[[Sequence[int], int], int]


def letters(prompt_ids: Sequence[int], index: int) -> int:
    """The token at `index` of the default answer: a lower-case letter that depends on the prompt and the position."""
    seed = b",".join(str(token_id).encode() for token_id in prompt_ids)
    return ord("a") + crc32(seed + b"@%d" % index) % 26


def saying(text: str, *, then: int | None = None) -> Reply:
    """A reply that says `text`, byte by byte, and then `then` for ever (from the text's start again if None)."""
    ids = list(text.encode())

    def reply(prompt_ids: Sequence[int], index: int) -> int:
        return then if then is not None and index >= len(ids) else ids[index % len(ids)]

    return reply


def expected_text(prompt_ids: Sequence[int], count: int, reply: Reply = letters) -> str:
    """The first `count` tokens of the answer as the fake model's tokenizer shows them."""
    return bytes(reply(prompt_ids, index) for index in range(count)).decode(errors="replace")


def foretold(request: BackendRequest) -> tuple[TokenLogprob | None, ...]:
    """What is told of a prompt: token i has the log-probability -i and, as alternatives, ids of its own and higher."""
    top = request.params.prompt_logprobs
    if top is None:
        return ()
    told = [
        TokenLogprob(
            token_id=token_id,
            logprob=-float(place),
            top=tuple((token_id + other, -float(place) - other) for other in range(top)),
            rank=1,
        )
        for place, token_id in enumerate(request.prompt_ids[1:], 1)
    ]
    return (None, *told)


def vector_of(prompt_ids: Sequence[int]) -> list[float]:
    """The vector of a prompt, of length 1 and exact in float32: one axis, which depends on the prompt."""
    axis = crc32(b",".join(str(token_id).encode() for token_id in prompt_ids)) % HIDDEN_SIZE
    return [float(place == axis) for place in range(HIDDEN_SIZE)]


class Gate:
    """Lets a backend through as often as the test says; closed at first. Thread-safe."""

    def __init__(self, allowed: int = 0) -> None:
        self._allowed = allowed
        self._waiting = 0
        self._changed = threading.Condition()

    def allow(self, count: int = 1) -> None:
        """Let it through `count` more times."""
        with self._changed:
            self._allowed += count
            self._changed.notify_all()

    def open(self) -> None:
        """Let it through from now on."""
        self.allow(10**12)

    def close_after(self, count: int) -> None:
        """Let it through `count` times from now on, and no more."""
        with self._changed:
            self._allowed = count
            self._changed.notify_all()

    def wait_until_reached(self) -> None:
        """Wait until somebody stands before the gate and may not pass."""
        with self._changed:
            stopped = self._changed.wait_for(lambda: self._waiting > 0 and self._allowed < 1, PATIENCE_S)
            assert stopped, "nobody came to the gate"

    def enter(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Pass, waiting for permission; returns without it once `cancelled()` is true."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            try:
                while self._allowed < 1 and not cancelled():
                    self._changed.wait(0.01)
                self._allowed = max(0, self._allowed - 1)
            finally:
                self._waiting -= 1
                self._changed.notify_all()


class FakeBackend:
    """Backend: one token per running request and step, requests beyond max_prompts wait their turn.

    reply: (prompt_ids, index) -> token id.   gate: passed once per step.   load_gate: once per reported load step.
    load_error: raised in the middle of every load until set to None.   fail_at_steps: numbers of steps (from 1,
    over the backend's life) that raise RuntimeError.   check_error: raised by check().
    A token in banned_next becomes the next byte that is not, and one that a mask does not allow the next that it does;
    where it allows none but those, the request ends with an error.
    prompt_step: tokens of each prompt that a step computes; 0 is all, as far as anyone can tell.
    It ends no request that is to have an answer: the output processor does. `submitted` and `cancelled` are kept for
    the test to look at.
    """

    def __init__(
        self,
        *,
        reply: Reply = letters,
        gate: Gate | None = None,
        load_gate: Gate | None = None,
        load_error: Exception | None = None,
        fail_at_steps: Sequence[int] = (),
        check_error: str = "",
        max_model_len: int = 4096,
        load_steps: int = 4,
        adapters_per_request: bool = True,
        embeds: bool = True,
        vocab_size: int = VOCAB_SIZE,
        prompt_step: int = 0,
    ) -> None:
        self.reply = reply
        self.gate = gate
        self.load_gate = load_gate
        self.load_error = load_error
        self.fail_at_steps = frozenset(fail_at_steps)
        self.check_error = check_error
        self.max_model_len = max_model_len
        self.load_steps = load_steps
        self.adapters_per_request = adapters_per_request
        self.vocab_size = vocab_size
        self.prompt_step = prompt_step
        self.embeds = embeds
        self.loaded: ModelSpec | None = None
        self.max_prompts = 0
        self.step_tokens = 0
        self.itl_target_s: float | None = None
        self.page_tokens = 16
        self.kv_tokens = 0
        self.steps = 0
        self.checks = 0
        self.cancelled: list[str] = []
        self.changes = PrefixChanges()
        self.lost: dict[str, TimeLost] = {}
        self.adapters: dict[str, AdapterSpec] = {}
        self.submitted: list[BackendRequest] = []
        self._live: dict[str, tuple[BackendRequest, list[int]]] = {}
        self._masks: dict[str, TokenMask] = {}
        self._started: set[str] = set()
        self._computed: dict[str, int] = {}

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
        """Report `load_steps` of weights and one of kv_cache; cancelled between any two."""
        share = WEIGHTS_BYTES // self.load_steps
        for done in range(self.load_steps + 1):
            if self.load_gate is not None:
                self.load_gate.enter(cancelled)
            if cancelled():
                raise LoadCancelled("the load was cancelled")
            if self.load_error is not None and done > self.load_steps // 2:
                raise self.load_error
            report(LoadProgress(phase="weights", done=done * share, total=self.load_steps * share))
        self.max_prompts = max_prompts
        self.step_tokens = step_tokens
        self.page_tokens = page_tokens
        self.kv_tokens = spec.kv_cache_tokens or self.max_model_len * max_prompts
        self.loaded = spec
        report(LoadProgress(phase="kv_cache", done=self.kv_tokens, total=self.kv_tokens))
        return LoadedModel(
            backend="fake",
            architecture="FakeForCausalLM",
            dtype="float32",
            devices=("cpu",),
            vocab_size=self.vocab_size,
            max_model_len=spec.max_model_len or self.max_model_len,
            kv_tokens=self.kv_tokens,
            page_tokens=page_tokens,
            weights_bytes=WEIGHTS_BYTES,
            kv_bytes=self.kv_tokens,
            parameters=1000,
            adapters_per_request=self.adapters_per_request,
            hidden_size=HIDDEN_SIZE if self.embeds else 0,
        )

    def submit(self, request: BackendRequest, mask: TokenMask | None = None) -> None:
        """Take a request; refuse a prompt longer than the context."""
        if len(request.prompt_ids) >= self.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.prompt_ids)} tokens; the limit is {self.max_model_len}",
                prompt_tokens=len(request.prompt_ids),
                limit=self.max_model_len,
            )
        self.submitted.append(request)
        self._live[request.id] = (request, list(request.generated))
        if mask is not None:
            self._masks[request.id] = mask

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        self.cancelled.append(request_id)
        self._live.pop(request_id, None)
        self._masks.pop(request_id, None)
        self._started.discard(request_id)

    def set_max_prompts(self, max_prompts: int) -> None:
        """How many to work on at once from the next step on; running ones go on."""
        self.max_prompts = max_prompts

    def set_step_tokens(self, step_tokens: int) -> None:
        """Written down."""
        self.step_tokens = step_tokens

    def set_itl_target(self, target_s: float | None) -> None:
        """Written down."""
        self.itl_target_s = target_s

    def step(self) -> Sequence[TokenEvent]:
        """One token for each running request."""
        if self.gate is not None:
            self.gate.enter()
        self.steps += 1
        if self.steps in self.fail_at_steps:
            raise RuntimeError(f"step {self.steps} was told to fail")
        for request_id in self._live:
            if len(self._started) >= self.max_prompts:
                break
            self._started.add(request_id)
        started = [request_id for request_id in tuple(self._live) if request_id in self._started]
        return [self._produce(request_id) for request_id in started if self._prompt_is_computed(request_id)]

    def _prompt_is_computed(self, request_id: str) -> bool:
        """Compute the next `prompt_step` tokens of a prompt, and return whether there are no more."""
        tokens = len(self._live[request_id][0].prompt_ids)
        computed = min(tokens, self._computed.get(request_id, 0) + (self.prompt_step or tokens))
        self._computed[request_id] = computed
        return computed == tokens

    def _produce(self, request_id: str) -> TokenEvent:
        request, tokens = self._live[request_id]
        if not request.params.max_tokens:
            return self._end(request)
        token_id = self.reply(request.prompt_ids, len(tokens))
        first = len(tokens) == len(request.generated)
        while first and token_id in request.banned_next:
            token_id = (token_id + 1) % 256
        mask = self._masks.get(request_id)
        if mask is not None:
            allowed = nearest(token_id, mask, self.vocab_size, ruled_out=request.banned_next if first else ())
            if allowed is None:
                self._live.pop(request_id)
                self._started.discard(request_id)
                return TokenEvent(request_id=request_id, finish="error", message="nothing is left to choose from")
            token_id = allowed
            mask.accept(token_id)
        tokens.append(token_id)
        if whole := mask is not None and mask.is_complete:
            self._live.pop(request_id)
            self._masks.pop(request_id)
            self._started.discard(request_id)
        wanted = request.params.logprobs is not None
        return TokenEvent(
            request_id=request_id,
            token_id=token_id,
            logprob=TokenLogprob(token_id=token_id, logprob=-0.5) if wanted else None,
            finish="stop" if whole else None,
            cached_tokens=0 if first else None,
            prompt_logprobs=foretold(request) if first else (),
        )

    def _end(self, request: BackendRequest) -> TokenEvent:
        self._live.pop(request.id)
        self._started.discard(request.id)
        return TokenEvent(
            request_id=request.id,
            finish="stop" if request.embed else "length",
            cached_tokens=0,
            prompt_logprobs=foretold(request),
            vector=array("f", vector_of(request.prompt_ids)).tobytes() if request.embed else b"",
        )

    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._live)

    def stats(self) -> BackendStats:
        """Gauges that add up: a page holds `page_tokens` tokens of one request."""
        running = [(request, tokens) for request, tokens in self._live.values() if request.id in self._started]
        lengths = [len(request.prompt_ids) + len(tokens) for request, tokens in running]
        pages_total = self.kv_tokens // self.page_tokens
        return BackendStats(
            waiting=len(self._live) - len(running),
            decoding=len(running),
            pages_total=pages_total,
            pages_free=max(0, pages_total - sum(-(-length // self.page_tokens) for length in lengths)),
            steps=self.steps,
            weights_bytes=WEIGHTS_BYTES if self.loaded else 0,
            kv_bytes=self.kv_tokens,
            sequences=tuple(
                SequenceStats(
                    request_id=request.id,
                    computed_tokens=min(self._computed[request.id], length - 1) if not tokens else length - 1,
                    known_tokens=length,
                )
                for (request, tokens), length in zip(running, lengths, strict=True)
            ),
        )

    def time_lost(self, request_id: str) -> TimeLost:
        """What the test put into `lost`."""
        return self.lost.get(request_id, TimeLost())

    def prefix_changes(self) -> PrefixChanges:
        """Return what the test put into `changes`, once."""
        changes, self.changes = self.changes, PrefixChanges()
        return changes

    def attach(self, adapter: AdapterSpec) -> int:
        """Take any adapter; its bytes are a thousand."""
        self.adapters[adapter.key] = adapter
        return 1000

    def detach(self, key: str) -> None:
        """Forget it."""
        self.adapters.pop(key, None)

    def check(self) -> None:
        """Nothing to add up here; raises what the test asked for."""
        self.checks += 1
        assert not self.check_error, self.check_error

    def unload(self) -> None:
        """Forget everything."""
        self.loaded = None
        self.kv_tokens = 0
        self._live.clear()
        self._started.clear()


def nearest(
    token_id: int, mask: TokenMask, vocab_size: int = VOCAB_SIZE, *, ruled_out: Collection[int] = ()
) -> int | None:
    """The first token from this one on that the mask allows and that is not ruled out, None where there is none."""
    bits = mask.bitmask()
    for candidate in (*range(token_id, vocab_size), *range(token_id)):
        if bits[candidate // 8] >> candidate % 8 & 1 and candidate not in ruled_out:
            return candidate
    return None
