"""A device that does nothing before somebody waits for it: the CPU, with a queue in between, as a GPU has one.

What is computed with one of its tensors is put into the queue, by a tensor subclass that sees every operation; a wait
does the work, in order. Memory of the host is read when the queue comes to it, as a GPU reads pinned memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.backends.paged_attention import gathered
from engine.backends.paged_attention.choose import Choice
from engine.backends.paged_attention.interface import PagedAttention
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch import runner as runner_module
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.cuda import decode_graphs as graphs_module
from engine.backends.torch.cuda.decode_graphs import DecodeGraphs
from engine.backends.torch.cuda.step_transfer import PinnedUploader, Wait
from engine.backends.torch.native.library import Kernels
from engine.backends.torch.prompt_logprobs import ReadPromptStates
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.weights import model_loader

UNREAD = -987_654
_READS = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "unique", "masked_select", "equal")


class Queue:
    """The device. log: "launch" and "read" as they happen.  waits: how often the host read something by the way.

    breaks: raised once, by the next read of what was drawn.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.waits = 0
        self.breaks: Exception | None = None
        self._work: deque[Callable[[], object]] = deque()
        self._done = self._put = 0
        self._shapes: dict[Any, Any] = {}

    def put(self, work: Callable[[], object]) -> None:
        """Have it done after all before it."""
        self._work.append(work)
        self._put += 1

    def mark(self) -> Wait:
        """A wait for all that was put so far."""
        upto = self._put

        def wait() -> None:
            while self._done < upto:
                self._done += 1
                self._work.popleft()()

        return wait

    def read_by_the_way(self) -> None:
        """The host waits for all that was put so far."""
        self.waits += 1
        self.mark()()

    def resident(self, value: Tensor) -> QueuedTensor:
        """A tensor that lies on the device."""
        return QueuedTensor(value, self, value)

    def shapes(self, function: Any, arguments: Any, named: Mapping[str, Any]) -> Any:
        """What a call will give, but for its contents."""
        key = (function, _outline(arguments), _outline(named))
        if key not in self._shapes:
            named = _mapped(named, _empty)
            if "device" in named:
                named["device"] = torch.device("meta")
            self._shapes[key] = function(*_mapped(arguments, _empty), **named)
        return self._shapes[key]


class QueuedTensor(Tensor):
    """A tensor of the device. value: what it is, once that is computed."""

    queue: Queue
    value: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor, queue: Queue, value: Tensor | None = None) -> QueuedTensor:
        made: QueuedTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device="cpu"
        )
        return made

    def __init__(self, like: Tensor, queue: Queue, value: Tensor | None = None) -> None:
        self.queue, self.value = queue, value

    def __repr__(self, **named: Any) -> str:
        return f"QueuedTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """The host waits and reads."""
        self.queue.read_by_the_way()
        assert self.value is not None
        return self.value.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Any = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        named = named or {}
        queue = next(each.queue for each in _tensors((arguments, named)) if isinstance(each, QueuedTensor))

        def call() -> Any:
            return function(*_mapped(arguments, _value), **_mapped(named, _value))

        if function.overloadpacket.__name__ in _READS:
            queue.read_by_the_way()
            return call()
        if function._schema.is_mutable:
            queue.put(call)
            return named.get("out", arguments[0])
        found = _mapped(queue.shapes(function, arguments, named), lambda each: QueuedTensor(each, queue))

        def compute() -> None:
            for ours, theirs in zip(_tensors(found), _tensors(call()), strict=True):
                ours.value = theirs

        queue.put(compute)
        return found


def _mapped(tree: Any, to: Callable[[Tensor], Any]) -> Any:
    """Arguments or results with what `to` gives in place of each tensor."""
    match tree:
        case Tensor():
            return to(tree)
        case tuple() | list():
            return type(tree)([_mapped(each, to) for each in tree])
        case dict():
            return {name: _mapped(each, to) for name, each in tree.items()}
        case _:
            return tree


def _tensors(tree: Any) -> list[Any]:
    found: list[Any] = []
    _mapped(tree, found.append)
    return found


def _value(each: Tensor) -> Tensor | None:
    return each.value if isinstance(each, QueuedTensor) else each


def _empty(each: Tensor) -> Tensor:
    return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")


def _outline(tree: Any) -> Any:
    """What the shape of a result depends on, to look it up by."""
    match tree:
        case Tensor():
            return tree.shape, tree.stride(), tree.dtype
        case tuple() | list():
            return tuple([_outline(each) for each in tree])
        case dict():
            return tuple((name, _outline(each)) for name, each in tree.items())
        case _:
            return tree


class QueuedUploader(PinnedUploader):
    """Indices on their way to the device."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(torch.device("cpu"), lambda size: torch.empty(size, dtype=torch.uint8), queue.mark)
        self._queue = queue

    def send(self, buffer: Tensor, target: Tensor | None = None) -> Tensor:
        if target is None:
            target = self._queue.resident(torch.full((len(buffer),), 255, dtype=torch.uint8))
        return super().send(buffer, target)


