"""Which GPU gets what of a model that the library loads, and what is said where it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends.common.exllama_memory import (
    PAGE_TOKENS,
    CacheShape,
    active_parameters,
    cache_pages,
    module_bytes,
)
from engine.backends.common.step_memory import split_keys_bytes
from engine.backends.exllamav2.load_plan import plan_load
from engine.config import ModelSpec
from engine.errors import BackendUnavailable, InsufficientMemory, InvalidRequest
from engine.models.headers import TensorHeader
from tests.fakes.exllama_loads import edit_config, load, models_of
from tests.fakes.exllama_model import GIB, MIB, FakeCache, FakeGpus, fake_library
from tests.fakes.model_folders import write_model
from tests.fakes.tiny_models import make_tiny_model

pytestmark = pytest.mark.long


def test_automatic_split_moves_on_where_a_gpu_is_full_and_leaves_the_reserve(folder: Path) -> None:
    gpus = FakeGpus((100 + 256) * MIB + 200_000, 8 * GIB, 8 * GIB)
    made, library = models_of(gpus)
    parts = load(folder, gpus, library=library, gpu_reserve_mib=(100,), kv_cache_tokens=512)
    assert made[0].calls == [{"reserve_vram": [100 * MIB, 64 * MIB, 64 * MIB]}]
    assert parts.info.devices == ("cuda:0", "cuda:1")


def test_a_named_gpu_gets_everything(folder: Path) -> None:
    gpus = FakeGpus(8 * GIB, 8 * GIB)
    made, library = models_of(gpus)
    parts = load(folder, gpus, library=library, device="cuda:1")
    assert parts.info.devices == ("cuda:1",)
    assert gpus.free_bytes(0) == 8 * GIB
    assert made[0].forwarded == [2048]  # the largest step, tried


def test_the_work_of_a_load_counts_what_attention_with_triton_keeps_and_no_other(folder: Path, gpus: FakeGpus) -> None:
    spec = ModelSpec(path=folder, name="m", backend="exllamav2")
    triton, flash = (
        plan_load(fake_library(gpus, attention=name), spec, max_prompts=4, gpus=1) for name in ("triton", "flash")
    )
    assert triton.work_bytes - flash.work_bytes == split_keys_bytes(triton.sources[0].config.head_dim)


def test_a_given_split_is_in_gigabytes_and_the_cache_fits_the_fullest_gpu(tmp_path: Path) -> None:
    wide = make_tiny_model(tmp_path / "wide", dtype="float16", max_position_embeddings=4096, num_hidden_layers=4)
    gpus = FakeGpus(8 * GIB, 8 * GIB)
    made, library = models_of(gpus)
    split = (100_000 / GIB, 1.0)
    parts = load(wide, gpus, library=library, gpu_split_gb=split)
    assert made[0].calls == [{"gpu_split": list(split)}]
    assert parts.info.devices == ("cuda:0", "cuda:1")
    assert parts.pages == 4 * 2048 // PAGE_TOKENS


def test_each_gpus_share_of_a_load_is_what_it_has_less_of_since(tmp_path: Path) -> None:
    wide = make_tiny_model(tmp_path / "wide", dtype="float16", max_position_embeddings=4096, num_hidden_layers=4)
    gpus = FakeGpus(8 * GIB, 8 * GIB, 8 * GIB)
    parts = load(wide, gpus, gpu_split_gb=(100_000 / GIB, 1.0))
    first, second = parts.info.shares
    assert (first.device, second.device) == parts.info.devices
    assert first.layers + second.layers == 4
    assert first.kv_bytes + second.kv_bytes == parts.info.kv_bytes
    assert first.weights_bytes + second.weights_bytes == parts.info.weights_bytes
    for number, share in enumerate(parts.info.shares):
        assert share.kv_bytes == parts.info.kv_bytes * share.layers // 4
        assert share.total_bytes >= 8 * GIB - gpus.free_bytes(number)


def test_a_load_on_one_gpu_has_one_share_whose_parts_are_exact(folder: Path) -> None:
    gpus = FakeGpus(8 * GIB, 8 * GIB)
    info = load(folder, gpus, device="cuda:1").info
    [share] = info.shares
    assert (share.device, share.weights_bytes, share.kv_bytes) == ("cuda:1", info.weights_bytes, info.kv_bytes)


def test_a_given_split_that_is_too_small_is_refused_with_numbers(folder: Path, gpus: FakeGpus) -> None:
    with pytest.raises(InsufficientMemory, match="gpu_split must leave memory") as failure:
        load(folder, gpus, gpu_split_gb=(1 / MIB,))
    assert failure.value.details["free_bytes"] == 8 * GIB
    assert gpus.free_bytes(0) == 8 * GIB


def test_no_room_on_any_gpu_is_refused_with_numbers(folder: Path) -> None:
    gpus = FakeGpus(500 * MIB)
    with pytest.raises(InsufficientMemory) as failure:
        load(folder, gpus, kv_cache_tokens=2_000_000)
    needed, free, short = (failure.value.details[f"{name}_bytes"] for name in ("needed", "free", "short"))
    assert isinstance(needed, int) and isinstance(short, int) and short > 0
    assert (free, needed) == (500 * MIB, short + 500 * MIB)
    assert gpus.free_bytes(0) == 500 * MIB


def test_running_out_of_memory_after_the_weights_is_refused_too(folder: Path) -> None:
    gpus = FakeGpus(500 * MIB)
    with pytest.raises(InsufficientMemory, match="tiny does not fit on cuda:0"):
        load(folder, gpus, device="cuda:0", kv_cache_tokens=8_000_000)
    assert gpus.free_bytes(0) == 500 * MIB


def test_a_machine_without_gpus_is_refused(folder: Path) -> None:
    with pytest.raises(BackendUnavailable, match="torch sees none"):
        load(folder, FakeGpus())


def test_tensor_parallelism_splits_exl2_weights_where_flash_attn_is_there(folder: Path) -> None:
    gpus = FakeGpus(8 * GIB, 8 * GIB)
    edit_config(folder, quantization_config={"quant_method": "exl2", "bits": 4.0})
    made, library = models_of(gpus, attention="flash")
    parts = load(folder, gpus, library=library, tensor_parallel=True, kv_cache_tokens=4096)
    reserve = [192 * MIB, 64 * MIB]
    assert made[0].calls == [
        {"gpu_split": [(8 * GIB - each) / GIB for each in reserve], "expect_cache_tokens": 4096},
    ]
    assert parts.info.devices == ("cuda:0", "cuda:1")
    assert parts.config.max_output_len == 4 * 8  # one pinned buffer holds the logits of a whole step
    assert parts.make_generator().arguments["cache"].max_seq_len == 4096


@pytest.mark.parametrize(
    ("architecture", "attention", "exl2", "reason"),
    [
        ("LlamaForCausalLM", "triton", True, "needs flash-attn"),
        ("LlamaForCausalLM", "flash", False, "EXL2 weights only"),
        ("Qwen3ForCausalLM", "flash", True, "would leave out the query and key norms"),
        ("MixtralForCausalLM", "flash", True, "cannot split MixtralForCausalLM"),
    ],
)
def test_tensor_parallelism_is_refused_with_the_reason(
    tmp_path: Path, gpus: FakeGpus, architecture: str, attention: str, exl2: bool, reason: str
) -> None:
    quantisation = {"quantization_config": {"quant_method": "exl2", "bits": 4.0}} if exl2 else {}
    model = write_model(tmp_path / "model", architectures=[architecture], **quantisation)
    with pytest.raises(InvalidRequest, match=reason):
        load(model, gpus, library=fake_library(gpus, attention=attention), tensor_parallel=True)


def test_cache_sizes_are_those_of_the_library() -> None:
    elements = 2 * 3 * PAGE_TOKENS * 4 * 64
    sizes = {bits: CacheShape(3, 4, 64, bits).page_bytes for bits in (16, 8, 6, 4)}
    assert sizes == {16: elements * 2, 8: elements * 17 // 16, 6: elements * 13 // 16, 4: elements * 9 // 16}
    assert CacheShape(3, 4, 64, 16).unpacked_page_bytes == 0
    assert CacheShape(3, 4, 64, 4).unpacked_page_bytes == 2 * PAGE_TOKENS * 4 * 64 * 2


def test_pages_are_what_is_asked_for_rounded_up() -> None:
    assert cache_pages(asked_tokens=257, max_prompts=1, max_model_len=9, page_bytes={}, free_bytes={}) == 2


def test_pages_follow_prompts_then_memory_then_are_refused() -> None:
    def pages(free: int, max_prompts: int = 4) -> int:
        return cache_pages(
            asked_tokens=None,
            max_prompts=max_prompts,
            max_model_len=4096,
            page_bytes={"cuda:0": 100, "cuda:1": 50},
            free_bytes={"cuda:0": free, "cuda:1": 10**9},
        )

    assert pages(10**9) == 4 * 8
    assert pages(10**9, max_prompts=1) == 4096 // PAGE_TOKENS
    assert pages(2000) == 18
    with pytest.raises(InsufficientMemory) as refusal:
        pages(888)
    assert refusal.value.details == {"device": "cuda:0", "needed_bytes": 889, "free_bytes": 888, "short_bytes": 1}


def test_bytes_of_modules_add_up_whatever_the_names() -> None:
    tensors = {
        name: TensorHeader("U8", (size,), (0, size))
        for name, size in (("emb.weight", 10), ("layer.attn.q.weight", 6), ("layer.qkv.weight", 4), ("odd.w", 7))
    }
    assert module_bytes(tensors, [["emb"], ["layer.attn.q", "layer"], ["layer.mlp", "layer"]]) == [12, 12, 3]


def test_a_cache_that_is_still_referred_to_keeps_its_bytes(folder: Path, gpus: FakeGpus) -> None:
    parts = load(folder, gpus, device="cuda:0")
    held: FakeCache | None = parts.make_generator().arguments["cache"]
    parts.free()
    assert gpus.free_bytes(0) < 8 * GIB  # so that the other tests prove that nothing does
    held = None
    assert held is None
    gpus.give_back()
    assert gpus.free_bytes(0) == 8 * GIB


def test_a_token_goes_through_some_of_the_experts_parameters() -> None:
    stem = "model.layers.0.block_sparse_moe.experts"
    experts = {f"{stem}.{number}.w1.weight": TensorHeader("F16", (30, 10), (0, 600)) for number in range(8)}
    tensors = {"model.embed_tokens.weight": TensorHeader("F16", (10, 10), (0, 200)), **experts}
    assert active_parameters(tensors, experts=8, per_token=2) == 100 + 2 * 300
    assert active_parameters(tensors, experts=0, per_token=0) == 100 + 8 * 300
