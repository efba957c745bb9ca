"""Products from the codes of a GGUF file are those of the decoded numbers, whatever the formats, the shape, the batch,
the threads and the CPU; nothing but the rows of x is rounded."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from engine.backends.checkpoints.gguf import dequantise
from engine.backends.common.families.base import Traits, full_attention
from engine.backends.common.families.experts import Experts
from engine.backends.common.gguf_codes import CODED_FORMATS, CodedTensors, Codes, coded_bytes, place_blocks
from engine.backends.torch.native.layer import (
    CodedEmbedding,
    FusedLinear,
    NativeLinear,
    looks_up_codes,
    matches_codes,
    pack_codes,
    rounds_rows,
)
from engine.backends.torch.native.library import NativeLibrary
from engine.models.gguf.header import FORMATS
from tests.fakes.bounds import within_bounds
from tests.fakes.native_libraries import LIBRARIES, native

pytestmark = pytest.mark.long

BLOCKS = {block.name: block for block in FORMATS.values()}
HALVES = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}
"""Where a block has floats of 16 bits, if not in its first two places."""

ROWS = (0, 1, 2, 3, 5, 8, 9, 17, 40, 130)
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return native(request.param)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def random_codes(name: str, rows: int, inputs: int, seed: int = 1) -> tuple[Tensor, Codes]:
    """Any bytes, but for scales that are finite."""
    block, draw = BLOCKS[name], np.random.default_rng(seed)
    count = inputs // block.values
    raw = draw.integers(0, 256, (rows, count, block.num_bytes), dtype=np.uint8)
    for at in HALVES.get(name, (0, 2)):
        raw[:, :, at : at + 2] = draw.uniform(-0.02, 0.02, (rows, count, 1)).astype(np.float16).view(np.uint8)
    return torch.from_numpy(raw.reshape(rows, -1)), Codes(name, rows, inputs)


def layer_of(
    library: NativeLibrary, dtype: torch.dtype, *parts: tuple[Tensor, Codes], gates: bool = False
) -> tuple[NativeLinear, Tensor]:
    """A layer and the numbers that it multiplies by, in double."""
    rows, codes = [raw for raw, _ in parts], [each for _, each in parts]
    layer = pack_codes(library, rows, codes, dtype, None, interleaved=gates)
    assert layer.weight.nbytes == coded_bytes(codes, gates=gates)
    return layer, torch.cat([dequantise(raw, each.format) for raw, each in parts]).double()


def random(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded(x: Tensor) -> Tensor:
    """Rows as products read them: each 32 inputs as whole numbers up to 127 times a scale, in double."""
    groups = x.float().unflatten(1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    return ((groups * inverse).round().double() * (largest / 127).double()).reshape(x.shape)


def assert_products(layer: NativeLinear, weight: Tensor, dtype: torch.dtype) -> None:
    for count in ROWS:
        x = random(count, weight.shape[1], dtype=dtype, seed=count)
        found = layer(x)
        exact = rounded(x) @ weight.T
        size = float(exact.abs().max()) if count else 0.0
        rounding = 2**-8 if dtype is torch.bfloat16 else 2**-20
        torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=size * 2**-18)
        alone = [layer(row.unsqueeze(0)) for row in x]
        assert torch.equal(found, torch.cat(alone) if alone else found)


@both_dtypes
@pytest.mark.parametrize("name", CODED_FORMATS)
@pytest.mark.parametrize(("outputs", "blocks"), [(16, 1), (48, 3), (37, 2), (1, 1), (130, 5)])
def test_a_product_is_the_one_of_the_decoded_numbers(
    library: NativeLibrary, dtype: torch.dtype, name: str, outputs: int, blocks: int
) -> None:
    layer, weight = layer_of(library, dtype, random_codes(name, outputs, blocks * BLOCKS[name].values))
    assert_products(layer, weight, dtype)


@both_dtypes
@pytest.mark.parametrize("name", CODED_FORMATS)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (37, 3), (160, 5)])
def test_rows_that_are_looked_up_are_the_decoded_numbers_to_the_bit(
    library: NativeLibrary, dtype: torch.dtype, name: str, rows: int, blocks: int
) -> None:
    layer, weight = layer_of(library, dtype, random_codes(name, rows, blocks * BLOCKS[name].values))
    embedding = CodedEmbedding(layer)
    ids = torch.randint(rows, (200,), generator=torch.Generator().manual_seed(0))
    for some in (ids, ids[::3], ids[:1], ids[:0]):
        assert torch.equal(embedding(some), weight[some].to(dtype))


@pytest.mark.parametrize("missing", [-1, 37, 48, 2**40])
def test_a_row_that_there_is_not_is_refused(library: NativeLibrary, missing: int) -> None:
    layer, _ = layer_of(library, torch.float32, random_codes("Q4_0", 37, 64))
    with pytest.raises(IndexError, match="an id is not one of 37"):
        CodedEmbedding(layer)(torch.tensor([0, missing]))


@both_dtypes
def test_outputs_of_one_layer_may_be_of_several_formats(library: NativeLibrary, dtype: torch.dtype) -> None:
    parts = [random_codes(name, 32 + 16 * place, 512, place) for place, name in enumerate(CODED_FORMATS)]
    assert_products(*layer_of(library, dtype, *parts), dtype)


@both_dtypes
@pytest.mark.parametrize("names", [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K")])
@pytest.mark.parametrize("inner", [32, 70])
def test_the_first_half_of_the_outputs_gates_the_second(
    library: NativeLibrary, dtype: torch.dtype, names: tuple[str, str], inner: int
) -> None:
    parts = [random_codes(name, inner, 256, seed) for seed, name in enumerate(names)]
    layer, weight = layer_of(library, dtype, *parts, gates=True)
    fused = FusedLinear(layer, activation="silu")
    assert rounds_rows(fused.format)
    x = random(9, 256, dtype=dtype)
    gate, up = (rounded(x) @ weight.T).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    rounding = 2**-7 if dtype is torch.bfloat16 else 2**-18
    torch.testing.assert_close(fused(x).double(), exact, rtol=rounding, atol=float(exact.abs().max()) * 2**-16)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_what_the_package_quantises_is_multiplied_as_it_says(library: NativeLibrary, name: str) -> None:
    values = random(32, 128, dtype=torch.float32).numpy()
    raw = quants.quantize(values, GGMLQuantizationType[name])
    layer, _ = layer_of(library, torch.float32, (torch.from_numpy(raw), Codes(name, 32, 128)))
    theirs = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[name])).double()
    assert_products(layer, theirs, torch.float32)


def test_a_row_that_is_not_finite_makes_its_own_products_nan_alone(library: NativeLibrary) -> None:
    layer, _ = layer_of(library, torch.float32, random_codes("Q4_K", 32, 256))
    x = random(3, 256, dtype=torch.float32)
    clean = layer(x)
    x[1, 7] = torch.inf
    found = layer(x)
    assert found[1].isnan().all()
    assert torch.equal(found[0::2], clean[0::2])


def test_threads_change_nothing(library: NativeLibrary) -> None:
    layer, _ = layer_of(library, torch.bfloat16, random_codes("Q5_K", 200, 512))
    x = random(33, 512, dtype=torch.bfloat16)
    found = layer(x)
    torch.set_num_threads(1)
    assert torch.equal(layer(x), found)


@both_dtypes
@pytest.mark.parametrize("name", CODED_FORMATS)
def test_every_cpu_with_avx512_gives_the_same_to_the_bit(name: str, dtype: torch.dtype) -> None:
    libraries = [native(each) for each in LIBRARIES if each != "avx2"]
    x = random(130, 3 * BLOCKS[name].values, dtype=dtype)
    x[7], x[45, 0] = float("nan"), float("inf")
    part = random_codes(name, 70, x.shape[1])
    layers = [layer_of(library, dtype, part)[0] for library in libraries]
    for rows in (*range(1, 71), 130):
        for layer in layers[1:]:
            torch.testing.assert_close(layer(x[:rows]), layers[0](x[:rows]), rtol=0, atol=0, equal_nan=True)


def test_a_block_of_two_formats_has_no_place() -> None:
    assert place_blocks([Codes("Q4_K", 24, 256), Codes("Q6_K", 24, 256)]) is None
    assert place_blocks([Codes("Q4_K", 24, 256), Codes("Q6_K", 24, 256)], gates=True) is not None
    assert place_blocks([Codes("Q4_K", 24, 256), Codes("Q4_K", 24, 256)]) is not None
    between = [Codes("Q8_0", 24, 256), Codes("Q4_0", 4, 256), Codes("Q8_0", 4, 256)]
    assert place_blocks(between) is coded_bytes(between) is None


@pytest.mark.parametrize("gates", [False, True])
def test_what_codes_take_is_known_without_their_places(gates: bool) -> None:
    for name in CODED_FORMATS:
        parts = [Codes(name, 32, 512), Codes("Q6_K", 16, 512), Codes(name, 48, 512), Codes(name, 4, 512)]
        places = place_blocks(parts, gates=gates)
        assert places is not None
        assert coded_bytes(parts, gates=gates) == places.num_bytes


def test_a_layer_is_computed_from_codes_where_all_of_its_tensors_are() -> None:
    tensors = CodedTensors({"q": Codes("Q4_K", 32, 256), "k": Codes("Q6_K", 16, 256), "narrow": Codes("Q4_0", 16, 32)})
    assert tensors.parts(["q", "k"]) is not None
    assert tensors.parts(["q", "v"]) is None
    assert tensors.parts(["q", "narrow"]) is None


def test_sizes_take_as_long_as_there_are_tensors_whatever_the_metadata_says() -> None:
    layers = 10_000
    experts = Experts(layers=(True,) * layers, count=10_000, per_token=1, inner=32)
    config: Any = SimpleNamespace(
        architecture="MixtralForCausalLM", layers=layers, traits=Traits(full_attention(layers), experts=experts)
    )
    with within_bounds():
        sizes = CodedTensors({"lm_head.weight": Codes("Q4_0", 32, 32)}).sizes(config, tied=False)
    assert sizes.layers == ((0, 0),) * layers
    assert sizes.head_bytes == coded_bytes([Codes("Q4_0", 32, 32)])


@pytest.mark.parametrize("scale", [0.5, float("nan")])
def test_a_layer_whose_products_are_others_is_found_out(library: NativeLibrary, scale: float) -> None:
    raw, codes = random_codes("Q8_0", 32, 64)
    layer = pack_codes(library, [raw], [codes], torch.float32, None)
    assert matches_codes(layer, [raw], [codes])
    assert looks_up_codes(layer, raw, codes)
    places = place_blocks([codes])
    assert places is not None
    for _, offset in places.blocks:
        scales = layer.weight[offset : offset + 64].view(torch.float16)
        scales.mul_(scale)
    assert not matches_codes(layer, [raw], [codes])
    assert not looks_up_codes(layer, raw, codes)
