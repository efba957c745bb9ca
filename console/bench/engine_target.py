"""The engine in this process as a target: one of its own, or that of a console."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from console.bench.engines import all_ready
from console.bench.prompts import Material, TokenIds
from console.bench.result import Setting, TargetInfo
from console.bench.target import Chunk, Counters, TargetFailed
from console.bench.workload import Item
from console.logs import logging_to
from console.runtime import Runtime
from console.settings import Settings
from console.sources import changed
from engine.backends.base import LoadedModel
from engine.config import ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest
from engine.errors import InvalidRequest, NoModelLoaded
from engine.models.headers import weight_files
from engine.models.resolve import is_synthetic, resolve_local

MAX_QUEUE = 1_000_000
_TOLD = (
    *("max_model_len", "cache_bits", "alpha_value", "compress_pos_emb", "num_experts", "lora", "tensor_parallel"),
    *("draft_model", "ngram_draft", "draft_tokens", "gpu_balance", "threads"),
)
"""What of a ModelSpec a result tells, where it is not at its default."""

Reload = Callable[[Mapping[str, object]], Awaitable[None]]
"""Loads the model anew, with these settings changed."""


class EngineTarget:
    """Target and EngineHere: an engine whose first model is loaded and ready. Its coroutines run on the engine's loop.

    reload: None where the model must stay as it is.
    """

    def __init__(self, engine: Engine, reload: Reload | None = None) -> None:
        self._engine = engine
        self._reload = reload

    @property
    def info(self) -> TargetInfo:
        """Target."""
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
        """Target."""
        model, spec = self._model, self._spec
        workers, max_prompts = self.knobs
        neutral = ModelSpec(path=spec.path, name=spec.name)
        asked = {name: getattr(spec, name) for name in _TOLD if getattr(spec, name) != getattr(neutral, name)}
        ways: dict[str, Setting] = {"attention": model.attention, "linear": model.linear, "kv_tokens": model.kv_tokens}
        return (
            {"num_workers": workers, "max_prompts": max_prompts}
            | ways
            | {
                name: value if isinstance(value, bool | int | float | None) else str(value)
                for name, value in asked.items()
            }
        )

    @property
    def material(self) -> Material:
        """Target: ids."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise NoModelLoaded("no model is loaded")
        return TokenIds.of(tokenizer, self._model.vocab_size)

    @property
    def max_model_len(self) -> int | None:
        """Target: the context, or what the KV pages hold where that is less."""
        return min(self._model.max_model_len, self._model.kv_tokens)

    async def send(self, item: Item) -> AsyncGenerator[Chunk, None]:
        """Target."""
        params = SamplingParams(temperature=0.0, max_tokens=item.output_tokens, ignore_eos=True, seed=0)
        asked = GenerateRequest(prompt_ids=item.prompt.ids, params=params, source="bench", timeout_s=0)
        async with self._engine.submit(asked) as stream:
            async for delta in stream:
                if delta.finish not in (None, "length", "stop"):
                    said = delta.error.message if delta.error else f"the answer ended with {delta.finish}"
                    raise TargetFailed(said)
                yield Chunk(
                    tokens=len(delta.token_ids),
                    output_tokens=delta.output_tokens,
                    prompt_tokens=delta.prompt_tokens,
                    cached_tokens=delta.cached_tokens,
                )

    def counters(self) -> Counters:
        """EngineHere."""
        totals = self._engine.snapshot().totals
        return Counters(draft_tokens=totals.draft_tokens, draft_accepted=totals.draft_accepted)

    @property
    def knobs(self) -> tuple[int, int]:
        """EngineHere."""
        return self._engine.config.num_workers, self._engine.config.max_prompts

    async def turn(self, *, workers: int, max_prompts: int) -> None:
        """EngineHere."""
        await self._engine.reconfigure(workers=workers, max_prompts=max_prompts)
        await all_ready(self._engine, workers)

    async def guess(self, tokens: int) -> None:
        """EngineHere: where it guesses so already, nothing is done."""
        spec = self._engine.status.spec  # None where the load before was refused
        if spec is not None and tokens == (spec.draft_tokens if spec.ngram_draft else 0):
            return
        await self._load({"ngram_draft": True, "draft_tokens": tokens} if tokens else {"ngram_draft": False})

    async def load_s(self) -> float:
        """EngineHere: until every worker is ready."""
        reload = self._may_reload()
        await self._engine.unload(drain_s=0)
        began_s = time.perf_counter()
        await reload({})
        await all_ready(self._engine, self.knobs[0])
        return time.perf_counter() - began_s

    def weight_files(self) -> list[str]:
        """EngineHere."""
        return [str(file) for file in weight_files(self._spec.path)]

    async def _load(self, changes: Mapping[str, object]) -> None:
        await self._may_reload()(changes)
        await all_ready(self._engine, self.knobs[0])

    def _may_reload(self) -> Reload:
        if self._reload is None:
            raise InvalidRequest("the model that is being served is not loaded anew for a bench", param="model")
        return self._reload

    @property
    def _model(self) -> LoadedModel:
        model = self._engine.status.model
        if model is None:
            raise NoModelLoaded("no model is loaded")
        return model

    @property
    def _spec(self) -> ModelSpec:
        spec = self._engine.status.spec
        if spec is None:
            raise NoModelLoaded("no model is loaded")
        return spec


@asynccontextmanager
async def engine_target(settings: Settings, show: Callable[[str], None]) -> AsyncIterator[EngineTarget]:
    """An engine with the model of the settings, loaded as they say, without API; a synthetic model is made for it, and
    removed afterwards if it was. Raises EngineError."""
    name = settings.model
    made = is_synthetic(name) and resolve_local(name, ()) is None
    quiet = changed(settings, {"api": False, "timeout": 0, "max_queue": MAX_QUEUE})
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ericllm-bench-")))
        if made:
            stack.callback(_remove, name)
        runtime = await Runtime.open(quiet, log_dir=folder, state_dir=folder)
        stack.enter_context(logging_to(runtime.engine.log, None, verbose=False, stderr=False))
        stack.push_async_callback(runtime.close, drain_s=0)
        await runtime.start()
        show(f"making and loading {name}" if made else f"loading {name}")
        await runtime.load(name)
        await all_ready(runtime.engine, runtime.engine.config.num_workers)

        async def reload(changes: Mapping[str, object]) -> None:
            await runtime.load(name, changes=changes)

        yield EngineTarget(runtime.engine, reload)


def _remove(name: str) -> None:
    """What was made for the bench alone."""
    path = resolve_local(name, ())
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)
