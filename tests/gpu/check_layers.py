"""The Triton kernels of a layer on CUDA: against torch's separate operations at the sizes of real models, and what both
take; a mixture of experts that is recorded and launched ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

import msgspec
import torch
from torch import Tensor

from engine.backends.common.families.experts import Experts
from engine.backends.common.gguf_codes import Codes
from engine.backends.common.rope_config import RopeConfig
from engine.backends.torch.cuda.coded_linear import CodedKernels, CodedLinear
from engine.backends.torch.cuda.grouped_experts import CodedExperts, GroupedExperts, PlainExperts, experts_problem
from engine.backends.torch.cuda.layer_ops import DTYPES, HeadNormWeight, LayerOps, layer_ops_problem
from engine.backends.torch.cuda.packed_matrix import random_matrix
from engine.backends.torch.model.linear import PlainLinear
from engine.backends.torch.model.mlp import GatedMlp, MixtureMlp
from engine.backends.torch.model.norms import HeadNorm, RmsNorm, norm_without_weight
from engine.backends.torch.model.rope import RotaryEmbedding, rotate_
from tests.fakes.tiny_models import make_tiny_model
from tests.gpu import check_formats
from tests.gpu.check_ahead import alike
from tests.gpu.check_attention import microseconds
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, measured, promise

WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
MIXTURE = Experts(layers=(True,), count=128, per_token=8, inner=768)
MIXTURE_WIDTH = 2048
_UNITS = 4
"""Units in the last place of a row's largest number by which results may differ: sums and roots in another order."""


def checks(place: Place) -> Iterable[Row]:
    """Rows for each dtype, then speeds."""
    device = torch.device("cuda:0")
    for dtype in DTYPES:
        title = str(dtype).removeprefix("torch.")
        problem = layer_ops_problem([device], dtype, "silu") or experts_problem([device], dtype, "silu", MIXTURE)
        yield promise(f"{title}: kernels", not problem, problem)
        for rows in (1, 7, 300):
            yield from attempt(f"{title}: {rows} rows", partial(equal, title, Layer(rows, dtype, device)))
        yield from attempt(f"{title}: experts", partial(equal_experts, mixture(MIXTURE, MIXTURE_WIDTH, dtype, device)))
        few = Experts(layers=(True,), count=16, per_token=4, inner=768)
        coded = partial(coded_mixture, few, MIXTURE_WIDTH, dtype, device)
        yield from attempt(f"{title}: experts in codes", lambda c=coded: equal_experts(c(), (1, 64, 700)))  # type: ignore[misc]
    yield from attempt("mixture", partial(_mixture_answers, place))
    for method in ("gptq", "awq", "fp8-channel"):
        yield from attempt(f"mixture, {method}", partial(_coded_answers, place, method))
    for rows in (1, 64) if place.quick else (1, 16, 64, 512, 2048):
        yield from attempt(f"{rows} rows", partial(_times, rows, device))


