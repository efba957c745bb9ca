"""Our EXL3 reader on a GPU, against exllamav3's `get_weight_tensor()` where that is installed, and against the CPU; and
that library's drafts."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping

import msgspec
import torch
from torch import Tensor

from engine.backends.checkpoints.exl3 import Exl3Linear
from engine.config import ModelSpec
from tests.fakes.exl3_tensors import Codebook, random_exl3
from tests.gpu.answers import agreement, ask, prompts
from tests.gpu.check_formats import HALF_NATS, TOKENS
from tests.gpu.models import TINY, exl3_model
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, promise, skipped

ROWS, COLUMNS = 1024, 1536
WIDTHS: tuple[tuple[float, Codebook], ...] = (
    *((bits, "plain") for bits in range(1, 9)),
    *((bits, "mcg") for bits in range(1, 9)),
    *((bits, "mul1") for bits in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)),
)
MAX_TIES = 0.01
"""Share of weights that a sum made in another order may round to the other side."""


def checks(place: Place) -> Iterable[Row]:
    """Two rows for each width and codebook."""
    ready = all(importlib.util.find_spec(name) is not None for name in ("exllamav3", "exllamav3_ext"))
    if not ready:
        yield skipped("against exllamav3", "exllamav3 with compiled kernels is not installed")
    for bits, codebook in WIDTHS:
        tensors = random_exl3(ROWS, COLUMNS, bits, codebook=codebook)
        yield from attempt(
            f"{bits:g}-bit {codebook}", lambda t=tensors, n=f"{bits:g}-bit {codebook}": _rows(n, t, ready)
        )
    if ready:
        spec = ModelSpec(
            path=exl3_model(place, TINY),
            name="tiny",
            backend="exllamav3",
            device="cuda:0",
            max_model_len=1024,
            kv_cache_tokens=8192,
        )
        yield from attempt("drafts", lambda: drafted(spec))


def drafted(spec: ModelSpec) -> list[Row]:
    """Whether exllamav3's answers with n-grams, and with the model itself as draft model, are its plain ones."""
    rows, asked = [], prompts(5, TINY.vocab)[1:]
    plain = ask(spec, asked, TOKENS)
    for name, fields in (("n-grams", {"ngram_draft": True}), ("draft model", {"draft_model": spec.path})):
        got = ask(msgspec.structs.replace(spec, **fields), asked, TOKENS)
        found = agreement(plain, got)
        rows.append(promise(f"exllamav3, {name}", found.within(HALF_NATS, TOKENS // 2), str(found)))
        share = got.accepted / max(1, got.drafted)
        rows.append(promise(f"exllamav3, {name}: drafts", got.drafted > 0, value=share))
    return rows


def _rows(name: str, tensors: Mapping[str, Tensor], ready: bool) -> Iterable[Row]:
    ours = decoded(tensors, torch.device("cuda"))
    yield against_cpu(f"{name}, CUDA against CPU", ours, decoded(tensors, torch.device("cpu")))
    if ready:
        yield against_library(f"{name} weights equal", ours, library_weight(tensors))


def decoded(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Our reader's weight [out, in] of a layer, made on `device`, on the CPU."""
    weight = torch.empty(COLUMNS, ROWS, dtype=torch.float16, device=device)
    Exl3Linear("layer", **{name: tensor.to(device) for name, tensor in tensors.items()}).write(weight)
    return weight.cpu()


def library_weight(tensors: Mapping[str, Tensor]) -> Tensor:
    """The library's weight [out, in], on the CPU."""
    linear = importlib.import_module("exllamav3.modules.quant").LinearEXL3
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    weight: Tensor = linear(None, ROWS, COLUMNS, **on_gpu).get_weight_tensor().t().cpu()
    return weight


def against_library(name: str, ours: Tensor, theirs: Tensor) -> Row:
    """Every bit is the same."""
    wrong = int(_differing(ours, theirs).sum())
    return promise(name, not wrong, f"{wrong} of {ours.numel()} differ")


def against_cpu(name: str, ours: Tensor, cpu: Tensor) -> Row:
    """Weights are equal, but for sums at a tie of float16, which the two may make in different orders."""
    share = _differing(ours, cpu).float().mean().item()
    near = torch.allclose(ours, cpu, rtol=2**-10, atol=2**-9 * cpu.abs().max().item())
    return promise(name, near and share <= MAX_TIES, f"{share:.3%} rounded otherwise")


def _differing(one: Tensor, other: Tensor) -> Tensor:
    return one.contiguous().view(torch.int16) != other.contiguous().view(torch.int16)
