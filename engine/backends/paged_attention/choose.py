"""Choice of the paged attention: a pure decision over facts of the machine and the model. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.config import AttentionName, CacheBits
from engine.errors import InvalidRequest

ImplementationName = Literal["flash", "triton", "varlen", "gathered", "native"]
Version = tuple[int, ...]

NO_CPU = "the native kernels are for CPUs only"

ORDER: tuple[ImplementationName, ...] = ("flash", "triton", "varlen", "gathered")
"""From the best on, on CUDA. See `choose`."""

_FLASH_SINCE: Version = (2, 5, 7)
_FLASH_SOFTCAP_SINCE: Version = (2, 6)
_TRITON_SINCE: Version = (2, 3)
_VARLEN_SINCE: Version = (2, 12)
_AMPERE = (8, 0)
_TURING = (7, 5)
_MAX_HEAD_DIM = 256
_FLASH_PAGE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """Facts about the machine and the model that decide.

    capability: compute capability, the lowest of all devices that the model lies on; None without CUDA.
    torch, triton, flash: versions; None where it is not installed or does not import, `flash_problem` saying why.
    heads, kv_heads: of the model, with which a choice is tried; of a part of them where the model is not known.
    dtype: as torch names it, such as "float16".
    cache_bits: of keys and values in the pages; below 16 they are codes, which on CUDA Triton reads, or are gathered.
    native_problem: why the torch backend's native kernels cannot attend here, as a clause; "" where they can.
    failed: implementations that were tried on the device and did not work, and how.
    """

    capability: tuple[int, int] | None
    torch: Version
    triton: Version | None = None
    flash: Version | None = None
    flash_problem: str = "flash-attn is not installed"
    page_tokens: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    dtype: str = "float16"
    softcap: float = 0.0
    window: int | None = None
    cache_bits: CacheBits = 16
    native_problem: str = NO_CPU
    failed: Mapping[ImplementationName, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which implementation, and one sentence that says why."""

    name: ImplementationName
    reason: str


def choose(wanted: AttentionName, facts: AttentionFacts) -> Choice:
    """Return the attention that `--attention wanted` comes to. Raises InvalidRequest, with the reason, where `wanted`
    cannot be.

    Without CUDA, "auto" takes native where it fits and gathered where it does not; else the first that fits of:
    flash: hand-tuned for what it takes, appends and splits long contexts in one launch.
    triton: does the same in two or three launches, for any page size and soft-cap. Not taken unasked on a Turing
        card: Triton supports 8.0 and newer. For 7.5 it compiles without tensor cores, and some versions' compiler
        ends the process.
    varlen: FlashAttention 2 within torch, which needs no host compiler as Triton does; but the append is a handful
        of small kernels, and long contexts are split only for grouped queries.
    gathered: copies all pages at every call; runs everywhere.
    """
    if wanted != "auto":
        problem = obstacle(wanted, facts)
        if problem:
            raise InvalidRequest(f"--attention {wanted} is not available: {problem}", param="attention", value=wanted)
        return Choice(wanted, "set by --attention")
    if facts.capability is None:
        problem = obstacle("native", facts)
        if not problem:
            return Choice("native", "no CUDA device")
        return Choice("gathered", f"no CUDA device; {problem}")
    passed: list[str] = []
    for name in ORDER:
        problem = obstacle(name, facts) or _automatic_obstacle(name, facts)
        if not problem:
            return Choice(name, "; ".join(passed) or "flash-attn is installed")
        passed.append(problem)
    raise AssertionError("gathered pages fit everywhere")


def obstacle(name: ImplementationName, facts: AttentionFacts) -> str:
    """Why `name` cannot be used here, as a clause; "" where it can."""
    if name == "native":
        return _native(facts)
    if facts.capability is None and name != "gathered":
        return f"{name} attention needs a CUDA device"
    if facts.cache_bits != 16 and name not in ("triton", "gathered"):
        return f"{name} attention cannot read a KV cache of {facts.cache_bits} bits"
    return facts.failed.get(name, "") or _OBSTACLES[name](facts)


def _native(facts: AttentionFacts) -> str:
    return NO_CPU if facts.capability is not None else facts.native_problem


def _automatic_obstacle(name: ImplementationName, facts: AttentionFacts) -> str:
    if name == "triton" and _capability(facts) < _AMPERE:
        return f"Triton needs compute capability 8.0, not {_dotted(_capability(facts))}"
    return ""


def _flash(facts: AttentionFacts) -> str:
    if facts.flash is None:
        return facts.flash_problem
    if facts.flash < _FLASH_SINCE:
        return f"flash-attn is {_dotted(facts.flash)}, which has no paged KV cache; 2.5.7 has"
    if facts.softcap and facts.flash < _FLASH_SOFTCAP_SINCE:
        return f"flash-attn is {_dotted(facts.flash)}, which has no soft-cap; 2.6 has"
    return _flash_kernels("flash-attn", facts)


def _varlen(facts: AttentionFacts) -> str:
    if facts.torch < _VARLEN_SINCE:
        return f"torch is {_dotted(facts.torch)}; its varlen_attn reads KV pages since 2.12"
    if facts.softcap:
        return "torch's varlen_attn has no soft-cap, which this model needs"
    return _flash_kernels("torch's varlen_attn", facts)


def _flash_kernels(who: str, facts: AttentionFacts) -> str:
    """Return the obstacle that flash-attn and torch's copy of it share."""
    if _capability(facts) < _AMPERE:
        return f"{who} needs compute capability 8.0 on every device; one has {_dotted(_capability(facts))}"
    if facts.dtype == "float32":
        return f"{who} needs float16 or bfloat16, not float32"
    if facts.page_tokens % _FLASH_PAGE_TOKENS:
        return f"{who} needs pages of a multiple of 256 tokens, not {facts.page_tokens}"
    if facts.head_dim > _MAX_HEAD_DIM or facts.head_dim % 8:
        return f"{who} needs a head size that is a multiple of 8, max 256, not {facts.head_dim}"
    return ""


def _triton(facts: AttentionFacts) -> str:
    capability = _capability(facts)
    if facts.triton is None:
        return "triton is not installed"
    if facts.triton < _TRITON_SINCE:
        return f"triton is {_dotted(facts.triton)}; the kernel needs 2.3"
    if capability < _TURING:
        return f"the Triton kernel needs compute capability 7.5, not {_dotted(capability)}"
    if facts.dtype == "float32":
        return "the Triton kernel needs float16 or bfloat16, not float32"
    if facts.dtype == "bfloat16" and capability < _AMPERE:
        return f"bfloat16 needs compute capability 8.0, not {_dotted(capability)}"
    if facts.head_dim > _MAX_HEAD_DIM:
        return f"the Triton kernel needs a head size of max 256, not {facts.head_dim}"
    return ""


_OBSTACLES: Mapping[ImplementationName, Callable[[AttentionFacts], str]] = {
    "flash": _flash,
    "triton": _triton,
    "varlen": _varlen,
    "gathered": lambda facts: "",
}


def _capability(facts: AttentionFacts) -> tuple[int, int]:
    return facts.capability or (0, 0)


def _dotted(version: Version) -> str:
    return ".".join(str(part) for part in version)
