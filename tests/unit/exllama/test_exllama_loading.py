"""A load with the library: what it says, gives back, makes generators of, and how its settings are honoured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.backends.base import LoadProgress
from engine.backends.common.exllama_memory import PAGE_TOKENS
from engine.backends.exllama.load import LoadNumbers, explain_load
from engine.backends.exllamav2.library import Library
from engine.errors import (
    BackendUnavailable,
    InsufficientMemory,
    InvalidRequest,
    LoadCancelled,
    ModelLoadFailed,
    UnsupportedModel,
)
from tests.fakes.exllama_loads import LAYERS, edit_config, load, models_of, torch_tensors
from tests.fakes.exllama_model import GIB, FakeConfig, FakeGpus, OutOfMemoryError, fake_library
from tests.fakes.model_folders import write_model
from tests.fakes.tiny_models import make_tiny_model

pytestmark = pytest.mark.long


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
    for pool in pools:
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(int)
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


def test_a_new_generator_takes_the_place_of_the_old_one(folder: Path, gpus: FakeGpus) -> None:
    parts = load(folder, gpus)
    first, second = parts.make_generator(), parts.make_generator()
    assert first is not second
    with pytest.raises(RuntimeError, match="after shutdown"):
        first.sampling_pool.submit(int)
    assert second.sampling_pool.submit(int).result() == 0
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
    with pytest.raises(UnsupportedModel, match="different vocabularies"):
        load(folder, gpus, draft_model=draft)


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
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
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


def test_the_kernels_of_attention_are_compiled_for_every_model_with_progress(folder: Path) -> None:
    gpus, prepared, reports = FakeGpus(8 * GIB), list[str](), list[LoadProgress]()

    def prepare(config: FakeConfig, report: Callable[[int, int], None]) -> None:
        prepared.append(Path(str(config.model_dir)).name)
        report(1, 2)

    draft = make_tiny_model(folder.parent / "draft", dtype="float16")
    load(folder, gpus, library=fake_library(gpus, prepare=prepare), draft_model=draft, report=reports.append)
    assert prepared == ["main", "draft"]
    assert reports[-2:] == [LoadProgress(phase="kernels", done=1, total=2, unit="steps")] * 2


def test_torch_s_own_error_is_told_by_its_name() -> None:
    for error in (
        OutOfMemoryError("?"),
        RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ):
        assert isinstance(explain_load(error, LoadNumbers("exllamav2", "m", "cuda:0")), InsufficientMemory)
    assert isinstance(explain_load(AssertionError("No!"), LoadNumbers("exllamav2", "m", "cuda:0")), ModelLoadFailed)