class QueuedLanding:
    """Ids on their way back: nonsense until the queue has come to the copy."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def fetch(self, tensor: Tensor) -> Tensor:
        assert isinstance(tensor, QueuedTensor), "what is fetched was not computed on the device"
        host = torch.full(tensor.shape, UNREAD, dtype=tensor.dtype)
        self._queue.put(lambda: host.copy_(tensor.value))
        return host

    def mark(self) -> Wait:
        wait = self._queue.mark()

        def read() -> None:
            self._queue.log.append("read")
            wait()
            error, self._queue.breaks = self._queue.breaks, None
            if error is not None:
                raise error

        return read


class QueuedRunner(ModelRunner):
    """Notes what is launched, and which pages that writes to until it is done."""

    queue: Queue
    writing: list[set[int]]

    def forward(
        self, chunks: Sequence[ChunkInput], tell: ReadPromptStates | None = None, drawn: Tensor | None = None
    ) -> Tensor:
        size = self._kv.page_tokens if self._kv is not None else 1
        written = {page for each in chunks for page in each.pages[each.start // size : -(-each.end // size)]}
        logits = super().forward(chunks, tell, drawn)
        self.queue.log.append("launch" if drawn is None else "launch ahead")
        self.writing.append(written)
        self.queue.put(lambda: self.writing.remove(written))
        return logits


def over_pages(monkeypatch: Any) -> None:
    """Have every runner loaded from here on compute with plain torch over pages as they lie, as on CUDA, and wait for
    every step."""

    def picked(runner: ModelRunner, page_tokens: int) -> tuple[Choice, PagedAttention | None]:
        return Choice("gathered", "the test wants it"), gathered.paged_attention

    monkeypatch.setattr(model_loader, "find_kernels", lambda *_, **__: Kernels())
    for name in ("uploader_for", "readback_for"):
        monkeypatch.setattr(runner_module, name, lambda *_: None)
    monkeypatch.setattr(ModelRunner, "pick_attention", picked)


def use(monkeypatch: Any) -> tuple[type[QueuedRunner], Queue]:
    """Have every runner loaded from here on compute on a device with a queue, where steps are planned ahead; a type of
    runner that notes what it is given, and the queue."""
    queue = Queue()
    over_pages(monkeypatch)
    monkeypatch.setattr(runner_module, "uploader_for", lambda device: QueuedUploader(queue))
    monkeypatch.setattr(runner_module, "readback_for", lambda device: QueuedLanding(queue))

    class QueuedGraphs(DecodeGraphs):
        """Recordings whose buffers lie on the device."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._stages = [
                replace(
                    stage,
                    inputs=queue.resident(stage.inputs),
                    tables=queue.resident(stage.tables),
                    states=None if stage.states is None else queue.resident(stage.states),
                    outputs=tuple(queue.resident(each) for each in stage.outputs),
                )
                for stage in self._stages
            ]

    monkeypatch.setattr(graphs_module, "DecodeGraphs", QueuedGraphs)
    return type("Runner", (QueuedRunner,), {"queue": queue, "writing": []}), queue


def guard(backend: TorchBackend, runner: type[QueuedRunner]) -> None:
    """Fail where a page is given to somebody while a launched step is still to write there."""
    assert backend._scheduler is not None
    pool = backend._scheduler.pool
    allocate = pool.allocate

    def guarded(count: int) -> list[int] | None:
        pages = allocate(count)
        unsafe = set().union(*runner.writing).intersection(pages or ())
        assert not unsafe, f"a launched step writes to pages {unsafe}, which are given away"
        return pages

    pool.allocate = guarded  # type: ignore[method-assign]
