"""The EXL3 reader against exllamav3's source: its kernels' decoding compiled for this CPU, and its Python on top."""

from __future__ import annotations

import ast
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends.checkpoints import exl3
from engine.backends.checkpoints.exl3 import Exl3Linear, hadamard_matrix
from tests.fakes.exl3_tensors import Codebook, element_of, random_exl3, rotated_by_rules, sums_in_order
from tests.fakes.published_sources import EXLLAMAV3, source_folder

CODEBOOKS: tuple[Codebook, ...] = ("plain", "mcg", "mul1")
WIDTHS = [(float(bits), codebook) for bits in range(1, 9) for codebook in CODEBOOKS]
WIDTHS += [(bits, "mul1") for bits in (1.5, 2.5, 3.5)]
CPU_PROGRAM = Path(__file__).parent.parent / "fakes/exl3_on_cpu.cpp"


@pytest.fixture(scope="module")
def package() -> Path:
    return source_folder(EXLLAMAV3) / "exllamav3"


@pytest.fixture(scope="module")
def program(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels' decoding of tiles, compiled."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    built = tmp_path_factory.mktemp("exl3") / "decode"
    command = [compiler, "-std=c++17", "-O1", "-w", f"-I{package / 'exllamav3_ext/quant'}", str(CPU_PROGRAM)]
    subprocess.run([*command, "-o", str(built)], check=True)
    return built


def functions_of(file: Path, *names: str, **globals_: Any) -> Mapping[str, Callable[..., Any]]:
    """Functions of a module that cannot be imported without its extension."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in body:
        node.decorator_list = []
    scope: dict[str, Any] = {"torch": torch, "math": math, **globals_}
    exec(compile(ast.Module(body, []), str(file), "exec"), scope)
    return {name: scope[name] for name in names}


def sylvester_matrix(package: Path) -> Tensor:
    """The library's matrix of 128, float32, before it is scaled."""
    sylvester = functions_of(package / "util/hadamard.py", "sylvester")["sylvester"]
    matrix = torch.ones(1, 1)
    while len(matrix) < 128:
        matrix = sylvester(matrix)
    return matrix


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "codebook"), WIDTHS)
def test_tiles_are_decoded_as_the_librarys_kernels_decode_them(
    bits: float, codebook: Codebook, program: Path, package: Path
) -> None:
    tensors = random_exl3(128, 256, bits, codebook=codebook, seed=int(2 * bits))
    tiles = tensors["trellis"].reshape(-1, tensors["trellis"].shape[-1])
    arguments = [str(int(bits)), str(CODEBOOKS.index(codebook)), str(int(bits != int(bits)))]
    done = subprocess.run([program, *arguments], input=tiles.numpy().tobytes(), capture_output=True, check=True)
    values = np.frombuffer(done.stdout, dtype=np.float16).reshape(8, 16, 256)
    place = functions_of(package / "modules/quant/exl3_lib/quantize.py", "tensor_core_perm")["tensor_core_perm"]("cpu")
    tile = np.empty_like(values)
    tile[..., place.numpy()] = values
    matrix = tile.reshape(8, 16, 16, 16).transpose(0, 2, 1, 3).reshape(128, 256)
    assert np.array_equal(rotated_by_rules(tensors).view(np.int16), matrix.view(np.int16))
    read = exl3._tile_values(tensors["trellis"], exl3.codebook_values(codebook)).half().t().contiguous()
    assert np.array_equal(read.numpy().view(np.int16), matrix.view(np.int16))


def test_values_lie_where_the_librarys_permutation_has_them(package: Path) -> None:
    place = functions_of(package / "modules/quant/exl3_lib/quantize.py", "tensor_core_perm")["tensor_core_perm"]("cpu")
    assert [divmod(each, 16) for each in place.tolist()] == [element_of(value) for value in range(256)]


def test_the_hadamard_matrix_is_the_librarys(package: Path) -> None:
    expected = sylvester_matrix(package)
    expected *= 1 / math.sqrt(128)
    assert torch.equal(hadamard_matrix(), expected)


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_a_weight_is_made_of_its_values_as_the_library_makes_it(codebook: Codebook, package: Path) -> None:
    """`get_weight_tensor()`, with its own transforms, run on the CPU."""
    tensors = random_exl3(256, 384, 3, codebook=codebook)

    def get_hadamard_dt(size: int, device: torch.device, dtype: torch.dtype, scale: float) -> Tensor:
        matrix = sylvester_matrix(package)
        matrix *= scale
        return matrix

    transforms = functions_of(
        package / "modules/quant/exl3_lib/quantize.py",
        "preapply_had_l",
        "preapply_had_r",
        get_hadamard_dt=get_hadamard_dt,
        _HAD_MAX_GEMM_ROWS=1 << 19,
    )
    expected = transforms["preapply_had_l"](torch.from_numpy(rotated_by_rules(tensors)), 128)
    expected *= tensors["suh"].unsqueeze(1)
    expected = transforms["preapply_had_r"](expected, 128)
    expected *= tensors["svh"].unsqueeze(0)
    weight = torch.empty(384, 256, dtype=torch.float16)
    Exl3Linear("layer", **tensors).write(weight)
    if sums_in_order():
        assert torch.equal(weight.t(), expected)
    torch.testing.assert_close(weight.t(), expected, rtol=2**-10, atol=2**-9 * expected.abs().max().item())


def test_signs_are_unpacked_as_the_library_unpacks_them(package: Path) -> None:
    tree = ast.parse((package / "modules/quant/exl3.py").read_text(encoding="utf-8"))
    [unpack] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "unpack_bf"]
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([unpack], []), "exl3.py", "exec"), scope)

    class Layer:
        transformers_fix = False

    packed = random_exl3(128, 128, signs="su")["su"]
    assert torch.equal(exl3._scales(None, packed), scope["unpack_bf"](Layer, packed))


def test_constants_are_those_of_the_librarys_source(package: Path) -> None:
    source = (package / "exllamav3_ext/quant/codebook.cuh").read_text(encoding="utf-8")
    factors = {int(number.rstrip("u"), 0) for number in re.findall(r"x \*= (\w+);", source)}
    assert factors == set(exl3.MULTIPLIERS.values())
    assert f"x += {exl3.PLAIN_INCREMENT}u" in source
    assert f"{exl3.HALVES_MASK:#x}, {exl3.HALVES_FLIP:#x}" in source
    assert f"__ushort_as_half({exl3.MUL1_SCALE_BITS:#x})" in source
    assert f"__ushort_as_half({exl3.MUL1_OFFSET_BITS:#x})" in source
    marker = (package / "loader/safetensors.py").read_text(encoding="utf-8")
    assert 'h["dtype"] != "I32" or h["shape"] != []' in marker


def test_tensors_and_padding_are_those_of_the_librarys_source(package: Path) -> None:
    source = (package / "modules/linear.py").read_text(encoding="utf-8")
    loading = source[source.index("def load_exl3") : source.index("def can_defer_load")]
    assert set(re.findall(r'"\.(\w+)"', loading)) == {*exl3.PARTS, "scale"}
    assert "scale = None" in loading
    assert f"pad_to: int = {exl3.FEATURE_MULTIPLE}," in source
