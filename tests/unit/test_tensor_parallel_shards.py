"""Ranks of tensor parallelism, each with its part of every layer, compute what the whole model computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.base import LoadProgress
from engine.backends.common.model_config import Shard, read_model_config
from engine.backends.common.sharding import shard_config, tensor_parts
from engine.backends.common.tensor_shapes import tensor_shapes
from engine.backends.common.torch_load_settings import refuse_settings
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.runner import ModelRunner
from engine.config import AdapterSpec, ModelSpec
from engine.errors import InvalidRequest
from tests.fakes.adapters import make_adapter
from tests.fakes.families import FAMILIES, make_family
from tests.fakes.gguf_models import write_gguf
from tests.fakes.oracle import NUM_PAGES, ignore_progress, load_runner, never
from tests.fakes.quantised_folders import make_twins
from tests.fakes.ranks import Ranks
from tests.fakes.tiny_models import ARCHITECTURES, MIXTURES, make_tiny_model

PROMPT = [7 * position % 300 + 3 for position in range(45)]
PAGES = {"a": list(range(8)), "b": list(range(8, 12))}


def steps(adapter: str = "") -> list[list[ChunkInput]]:
    """Two prompts at once; a decode of each; one with drafts beside the other."""
    a, b = PAGES["a"], PAGES["b"]

    def chunk(tokens: Sequence[int], start: int, pages: list[int], **more: Any) -> ChunkInput:
        return ChunkInput(list(tokens), start, pages, sample=True, **more)

    return [
        [chunk(PROMPT, 0, a, adapter=adapter), chunk(PROMPT[:20], 0, b)],
        [chunk([5], 45, a, adapter=adapter), chunk([9], 20, b)],
        [chunk([5, 6, 7], 46, a, num_drafts=2, adapter=adapter), chunk([9], 21, b)],
    ]


def assert_same_logits(one: ModelRunner, ranks: Ranks, adapter: str = "") -> None:
    """All ranks have the same logits, bit by bit, which are those of the whole model but for rounding."""
    for chunks in steps(adapter):
        expected = one.forward(chunks)
        found = ranks.each(lambda runner, chunks=chunks: runner.forward(chunks), ranks.runners)
        assert all(torch.equal(logits, found[0]) for logits in found)
        torch.testing.assert_close(found[0], expected, atol=2e-5, rtol=1e-4)
        assert found[0].argmax(-1).tolist() == expected.argmax(-1).tolist()


def assert_ranks_compute_the_model(folder: Path, size: int = 2, page_tokens: int = 8, **spec: Any) -> Ranks:
    one, ranks = load_runner(folder, **spec), Ranks(folder, size, page_tokens=page_tokens, **spec)
    one.allocate_kv(NUM_PAGES, page_tokens, report=ignore_progress)
    assert_same_logits(one, ranks)
    return ranks


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MIXTURES])
def test_two_ranks_compute_each_architecture(tmp_path: Path, architecture: str) -> None:
    assert_ranks_compute_the_model(make_tiny_model(tmp_path, architecture, with_tokenizer=False), page_tokens=16)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_each_family(tmp_path: Path, family: str) -> None:
    assert_ranks_compute_the_model(make_family(tmp_path, family))


def test_ranks_compute_without_the_native_kernels(tmp_path: Path) -> None:
    assert_ranks_compute_the_model(make_tiny_model(tmp_path, with_tokenizer=False, tie=True), native=False)


def test_ranks_that_are_more_than_the_key_heads_share_them(tmp_path: Path) -> None:
    assert_ranks_compute_the_model(make_family(tmp_path / "olmo2", "olmo2"), size=4)
    assert_ranks_compute_the_model(make_family(tmp_path / "stablelm", "stablelm 2"), size=4)


def test_a_vocabulary_that_ranks_cannot_share_evenly_is_split_all_the_same(tmp_path: Path) -> None:
    assert_ranks_compute_the_model(make_tiny_model(tmp_path, vocab_size=319, with_tokenizer=False), size=4)


def test_ranks_keep_keys_and_values_in_8_bits(tmp_path: Path) -> None:
    assert_ranks_compute_the_model(make_tiny_model(tmp_path, with_tokenizer=False), cache_bits=8)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_ranks_decode_quantised_weights_and_take_their_part(tmp_path: Path, method: Any) -> None:
    assert_ranks_compute_the_model(make_twins(tmp_path, method).quantised)


def test_ranks_decode_a_gguf_file_and_take_their_part(tmp_path: Path) -> None:
    for architecture in ("LlamaForCausalLM", "MixtralForCausalLM"):
        folder = make_tiny_model(tmp_path / architecture, architecture, hidden_size=256, intermediate_size=256)
        file = write_gguf(folder, tmp_path / f"{architecture}.gguf", kind="Q8_0")
        assert_ranks_compute_the_model(file, native=False)


def test_a_rank_has_its_part_of_the_weights_and_reads_no_more(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, with_tokenizer=False)
    whole, reported = load_runner(folder), list[int]()
    ranks = assert_ranks_compute_the_model(folder)
    norms = 5 * 64 * 4
    assert sum(runner.weights_bytes for runner in ranks.runners) == whole.weights_bytes + norms
    assert [runner.kv_bytes for runner in ranks.runners] == [whole.kv_bytes // 2] * 2
    config = read_model_config(folder)
    for rank in range(2):
        part = shard_config(config, Shard(rank, 2))
        assert sum(map(torch.Size.numel, map(torch.Size, tensor_shapes(part).values()))) * 4 == reported_bytes(
            folder, rank, reported.append
        )


def reported_bytes(folder: Path, rank: int, note: Callable[[int], None]) -> int:
    """Bytes that a rank reads of the files."""
    from engine.backends.checkpoints.checkpoint import Checkpoint
    from engine.backends.torch.weights.reader import WeightReader, locate_weights, weight_parts

    config = read_model_config(folder)
    weights = locate_weights(Checkpoint.open(folder), tensor_shapes(config), None)

    def report(progress: LoadProgress) -> None:
        note(progress.done)

    reader = WeightReader(
        weight_parts(weights, tensor_parts(config, Shard(rank, 2))),
        dtype=torch.float32,
        report=report,
        cancelled=never,
    )
    return sum(reader.read(name, device=torch.device("cpu")).nbytes for name in weights)


def test_an_adapter_is_split_as_the_layers_are(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", with_tokenizer=False)
    adapter = make_adapter(tmp_path / "adapter", folder, seed=1)
    spec = AdapterSpec(name="a", path=adapter.folder)
    for page_tokens, native in ((8, False), (16, None)):  # over gathered pages and over those of the native kernels
        one, ranks = load_runner(folder, native=native), Ranks(folder, 2, page_tokens=page_tokens, native=native)
        one.allocate_kv(NUM_PAGES, page_tokens, report=ignore_progress)
        whole = one.adapters.attach(spec)
        attached = ranks.each(lambda runner: runner.adapters.attach(spec), ranks.runners)
        assert_same_logits(one, ranks, whole.key)
        assert all(each.size_bytes < whole.size_bytes for each in attached)


def test_an_adapter_merged_into_the_weights_is_split_with_them(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", with_tokenizer=False)
    assert_ranks_compute_the_model(folder, lora=make_adapter(tmp_path / "adapter", folder, seed=1).folder)


@pytest.mark.parametrize(
    ("changes", "size", "named"),
    [
        ({}, 3, "4 attention heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96}, 4, "6 key-value heads"),
        ({"intermediate_size": 129}, 2, "129 neurons in an MLP"),
        ({"num_attention_heads": 32, "num_key_value_heads": 32}, 32, "320 tokens in its vocabulary"),
    ],
)
def test_a_model_that_ranks_cannot_share_evenly_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], size: int, named: str
) -> None:
    folder = make_tiny_model(tmp_path, with_tokenizer=False, **changes)
    with pytest.raises(InvalidRequest, match=f"tensor_parallel_size is {size}; this model has {named}") as refused:
        shard_config(read_model_config(folder), Shard(0, size))
    assert refused.value.details["param"] == "tensor_parallel_size"


def test_experts_that_ranks_cannot_share_evenly_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "Qwen2MoeForCausalLM", with_tokenizer=False, moe_intermediate_size=41)
    with pytest.raises(InvalidRequest, match="41 neurons in an expert"):
        shard_config(read_model_config(folder), Shard(0, 2))


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"tensor_parallel": True}, "tensor_parallel"),
        ({"weights": "int8"}, "weights"),
        ({"deterministic": True}, "deterministic"),
        ({"draft_model": Path("/draft")}, "draft_model"),
        ({"kv_host_gib": 1.0}, "kv_host_gib"),
        ({"kv_disk_gib": 1.0}, "kv_disk_gib"),
    ],
)
def test_what_ranks_do_not_do_is_refused_by_name(settings: dict[str, Any], param: str) -> None:
    spec = ModelSpec(path=Path("/model"), name="m", tensor_parallel_size=2, **settings)
    with pytest.raises(InvalidRequest, match=param) as refused:
        refuse_settings(spec, on_cpu=True)
    assert refused.value.details["param"] == param
