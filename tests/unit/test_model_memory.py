"""What a model asks of memory, from its config and the headers of its files alone."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest

from engine.backends.common import native_kernels
from engine.backends.common.native_build import SWITCH
from engine.backends.common.step_memory import graph_bytes, max_recorded_rows, split_keys_bytes
from engine.backends.torch.model.linear import native_bfloat16 as torch_says
from engine.backends.torch.native.library import native_isa
from engine.config import CacheBits, ModelSpec
from engine.errors import ModelLoadFailed, UnsafeWeights, UnsupportedModel
from engine.models.headers import read_header
from engine.models.inspect import split_into_parts
from engine.placement.model_facts import read_facts
from engine.placement.model_memory import (
    Correction,
    ModelCosts,
    Workload,
    apply_correction,
    costs_of,
    device_kind,
)
from engine.placement.plan import plan
from engine.snapshot import DeviceReading
from engine.system.processor import cpu_flags, native_bfloat16
from tests.fakes.model_folders import write_model, write_safetensors

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def tensors(layers: int = 2, *, dtype: str = "BF16", head: bool = True) -> Tensors:
    """Embedding and head of 320 * 64, layers of 64 * 100, norms of 64."""
    found: Tensors = {"model.embed_tokens.weight": (dtype, (320, 64)), "model.norm.weight": (dtype, (64,))}
    for layer in range(layers):
        found[f"model.layers.{layer}.mlp.up_proj.weight"] = (dtype, (100, 64))
        found[f"model.layers.{layer}.input_layernorm.weight"] = (dtype, (64,))
    return found | ({"lm_head.weight": (dtype, (320, 64))} if head else {})


EMBEDDING, LAYER, NORM = 320 * 64, 101 * 64, 64


def costs(folder: Path, kind: str = "cuda", *, workload: Workload | None = None, **settings: Any) -> ModelCosts:
    spec = ModelSpec(path=folder, name="m", **settings)
    return costs_of(read_facts(spec), spec, device_kind(kind), workload or Workload(), bfloat16=True)


# -- weights -----------------------------------------------------------------------------------------------------------


def test_weights_are_counted_by_layer_with_what_goes_before_and_after(tmp_path: Path) -> None:
    found = costs(write_model(tmp_path, tensors()))
    assert found.layer_bytes == (2 * LAYER,) * 2
    assert (found.first_bytes, found.last_bytes, found.joined_bytes) == (2 * EMBEDDING, 2 * (EMBEDDING + NORM), 0)
    assert found.weights_bytes == 2 * (2 * EMBEDDING + 2 * LAYER + NORM)


def test_a_dtype_that_was_asked_for_counts_and_else_the_one_that_the_device_computes_in(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tensors(dtype="F16"), torch_dtype="float16")
    assert costs(folder).dtype == "float16"
    assert costs(folder, "cpu").dtype == "bfloat16"
    wide = costs(folder, "cpu", dtype="float32")
    assert wide.weights_bytes == 2 * costs(folder).weights_bytes


def test_a_tied_head_costs_nothing_on_the_embeddings_device_but_a_packed_copy_on_a_cpu(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tensors(head=False), tie_word_embeddings=True)
    assert costs(folder).joined_bytes == 2 * EMBEDDING
    assert costs(folder, "sim:0").joined_bytes == 2 * EMBEDDING
    assert costs(folder, "cpu").joined_bytes == 0
    assert costs(folder, "cpu").last_bytes == 2 * (EMBEDDING + NORM)


EXL2: Tensors = {
    "model.layers.0.mlp.up_proj.q_weight": ("I32", (20, 32)),
    "model.layers.0.mlp.up_proj.q_invperm": ("I16", (128,)),
    "model.layers.0.mlp.up_proj.q_scale": ("I32", (4, 4)),
    "model.layers.0.mlp.up_proj.q_scale_max": ("F16", (4,)),
    "model.layers.0.mlp.up_proj.q_groups": ("I16", (8,)),
    "model.embed_tokens.weight": ("F32", (320, 64)),
    "model.norm.weight": ("F16", (64,)),
    "lm_head.weight": ("F16", (320, 64)),
}
EXL3: Tensors = {
    "model.layers.0.mlp.up_proj.trellis": ("I16", (8, 2, 64)),
    "model.layers.0.mlp.up_proj.suh": ("F16", (128,)),
    "model.layers.0.mlp.up_proj.svh": ("F16", (32,)),
    "model.layers.0.mlp.up_proj.mcg": ("I32", ()),
    "model.embed_tokens.weight": ("BF16", (320, 64)),
}
GPTQ: Tensors = {
    "model.layers.0.mlp.up_proj.qweight": ("I32", (16, 32)),
    "model.layers.0.mlp.up_proj.qzeros": ("I32", (1, 4)),
    "model.layers.0.mlp.up_proj.scales": ("F16", (1, 32)),
    "model.layers.0.mlp.up_proj.g_idx": ("I32", (128,)),
    "model.embed_tokens.weight": ("F16", (320, 64)),
}
AWQ: Tensors = {
    "model.layers.0.mlp.up_proj.qweight": ("I32", (128, 4)),
    "model.layers.0.mlp.up_proj.qzeros": ("I32", (1, 4)),
    "model.layers.0.mlp.up_proj.scales": ("F16", (1, 32)),
    "model.embed_tokens.weight": ("F16", (320, 64)),
}
FP8: Tensors = {
    "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", (32, 128)),
    "model.layers.0.mlp.up_proj.weight_scale_inv": ("F32", (1, 1)),
    "model.layers.0.mlp.up_proj.input_scale": ("F32", ()),
    "model.embed_tokens.weight": ("BF16", (320, 64)),
    "lm_head.weight": ("F8_E4M3", (320, 64)),
    "lm_head.weight_scale_inv": ("F32", (3, 1)),
}


def test_torch_unpacks_8_bit_floats_to_the_floats_of_the_config_and_a_quantised_head_by_itself(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path, FP8, num_hidden_layers=1, tie_word_embeddings=True, quantization_config={"quant_method": "fp8"}
    )
    found = costs(folder, "cpu")
    assert found.dtype == "bfloat16"
    assert found.layer_bytes == (2 * 128 * 32,)
    assert (found.first_bytes, found.last_bytes, found.joined_bytes) == (2 * EMBEDDING, 2 * EMBEDDING, 0)


def test_on_cuda_a_head_of_8_bit_floats_stays_so_and_half_a_layer_of_them_is_unpacked(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found = costs(write_model(tmp_path, FP8, num_hidden_layers=1, quantization_config={"quant_method": "fp8"}))
    assert found.layer_bytes == (2 * 128 * 32,)  # gate and up are one layer
    assert (found.first_bytes, found.last_bytes) == (2 * EMBEDDING, EMBEDDING + 3 * 4)


@pytest.mark.parametrize(("packed", "method"), [(EXL2, "exl2"), (EXL3, "exl3"), (GPTQ, "gptq"), (AWQ, "awq")])
def test_torch_unpacks_quantised_layers_to_plain_numbers(tmp_path: Path, packed: Tensors, method: str) -> None:
    folder = write_model(tmp_path, packed, num_hidden_layers=1, quantization_config={"quant_method": method, "bits": 4})
    found = costs(folder, backend="torch")
    assert found.dtype == "float16"
    assert found.layer_bytes == (2 * 128 * 32,)


def test_exllamav2_keeps_layers_as_they_are_packed_and_the_embedding_off_the_gpu(tmp_path: Path) -> None:
    folder = write_model(tmp_path, EXL2, num_hidden_layers=1, quantization_config={"quant_method": "exl2", "bits": 4})
    found = costs(folder, backend="exllamav2")
    assert found.layer_bytes == (4 * 20 * 32 + 2 * 128 + 4 * 16 + 2 * 4 + 2 * 8,)
    assert (found.first_bytes, found.last_bytes) == (0, 2 * (EMBEDDING + NORM))
    assert found.page_tokens == 256


def test_exllamav3_keeps_layers_as_they_are_packed(tmp_path: Path) -> None:
    packed = {"model.layers.0.a.trellis": ("I16", (8, 16, 64)), "model.layers.0.a.suh": ("F16", (128,))}
    folder = write_model(tmp_path, packed, num_hidden_layers=1, quantization_config={"quant_method": "exl3", "bits": 4})
    found = costs(folder, backend="exllamav3")
    assert (found.backend, found.dtype, found.page_tokens) == ("exllamav3", "float16", 256)
    assert found.layer_bytes == (2 * 8 * 16 * 64 + 2 * 128,)
    assert costs(folder, backend="torch").layer_bytes == (2 * 128 * 256,)


def test_a_draft_model_and_an_adapter_go_with_the_first_layer(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "main", tensors(dtype="F16"))
    draft = write_model(tmp_path / "draft", tensors(1, dtype="F16"), num_hidden_layers=1)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_safetensors(adapter / "adapter_model.safetensors", {"a": ("F16", (50, 10))})
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 10}))
    plain = costs(folder, backend="exllamav2")
    found = costs(folder, backend="exllamav2", draft_model=draft, lora=adapter)
    assert found.first_bytes == 2 * (LAYER + EMBEDDING + NORM) + (adapter / "adapter_model.safetensors").stat().st_size
    assert found.first_page_bytes == plain.page_bytes
    assert found.working_bytes > plain.working_bytes


def test_a_torch_draft_model_lies_with_the_first_layer_and_has_pages_as_many_as_the_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "main", tensors(dtype="F16"))
    draft = write_model(tmp_path / "draft", tensors(1, dtype="F16"), num_hidden_layers=1)
    plain, alone = costs(folder), costs(draft)
    found = costs(folder, draft_model=draft)
    assert found.first_bytes == plain.first_bytes + alone.weights_bytes
    assert found.first_page_bytes == alone.page_bytes
    assert (found.layer_bytes, found.page_bytes, found.last_bytes) == (
        plain.layer_bytes,
        plain.page_bytes,
        plain.last_bytes,
    )
    assert found.identity != plain.identity


def test_every_expert_counts(tmp_path: Path) -> None:
    experts: Tensors = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight": ("BF16", (64, 32))
        for layer in range(2)
        for expert in range(4)
    }
    folder = write_model(tmp_path, experts, architectures=["MixtralForCausalLM"], num_local_experts=4)
    assert costs(folder).layer_bytes == (2 * 4 * 64 * 32,) * 2


def test_tensors_find_their_parts_under_other_names_too(tmp_path: Path) -> None:
    names = {
        "transformer.wte.weight": "embedding",
        "transformer.h.1.attn.weight": "layer",
        "transformer.blocks.0.ffn.weight": "layer",
        "vision_model.encoder.layers.0.weight": "none, as no backend loads it",
        "model.layers.7.extra.weight": "norm",
        "transformer.ln_f.weight": "norm",
        "output.weight": "head",
    }
    write_safetensors(tmp_path / "w", dict.fromkeys(names, ("F16", (3,))))

    for name, part in names.items():
        found = split_into_parts({name: read_header(tmp_path / "w")[name]}, 2, None)
        sizes = {
            "embedding": found.embedding.elements,
            "layer": sum(layer.elements for layer in found.layers),
            "norm": found.norm.elements,
            "head": found.head.elements,
        }
        assert sizes == {key: 3 * (key == part) for key in sizes}, name


# -- KV and working memory ---------------------------------------------------------------------------------------------


def test_kv_pages_hold_every_layers_keys_and_values(tmp_path: Path) -> None:
    found = costs(write_model(tmp_path, tensors(), num_key_value_heads=2, head_dim=16))
    assert found.page_bytes == 16 * 2 * 2 * 16 * 2
    assert found.kv_token_bytes == 2 * 2 * 2 * 16 * 2


def test_a_sliding_window_does_not_shrink_the_pages(tmp_path: Path) -> None:
    plain = costs(write_model(tmp_path / "a", tensors()))
    windowed = write_model(
        tmp_path / "b", tensors(), architectures=["MistralForCausalLM"], sliding_window=16, model_type="mistral"
    )
    assert costs(windowed).page_bytes == plain.page_bytes


@pytest.mark.parametrize(
    ("backend", "every"), [("exllamav2", (16, 8, 6, 4)), ("exllamav3", (16, 8, 6, 4)), ("torch", (16, 8, 4))]
)
def test_fewer_cache_bits_make_smaller_pages(tmp_path: Path, backend: str, every: tuple[int, ...]) -> None:
    folder = write_model(tmp_path, tensors())
    sizes = [costs(folder, backend=backend, cache_bits=bits).page_bytes for bits in every]
    assert sizes == sorted(set(sizes), reverse=True)


def test_working_memory_grows_with_the_step_the_batch_and_the_vocabulary(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "a", tensors())
    wide = write_model(tmp_path / "b", tensors(), vocab_size=32000)
    usual = costs(folder)
    assert costs(folder, workload=Workload(step_tokens=2048)).working_bytes > usual.working_bytes
    assert costs(folder, workload=Workload(max_prompts=64)).head_working_bytes > usual.head_working_bytes
    assert costs(wide).head_working_bytes > usual.head_working_bytes
    assert costs(wide).working_bytes == usual.working_bytes
    assert costs(folder, "sim:0").working_bytes < costs(folder, "cpu").working_bytes


@pytest.mark.parametrize(("drafts", "rows"), [(None, 8), (3, 4)])
def test_working_memory_has_the_rows_of_an_answer_with_all_its_drafts(
    tmp_path: Path, drafts: int | None, rows: int
) -> None:
    folder = write_model(tmp_path / "a", tensors(), vocab_size=32000)
    alone = Workload(max_prompts=1, step_tokens=16)
    guessing = costs(folder, workload=alone, ngram_draft=True, draft_tokens=drafts)
    assert (
        guessing.head_working_bytes
        == costs(folder, workload=Workload(max_prompts=rows, step_tokens=16)).head_working_bytes
    )
    assert guessing.head_working_bytes > costs(folder, workload=alone).head_working_bytes


@pytest.mark.parametrize("bits", [8, 4])
def test_recorded_steps_over_kv_codes_are_counted_but_for_gathered_ones(tmp_path: Path, bits: CacheBits) -> None:
    folder, workload = write_model(tmp_path, tensors()), Workload()
    read, gathered = (costs(folder, cache_bits=bits, attention=name, dtype="float16") for name in ("auto", "gathered"))
    shape = read_facts(ModelSpec(path=folder, name="m")).shape
    rows = max_recorded_rows(workload.max_prompts, workload.step_tokens)
    recorded = graph_bytes(shape, rows, workload.max_prompts, 2, workload.page_tokens)
    kept = 2 * split_keys_bytes(shape.head_dim)
    assert read.head_working_bytes - gathered.head_working_bytes == recorded + kept


@pytest.mark.parametrize("attention", ["auto", "triton"])
def test_what_attention_with_triton_keeps_is_counted_for_each_stream(tmp_path: Path, attention: str) -> None:
    folder = write_model(tmp_path, tensors())
    found, flash = costs(folder, attention=attention), costs(folder, attention="flash")
    kept = split_keys_bytes(read_facts(ModelSpec(path=folder, name="m")).shape.head_dim)
    assert found.working_bytes - flash.working_bytes == kept
    assert found.head_working_bytes - flash.head_working_bytes == 2 * kept  # recorded steps have a stream


@pytest.mark.parametrize(
    ("backend", "attention"), [("exllamav2", "auto"), ("exllamav2", "triton"), ("exllamav3", "auto")]
)
def test_what_attention_with_triton_keeps_is_counted_for_each_model_of_exllamav2_which_uses_it(
    tmp_path: Path, backend: str, attention: str
) -> None:
    folder, draft = write_model(tmp_path / "a", tensors()), write_model(tmp_path / "b", tensors())
    kept = split_keys_bytes(read_facts(ModelSpec(path=folder, name="m")).shape.head_dim)
    for models, extra in ((1, {}), (2, {"draft_model": draft})):
        found = costs(folder, backend=backend, attention=attention, **extra)
        flash = costs(folder, backend=backend, attention="flash", **extra)
        expected = models * kept if backend == "exllamav2" else 0
        assert found.working_bytes - flash.working_bytes == expected
        assert found.head_working_bytes - flash.head_working_bytes == expected


def test_what_attention_with_triton_keeps_is_that_of_the_largest_gpu_s_multiprocessors(tmp_path: Path) -> None:
    spec = ModelSpec(path=write_model(tmp_path, tensors()), name="m", backend="torch")
    facts = read_facts(spec)

    def working(*processors: int | None) -> int:
        devices = [
            DeviceReading(
                id=f"cuda:{at}",
                name="",
                kind="cuda",
                utilisation=None,
                total_bytes=8 << 30,
                free_bytes=8 << 30,
                processors=each,
            )
            for at, each in enumerate(processors)
        ]
        return plan(1, facts, devices, spec, Workload()).costs.working_bytes

    usual, head_dim = working(None), facts.shape.head_dim
    assert usual == working(132)
    assert working(20, 188) - usual == split_keys_bytes(head_dim, 188) - split_keys_bytes(head_dim)
    assert working(20) - usual == split_keys_bytes(head_dim, 20) - split_keys_bytes(head_dim)


def test_the_context_is_the_models_own_stretched_or_what_was_asked_for(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tensors())
    assert costs(folder).context_tokens == 2048
    assert costs(folder, alpha_value=2.0).context_tokens == 4096
    assert costs(folder, max_model_len=100).context_tokens == 100


def test_a_correction_changes_weights_by_a_factor_and_working_memory_by_bytes(tmp_path: Path) -> None:
    found = costs(write_model(tmp_path, tensors()))
    learned = Correction(weights_factor=1.5, working_bytes=1000, loads=1)
    better = apply_correction(found, learned)
    assert better.weights_bytes == found.weights_bytes * 1.5
    assert better.working_bytes == found.working_bytes + 1000
    assert (better.page_bytes, better.correction) == (found.page_bytes, learned)


def test_the_identity_changes_with_the_files_and_how_they_are_held(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tensors())
    before = costs(folder).identity
    assert costs(folder).identity == before
    assert len({before, costs(folder, dtype="float32").identity, costs(folder, "cpu").identity}) == 3
    write_model(folder, tensors(3))
    assert costs(folder).identity != before


# -- any folder --------------------------------------------------------------------------------------------------------


def test_a_folder_that_no_backend_can_run_is_counted_all_the_same(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 99}
    config = {"architectures": ["OddForCausalLM"], "text_config": text}
    write_model(tmp_path, tensors())
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = costs(tmp_path, dtype="bfloat16")
    assert (found.layer_bytes, found.context_tokens) == ((2 * LAYER,) * 2, 99)
    assert found.page_bytes == 16 * 2 * 64 * 2


def test_a_folder_without_weights_is_counted_as_its_config_describes_it(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    found = costs(tmp_path)
    assert found.layer_bytes[0] == 2 * 64 * (4 * 64 + 3 * 128 + 2)
    assert found.first_bytes == 2 * EMBEDDING


def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="not a folder"):
        costs(tmp_path / "missing")
    with pytest.raises(UnsupportedModel, match=r"has no config\.json"):
        costs(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="has no number of layers"):
        costs(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="not valid JSON"):
        costs(tmp_path)


def test_broken_weights_get_a_sentence(tmp_path: Path) -> None:
    write_model(tmp_path, tensors())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelLoadFailed, match="truncated or damaged"):
        costs(tmp_path)


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsafeWeights, match=r"pytorch_model\.bin"):
        costs(tmp_path)


# -- the processor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("flags\t: fpu avx512bw avx512_bf16\n", True),
        ("flags\t: fpu avx512bw amx_tile\n", True),
        ("flags\t: fpu avx512bw\n", False),
        ("flags\t: fpu avx512_bf16\n", False),
        ("Features\t: fp asimd bf16\n", True),
        ("Features\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_bfloat16_is_native_where_the_processor_says_so(tmp_path: Path, text: str, native: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert native_bfloat16(tmp_path / "cpuinfo") is native


@pytest.mark.parametrize(
    ("flags", "compiler", "switch", "preferred"),
    [
        ({"avx512bw", "avx512_bf16"}, "", "0", True),
        ({"avx2", "fma"}, "/usr/bin/g++", "1", True),
        ({"avx2", "fma"}, "", "1", False),
        ({"avx2", "fma"}, "/usr/bin/g++", "0", False),
        ({"sse4_2"}, "/usr/bin/g++", "1", False),
    ],
)
def test_bfloat16_is_preferred_where_the_processor_or_our_kernels_multiply_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: set[str], compiler: str, switch: str, preferred: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native_kernels, "native_bfloat16", lambda: "avx512_bf16" in flags)
    monkeypatch.setattr(native_kernels, "cpu_flags", lambda: flags)
    monkeypatch.setattr(native_kernels, "find_compiler", lambda: compiler)
    monkeypatch.setattr(native_kernels, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(native_kernels, "SHIPPED", tmp_path)
    monkeypatch.setenv(SWITCH, switch)
    assert native_kernels.prefers_bfloat16() is preferred


def test_the_kernels_are_for_what_torch_says_of_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    assert native_kernels.instruction_set(platform.machine(), cpu_flags()) == native_isa()


def test_torch_agrees_on_what_this_processor_multiplies_natively(tmp_path: Path) -> None:
    assert native_bfloat16() is torch_says()
    assert native_bfloat16(tmp_path / "missing") is False
