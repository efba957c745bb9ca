"""Facts about the machine for `choose`, and a trial of its choice there."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.backends.common.kv_format import HeadFormat
from engine.backends.paged_attention.choose import (
    NO_CPU,
    AttentionFacts,
    Choice,
    ImplementationName,
    Version,
    choose,
)
from engine.backends.paged_attention.interface import implementation, varlen_chunks
from engine.backends.torch_device import is_device_lost
from engine.config import AttentionName, CacheBits
from engine.errors import WorkerFailed
from engine.system.child_process import ROOT, child_environment, python_command

_IMPORT_TIMEOUT_S = 120.0
_LONG_CONTEXT = 700
"""Tokens, enough to be split over programs."""
_TOLERANCE = 0.02
"""Of 1 + a value, in half precision, after a softmax: a unit in the last place of bfloat16 is 1/128 of it."""


def probe(
    *devices: torch.device,
    page_tokens: int = 256,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 128,
    dtype: str = "float16",
    softcap: float = 0.0,
    window: int | None = None,
    cache_bits: CacheBits = 16,
    native_problem: str = NO_CPU,
) -> AttentionFacts:
    """Facts about `devices` (all that the model lies on) and about what is installed.

    flash-attn is imported in a child process only: a build for another torch ends in an ImportError at best.
    """
    on_cuda = bool(devices) and all(device.type == "cuda" for device in devices)
    flash, flash_problem = find_flash_attn() if on_cuda else (_installed("flash-attn"), "flash-attn is not installed")
    return AttentionFacts(
        capability=min(torch.cuda.get_device_capability(device) for device in devices) if on_cuda else None,
        torch=_version(torch.__version__),
        triton=_installed("triton"),
        flash=flash,
        flash_problem=flash_problem,
        page_tokens=page_tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        softcap=softcap,
        window=window,
        cache_bits=cache_bits,
        native_problem=native_problem,
    )


def engage(
    wanted: AttentionName, facts: AttentionFacts, devices: Sequence[torch.device], *, varlen: bool = False
) -> Choice:
    """`choose`, and the choice tried on each of `devices`; what fails there is passed over. varlen: True if calls will
    have chunks of different lengths.

    Raises InvalidRequest where `wanted` cannot be, or fails, and WorkerFailed as `failure` does.
    """
    while True:
        choice = choose(wanted, facts)
        problem = next(
            (found for found in (failure(choice.name, facts, device, varlen=varlen) for device in devices) if found), ""
        )
        if not problem:
            return choice
        facts = replace(facts, failed={**facts.failed, choice.name: problem})


def failure(name: ImplementationName, facts: AttentionFacts, device: torch.device, *, varlen: bool = False) -> str:
    """Return why `name` does not work on `device`, as a clause; "" where it gives what gathered pages give.

    A decode and a chunk of two short sequences, and a decode of a longer one, with the heads of the model: what a
    missing host compiler, too little shared memory or a kernel built for other cards would break.  varlen: a chunk
    beside a decode, too. Raises WorkerFailed, naming it, where it loses the device: this process cannot try another.
    """
    if name in ("gathered", "native"):  # native attention was tried when the facts said that it fits
        return ""
    try:
        chunk = min(33, facts.page_tokens)
        trials = [((1, 1), facts.page_tokens - 1), ((chunk, chunk), facts.page_tokens - 1), ((1, 1), _LONG_CONTEXT)]
        if varlen:
            trials.append(((1, chunk), _LONG_CONTEXT))
        for q_lens, context in trials:
            difference = _difference(name, facts, q_lens, context, device)
            if not difference <= _TOLERANCE:
                return f"{name} was tried on {device} and is off by {difference:.3g}"
    except Exception as error:  # whatever a compiler, a driver or a library raises
        text = (str(error) or repr(error)).strip().splitlines()[0][:200]
        if is_device_lost(error):
            lost = f"{name} attention was tried on {device}, which it broke: {text}; load with another --attention"
            raise WorkerFailed(lost) from error
        return f"{name} was tried on {device} and failed: {type(error).__name__}: {text}"
    return ""


def _difference(
    name: ImplementationName, facts: AttentionFacts, q_lens: tuple[int, int], context: int, device: torch.device
) -> float:
    """Return the largest difference of `name` from gathered pages, as a part of 1 + the value, for two sequences of
    `q_lens` new tokens that had `context` and no tokens before."""
    generator = torch.Generator().manual_seed(q_lens[1])

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, getattr(torch, facts.dtype))

    size, q_len, varies = facts.head_dim, q_lens[1], q_lens[0] != q_lens[1]
    width = -(-(context + q_len) // facts.page_tokens)
    table = torch.arange(2 * width, dtype=torch.int32).flip(0).view(2, width).to(device)
    options: dict[str, Any] = {"scale": size**-0.5, "window": facts.window, "softcap": facts.softcap}
    shape = (2 * width, facts.page_tokens, facts.kv_heads, size)
    heads = HeadFormat(size, facts.cache_bits, getattr(torch, facts.dtype).itemsize)
    attention, reference = implementation(name, heads, [device]), implementation("gathered")
    totals = [context + q_lens[0], q_lens[1]]
    rows = [drawn(2, q_len, number, size) for number in (facts.heads, facts.kv_heads, facts.kv_heads)]
    if varies:
        rows[0] = rows[0].flatten(0, 1)[: sum(q_lens)]
        counts = {"heads": facts.heads, "kv_heads": facts.kv_heads, "head_dim": size}
        options["chunks"] = varlen_chunks(attention, q_lens, totals, **counts, device=device)
    keys, values = (drawn(*shape) for _ in range(2))
    decoded = (keys.clone(), values.clone())
    if heads.is_quantised:
        keys, values = (_random_codes(shape[:3], heads, generator).to(device) for _ in range(2))
        decoded = (_decoded(keys, heads).to(rows[0].dtype), _decoded(values, heads).to(rows[0].dtype))
    if varies or heads.is_quantised:  # the new keys lie in the pages
        q, k, v, lengths = rows[0], None, None, torch.tensor(totals, dtype=torch.int32, device=device)
    else:
        q, k, v = rows
        lengths = torch.tensor([context, 0], dtype=torch.int32, device=device)
    found = attention(q, k, v, keys, values, lengths, table, **options).float()
    expected = reference(q, k, v, *decoded, lengths, table, **options).float()
    return float(((found - expected).abs() / (1 + expected.abs())).max())


def _random_codes(shape: Sequence[int], heads: HeadFormat, generator: torch.Generator) -> Tensor:
    """Return int8 [*shape, head_bytes] of elements up to about 1."""
    codes = torch.randint(-128, 128, (*shape, heads.code_bytes), generator=generator, dtype=torch.int8)
    scales = torch.rand(*shape, heads.head_dim // heads.group, generator=generator).half() / 128
    return torch.cat([codes, scales.view(torch.int8)], dim=-1)


def _decoded(stored: Tensor, heads: HeadFormat) -> Tensor:
    """Return the elements [..., head_dim] of codes [..., head_bytes], see `HeadFormat`."""
    codes, scales = stored[..., : heads.code_bytes], stored[..., heads.code_bytes :].view(torch.float16)
    if heads.bits == 4:
        codes = torch.cat([codes << 4, codes & -16], dim=-1)
    elements: Tensor = codes.unflatten(-1, (-1, heads.group)) * scales[..., None]
    return elements.flatten(-2)


def find_flash_attn() -> tuple[Version | None, str]:
    """The version of the flash-attn that this Python has and "", or None and why it cannot be used."""
    version = _installed("flash-attn")
    if version is None:
        return None, "flash-attn is not installed"
    try:
        child = subprocess.run(
            python_command("-c", "import torch; from flash_attn import flash_attn_with_kvcache"),
            cwd=ROOT,
            env=child_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=_IMPORT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return None, f"flash-attn does not import within {_IMPORT_TIMEOUT_S:.0f} s"
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"it ends with status {child.returncode}"])[-1]
        return None, f"flash-attn is installed but does not import: {last[:200]}"
    return version, ""


def _installed(distribution: str) -> Version | None:
    try:
        return _version(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return None


def _version(text: str) -> Version:
    """The leading numbers: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