class Layer:
    """Random inputs of what lies between the products of a layer."""

    def __init__(
        self,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        width: int = WIDTH,
        inner: int = INNER,
        heads: tuple[int, int, int] = (HEADS, KV_HEADS, HEAD_DIM),
    ) -> None:
        generator = torch.Generator().manual_seed(rows)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.ops, self.rows = LayerOps(device), rows
        self.heads, kv_heads, size = heads
        self.turned = self.heads + kv_heads
        self.hidden, self.added, self.both = random(rows, width), random(rows, width), random(rows, 2 * inner)
        self.norm = RmsNorm(random(width), 1e-6)
        self.mlp = GatedMlp(PlainLinear(self.both, None), PlainLinear(self.both, None))
        self.qkv = random(rows, self.heads + 2 * kv_heads, size)
        self.head_norm = HeadNorm(norm_without_weight("rms", size, 1e-6), random(self.turned, size), 1e-6)
        angles = RotaryEmbedding(RopeConfig(), size, device)
        self.angles = angles.angles(torch.arange(rows, device=device), dtype)
        self.pages = torch.zeros(rows, 1, 2 * kv_heads, size, dtype=dtype, device=device)
        self.slots = torch.randperm(rows, generator=generator).to(device)

    def add_norm(self) -> tuple[Tensor, ...]:
        """One kernel; the sum, which replaces `hidden`, and its norm."""
        return self.hidden, self.ops.add_norm(self.hidden, self.added, self.norm.weight, self.norm.eps)

    def add_norm_separately(self) -> tuple[Tensor, ...]:
        """Torch's sum and norm."""
        total = self.hidden + self.added
        return total, self.norm(total)

    def rotate(self) -> tuple[Tensor, ...]:
        """One kernel; queries, which are replaced, and pages."""
        norm = HeadNormWeight("rms", self.head_norm.weight, 1e-6)
        self.ops.rotate_and_write(self.qkv, self.heads, norm, self.angles, self.pages, self.slots)
        return self.qkv[:, : self.heads], self.pages

    def rotate_separately(self) -> tuple[Tensor, ...]:
        """Torch's, which replaces keys too."""
        turned = self.qkv[:, : self.turned]
        turned.copy_(self.head_norm(turned))
        rotate_(turned, *self.angles)
        self.pages.flatten(0, 1).index_copy_(0, self.slots, self.qkv[:, self.heads :])
        return self.qkv[:, : self.heads], self.pages

    def gate(self) -> tuple[Tensor, ...]:
        """One kernel."""
        return (self.ops.activate_gate(self.both, "silu"),)

    def gate_separately(self) -> tuple[Tensor, ...]:
        """Torch's silu and product."""
        return (self.mlp.activate_gate(self.both),)

    @property
    def pairs(self) -> dict[str, tuple[Callable[[], tuple[Tensor, ...]], Callable[[], tuple[Tensor, ...]]]]:
        """Each kernel, and what torch does in its place."""
        return {
            "sum and norm": (self.add_norm, self.add_norm_separately),
            "rotation and KV write": (self.rotate, self.rotate_separately),
            "gate": (self.gate, self.gate_separately),
        }


def equal(title: str, layer: Layer) -> Iterable[Row]:
    """Whether each kernel gives what torch gives from the same inputs."""
    for name, (ours, theirs) in layer.pairs.items():
        changing = (layer.hidden, layer.qkv, layer.pages)
        before = [each.clone() for each in changing]
        expected = [each.clone() for each in theirs()]
        for tensor, value in zip(changing, before, strict=True):
            tensor.copy_(value)
        worst = max(units(found, each) for found, each in zip(ours(), expected, strict=True))
        detail = f"units in the last place, max {_UNITS}"
        yield promise(f"{title}: {name}, {layer.rows} rows", worst <= _UNITS, detail, value=worst)


