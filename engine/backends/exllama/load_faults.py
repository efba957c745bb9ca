"""What the library's exceptions during a load mean, as errors of ours. Pure; no torch here."""

from __future__ import annotations

from dataclasses import dataclass

from engine.backends.exllama.import_faults import first_line
from engine.errors import EngineError, InsufficientMemory, ModelLoadFailed, UnsupportedModel, from_info

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadNumbers:
    """What a load was about to need, and what there was, for its error messages.

    other_bytes: work buffers and reserves, estimated.  split: whether gpu_split was given.
    """

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
    if _is_out_of_memory(error, text):
        return _does_not_fit(numbers)
    if text.startswith("Could not find"):
        return UnsupportedModel(f"{numbers.name} is not complete: {_lower(first_line(text))}")
    if isinstance(error, AssertionError):
        return ModelLoadFailed(f"exllamav2 refuses {numbers.name}: {first_line(text)}")
    return ModelLoadFailed(f"exllamav2 could not load {numbers.name}: {type(error).__name__}: {first_line(text)}")


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
        "gpu_split has to leave room for the cache and for work buffers"
        if numbers.split
        else "a smaller KV cache, one of fewer bits or a smaller max_model_len takes less"
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


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
