"""The pinned exllamav2 has the names and signatures that the backend uses: its own Python, with stubbed kernels."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.backends.common.exllama_memory import PACKED_ROWS
from engine.backends.exllama import load
from engine.backends.exllama.package import environment
from engine.backends.exllamav2 import attention, library, sampling
from engine.backends.exllamav2.library import PACKAGE, Library
from engine.config import SamplingParams
from tests.fakes import exllama_generator, exllama_job
from tests.fakes.exllamav2_wheel import wheel_folder

OBJECT = object()
"""Stands for any positional argument."""


@pytest.fixture(scope="module")
def package() -> Iterator[SimpleNamespace]:
    """Its modules by name. Nothing of it stays importable: other tests check whether it is installed."""
    stubs = {name: ModuleType(name) for name in ("exllamav2_ext", "PIL", "PIL.Image")}
    stubs["PIL"].Image = stubs["PIL.Image"]  # type: ignore[attr-defined]
    stubs["PIL.Image"].Image = object  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(wheel_folder()))
        for name, stub in stubs.items():
            patch.setitem(sys.modules, name, stub)
        try:
            with environment(**library.NO_ATTENTION):
                library.PACKAGE.load_modules()
            yield SimpleNamespace(
                library=library.library_of_modules(),
                **{
                    name.rpartition(".")[2]: importlib.import_module(f"exllamav2.{name}")
                    for name in ("attn", "model", "module", "linear", "tensor_p", "util", "generator.dynamic")
                },
            )
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "exllamav2"]:
                del sys.modules[name]


@pytest.fixture(scope="module")
def classes(package: SimpleNamespace) -> Library:
    return package.library  # type: ignore[no-any-return]


def calls(package: SimpleNamespace) -> Iterator[tuple[Any, int, tuple[str, ...]]]:
    """Every callable that the backend calls, the number of positional arguments, and the keywords."""
    classes, dynamic = package.library, package.dynamic
    job, generator = dynamic.ExLlamaV2DynamicJob, dynamic.ExLlamaV2DynamicGenerator
    yield classes.config, 0, ()
    yield classes.config.prepare, 1, ()
    yield classes.config.arch_compat_overrides, 1, ("quiet",)
    yield classes.model, 1, ()
    yield classes.model.load, 2, ("callback",)
    yield classes.model.load_autosplit, 2, ("reserve_vram", "callback")
    yield classes.model.load_tp, 2, ("callback", "expect_cache_tokens", "expect_cache_base")
    yield classes.model.forward, 3, ("preprocess_only",)
    yield classes.model.unload, 1, ()
    for cache in classes.caches.values():
        yield cache, 1, ("batch_size", "max_seq_len", "lazy")
    yield classes.cache_tp, 1, ("base", "batch_size", "max_seq_len")
    yield classes.tokenizer, 1, ()
    yield classes.lora, 3, ()
    yield classes.lora.unload, 1, ()
    yield classes.page_hash, 2, ()
    yield classes.settings.greedy, 0, ()
    yield (
        generator,
        0,
        (
            *("model", "cache", "tokenizer", "max_batch_size", "max_chunk_size", "max_q_size", "paged"),
            *("draft_model", "draft_cache", "num_draft_tokens", "use_ngram_draft"),
        ),
    )
    yield generator.iterate, 1, ()
    yield generator.enqueue, 2, ()
    yield generator.cancel, 2, ()
    yield generator.set_loras, 2, ()
    yield generator.reset_page_table, 1, ()
    yield job, 0, ("input_ids", "max_new_tokens", "max_skips", "gen_settings", "return_top_tokens", "identifier")
    yield job.prepare_for_queue, 3, ()
    yield job.allocate_pages, 1, ()
    yield job.prefill, 2, ()
    yield job.is_prefill_done, 1, ()
    yield job.receive_logits, 2, ()
    yield job.receive_sample, 9, ()
    yield dynamic.CachePage.update_hash, 2, ()
    yield dynamic.CachePage.clear, 1, ()
    yield package.util.SeqTensor.torch, 1, ()
    yield package.util.SeqTensor.torch_slice, 3, ()
    yield package.tensor_p.TPContext.all_devices, 1, ()
    yield package.linear.ExLlamaV2Linear.get_weight_tensor_dq, 1, ()


def test_the_package_takes_every_call_of_the_backend(package: SimpleNamespace) -> None:
    for called, positional, keywords in calls(package):
        signature = inspect.signature(called)
        named = {name for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD}
        assert set(keywords) <= named, called  # what falls into **kwargs would be ignored silently
        signature.bind(*[OBJECT] * positional, **dict.fromkeys(keywords))


def test_the_config_has_every_field_that_the_backend_reads_or_sets(package: SimpleNamespace) -> None:
    source = inspect.getsource(package.library.config)
    for name in (
        *("alt_rope_method", "arch", "architecture", "attn_logit_softcapping", "head_dim", "hidden_size"),
        *(
            "intermediate_size",
            "max_attention_size",
            "max_batch_size",
            "max_input_len",
            "max_output_len",
            "max_seq_len",
        ),
        *("model_dir", "no_flash_attn", "no_sdpa", "no_xformers", "num_experts", "num_experts_per_token"),
        *("num_hidden_layers", "num_key_value_heads", "rotary_embedding_base", "scale_alpha_value", "scale_pos_emb"),
        *("sliding_window", "tensor_file_map", "use_qk_norm", "vocab_size", "yarn_rope_factor"),
        "yarn_rope_original_max_position_embeddings",
    ):
        assert f"self.{name} =" in source or f"{name}:" in source, name


def test_the_samplers_settings_get_a_value_for_each_field(classes: Library) -> None:
    fields = set(inspect.signature(classes.settings).parameters)
    for params in (SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(mirostat=2, cfg_scale=1.5)):
        assert set(sampling.settings_of(params, 320)) == fields
    assert {field.name for field in dataclasses.fields(exllama_job.FakeSettings)} == fields


def test_the_wheel_is_the_version_that_we_ask_for() -> None:
    assert PACKAGE.version in (wheel_folder() / "exllamav2" / "version.py").read_text()


def test_variables_and_messages_that_the_backend_goes_by_are_the_packages() -> None:
    source = "".join(file.read_text() for file in sorted((wheel_folder() / "exllamav2").rglob("*.py")))
    for name in library.NO_ATTENTION:
        assert f"'{name}'" in source
    matched = inspect.getsource(load)
    for message in ("Insufficient VRAM", "Insufficient space in device allocation", "Could not find"):
        assert message in matched and message in source


def test_the_rows_that_packed_weights_are_multiplied_with_are_the_packages() -> None:
    kernels = wheel_folder() / "exllamav2" / "exllamav2_ext"
    assert f"#define MAX_Q_GEMM_ROWS {PACKED_ROWS}\n" in (kernels / "config.h").read_text()
    assert "size_m > MAX_Q_GEMM_ROWS" in (kernels / "cuda" / "q_gemm.cu").read_text()


def test_a_generator_reads_its_logits_and_drafts_as_the_backend_takes_it(package: SimpleNamespace) -> None:
    generator = package.dynamic.ExLlamaV2DynamicGenerator
    step, start = inspect.getsource(generator.iterate_gen), inspect.getsource(generator.__init__)
    assert "self.model.forward_chunk(" in step
    assert "self.logits_pinned[:device_logits.shape[0], :device_logits.shape[1], :]" in step
    assert "self.padded_vocab_size =" in start and "self.num_draft_tokens =" in start
    for drafting in (generator.iterate_draftmodel_gen, generator.iterate_ngram_gen):
        inspect.signature(drafting).bind(OBJECT, OBJECT)
        assert "range(self.num_draft_tokens)" in inspect.getsource(drafting)


def test_our_attention_takes_every_argument_that_the_package_gives(package: SimpleNamespace) -> None:
    source = inspect.getsource(package.attn)
    assert 'flash_kwargs["window_size"]' in source and 'flash_kwargs["softcap"]' in source
    options = dict.fromkeys(("window_size", "softcap"))
    calls = re.findall(r"flash_attn_with_kvcache\(\n(.*?)\n +\)", source, re.DOTALL)
    paged = [re.findall(r"(\w+) = ", call) for call in calls if "block_table" in call]
    assert len(paged) == 2
    for keywords in paged:
        inspect.signature(attention.FlashAttention.paged_with_cache).bind(None, **dict.fromkeys(keywords), **options)
    inspect.signature(attention.FlashAttention.dense).bind(
        None, OBJECT, OBJECT, OBJECT, causal=True, softmax_scale=1.0, **options
    )
    for flag in ("has_flash_attn", "has_flash_attn_with_paged", "has_flash_attn_with_window"):
        assert hasattr(package.attn, flag)
    assert hasattr(package.attn, "has_flash_attn_with_softcap") and hasattr(package.model, "has_flash_attn")


def test_our_random_numbers_have_every_method_that_the_package_calls(package: SimpleNamespace) -> None:
    called = set(re.findall(r"\.rng\.(\w+)\(", inspect.getsource(package.dynamic)))
    assert called
    assert all(callable(getattr(sampling.RandomDraws, name, None)) for name in called)


@pytest.mark.parametrize(
    ("fake", "real", "own"),
    [
        (
            exllama_generator.FakeGenerator,
            "ExLlamaV2DynamicGenerator",
            {"allocate", "prefill", "page_filled"},
        ),
        (exllama_job.FakeJob, "ExLlamaV2DynamicJob", {"result"}),
        (exllama_job.FakePage, "CachePage", set()),
    ],
)
def test_a_fake_has_no_method_that_the_package_lacks(
    fake: type, real: str, own: set[str], package: SimpleNamespace
) -> None:
    theirs = getattr(package.dynamic, real)
    for name, method in inspect.getmembers(fake, inspect.isfunction):
        if not name.startswith("_") and name not in own:
            required = inspect.signature(method).parameters
            inspect.signature(getattr(theirs, name)).bind(**dict.fromkeys(required))
