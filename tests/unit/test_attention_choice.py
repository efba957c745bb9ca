"""Which paged attention computes: what fits, why, and that what fails on the device is passed over."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.backends.paged_attention import probe as probing
from engine.backends.paged_attention.choose import ORDER, AttentionFacts, ImplementationName, choose
from engine.backends.paged_attention.interface import PagedAttention, implementation
from engine.backends.paged_attention.probe import engage, failure, find_flash_attn, probe
from engine.backends.paged_attention.triton_attention import MAX_SPLITS, split_count, tile_for
from engine.backends.torch.native.attention import Heads
from engine.backends.torch.native.attention_check import MAX_ROW_NUMBERS, LayerHeads, native_obstacle
from engine.backends.torch.native.library import Kernels, NativeLibrary
from engine.backends.triton_launch import Gpu
from engine.errors import InvalidRequest, WorkerFailed

pytestmark = pytest.mark.long

AMPERE = AttentionFacts(capability=(8, 6), torch=(2, 13, 0), triton=(3, 7, 1), flash=(2, 8, 3))
TURING = replace(AMPERE, capability=(7, 5))
BARE = replace(AMPERE, flash=None)
CPU = torch.device("cpu")
H100 = Gpu(processors=132, capability=(9, 0))


@pytest.mark.parametrize(
    ("facts", "name", "words"),
    [
        (AMPERE, "flash", "flash-attn is installed"),
        (replace(AMPERE, capability=(12, 0), torch=(2, 6)), "flash", "flash-attn is installed"),
        (BARE, "triton", "flash-attn is not installed"),
        (replace(BARE, flash_problem="flash-attn is installed but does not import: x"), "triton", "does not import: x"),
        (replace(AMPERE, flash=(2, 5, 6)), "triton", "flash-attn is 2.5.6"),
        (replace(AMPERE, flash=(2, 5, 9), softcap=50.0), "triton", "no soft-cap"),
        (replace(AMPERE, page_tokens=16), "triton", "multiple of 256 tokens, not 16"),
        (replace(AMPERE, head_dim=100), "triton", "multiple of 8, max 256, not 100"),
        (replace(BARE, triton=None), "varlen", "triton is not installed"),
        (replace(BARE, triton=(2, 1)), "varlen", "triton is 2.1"),
        (
            replace(BARE, triton=None, torch=(2, 11)),
            "gathered",
            "torch is 2.11; its varlen_attn reads KV pages since 2.12",
        ),
        (replace(BARE, triton=None, softcap=30.0), "gathered", "varlen_attn has no soft-cap"),
        (replace(AMPERE, dtype="float32"), "gathered", "float16 or bfloat16, not float32"),
        (replace(AMPERE, head_dim=512), "gathered", "max 256, not 512"),
        (replace(AMPERE, cache_bits=8), "triton", "flash attention cannot read a KV cache of 8 bits"),
        (replace(AMPERE, cache_bits=4, triton=None), "gathered", "varlen attention cannot read a KV cache of 4 bits"),
        (TURING, "gathered", "needs compute capability 8.0 on every device; one has 7.5"),
        (replace(AMPERE, capability=None), "gathered", "no CUDA device"),
    ],
)
def test_auto_takes_the_best_that_fits_and_says_why(facts: AttentionFacts, name: str, words: str) -> None:
    choice = choose("auto", facts)
    assert choice.name == name
    assert words in choice.reason


@pytest.mark.parametrize(
    ("wanted", "facts", "words"),
    [
        ("flash", BARE, "flash-attn is not installed"),
        ("flash", TURING, "8.0 on every device; one has 7.5"),
        ("varlen", replace(AMPERE, page_tokens=128), "pages of a multiple of 256 tokens, not 128"),
        ("varlen", replace(AMPERE, torch=(2, 9, 1)), "torch is 2.9.1"),
        ("triton", replace(AMPERE, triton=None), "triton is not installed"),
        ("flash", replace(AMPERE, cache_bits=4), "a KV cache of 4 bits"),
        ("triton", replace(AMPERE, capability=(7, 0)), "capability 7.5, not 7.0"),
        ("triton", replace(TURING, dtype="bfloat16"), "bfloat16 needs compute capability 8.0"),
        ("triton", replace(AMPERE, capability=None), "needs a CUDA device"),
        ("varlen", replace(AMPERE, failed={"varlen": "varlen was tried and failed"}), "was tried and failed"),
    ],
)
def test_what_is_asked_for_and_cannot_be_is_refused_with_the_reason(
    wanted: ImplementationName, facts: AttentionFacts, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"--attention {wanted} is not available: .*{words}") as refusal:
        choose(wanted, facts)
    assert refusal.value.details == {"param": "attention", "value": wanted}


@pytest.mark.parametrize("name", ORDER)
def test_what_is_asked_for_and_fits_is_taken(name: ImplementationName) -> None:
    assert choose(name, AMPERE).name == name


def test_triton_can_be_asked_for_on_a_turing_card() -> None:
    assert choose("triton", TURING).name == "triton"


def broken(name: ImplementationName, heads: object = None, devices: object = ()) -> PagedAttention:
    """Implementations of which all but gathered pages fail."""

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("no host compiler\nfound")

    return implementation("gathered") if name == "gathered" else attention


def test_what_fails_on_the_device_is_passed_over_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "implementation", broken)
    choice = engage("auto", BARE, [CPU])
    assert choice.name == "gathered"
    assert "triton was tried on cpu and failed: RuntimeError: no host compiler" in choice.reason
    with pytest.raises(InvalidRequest, match="--attention triton is not available: triton was tried on cpu"):
        engage("triton", BARE, [CPU])


def test_an_implementation_that_computes_something_else_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(name: ImplementationName, heads: object = None, devices: object = ()) -> PagedAttention:
        def attention(*args: Any, **kwargs: Any) -> Tensor:
            return implementation("gathered")(*args, **kwargs) * (1.0 if name == "gathered" else torch.nan)

        return attention

    monkeypatch.setattr(probing, "implementation", wrong)
    assert failure("varlen", AMPERE, CPU) == "varlen was tried on cpu and is off by nan"


def test_a_result_that_is_a_unit_of_bfloat16_away_is_none_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded_up(name: ImplementationName, heads: object = None, devices: object = ()) -> PagedAttention:
        def attention(*args: Any, **kwargs: Any) -> Tensor:
            found = implementation("gathered")(*args, **kwargs)
            return found if name == "gathered" else torch.nextafter(found, found.new_tensor(torch.inf))

        return attention

    monkeypatch.setattr(probing, "implementation", rounded_up)
    assert (
        failure("varlen", replace(AMPERE, page_tokens=16, heads=128, kv_heads=128, head_dim=256, dtype="bfloat16"), CPU)
        == ""
    )


@pytest.mark.parametrize("error", ["an illegal memory access was encountered", "misaligned address"])
def test_attention_that_loses_the_device_ends_the_worker_by_its_name(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losing(name: ImplementationName, heads: object = None, devices: object = ()) -> PagedAttention:
        def attention(*args: Any, **kwargs: Any) -> Tensor:
            raise torch.AcceleratorError(f"CUDA error: {error}\nadvice")

        return attention

    monkeypatch.setattr(probing, "implementation", losing)
    with pytest.raises(
        WorkerFailed, match=f"triton attention was tried on cpu, which it broke: CUDA error: {error}; load with"
    ):
        engage("auto", BARE, [CPU])


def test_a_kernel_that_is_for_other_cards_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def foreign(name: ImplementationName, heads: object = None, devices: object = ()) -> PagedAttention:
        def attention(*args: Any, **kwargs: Any) -> Tensor:
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nadvice")

        return implementation("gathered") if name == "gathered" else attention

    monkeypatch.setattr(probing, "implementation", foreign)
    choice = engage("auto", AMPERE, [CPU])
    assert choice.name == "gathered" and "no kernel image" in choice.reason


def test_chunks_of_different_lengths_are_tried_where_there_will_be_some(monkeypatch: pytest.MonkeyPatch) -> None:
    def uniform(name: ImplementationName, heads: object = None, devices: object = ()) -> PagedAttention:
        def attention(*args: Any, **kwargs: Any) -> Tensor:
            if name == "varlen" and "chunks" in kwargs:
                raise RuntimeError("no block table for such calls")
            return implementation("gathered")(*args, **kwargs)

        return attention

    monkeypatch.setattr(probing, "implementation", uniform)
    assert failure("varlen", AMPERE, CPU) == ""
    assert failure("varlen", AMPERE, CPU, varlen=True).endswith("failed: RuntimeError: no block table for such calls")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels take its tensors alone")
@pytest.mark.parametrize(
    "facts",
    [
        replace(BARE, heads=2, kv_heads=1, head_dim=64),
        replace(BARE, page_tokens=16, heads=3, kv_heads=1, head_dim=80, softcap=20.0, window=9),
        replace(BARE, page_tokens=16, heads=2, kv_heads=1, head_dim=64, cache_bits=8),
        replace(BARE, page_tokens=16, heads=2, kv_heads=1, head_dim=64, cache_bits=4),
    ],
)
def test_what_works_is_taken_as_it_was_chosen(facts: AttentionFacts) -> None:
    pytest.importorskip("triton")
    assert engage("auto", facts, [CPU], varlen=True) == choose("auto", facts)


def test_a_probe_without_cuda_says_so() -> None:
    facts = probe(CPU, page_tokens=16, head_dim=80, dtype="float32", softcap=1.0, window=5)
    assert facts.capability is None and facts.torch[:1] == (2,)
    assert (facts.page_tokens, facts.head_dim, facts.dtype, facts.softcap, facts.window) == (16, 80, "float32", 1.0, 5)
    assert choose("auto", facts).name == "gathered"


@pytest.mark.parametrize(
    ("body", "version", "words"),
    [
        ("def flash_attn_with_kvcache(): ...", (2, 8, 3), ""),
        ("raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')", None, "undefined symbol: _ZN3c10"),
        ("import os; os.abort()", None, "ends with status"),
    ],
    ids=["sound", "built for another torch", "crashing"],
)
def test_flash_attn_is_imported_where_it_can_do_no_harm(
    body: str, version: tuple[int, ...] | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text(body)
    (tmp_path / "flash_attn-2.8.3.dist-info").mkdir()
    (tmp_path / "flash_attn-2.8.3.dist-info" / "METADATA").write_text("Name: flash-attn\nVersion: 2.8.3.post1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found, problem = find_flash_attn()
    assert found == version
    assert words in problem and bool(problem) == (version is None)
    assert "flash_attn" not in sys.modules


def test_long_contexts_are_split_until_the_gpu_is_busy_and_no_further() -> None:
    assert split_count(programs=264, tokens=10**6, gpu=H100) == 1
    assert split_count(programs=64, tokens=10**6, gpu=H100) == 4
    assert split_count(programs=8, tokens=10**6, gpu=H100) == 33
    assert split_count(programs=1, tokens=10**6, gpu=H100) == MAX_SPLITS
    assert split_count(programs=8, tokens=1024, gpu=H100) == 4
    assert split_count(programs=8, tokens=255, gpu=H100) == 1


@pytest.mark.parametrize(
    ("capability", "kib"), [((7, 5), 64), ((8, 0), 163), ((8, 6), 99), ((9, 0), 227), ((12, 0), 99)]
)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("rows", [1, 16, 20, 65, 8192])
def test_tiles_fit_in_shared_memory(rows: int, head_dim: int, capability: tuple[int, int], kib: int) -> None:
    tile = tile_for(rows, head_dim, capability)
    width = 128 if 64 < head_dim <= 128 else head_dim
    assert 2 * width * (tile.block_m + 2 * tile.stages * tile.block_n) <= kib * 1024
    assert tile.block_m >= 16 and tile.block_n >= 16
    assert tile.block_m < 2 * max(rows, 16)


def test_heads_that_would_take_gigabytes_to_try_the_native_kernel_with_are_left_to_torch() -> None:
    head_dim = MAX_ROW_NUMBERS // 3 // 16 * 16 + 16
    heads = Heads(heads=1, kv_heads=1, head_dim=head_dim, window=None, scale=1.0)
    untried = cast(NativeLibrary, object())
    obstacle = native_obstacle(
        Kernels(untried),
        [LayerHeads(heads, None)],
        dtype=torch.bfloat16,
        devices=[torch.device("cpu")],
        page_tokens=16,
    )
    assert obstacle == f"native attention needs heads with max 131072 values together, not {3 * head_dim}"
