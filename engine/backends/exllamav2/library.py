"""The one place where exllamav2 is imported.

Importing it narrows torch to one thread for the whole process and looks for three attentions of which we want none
(see `attention`).
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.backends.common.exllamav2_checkpoint import read_folder
from engine.backends.exllama.package import LibraryPackage, Report, import_package
from engine.config import AttentionName, ModelSpec

MAX_Q_SIZE = 8
"""Rows of the library's decode buffer per sequence: a step with drafts holds at most one less of them."""


@dataclass(frozen=True, slots=True)
class Library:
    """The library's classes, imported. The fields are named after what they are, not after the library's names.

    page_hash: how pages of the cache are known (see `jobs.CacheScope`).
    caches: by bits per element (16, 8, 6, 4).  cache_tp: wraps one of them for tensor parallelism.
    attention, attention_reason: as in LoadedModel.
    engage: (config, wanted attention, GPU numbers) -> this library, computing with the attention that fits them; None
        where the attention is settled.
    prepare: (config, report) compiles the kernels of that attention for a model, see `attention.prepare`.
    read_packed: (config, cache) has that attention read a packed cache as it is, see `packed_cache`.
    """

    config: Any
    model: Any
    caches: dict[int, Any]
    cache_tp: Any
    tokenizer: Any
    generator: Any
    job: Any
    page_hash: Any
    settings: Any
    lora: Any
    attention: str
    attention_reason: str
    engage: Callable[[Any, AttentionName, Sequence[int]], Library] | None = None
    prepare: Callable[[Any, Callable[[int, int], None]], None] = lambda config, report: None
    read_packed: Callable[[Any, Any], None] = lambda config, cache: None


def count_sources(script: Path) -> int:
    """How many files the library compiles: the length of the list `sources_` in its ext.py; 1 where there is none."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if names == ["sources_"]:
                return len(node.value.elts)
    return 1


NO_ATTENTION = {"EXLLAMA_NO_FLASH_ATTN": "1", "EXLLAMA_NO_XFORMERS": "1", "EXLLAMA_NO_SDPA": "1"}
"""A broken flash-attn or xformers would end the import; the attention over SDPA is not causal."""

PACKAGE = LibraryPackage(
    name="exllamav2",
    version="0.3.2",
    extension="exllamav2_ext",
    modules=("exllamav2", "exllamav2.generator"),
    count_sources=lambda folder: count_sources(folder / "ext.py"),
    variables=NO_ATTENTION,
)


def import_library(
    report: Report, *, spec: ModelSpec | None = None, cancelled: Callable[[], bool] = lambda: False
) -> Library:
    """The library, its attention not chosen yet (see `Library.engage`).

    report: called with the number of compiled kernel files, on this thread. spec: its folder is read first, so that a
    model which cannot be loaded costs no compilation.
    Raises BackendUnavailable, LoadCancelled, and for the folder what `read_folder` raises.
    """
    if spec is not None:
        read_folder(spec.path)
    import_package(PACKAGE, report, cancelled)
    return library_of_modules()


def library_of_modules() -> Library:
    """The classes of the imported package, under our names."""
    package = importlib.import_module(PACKAGE.name)
    generator = importlib.import_module(f"{PACKAGE.name}.generator")
    dynamic = importlib.import_module(f"{PACKAGE.name}.generator.dynamic")
    library = Library(
        config=package.ExLlamaV2Config,
        model=package.ExLlamaV2,
        caches={
            16: package.ExLlamaV2Cache,
            8: package.ExLlamaV2Cache_Q8,
            6: package.ExLlamaV2Cache_Q6,
            4: package.ExLlamaV2Cache_Q4,
        },
        cache_tp=package.ExLlamaV2Cache_TP,
        tokenizer=package.ExLlamaV2Tokenizer,
        generator=generator.ExLlamaV2DynamicGenerator,
        job=generator.ExLlamaV2DynamicJob,
        page_hash=dynamic._tensor_hash_checksum,
        settings=generator.ExLlamaV2Sampler.Settings,
        lora=package.ExLlamaV2Lora,
        attention="",
        attention_reason="no model is loaded",
    )
    return replace(library, engage=lambda *needs: _engaged(library, *needs))


def _engaged(library: Library, config: Any, wanted: AttentionName, devices: Sequence[int]) -> Library:
    """`library` with the paged attention that fits the model of `config` on these GPUs, put in its place.

    Raises InvalidRequest where `wanted` cannot be.
    """
    import torch

    from engine.backends.exllamav2.attention import install, install_flash, model_needs, model_windows, prepare
    from engine.backends.paged_attention.interface import implementation
    from engine.backends.paged_attention.probe import engage, probe

    places = [torch.device("cuda", number) for number in devices]
    choice = engage(wanted, probe(*places, **model_needs(config)), places)
    attn, model = (importlib.import_module(f"{PACKAGE.name}.{name}") for name in ("attn", "model"))
    library = replace(library, attention=choice.name, attention_reason=choice.reason)
    if choice.name == "flash":
        install_flash(attn, model)
        return library
    paged = implementation(choice.name)
    installed = install(attn, model, paged)
    library = replace(library, prepare=lambda config, report: prepare(paged, config, places, report))
    if choice.name != "triton":
        return library

    def reads(config: Any, cache: Any) -> None:
        from engine.backends.exllamav2.packed_cache import read_packed
        from engine.backends.paged_attention.triton_attention import TritonAttention

        assert isinstance(paged, TritonAttention)
        needs = model_needs(config)
        read_packed(cache, paged, needs["heads"], model_windows(config), needs["softcap"], installed.register)

    return replace(library, read_packed=reads)
