"""The engine in this process as a target: one of its own (`own_engine`), or that of a console."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

from console.bench.result import Setting, TargetInfo
from console.bench.target import Chunk, TargetFailed
from console.bench.workload import Fresh, Item, Material, TokenIds
from engine.backends.base import LoadedModel
from engine.config import ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest
from engine.errors import InvalidRequest, NoModelLoaded, WorkerFailed
from engine.models.gguf.file import is_gguf, split_files
from engine.models.headers import weight_files
from engine.snapshot import ModelReading, ModelStatus, Totals

SOURCE = "bench"
_POLL_S = 0.05
_MAX_DRAFT_TOKENS = 7
"""Where it was loaded without a number."""
_REPORTED = (
    *("max_model_len", "cache_bits", "alpha_value", "compress_pos_emb", "num_experts", "lora"),
    *("tensor_parallel", "tensor_parallel_size"),
    *("draft_model", "ngram_draft", "draft_tokens", "gpu_balance", "threads", "weights", "deterministic"),
)
"""Fields of ModelSpec that a result contains where they are not at their default."""

Reload = Callable[[Mapping[str, object]], Awaitable[None]]
"""Reloads the model with changed settings."""


async def all_ready(engine: Engine, workers: int, model: str = "") -> None:
    """Wait until a number of workers are ready, of all models or of one. Raises WorkerFailed where one cannot."""
    while True:
        readings = [worker for worker in engine.snapshot().workers if model in ("", worker.model)]
        failed = next((worker for worker in readings if worker.state in ("failed", "dead")), None)
        if failed is not None:
            reason = failed.last_error.message if failed.last_error else "no reason given"
            raise WorkerFailed(f"worker {failed.id} did not become ready: {reason}", worker=failed.id)
        if [worker.state for worker in readings] == ["ready"] * workers:
            return
        await asyncio.sleep(_POLL_S)


class EngineTarget:
    """Target and EngineHere: an engine with a model that is loaded and ready. Its coroutines run on the engine's loop.

    reload: None where the model must stay as it is.  model: by its name; "" is the first.
    fresh: the engine has answered others before, so prompts are to be none of theirs.  sent: requests so far.
    note: what a reader of its numbers must know, as a sentence.
    """

    def __init__(
        self, engine: Engine, reload: Reload | None = None, *, model: str = "", fresh: bool = False, note: str = ""
    ) -> None:
        self._engine = engine
        self._reload = reload
        self._name = model
        self._fresh = fresh
        self.note = note
        self.sent = 0

    @property
    def info(self) -> TargetInfo:
        model, spec = self._model, self._spec
        return TargetInfo(
            kind="engine",
            model=spec.name,
            backend=model.backend,
            dtype=model.dtype,
            weights_bytes=model.weights_bytes,
        )

    @property
    def settings(self) -> Mapping[str, Setting]:
        model, spec = self._model, self._spec
        workers, max_prompts = self.knobs
        neutral = ModelSpec(path=spec.path, name=spec.name)
        asked = {name: getattr(spec, name) for name in _REPORTED if getattr(spec, name) != getattr(neutral, name)}
        ways: dict[str, Setting] = {"attention": model.attention, "linear": model.linear, "kv_tokens": model.kv_tokens}
        return (
            {"num_workers": workers, "max_prompts": max_prompts, "step_tokens": self._engine.config.step_tokens}
            | ways
            | {
                name: value if isinstance(value, bool | int | float | None) else str(value)
                for name, value in asked.items()
            }
        )

    @property
    def material(self) -> Material:
        """Target: ids."""
        tokenizer = self._engine.tokenizer_of(self._name)
        if tokenizer is None:
            raise NoModelLoaded("no model is loaded")
        ids = TokenIds.of(tokenizer, self._model.vocab_size)
        return Fresh(ids) if self._fresh else ids

    @property
    def max_model_len(self) -> int | None:
        """Target: the context, or what the KV pages hold where that is less."""
        return min(self._model.max_model_len, self._model.kv_tokens)

    async def send(self, item: Item) -> AsyncGenerator[Chunk, None]:
        params = SamplingParams(temperature=0.0, max_tokens=item.output_tokens, ignore_eos=True, seed=0)
        asked = GenerateRequest(
            prompt_ids=item.prompt.ids, params=params, source=SOURCE, client=SOURCE, timeout_s=0, model=self._name
        )
        self.sent += 1
        async with self._engine.submit(asked) as stream:
            async for delta in stream:
                if delta.finish not in (None, "length", "stop"):
                    reason = delta.error.message if delta.error else f"the answer ended with {delta.finish}"
                    raise TargetFailed(reason)
                yield Chunk(
                    tokens=len(delta.token_ids),
                    gaps_s=delta.gaps,
                    output_tokens=delta.output_tokens,
                    prompt_tokens=delta.prompt_tokens,
                    cached_tokens=delta.cached_tokens,
                )

    def totals(self) -> Totals:
        return self._engine.totals()

    @property
    def draft_tokens(self) -> int:
        """The most tokens that it guesses ahead from a request's own text, as it was loaded."""
        spec = self._spec
        return (spec.draft_tokens or _MAX_DRAFT_TOKENS) if spec.ngram_draft else 0

    @property
    def knobs(self) -> tuple[int, int]:
        if not self._name:
            return self._engine.config.num_workers, self._engine.config.max_prompts
        reading = self._reading
        return reading.target_workers, reading.max_prompts

    async def set_knobs(self, *, workers: int, max_prompts: int) -> None:
        await self._engine.reconfigure(num_workers=workers, max_prompts=max_prompts, model=self._name)
        await all_ready(self._engine, workers, self._name)

    async def set_draft_tokens(self, tokens: int) -> None:
        """EngineHere: where it guesses so already, nothing is done."""
        spec = self._status.spec  # None where the load before was refused
        if spec is not None and tokens == self.draft_tokens:
            return
        if tokens:
            await self._load({"ngram_draft": True, "draft_tokens": tokens})
        else:  # draft_tokens then applies to a draft model only
            drafts = spec is not None and spec.draft_model is not None
            await self._load({"ngram_draft": False} | ({} if drafts else {"draft_tokens": None}))

    async def load_s(self) -> float:
        """EngineHere: until every worker is ready."""
        reload = self._may_reload()
        await self._engine.unload(self._name, drain_s=0)
        began_s = time.perf_counter()
        await reload({})
        await all_ready(self._engine, self.knobs[0], self._name)
        return time.perf_counter() - began_s

    def weight_files(self) -> list[str]:
        path = self._spec.path
        return [str(file) for file in (split_files(path) if is_gguf(path) else weight_files(path))]

    async def _load(self, changes: Mapping[str, object]) -> None:
        await self._may_reload()(changes)
        await all_ready(self._engine, self.knobs[0], self._name)

    def _may_reload(self) -> Reload:
        if self._reload is None:
            raise InvalidRequest("the serving model cannot be reloaded for a benchmark", param="model")
        return self._reload

    @property
    def _reading(self) -> ModelReading:
        for model in self._engine.snapshot().models:
            if model.name == self._name:
                return model
        raise NoModelLoaded(f"{self._name} was unloaded")

    @property
    def _status(self) -> ModelStatus:
        return self._reading.status if self._name else self._engine.status

    @property
    def _model(self) -> LoadedModel:
        model = self._status.model
        if model is None:
            raise NoModelLoaded("no model is loaded")
        return model

    @property
    def _spec(self) -> ModelSpec:
        spec = self._status.spec
        if spec is None:
            raise NoModelLoaded("no model is loaded")
        return spec
