"""Parts of a load onto GPUs: how a model is spread, what is free, how far it is, and what failures mean."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch

from engine.backends.base import LoadPhase, LoadProgress
from engine.backends.checkpoints.checkpoint import Checkpoint, TensorInfo
from engine.backends.common.exllama_memory import module_bytes, stored_bytes
from engine.backends.exllama.package import Report
from engine.backends.torch_device import release_cached
from engine.config import DeviceShare, ModelSpec
from engine.errors import (
    BackendUnavailable,
    EngineError,
    InsufficientMemory,
    InvalidRequest,
    LoadCancelled,
    ModelLoadFailed,
    UnsupportedModel,
    from_info,
)
from engine.models.files import file_names
from engine.models.headers import TensorHeader, read_header
from engine.text.tokenizer_config import refuse_other_vocabulary as refuse_other_tokens

# How a model is spread over the GPUs: a pure decision. No torch here.

SplitKind = Literal["one", "given", "automatic", "tensor_parallel"]

FIRST_RESERVE_BYTES = 192 << 20
"""Left free on the first GPU by default: it also holds what a desktop or a display needs."""

OTHER_RESERVE_BYTES = 64 << 20

_ALL_GB = 99999.0
"""The library's word for "as much as there is"."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Split:
    """kind: whole layers on one GPU, by given sizes or as they fit, or every layer over all GPUs.

    gigabytes: per GPU for weights and buffers, in units of 1024**3; None leaves it to the library.
    reserve_bytes: left free on each visible GPU.  numbers: the GPUs that may be used.
    """

    kind: SplitKind
    gigabytes: tuple[float, ...] | None
    reserve_bytes: tuple[int, ...]
    numbers: tuple[int, ...]

    @property
    def names(self) -> str:
        """The GPUs that may be used, for messages."""
        return ", ".join(f"cuda:{number}" for number in self.numbers)


def plan_split(spec: ModelSpec, gpus: int, backend: str) -> Split:
    """The split that `spec` asks for on a machine of `gpus` GPUs. Raises InvalidRequest naming the setting."""
    if gpus < 1:
        raise BackendUnavailable(f"{backend} computes on NVIDIA GPUs, and torch sees none", param="backend")
    reserve = _reserve(spec, gpus)
    number = _number(spec.device, gpus, backend)
    everywhere = tuple(range(gpus))
    for param, is_set in (("gpu_split", bool(spec.gpu_split_gb)), ("tensor_parallel", spec.tensor_parallel)):
        if is_set and number is not None:
            raise InvalidRequest(
                f"{param} spreads a model over the GPUs, and device names one: {spec.device}", param=param
            )
    if len(spec.gpu_split_gb) > gpus:
        raise InvalidRequest(
            f"gpu_split names {len(spec.gpu_split_gb)} GPUs; this machine has {gpus}", param="gpu_split"
        )
    gigabytes = spec.gpu_split_gb or None
    if spec.tensor_parallel:
        return Split("tensor_parallel", gigabytes, reserve, everywhere)
    if gigabytes is not None:
        given = tuple(number for number, size in enumerate(gigabytes) if size > 0)
        return Split("given", gigabytes, reserve, given or everywhere)
    if number is not None:
        return Split("one", whole(number), reserve, (number,))
    return Split("automatic", None, reserve, everywhere)


def whole(number: int) -> tuple[float, ...]:
    """A split that puts everything on one GPU."""
    return (*(0.0,) * number, _ALL_GB)


def _reserve(spec: ModelSpec, gpus: int) -> tuple[int, ...]:
    if len(spec.gpu_reserve_mib) > gpus:
        raise InvalidRequest(
            f"gpu_reserve names {len(spec.gpu_reserve_mib)} GPUs; this machine has {gpus}", param="gpu_reserve"
        )
    default = [FIRST_RESERVE_BYTES, *[OTHER_RESERVE_BYTES] * (gpus - 1)]
    asked = [mebibytes * _MIB for mebibytes in spec.gpu_reserve_mib]
    return tuple(asked + default[len(asked) :])


def _number(device: str, gpus: int, backend: str) -> int | None:
    """The GPU that `device` names; None where it names none."""
    if device == "auto":
        return None
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise InvalidRequest(f"device is {device}; {backend} computes on cuda:0, cuda:1, ... only", param="device")
    if int(number or "0") >= gpus:
        raise InvalidRequest(f"device is {device}; this machine has {gpus} GPUs, from cuda:0 on", param="device")
    return int(number or "0")


