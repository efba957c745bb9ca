"""The pinned exllamav3 has the names and signatures that the backend uses: its own Python, with stubbed kernels."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.common.exllamav3_checkpoint import ARCHITECTURES
from engine.backends.exllama import load
from engine.backends.exllamav3 import jobs, library, loading
from engine.backends.exllamav3.library import PACKAGE, Library, count_sources
from tests.fakes import exllama3
from tests.fakes.published_sources import EXLLAMAV3, source_folder

OBJECT = object()
"""Stands for any positional argument."""

DRAFTING = frozenset(
    {
        "DFlashDraftModel",
        "DFlash2DraftModel",
        "DFlashLagunaForCausalLM",
        "Gemma4AssistantForCausalLM",
        "MuseGlimmerAssistantModel",
    }
)
"""Architectures of the package that answer nothing by themselves."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return source_folder(EXLLAMAV3) / PACKAGE.name


@pytest.fixture(scope="module")
def package() -> Iterator[SimpleNamespace]:
    """Its modules by name. Nothing of it stays importable: other tests check whether it is installed."""
    before = set(sys.modules)
    stubs = exllama3.stubs()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(source_folder(EXLLAMAV3)))
        for name, stub in stubs.items():
            patch.setitem(sys.modules, name, stub)
        try:
            PACKAGE.load_modules()
            names = ("generator.job", "generator.pagetable", "generator.generator", "cache.recurrent", "util.tensor")
            names += ("architecture.architectures", "model.config", "modules.linear")
            yield SimpleNamespace(
                library=library.library_of_modules(),
                **{name.rpartition(".")[2]: importlib.import_module(f"{PACKAGE.name}.{name}") for name in names},
            )
        finally:
            for name in set(sys.modules) - before:
                if name.partition(".")[0] == PACKAGE.name:
                    del sys.modules[name]


def calls(package: SimpleNamespace) -> Iterator[tuple[Any, int, tuple[str, ...]]]:
    """Every callable that the backend calls, the number of positional arguments, and the keywords."""
    classes: Library = package.library
    job, generator, pages = classes.job, classes.generator, package.pagetable
    yield classes.config.from_directory, 1, ()
    yield classes.model.from_config, 1, ()
    yield classes.model.load_gen, 1, ("max_chunk_size", "callback", "reserve_per_device")
    yield classes.model.load_gen, 1, ("max_chunk_size", "callback", "use_per_device")
    yield classes.model.unload, 1, ()
    yield classes.cache, 1, ("max_num_tokens", "layer_type", "max_batch_size")
    yield classes.cache.detach_from_model, 1, ()
    for layer in (classes.float_layer, classes.packed_layer):
        yield layer.storage_size, 1, ()
    yield classes.packed_layer, 4, ("k_bits", "v_bits")
    yield classes.page_hash, 2, ()
    yield (
        generator,
        0,
        (
            *("model", "cache", "tokenizer", "max_batch_size", "max_chunk_size"),
            *("draft_model", "draft_cache", "num_draft_tokens", "ngram_match_min", "draft_max_rows"),
        ),
    )
    for method in (generator.iterate, generator.close):
        yield method, 1, ()
    for method in (generator.iterate_ngram_gen, generator.row_limited):
        yield method, 2, ()
    for method in (generator.iterate_draftmodel_gen, generator.iterate_gen):
        yield method, 3, ()
    for method in (generator.enqueue, generator.cancel):
        yield method, 2, ()
    yield job, 0, ("input_ids", "max_new_tokens", "max_skips", "sampler", "identifier")
    yield job.prepare_for_queue, 3, ()
    yield job.allocate_pages, 1, ()
    yield job.prefill, 3, ()
    yield job.is_prefill_done, 1, ()
    yield job.hash_completed_page, 3, ()
    yield job.receive_logits, 2, ()
    yield job.receive_sample, 7, ()
    yield pages.PageTable.reset_page_table, 1, ()
    yield pages.CachePage.update_hash, 2, ()
    yield pages.CachePage.clear, 1, ()
    yield package.recurrent.RecurrentCache.rekey, 3, ()
    yield package.tensor.SeqTensor.torch, 1, ()
    yield package.tensor.SeqTensor.torch_slice, 3, ()


def test_the_package_takes_every_call_of_the_backend(package: SimpleNamespace) -> None:
    for called, positional, keywords in calls(package):
        signature = inspect.signature(called)
        named = {name for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD}
        assert set(keywords) <= named, called  # what falls into **kwargs would be ignored silently
        signature.bind(*[OBJECT] * positional, **dict.fromkeys(keywords))


