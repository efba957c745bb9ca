"""What a load will do, worked out from folders and settings before anything of it reaches a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from engine.backends.exllama.adapters import Adapter, read_adapter
from engine.backends.exllama.configure import (
    apply_settings,
    draft_tokens,
    follow_main,
    read_config,
    refuse_other_vocabulary,
    refuse_tensor_parallel,
)
from engine.backends.exllama.folder import ModelFolder, read_folder
from engine.backends.exllama.load_faults import LoadNumbers, explain_load
from engine.backends.exllama.parts import Library
from engine.backends.exllama.sizes import CacheShape, loaded_bytes, stored_bytes, work_bytes
from engine.backends.exllama.split import Split, plan_split
from engine.config import AttentionName, ModelSpec


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model of a load: its folder, the library's config of it with settings applied, and its cache's shape."""

    folder: ModelFolder
    config: Any
    cache: CacheShape

    @property
    def work_bytes(self) -> int:
        """What each device needs for it besides weights and cache."""
        config = self.config
        return work_bytes(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            chunk_tokens=config.max_input_len,
        )


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load. sources: the main model first, then the draft model where there is one.

    library: with the attention that fits.  max_model_len: tokens, as asked for; the config has it rounded up.
    """

    library: Library
    spec: ModelSpec
    sources: tuple[ModelSource, ...]
    adapter: Adapter | None
    split: Split
    max_model_len: int
    max_prompts: int

    @property
    def draft_tokens(self) -> int:
        """Tokens guessed ahead per step."""
        return draft_tokens(self.spec)

    @property
    def weights_bytes(self) -> int:
        """Of all models and the adapter, once loaded."""
        adapter = self.adapter.weights_bytes if self.adapter is not None else 0
        return adapter + sum(loaded_bytes(source.folder.tensors) for source in self.sources)

    @property
    def file_bytes(self) -> int:
        """Of all models, as they lie in their files."""
        return sum(stored_bytes(source.folder.tensors) for source in self.sources)

    @property
    def work_bytes(self) -> int:
        """What each device needs besides weights and caches."""
        return sum(source.work_bytes for source in self.sources)

    @property
    def page_bytes(self) -> int:
        """What one page takes in all layers of all models."""
        return sum(source.cache.page_bytes for source in self.sources)

    @property
    def unpacked_page_bytes(self) -> int:
        """What packed caches add per page on each device."""
        return sum(source.cache.unpacked_page_bytes for source in self.sources)


def plan_load(library: Library, spec: ModelSpec, *, max_prompts: int, gpus: int) -> LoadPlan:
    """Read folders and settings of `spec` for a machine of `gpus` GPUs.

    Raises ModelLoadFailed or a child of it, and InvalidRequest naming a setting that cannot be honoured.
    """
    split = plan_split(spec, gpus)
    main = read_folder(spec.path)
    draft = read_folder(spec.draft_model) if spec.draft_model is not None else None
    adapter = read_adapter(spec.lora) if spec.lora is not None else None
    try:
        config = read_config(library, main)
        engage = library.engage
        if engage is not None:
            library = engage(config, spec.attention, split.numbers)
        if spec.tensor_parallel:
            refuse_tensor_parallel(config, main, library)
        length = apply_settings(config, spec, attention=library.attention, max_sequences=max_prompts)
        sources = [_source(main, config, spec)]
        if draft is not None:
            drafting = read_config(library, draft)
            refuse_other_vocabulary(main, draft, config.vocab_size, drafting.vocab_size)
            if engage is not None:  # the main model's has to do for both
                engage(drafting, cast(AttentionName, library.attention), split.numbers)
            follow_main(drafting, config, attention=library.attention)
            sources.append(_source(draft, drafting, spec))
    except Exception as error:
        failure = explain_load(error, LoadNumbers(name=spec.name, devices=split.names))
        raise failure from error
    return LoadPlan(library, spec, tuple(sources), adapter, split, length, max_prompts)


def _source(folder: ModelFolder, config: Any, spec: ModelSpec) -> ModelSource:
    shape = CacheShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, spec.cache_bits)
    return ModelSource(folder, config, shape)
