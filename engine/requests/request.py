"""A request: as a caller hands it in (GenerateRequest) and as the engine follows it (Request)."""

from __future__ import annotations

import asyncio
import time
import zlib
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.backends.base import BackendRequest, FinishReason, SequenceStats
from engine.config import SamplingParams
from engine.errors import ErrorInfo
from engine.metrics.meter import Choices
from engine.requests.causes import Cause
from engine.requests.forecast import QueuePlace
from engine.requests.history import RequestDetail, Timeline, non_default_params
from engine.requests.stream import RequestStream
from engine.snapshot import RequestRow, RequestState
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.scheduling.queue import ModelQueue

QUARANTINE_DEATHS = 2
MAX_DEATHS = QUARANTINE_DEATHS + 1

Encode = Callable[[Tokenizer], Awaitable[list[int]]]


def compact_ids(token_ids: Sequence[int]) -> array[int]:
    """Token ids (0 to 2**32 - 1) in four bytes each, as long as they are kept for: a list takes nine times as much.

    Those that are compact already are not copied.
    """
    return token_ids if isinstance(token_ids, array) else array("I", token_ids)


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens to continue, and how.

    id: "" lets the engine make one; an id may not be that of a live request.  source: who asks, for the request table.
    priority: higher goes first, equal ones in order of arrival.  timeout_s: from submit to the last token, time in the
    queue included; None takes the engine's default, 0 is no limit.  model: the name it is for; "" is the first one.
    key: the deployment (ModelReading.key) whose tokenizer made prompt_ids; "" is the one that `model` means now.
    adapter: a LoRA adapter of that model.  client: who shares the queue fairly with others.  key_name: of its API key.
    address, program: of its client, for the request table.
    tenant: shares the prefix cache with no other tenant (EngineConfig.prefix_sharing).  cache_salt: nor with requests
    of the tenant that have another one.  shared_tokens: leading tokens of prompt_ids that hold its system prompt alone.
    encode: makes prompt_ids again for another model's tokenizer, where the request may go to any.
    choices: shared by the answers to its prompt that were requested together; None where it is the only one.
    continues: as in BackendRequest.
    embed: the result is the prompt's vector (see TokenEvent), no answer.
    reports_prompt: its stream reports how far its prompt is computed.
    arrived: when its client's request came, by the loop's clock; None where it is submitted at once.
    waited: seconds before it was submitted, by cause, of those since then.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams = SamplingParams()
    id: str = ""
    source: str = "api"
    priority: int = 0
    timeout_s: float | None = None
    model: str = ""
    key: str = ""
    adapter: str = ""
    client: str = ""
    key_name: str = ""
    address: str = ""
    program: str = ""
    tenant: str = ""
    cache_salt: str = ""
    shared_tokens: int = 0
    encode: Encode | None = None
    choices: Choices | None = None
    continues: bool = False
    embed: bool = False
    reports_prompt: bool = False
    arrived: float | None = None
    waited: Mapping[Cause, float] = {}