def test_the_package_calls_what_stands_in_for_its_methods_as_they_take_it(package: SimpleNamespace) -> None:
    for ours, theirs in (
        (jobs.CacheScope._prefilled, package.job.Job.prefill),
        (jobs.CacheScope._completed, package.job.Job.hash_completed_page),
        (jobs.TokenSampler.receive_logits, package.job.Job.receive_logits),
    ):
        given = inspect.signature(theirs).parameters
        assert len(inspect.signature(ours).parameters) == len(given), theirs
    source = inspect.getsource(package.generator.Generator)
    assert "job.prepare_for_queue(self, self.job_serial)" in source
    assert "job.allocate_pages()" in source
    assert "job.prefill(results, chunk_size)" in source
    assert "self.hash_completed_page(seq, page_before)" in inspect.getsource(package.job.Job.receive_sample)
    assert "self.hash_completed_page(seq, local_idx)" in inspect.getsource(package.job.Job.prefill)


def test_first_pages_are_hashed_nowhere_else(package: SimpleNamespace) -> None:
    """Each of these places is one that CacheScope sees to."""
    sources = [inspect.getsource(module) for module in (package.job, package.pagetable, package.generator)]
    found = [len(re.findall(r"tensor_hash_checksum\(", source)) for source in sources]
    assert found == [1, 3, 0]  # completed pages; prepared ones, CachePage.update_hash without one, and a check
    assert "newhash is None" in inspect.getsource(package.pagetable.CachePage.update_hash)


def test_a_scope_without_a_root_is_hashed_as_the_package_does(package: SimpleNamespace) -> None:
    import torch

    ids = torch.arange(256).view(1, 256)
    assert package.library.page_hash(ids, b"") == package.library.page_hash(ids, None)
    assert package.library.page_hash(ids, b"root") != package.library.page_hash(ids, None)


def test_what_the_package_asks_of_a_tokenizer_is_there(package: SimpleNamespace) -> None:
    """Without stop strings, banned strings, healing and forced output, which no job here has."""
    source = inspect.getsource(package.job.Job.receive_sample) + inspect.getsource(package.generator.Generator.__init__)
    asked = set(re.findall(r"tokenizer\.(\w+)\(", source))
    assert asked == {"get_id_to_piece_list", "decode"}
    assert loading.NoText(3).get_id_to_piece_list(True) == ["", "", ""]
    assert '"�" in self.held_text' in source  # what decode is called for, which texts of nothing never have


def test_errors_of_one_job_are_told_as_the_backend_reads_them(package: SimpleNamespace) -> None:
    source = inspect.getsource(package.generator.Generator.reap_failed_job)
    assert all(f'"{key}":' in source for key in ("job", "stage", "error", "eos"))
    assert '"stage": "error"' in source


def test_the_config_has_every_field_that_the_backend_reads(package: SimpleNamespace) -> None:
    source = inspect.getsource(package.config.Config) + inspect.getsource(
        package.architectures.ARCHITECTURES["LlamaForCausalLM"]["config_class"]
    )
    for name in ("max_position_embeddings", "head_dim", "hidden_size", "intermediate_size", "vocab_size"):
        assert f"self.{name} =" in source, name
    mixture = inspect.getsource(package.architectures.ARCHITECTURES["MixtralForCausalLM"]["config_class"])
    for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        assert f"self.{name} =" in mixture, name


def test_every_architecture_that_answers_is_taken_and_no_other(package: SimpleNamespace) -> None:
    assert package.architectures.ARCHITECTURES.keys() - DRAFTING == ARCHITECTURES


def test_the_version_is_the_one_that_we_ask_for(folder: Path) -> None:
    assert f'"{PACKAGE.version}"' in (folder / "version.py").read_text()


def test_the_rows_that_packed_weights_are_multiplied_with_are_the_packages(folder: Path) -> None:
    source = (folder / "modules" / "quant" / "exl3.py").read_text(encoding="utf-8")
    assert f"AUTO_RECONSTRUCT_THRESHOLD = {loading.PACKED_ROWS}\n" in source
    assert "if rows <= AUTO_RECONSTRUCT_THRESHOLD or" in source


def test_a_sampler_that_needs_the_tokens_before_draws_for_a_draft_one_by_one(package: SimpleNamespace) -> None:
    source = inspect.getsource(package.generator.Generator.iterate_gen)
    assert "and not job.sampler.reqs_past_ids" in source
    assert "job.prepare_sampling_past_ids()" in source


def test_the_kernels_that_are_compiled_are_counted(folder: Path) -> None:
    from_package: dict[str, Any] = {}
    exec((folder / "util/cuda_flags.py").read_text(encoding="utf-8"), from_package)
    assert count_sources(folder) == len(from_package["extension_sources"](str(folder / PACKAGE.extension))) > 50


def test_messages_that_the_backend_goes_by_are_the_packages(folder: Path) -> None:
    source = (folder / "model/model_ls.py").read_text(encoding="utf-8")
    assert "Insufficient VRAM" in source and "Insufficient VRAM" in inspect.getsource(load)
    assert "set_memory_fraction_reserve" in source and "set_memory_fraction_use" in source