# Drafts: how many tokens a step is to draft for each request, by a draft model or by n-grams of its own text.

DEFAULT_DRAFT_TOKENS = 4


def draft_tokens(spec: ModelSpec) -> int:
    """Tokens guessed ahead per step; 0 without speculation."""
    if spec.draft_model is None and not spec.ngram_draft:
        return 0
    return spec.draft_tokens or DEFAULT_DRAFT_TOKENS


def refuse_drafts(spec: ModelSpec, max_tokens: int) -> None:
    """Raise InvalidRequest for settings of drafts that exclude each other, or more than `max_tokens` for a step."""
    drafts = (spec.draft_model is not None) + spec.ngram_draft
    if drafts > 1:
        raise InvalidRequest("ngram_draft is not supported: a draft model is set already", param="ngram_draft")
    if spec.draft_tokens is None:
        return
    if not drafts:
        raise InvalidRequest("draft_tokens is not supported: it needs draft_model or ngram_draft", param="draft_tokens")
    if not 1 <= spec.draft_tokens <= max_tokens:
        raise InvalidRequest(
            f"draft_tokens is not supported: it must be between 1 and {max_tokens}", param="draft_tokens"
        )


def refuse_other_vocabulary(main: Path, draft: Path, main_size: int, draft_size: int) -> None:
    """Raise UnsupportedModel where a draft model's token ids mean other texts than the main model's."""
    if draft_size > main_size:
        raise UnsupportedModel(f"the draft model {draft.name} and {main.name} have different vocabularies")
    refuse_other_tokens(main, draft)


@dataclass(slots=True)
class ModelAndCache:
    """A model of the library's, loaded or about to be, and its cache."""

    model: Any
    cache: Any = None


# The GPUs as a load sees them: how many there are and what each has left.


class Gpus:
    """The visible GPUs, numbered as torch numbers them."""

    def count(self) -> int:
        """How many there are."""
        return torch.cuda.device_count()

    def free_bytes(self, number: int) -> int:
        """Bytes that a GPU can still give: the driver's number, and what torch has cached and can use again."""
        cached = torch.cuda.memory_reserved(number) - torch.cuda.memory_allocated(number)
        return int(torch.cuda.mem_get_info(number)[0]) + int(cached)

    def lift_limits(self) -> None:
        """Let torch use all of every GPU again: a load that was ended may have left it a share."""
        for number in range(self.count()):
            torch.cuda.set_per_process_memory_fraction(1.0, number)

    def give_back(self) -> None:
        """Collect what nothing refers to any more, cycles too, and return it to the driver."""
        gc.collect()
        if torch.cuda.is_initialized():
            release_cached()


# What a load took of each GPU. Pure: integers in and out.


def device_shares(
    taken_bytes: Mapping[int, int], layers: Mapping[int, int], kv_bytes: Mapping[int, int], weights_bytes: int
) -> tuple[DeviceShare, ...]:
    """The shares of the GPUs that `taken_bytes` names, which is what each has less of since the load began.

    layers, kv_bytes: of the main model, and of all caches, by GPU.  weights_bytes: of all GPUs together; they are
    shared out by layers, as the library does not say, and what else was taken is working memory. So the sum of a share
    is measured, and for a model on one GPU each of its parts is exact.
    """
    all_layers = sum(layers.values()) or 1
    shares = []
    for number, used_bytes in sorted(taken_bytes.items()):
        weights, kv = weights_bytes * layers.get(number, 0) // all_layers, kv_bytes.get(number, 0)
        shares.append(
            DeviceShare(
                device=f"cuda:{number}",
                layers=layers.get(number, 0),
                weights_bytes=weights,
                kv_bytes=kv,
                working_bytes=max(0, used_bytes - weights - kv),
            )
        )
    return tuple(shares)


# How far the weights are, in bytes: the library counts modules, the files' headers know their sizes.


