"""Engine: one model, its workers and its queue. An async object that lives on the loop it was started on."""

from __future__ import annotations

from engine.backends.base import LoadedModel
from engine.config import EngineConfig, ModelSpec
from engine.devices import DeviceProbe
from engine.log import LogRing
from engine.request import GenerateRequest
from engine.snapshot import Snapshot
from engine.stream import RequestStream, StreamDelta
from engine.text import Tokenizer
from engine.worker.hosts import BackendFactory

__all__ = ["Engine", "GenerateRequest", "RequestStream", "StreamDelta"]


class Engine:
    """Loads a model, spreads requests over its workers, and says how it is doing.

    Every method but `snapshot` belongs to the loop that `start` ran on. `log` may be used from any thread.
    tokenizer: of the model that is loading or loaded, else None.
    """

    log: LogRing
    tokenizer: Tokenizer | None

    def __init__(
        self,
        config: EngineConfig,
        *,
        backend_factory: BackendFactory | None = None,
        probe: DeviceProbe | None = None,
    ) -> None: ...

    async def start(self) -> None:
        """Begin to sample; before anything else."""

    async def close(self, drain_s: float = 5.0) -> None:
        """Refuse new requests, give running ones `drain_s`, then stop every worker. Idempotent."""

    async def load(self, spec: ModelSpec) -> LoadedModel:
        """Load `spec` and return when its first worker is ready; a loaded model is drained and unloaded first.

        The load goes on if the caller is cancelled. Raises ModelLoadFailed and its children, EngineBusy, EngineClosed.
        """
        raise NotImplementedError

    async def cancel_load(self) -> None:
        """Stop the load under way, if any; returns when its workers are gone. `load` then raises LoadCancelled."""

    async def unload(self, drain_s: float = 30.0) -> None:
        """Give running requests `drain_s`, end the rest with an error, and unload. Cancels a load under way."""

    async def reconfigure(self, *, workers: int | None = None, max_prompts: int | None = None) -> None:
        """Set the targets; growth and shrinking go on in the background. Raises InvalidRequest out of range."""

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Queue a request and return its stream.

        A max_tokens that does not fit after the prompt is cut to the room there is (finish is then "length").
        Raises NoModelLoaded, QueueFull, ContextLengthExceeded, InvalidRequest or EngineClosed.
        """
        raise NotImplementedError

    def cancel(self, request_id: str) -> bool:
        """End a live request with finish "cancelled"; False if there is none of that id."""
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        """The engine now; from another thread the one published last, at most 0.25 s old."""
        raise NotImplementedError
