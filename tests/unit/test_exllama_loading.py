"""Loading with the library: plans, sizes, splits, caches, drafts, adapters, errors, and giving everything back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.backends.base import LoadProgress
from engine.backends.exllama.loading import load_parts
from engine.backends.exllama.parts import PAGE_TOKENS, Library, LoadedParts
from engine.backends.exllama.sizes import CacheShape, active_parameters, cache_pages, module_bytes
from engine.config import ModelSpec
from engine.errors import (
    BackendUnavailable,
    EngineError,
    InsufficientMemory,
    InvalidRequest,
    LoadCancelled,
    ModelLoadFailed,
    UnsafeWeights,
    UnsupportedModel,
)
from engine.models.headers import TensorHeader
from tests.fakes.exllama_model import GIB, MIB, FakeCache, FakeGpus, FakeModel, OutOfMemoryError, fake_library
from tests.fakes.exllama_settings import FakeConfig
from tests.fakes.model_folders import write_model
from tests.fakes.tiny_models import make_tiny_model

LAYERS = 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "main", dtype="float16", max_position_embeddings=4096)


@pytest.fixture
def gpus() -> FakeGpus:
    return FakeGpus(8 * GIB)


def load(
    folder: Path,
    gpus: FakeGpus,
    *,
    library: Library | None = None,
    max_prompts: int = 4,
    report: Callable[[LoadProgress], None] = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> LoadedParts:
    return load_parts(
        library or fake_library(gpus),
        ModelSpec(path=folder, name="tiny", **settings),
        max_prompts=max_prompts,
        report=report,
        cancelled=cancelled,
        gpus=gpus,
    )


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def models_of(gpus: FakeGpus, **changes: Any) -> tuple[list[FakeModel], Library]:
    """A library that remembers the models it makes, the main one first."""
    made: list[FakeModel] = []

    def make(config: FakeConfig) -> FakeModel:
        made.append(FakeModel(config, gpus))
        return made[-1]

    return made, fake_library(gpus, model=make, **changes)


# --- what a load says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_progress_is_in_bytes_and_ends_at_the_size_of_the_files(folder: Path, gpus: FakeGpus, device: str) -> None:
    seen: list[LoadProgress] = []
    load(folder, gpus, device=device, report=seen.append)
    weights = [each for each in seen if each.phase == "weights"]
    size = sum(tensor.nbytes for tensor in torch_tensors(folder).values())
    assert {each.total for each in weights} == {size}
    assert [each.done for each in weights] == sorted(each.done for each in weights)
    assert weights[0].done == 0
    assert weights[1].done == 320 * 64 * 2  # the embedding
    assert weights[-1].done == size
    assert seen[-1].phase == "kv_cache"
    assert seen[-1].done == seen[-1].total > 0


def torch_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_a_load_says_what_it_ended_with(folder: Path, gpus: FakeGpus) -> None:
    parts = load(folder, gpus, kv_cache_tokens=1000)
    info = parts.info
    assert (info.backend, info.architecture, info.dtype) == ("exllamav2", "LlamaForCausalLM", "float16")
    assert (info.devices, info.vocab_size, info.max_model_len) == (("cuda:0",), 320, 4096)
    assert (parts.pages, info.kv_tokens, info.page_tokens) == (4, 1024, PAGE_TOKENS)
    assert info.kv_bytes == 1024 * LAYERS * 2 * 2 * 16 * 2
    assert info.parameters == sum(tensor.numel() for tensor in torch_tensors(folder).values())
    assert (info.attention, info.attention_reason) == ("triton", "flash-attn is not installed")


def test_a_draft_model_counts_into_the_same_progress(folder: Path, gpus: FakeGpus, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path / "draft", dtype="float16", max_position_embeddings=4096)
    seen: list[LoadProgress] = []
    load(folder, gpus, draft_model=draft, report=seen.append)
    weights = [each.done for each in seen if each.phase == "weights"]
    assert weights == sorted(weights)
    assert weights[-1] == 2 * sum(tensor.nbytes for tensor in torch_tensors(folder).values())


# --- giving back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_free_gives_every_byte_back_and_may_be_called_again(folder: Path, gpus: FakeGpus, device: str) -> None:
    parts = load(folder, gpus, device=device)
    generator = parts.make_generator()
    assert gpus.free_bytes(0) < 8 * GIB
    pools = generator.sampling_pool, generator.filter_pool
    del generator
    parts.free()
    parts.free()
    assert gpus.free_bytes(0) == 8 * GIB
    assert not any(pool.running for pool in pools)
    with pytest.raises(RuntimeError):
        parts.make_generator()


@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_a_cancelled_load_stops_between_two_modules_and_leaves_nothing(
    folder: Path, gpus: FakeGpus, device: str
) -> None:
    seen: list[LoadProgress] = []
    with pytest.raises(LoadCancelled):
        load(folder, gpus, device=device, report=seen.append, cancelled=lambda: len(seen) >= 3)
    assert len(seen) == 3
    assert gpus.free_bytes(0) == 8 * GIB


@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_a_failed_load_leaves_nothing_even_while_its_error_is_held(folder: Path, gpus: FakeGpus, device: str) -> None:
    made, library = models_of(gpus)

    def fail_late(progress: LoadProgress) -> None:
        made[0].fails_at = (4, lambda: ValueError("a tensor is odd"))

    with pytest.raises(ModelLoadFailed, match="could not load tiny: ValueError: a tensor is odd") as failure:
        load(folder, gpus, library=library, device=device, report=fail_late)
    assert gpus.free_bytes(0) == 8 * GIB
    assert failure.value.__context__ is None


# --- generators -------------------------------------------------------------------------------------------------------


def test_a_new_generator_takes_the_place_of_the_old_one(folder: Path, gpus: FakeGpus) -> None:
    parts = load(folder, gpus)
    first, second = parts.make_generator(), parts.make_generator()
    assert first is not second
    assert not first.sampling_pool.running
    assert second.sampling_pool.running
    assert second.arguments["max_q_size"] == 8
    assert second.arguments["max_batch_size"] * 8 == parts.config.max_input_len
    assert second.arguments["num_draft_tokens"] == 0
    assert second.arguments["paged"]


def test_a_draft_model_guesses_with_a_cache_of_its_own(folder: Path, gpus: FakeGpus, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path / "draft", dtype="float16", max_position_embeddings=1024)
    parts = load(folder, gpus, draft_model=draft, draft_tokens=5)
    arguments = parts.make_generator().arguments
    assert parts.draft_tokens == arguments["num_draft_tokens"] == 5
    assert arguments["draft_model"].config.scale_alpha_value == 4.0  # stretched to the main model's length
    assert arguments["draft_cache"].max_seq_len == arguments["cache"].max_seq_len
    assert arguments["model"].config.model_dir == str(folder)


def test_ngram_drafts_need_no_second_model(folder: Path, gpus: FakeGpus) -> None:
    parts = load(folder, gpus, ngram_draft=True)
    arguments = parts.make_generator().arguments
    assert (parts.draft_tokens, arguments["use_ngram_draft"], arguments["draft_model"]) == (4, True, None)


def test_a_draft_model_of_another_vocabulary_is_refused(folder: Path, gpus: FakeGpus, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path / "draft", dtype="float16", vocab_size=280)
    with pytest.raises(UnsupportedModel, match="another vocabulary"):
        load(folder, gpus, draft_model=draft)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_the_config_is_prepared_and_then_overridden(folder: Path, gpus: FakeGpus) -> None:
    config = load(folder, gpus, max_model_len=3000).config
    assert (config.max_seq_len, config.max_input_len, config.max_batch_size) == (3072, 2048, 1)
    assert config.max_attention_size == config.max_input_len**2
    assert config.max_output_len >= 8
    assert (config.no_flash_attn, config.no_xformers, config.no_sdpa) == (False, True, True)
    assert config.overridden == 1


def test_a_short_cache_makes_the_chunks_short(folder: Path, gpus: FakeGpus) -> None:
    assert load(folder, gpus, kv_cache_tokens=500).config.max_input_len == 512


def test_rope_scaling_stretches_the_context(folder: Path, gpus: FakeGpus) -> None:
    edit_config(folder, rope_scaling={"type": "linear", "factor": 2.0})
    parts = load(folder, gpus, alpha_value=2.0, compress_pos_emb=3.0, kv_cache_tokens=4096)
    assert parts.info.max_model_len == 4096 * 6
    assert (parts.config.scale_alpha_value, parts.config.scale_pos_emb) == (2.0, 6.0)


def test_a_rope_base_where_the_library_does_not_look_is_used(folder: Path, gpus: FakeGpus) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder, gpus).config.rotary_embedding_base == 500000.0


def test_yarn_takes_the_length_that_it_was_made_for(folder: Path, gpus: FakeGpus) -> None:
    edit_config(folder, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096})
    assert load(folder, gpus, max_model_len=16384, kv_cache_tokens=4096).info.max_model_len == 16384


def test_experts_per_token_are_set_where_there_are_experts(tmp_path: Path, gpus: FakeGpus) -> None:
    moe = write_model(tmp_path / "moe", architectures=["MixtralForCausalLM"], num_local_experts=8)
    assert load(moe, gpus, num_experts=3).config.num_experts_per_token == 3


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"max_model_len": 5000}, "max_model_len"),
        ({"alpha_value": 0.5}, "alpha_value"),
        ({"num_experts": 2}, "num_experts"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"draft_tokens": 3}, "draft_tokens"),
        ({"ngram_draft": True, "draft_tokens": 8}, "draft_tokens"),
        ({"device": "cpu"}, "device"),
        ({"device": "cuda:1"}, "device"),
        ({"gpu_split_gb": (1.0, 1.0)}, "gpu_split"),
        ({"gpu_split_gb": (1.0,), "device": "cuda:0"}, "gpu_split"),
        ({"gpu_reserve_mib": (1, 1)}, "gpu_reserve"),
        ({"tensor_parallel": True}, "tensor_parallel"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused_by_name(
    folder: Path, gpus: FakeGpus, settings: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        load(folder, gpus, **settings)
    assert refusal.value.details["param"] == param
    assert gpus.free_bytes(0) == 8 * GIB


def test_a_packed_cache_needs_heads_of_whole_blocks(folder: Path, gpus: FakeGpus) -> None:
    with pytest.raises(InvalidRequest, match="heads of 16 elements"):
        load(folder, gpus, cache_bits=4)


def test_a_model_that_needs_more_than_the_attention_has_is_refused(
    folder: Path, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeConfig, "softcap_is_there", False)
    edit_config(folder, attn_logit_softcapping=50.0)
    with pytest.raises(BackendUnavailable, match="soft-cap"):
        load(folder, gpus)


def test_the_attention_is_chosen_for_the_model_and_has_to_do_for_its_draft(folder: Path) -> None:
    gpus = FakeGpus(8 * GIB, 8 * GIB)
    asked: list[tuple[str, str, tuple[int, ...]]] = []

    def engage(config: FakeConfig, wanted: str, devices: Sequence[int]) -> Library:
        asked.append((Path(str(config.model_dir)).name, wanted, tuple(devices)))
        return fake_library(gpus, attention="gathered")

    draft = make_tiny_model(folder.parent / "draft", dtype="float16")
    library = fake_library(gpus, engage=engage)
    parts = load(folder, gpus, library=library, draft_model=draft, device="cuda:1")
    assert asked == [("main", "auto", (1,)), ("draft", "gathered", (1,))]
    assert parts.info.attention == "gathered"


# --- GPUs -------------------------------------------------------------------------------------------------------------


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
    with pytest.raises(InsufficientMemory, match="gpu_split has to leave room") as failure:
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
        ("LlamaForCausalLM", "flash", False, "EXL2 weights alone"),
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


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "names 2 architectures"),
        ({"architectures": []}, "names 0 architectures"),
        ({"architectures": ["NewForCausalLM"]}, "does not know NewForCausalLM"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "Pixtral vision tower"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "GPTQ of 8 bits"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}}, "marlin"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "the weights are awq"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "RoPE scaling of type spiral"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "under rope_parameters"),
        ({"missing": "model.norm"}, "tiny is not complete: could not find model.norm"),
    ],
)
def test_a_folder_that_the_library_would_get_wrong_is_refused(
    tmp_path: Path, gpus: FakeGpus, changes: dict[str, Any], reason: str
) -> None:
    model = write_model(tmp_path / "model", **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        load(model, gpus)


def test_weights_of_a_dtype_that_cannot_be_read_are_refused_by_name(tmp_path: Path, gpus: FakeGpus) -> None:
    model = write_model(tmp_path / "model", {"model.norm.weight": ("I8", (4,))})
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is stored as I8"):
        load(model, gpus)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, gpus: FakeGpus) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        load(write_model(tmp_path / "model", tokenizer=False), gpus)


def test_four_bit_gptq_goes(folder: Path, gpus: FakeGpus) -> None:
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"})
    assert load(folder, gpus).info.dtype == "gptq 4-bit"


# --- adapters ---------------------------------------------------------------------------------------------------------


def write_adapter(folder: Path, target: str = "model.layers.0.self_attn.q_proj", **config: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | config))
    names = [f"base_model.model.{target}.lora_{half}.weight" for half in "AB"]
    save_file({name: torch.zeros(8, 8) for name in names}, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_is_applied_to_every_generator(folder: Path, gpus: FakeGpus, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "lora")
    (adapter / "adapter_model.bin").write_bytes(b"")  # the library would take this one
    parts = load(folder, gpus, lora=adapter)
    for _ in range(2):
        (applied,) = parts.make_generator().loras
        assert applied.lora_path.endswith(".safetensors")
    parts.free()
    assert applied.unloaded


def test_a_pickled_adapter_is_refused(folder: Path, gpus: FakeGpus, tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UnsafeWeights, match="pickle"):
        load(folder, gpus, lora=tmp_path / "lora")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 0}, "r in adapter_config"),
    ],
)
def test_an_adapter_that_would_not_be_honoured_in_full_is_refused(
    folder: Path, gpus: FakeGpus, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EngineError, match=reason):
        load(folder, gpus, lora=write_adapter(tmp_path / "lora", **config))


def test_an_adapter_for_another_model_is_refused_and_leaves_nothing(
    folder: Path, gpus: FakeGpus, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "lora", target="model.layers.7.self_attn.q_proj")
    with pytest.raises(UnsupportedModel, match=r"has no model\.layers\.7\.self_attn\.q_proj"):
        load(folder, gpus, lora=adapter)
    assert gpus.free_bytes(0) == 8 * GIB


# --- sizes ------------------------------------------------------------------------------------------------------------


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
        name: TensorHeader("F16", (size // 2,), (0, size))
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


def test_torch_s_own_error_is_told_by_its_name() -> None:
    from engine.backends.exllama.load_faults import LoadNumbers, explain_load

    assert isinstance(explain_load(OutOfMemoryError("?"), LoadNumbers("m", "cuda:0")), InsufficientMemory)
    assert isinstance(explain_load(AssertionError("No!"), LoadNumbers("m", "cuda:0")), ModelLoadFailed)


def test_a_token_goes_through_some_of_the_experts_parameters() -> None:
    stem = "model.layers.0.block_sparse_moe.experts"
    experts = {f"{stem}.{number}.w1.weight": TensorHeader("F16", (30, 10)) for number in range(8)}
    tensors = {"model.embed_tokens.weight": TensorHeader("F16", (10, 10)), **experts}
    assert active_parameters(tensors, experts=8, per_token=2) == 100 + 2 * 300
    assert active_parameters(tensors, experts=0, per_token=0) == 100 + 8 * 300