@dataclass(slots=True, eq=False)
class Request:
    """One admitted request from submit to its last delta. Times are the event loop's clock, in seconds.

    prompt_ids: compact, as thousands may wait.  prompt_of: folder of the model whose tokenizer made them; None where
    that model is gone.
    requested_params, params: the sampling as it was requested, and resolved (seed and max_tokens set).
    model_queue: of the model that is to answer it.
    order: arrival number, unique in the engine; a request that lost its worker keeps it and so returns to the head of
    the queue.  generated: every id that reached the engine so far.
    adapter_key: of the version of its adapter that it is computed with to its end, as in AdapterSpec.
    cache_scope, shared_tokens: as in BackendRequest.
    deaths: workers that died in a row while they worked on it, without a token to show for it.
    tokens_at_start: tokens that it had generated when its worker began to work on it, None before that.
    has_prompt_logprobs: True if its reader has the prompt's log-probabilities.
    gaps_s, num_gaps: sum and number of the times between its tokens (see `add_tokens`).
    created_at: unix time.
    """

    id: str
    source: str
    priority: int
    order: int
    prompt_ids: array[int]
    params: SamplingParams
    end_token_ids: tuple[int, ...]
    timeout_s: float
    created: float
    stream: RequestStream
    model_queue: ModelQueue
    requested_params: SamplingParams
    prompt_of: Path | None = None
    model: str = ""
    adapter: str = ""
    adapter_key: str = ""
    client: str = ""
    key_name: str = ""
    address: str = ""
    program: str = ""
    cache_scope: str = ""
    shared_tokens: int = 0
    encode: Encode | None = None
    choices: Choices | None = None
    continues: bool = False
    embed: bool = False
    reports_prompt: bool = False
    has_prompt_logprobs: bool = False
    generated: list[int] = field(default_factory=list)
    worker: str | None = None
    deaths: int = 0
    tokens_at_start: int | None = None
    cached_tokens: int = 0
    deadline: asyncio.TimerHandle | None = None
    dispatched: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    gaps_s: float = 0.0
    num_gaps: int = 0
    finished: float | None = None
    finish: FinishReason | None = None
    error: ErrorInfo | None = None
    created_at: float = field(default_factory=time.time)
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def wire_id(self) -> str:
        """Its name on the worker's channel: unlike `id`, never used twice, so a late output can find no wrong owner."""
        return f"{self.id}#{self.order}"

    @property
    def is_quarantined(self) -> bool:
        """True if it may be what kills workers: it was there each time."""
        return self.deaths >= QUARANTINE_DEATHS

    @property
    def given_up(self) -> bool:
        """True if more workers died of it than may: no other gets it."""
        return self.deaths >= MAX_DEATHS

    @property
    def ttft_s(self) -> float | None:
        """Seconds from submit to the first token."""
        return None if self.first_token is None else self.first_token - self.created

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between tokens."""
        return self.gaps_s / self.num_gaps if self.num_gaps else None

    def add_tokens(self, token_ids: Sequence[int], gaps: Sequence[float], now: float) -> Sequence[float]:
        """Add tokens that arrived at `now` and return the seconds before each of them, none for the first of all.

        gaps: as its worker measured them. Tokens for which it has none, the first after a move to another worker,
        share the time since the last one arrived: their client waited for just that.
        """
        if self.first_token is None or self.last_token is None:
            self.first_token = now
        elif unmeasured := len(token_ids) - len(gaps):
            paused_s = max(0.0, now - self.last_token - sum(gaps))
            gaps = [*[paused_s / unmeasured] * unmeasured, *gaps]
        self.last_token = now
        self.gaps_s += sum(gaps)
        self.num_gaps += len(gaps)
        self.generated.extend(token_ids)
        return gaps

    def worker_died(self) -> None:
        """Count the death of its worker where it may be to blame: the worker had begun with it, and no token came of
        it. One that came further than the time before is no reason why workers die."""
        if self.tokens_at_start is not None:
            self.deaths = 0 if len(self.generated) > self.tokens_at_start else self.deaths + 1

    def for_backend(self) -> BackendRequest:
        """Return the request for a worker: the prompt and the tokens so far. Nothing is requested twice."""
        params = msgspec.structs.replace(self.params, prompt_logprobs=None) if self.has_prompt_logprobs else self.params
        return BackendRequest(
            id=self.wire_id,
            prompt_ids=list(self.prompt_ids),
            generated=list(self.generated),
            params=params,
            end_token_ids=self.end_token_ids,
            adapter=self.adapter_key,
            cache_scope=self.cache_scope,
            shared_tokens=self.shared_tokens,
            continues=self.continues,
            embed=self.embed,
            client=zlib.crc32(self.client.encode()),
        )

    def row(self, now: float, stats: SequenceStats | None = None, place: QueuePlace | None = None) -> RequestRow:
        """Return its row of the request table at `now`. stats: as its worker reports; else every token is computed
        whose successor is known.  place: where it waits, None where it does not."""
        end = now if self.finished is None else self.finished
        itl_s = self.itl_s
        computed = len(self.prompt_ids) + len(self.generated) - 1 if self.generated else 0
        cached = stats.cached_tokens if stats is not None and self.first_token is None else self.cached_tokens
        return RequestRow(
            id=self.id,
            source=self.source,
            state=self._state,
            worker=self.worker,
            prompt_tokens=len(self.prompt_ids),
            computed_tokens=computed if stats is None else stats.computed_tokens,
            cached_tokens=cached,
            output_tokens=len(self.generated),
            max_tokens=self.params.max_tokens or 0,
            age_s=end - self.created,
            queued_s=(end if self.dispatched is None else self.dispatched) - self.created,
            ttft_s=self.ttft_s,
            itl_s=itl_s,
            tokens_per_s=1 / itl_s if itl_s else None,
            finish=self.finish,
            error=self.error,
            model=self.model or self.model_queue.model,
            client=self.client,
            key_name=self.key_name,
            address=self.address,
            program=self.program,
            priority=self.priority,
            order=self.order,
            created_at=self.created_at,
            queue_position=None if place is None else place.position,
            expected_wait_s=None if place is None else place.expected_wait_s,
        )

    def detail(self, row: RequestRow) -> RequestDetail:
        """All about it but its text; row: its line in the request table now."""
        return RequestDetail(
            row=row,
            adapter=self.adapter,
            sampling=non_default_params(self.requested_params),
            stays=self.timeline.stays(self.created),
            bursts=self.timeline.bursts(self.created),
        )

    @property
    def _state(self) -> RequestState:
        if self.finish is not None:
            return "finished"
        if self.worker is None:
            return "queued"
        return "prefill" if self.first_token is None else "decode"