class WeightsProgress:
    """Reports over all models of a load together, and ends the load between two modules where it is cancelled."""

    def __init__(self, report: Report, cancelled: Callable[[], bool], total_bytes: int) -> None:
        self._report = report
        self._cancelled = cancelled
        self._total_bytes = total_bytes
        self._before_bytes = 0

    def callback(
        self, modules: Sequence[Sequence[str]], tensors: Mapping[str, TensorHeader]
    ) -> Callable[[int, int], None]:
        """Return the callback of the library before it loads module `index` of `count` of a model, and once at the end.
        Models are loaded one after the other.

        modules: for each, the keys of the parts that it loads.
        """
        reached = [0, *accumulate(module_bytes(tensors, modules))]
        before, self._before_bytes = self._before_bytes, self._before_bytes + stored_bytes(tensors)

        def step(index: int, count: int) -> None:
            self.raise_if_cancelled()
            self._say("weights", before + reached[min(index, count)], self._total_bytes)

        return step

    def cache(self, cache_bytes: int, *, done: bool) -> None:
        """Report the cache, which is allocated in one go."""
        self.raise_if_cancelled()
        self._say("kv_cache", cache_bytes if done else 0, cache_bytes)

    def kernels(self, done: int, total: int) -> None:
        """Report kernels that are compiled once everything is loaded."""
        self.raise_if_cancelled()
        self._report(LoadProgress(phase="kernels", done=done, total=total, unit="steps"))

    def raise_if_cancelled(self) -> None:
        """Raise LoadCancelled where it was."""
        if self._cancelled():
            raise LoadCancelled("the load was cancelled")

    def _say(self, phase: LoadPhase, done: int, total: int) -> None:
        self._report(LoadProgress(phase=phase, done=done, total=total))


def open_all_files(folder: Path, names: Collection[str] | None = None) -> Checkpoint:
    """Open all files that a library takes tensors from, whatever an index says. Raises ModelLoadFailed where two
    tensors have the same name, as it is undefined which the library takes.

    names: those that the library makes of the tensors', where it makes others.
    """
    files = [folder / name for name in file_names(folder) if name.endswith(".safetensors") and name[0] != "."]
    headers = [(file, name, header) for file in files for name, header in read_header(file).items()]
    if len({name for _, name, _ in headers} if names is None else names) != len(headers):
        raise ModelLoadFailed(f"the weight files in {folder} have tensors of the same name")
    return Checkpoint({name: TensorInfo(file, header.shape, header.dtype) for file, name, header in headers})


# What the library's exceptions during a load mean, as errors of ours. Pure.


@dataclass(frozen=True, slots=True)
class LoadNumbers:
    """Memory that a load needed, and memory that was free, for the error messages of a backend.

    other_bytes: work buffers and reserves, estimated.  split: whether gpu_split was given.
    """

    backend: str
    name: str
    devices: str
    weights_bytes: int = 0
    cache_bytes: int = 0
    other_bytes: int = 0
    free_bytes: int = 0
    split: bool = False


def explain_load(error: Exception, numbers: LoadNumbers) -> EngineError:
    """The error to raise for `error`: always a new one, so that no traceback keeps tensors alive."""
    if isinstance(error, EngineError):
        return from_info(error.info)
    text = str(error).replace("##", "").strip()
    reason = (text.splitlines() or ["no reason given"])[0].strip()
    if _is_out_of_memory(error, text):
        return _does_not_fit(numbers)
    if text.startswith("Could not find"):
        return UnsupportedModel(f"{numbers.name} is not complete: {reason[:1].lower()}{reason[1:]}")
    if isinstance(error, AssertionError):
        return ModelLoadFailed(f"{numbers.backend} refuses {numbers.name}: {reason}")
    return ModelLoadFailed(f"{numbers.backend} could not load {numbers.name}: {type(error).__name__}: {reason}")


def _is_out_of_memory(error: Exception, text: str) -> bool:
    signs = (
        "Insufficient VRAM",
        "Insufficient space in device allocation",
        "CUDA out of memory",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "HIP out of memory",
    )
    return type(error).__name__ == "OutOfMemoryError" or any(sign in text for sign in signs)


def _does_not_fit(numbers: LoadNumbers) -> InsufficientMemory:
    needed = numbers.weights_bytes + numbers.cache_bytes + numbers.other_bytes
    advice = (
        "gpu_split must leave memory for the KV cache and work buffers"
        if numbers.split
        else "reduce the KV cache, its bits or max_model_len"
    )
    return InsufficientMemory(
        f"{numbers.name} does not fit on {numbers.devices}: weights {numbers.weights_bytes // _MIB} MiB, KV cache "
        f"{numbers.cache_bytes // _MIB} MiB, work buffers and reserve about {numbers.other_bytes // _MIB} MiB, of "
        f"{numbers.free_bytes // _MIB} MiB free; {advice}",
        device=numbers.devices,
        needed_bytes=needed,
        free_bytes=numbers.free_bytes,
        short_bytes=max(0, needed - numbers.free_bytes),
    )