def units(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units in the last place of the largest number of its row; infinite where one is not
    finite."""
    size = expected.float().abs().amax(dim=-1, keepdim=True)
    error = (found.float() - expected.float()).abs() / (torch.finfo(expected.dtype).eps * size).clamp(min=1e-30)
    return float(error.nan_to_num(nan=torch.inf).max())


def mixture(experts: Experts, width: int, dtype: torch.dtype, device: torch.device) -> MixtureMlp:
    """A mixture with random weights, all experts grouped."""
    generator = torch.Generator(device).manual_seed(1)

    def random(outputs: int, inputs: int) -> Tensor:
        return (torch.randn(outputs, inputs, generator=generator, device=device) / inputs**0.5).to(dtype)

    gate_ups = [random(2 * experts.inner, width) for _ in range(experts.count)]
    downs = [random(width, experts.inner) for _ in range(experts.count)]
    mlps = tuple(
        GatedMlp(PlainLinear(up, None), PlainLinear(down, None)) for up, down in zip(gate_ups, downs, strict=True)
    )
    ops = LayerOps(device)
    grouped = GroupedExperts(ops, PlainExperts(ops, gate_ups, downs, "silu"), len(mlps))
    router = PlainLinear(random(experts.count, width), None)
    return MixtureMlp(router, mlps, experts.per_token, normalised=True, grouped=grouped)


def coded_mixture(experts: Experts, width: int, dtype: torch.dtype, device: torch.device) -> MixtureMlp:
    """A mixture of random GPTQ codes, all experts grouped."""
    kernels, ops = CodedKernels(device), LayerOps(device)

    def layer(rows: int, inputs: int, seed: int, parts: int = 1) -> CodedLinear:
        codes = Codes("GPTQ", rows, inputs, 2)
        found = [random_matrix(codes, device, seed + at)[0] for at in range(parts)]
        # At the size that keeps numbers as large as they are: codes are off by up to 16, as their scales are by 0.03.
        for matrix in found:
            matrix.scale.div_(4 * inputs**0.5 * 0.03)
        return CodedLinear(kernels, found, dtype)

    gate_ups = [layer(experts.inner, width, 3 * at, parts=2) for at in range(experts.count)]
    downs = [layer(width, experts.inner, 3 * at + 2) for at in range(experts.count)]
    mlps = tuple(GatedMlp(up, down) for up, down in zip(gate_ups, downs, strict=True))
    grouped = GroupedExperts(ops, CodedExperts(ops, gate_ups, downs, "silu"), experts.count)
    router = torch.randn(experts.count, width, generator=torch.Generator().manual_seed(1)) / width**0.5
    return MixtureMlp(
        PlainLinear(router.to(device, dtype), None), mlps, experts.per_token, normalised=True, grouped=grouped
    )


def equal_experts(whole: MixtureMlp, rows: Iterable[int] = (1, 64, 300, 700)) -> Iterable[Row]:
    """Whether the grouped experts give what they give one by one."""
    assert isinstance(whole.router, PlainLinear)
    weight, limit = whole.router.weight, 8
    for count in rows:
        x = torch.randn(count, weight.shape[1], generator=torch.Generator().manual_seed(count)).to(weight)
        assert whole.grouped is not None
        logits = whole.router(x)
        chosen, weights = whole.grouped.route(logits, whole.per_token, normalised=True)
        yield promise(f"experts of {count} rows", *_routes_alike(whole, logits, chosen, weights))
        worst = units(whole.grouped(x, chosen, weights), whole._mix(x, chosen.long(), weights, 0))
        kind = "" if isinstance(whole.experts[0].down, PlainLinear) else " in codes"
        title = f"{str(weight.dtype).removeprefix('torch.')}: {len(whole.experts)} experts{kind}, {count} rows"
        yield promise(title, worst <= limit, f"units in the last place, max {limit}", value=worst)


def _routes_alike(whole: MixtureMlp, logits: Tensor, chosen: Tensor, weights: Tensor) -> tuple[bool, str]:
    """Whether rows whose logits are all different go to the same experts, and how many those are."""
    expected, shares = whole._route(logits)
    clear = torch.tensor([len(set(row)) == len(row) for row in logits.tolist()], device=logits.device)
    same = (chosen == expected).all(dim=-1) & ((weights - shares).abs().amax(dim=-1) < 1e-5)
    return bool((same | ~clear).all()), f"{int(clear.sum())} of {len(logits)} rows have no two equal logits"


def _mixture_answers(place: Place) -> list[Row]:
    place.models.mkdir(parents=True, exist_ok=True)
    folder = make_tiny_model(place.models / "mixture", "MixtralForCausalLM", with_tokenizer=False)
    return alike(folder, "cuda:0", dtype="float16")


def _coded_answers(place: Place, method: Literal["gptq", "awq", "fp8-channel"]) -> list[Row]:
    rows = alike(check_formats.coded_mixture(place, method), "cuda:0", dtype="float16")
    return [msgspec.structs.replace(row, name=f"mixture, {method}: {row.name}") for row in rows]


def _times(rows: int, device: torch.device) -> Iterable[Row]:
    """Microseconds of the device, from recorded calls; of experts one by one, which cannot be recorded, of the host."""
    layer = Layer(rows, torch.bfloat16, device)
    for name, (ours, theirs) in layer.pairs.items():
        separate = microseconds(_recorded(theirs))
        yield measured(f"{name}, {rows} rows", microseconds(_recorded(ours)), "us", f"separate: {separate:.1f} us")
    whole = mixture(MIXTURE, MIXTURE_WIDTH, torch.bfloat16, device)
    x = torch.randn(rows, MIXTURE_WIDTH, device=device, dtype=torch.bfloat16)
    separate = microseconds(lambda: whole._mix(x, *whole._route(whole.router(x)), 0), calls=3)
    grouped = microseconds(_recorded(lambda: whole(x, 0)))
    yield measured(f"128 experts, {rows} rows", grouped, "us", f"one by one: {separate:.0f} us")


def _recorded(action: Callable[[], object]) -> Callable[[], None]:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        action()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        action()
    replay: Callable[[], None] = graph.replay
    return replay
