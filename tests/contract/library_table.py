"""What the `Any`s of engine/backends/exllama are, and what the library's attributes are that are used further."""

from __future__ import annotations

from tests.contract.library_kinds import PLAIN

CONFIG = "config:ExLlamaV2Config"
MODEL = "model:ExLlamaV2"
MODULE = "module:ExLlamaV2Module"
CACHE = "cache:ExLlamaV2Cache"
GENERATOR = "generator.dynamic:ExLlamaV2DynamicGenerator"
JOB = "generator.dynamic:ExLlamaV2DynamicJob"
TOKENIZER = "tokenizer.tokenizer:ExLlamaV2Tokenizer"
SEQUENCE = f"{JOB}.Sequence"
PAGE = "generator.dynamic:CachePage"
SETTINGS = "generator.sampler:ExLlamaV2Sampler.Settings"
ARCHITECTURE = "architecture:ExLlamaV2ArchParams"
RESULT = "dict RESULT"
KEYS = "dict KEYS"

ROOTS: dict[str, str] = {
    "library_types: Library.config": f"class {CONFIG}",
    "library_types: Library.model": f"class {MODEL}",
    "library_types: Library.caches": f"class {CACHE}",
    "library_types: Library.cache_tp": "class cache:ExLlamaV2Cache_TP",
    "library_types: Library.tokenizer": f"class {TOKENIZER}",
    "library_types: Library.generator": f"class {GENERATOR}",
    "library_types: Library.job": f"class {JOB}",
    "library_types: Library.page_hash": "module generator.dynamic._tensor_hash_checksum",
    "library_types: Library.settings": f"class {SETTINGS}",
    "library_types: Library.lora": "class lora:ExLlamaV2Lora",
    "library_types: LoadedParts.config": CONFIG,
    "library_types: LoadedParts.tokenizer": TOKENIZER,
    "library_types: LoadedParts.make_generator": GENERATOR,
    "plan: load_adapter()": "lora:ExLlamaV2Lora",
    "plan: (lora)": "class lora:ExLlamaV2Lora",
    "attention: (attn)": "module attn",
    "attention: (model)": "module model",
    "backend: _generator": GENERATOR,
    "plan: (draft)": CONFIG,
    "plan: (main)": CONFIG,
    "plan: read_config()": CONFIG,
    "loading: model": MODEL,
    "loading: cache": CACHE,
    "loading: adapters": "lora:ExLlamaV2Lora",
    "loading: generator": GENERATOR,
    "jobs: handle": JOB,
    "loading: tokenizer": TOKENIZER,
    "loading: (tokenizer)": TOKENIZER,
    "loading: _Loader._new_cache()": CACHE,
    "loading: GeneratorMaker.__call__()": GENERATOR,
    "plan: ModelSource.config": CONFIG,
    "loading: _refuse_misfit(layer)": "linear:ExLlamaV2Linear",
    "jobs: (sequence)": SEQUENCE,
    "(config)": CONFIG,
    "(generator)": GENERATOR,
    "(job)": JOB,
    "(model)": MODEL,
    "library: import_module(f'{PACKAGE}.{name}')": PLAIN,  # attn and model, which go to install(attn, model)
    "library: import_module(name)": PLAIN,  # imports alone
    "sampling: ()": PLAIN,
    "attention: model_needs()": PLAIN,
}
"""By `file: Class.field`, `file: function()`, or an argument's name."""

TYPES: dict[str, str] = {
    "CachePage.kv_position": PLAIN,
    "CachePage.phash": PLAIN,
    "CachePage.prev_hash": PLAIN,
    "ExLlamaV2.cache_map": PLAIN,
    "ExLlamaV2.config": CONFIG,
    "ExLlamaV2.modules": f"[] {MODULE}",
    "ExLlamaV2.tp_context": "tensor_p:TPContext",
    "ExLlamaV2ArchParams.lm": f"{ARCHITECTURE}.Params",
    "ExLlamaV2ArchParams.Params.keys": KEYS,
    "ExLlamaV2Config.arch": ARCHITECTURE,
    "ExLlamaV2DynamicGenerator.active_jobs": f"[] {JOB}",
    "ExLlamaV2DynamicGenerator.all_pages": f"[] {PAGE}",
    "ExLlamaV2DynamicGenerator.iterate()": f"[] {RESULT}",
    "ExLlamaV2DynamicGenerator.pending_jobs": f"[] {JOB}",
    "ExLlamaV2DynamicGenerator.referenced_pages": f"[] {PAGE}",
    "ExLlamaV2DynamicGenerator.unreferenced_pages": f"[] {PAGE}",
    "ExLlamaV2DynamicJob.Sequence.allocated_pages": f"[] {PAGE}",
    "ExLlamaV2DynamicJob.Sequence.page_hashes": PLAIN,
    "ExLlamaV2DynamicJob.Sequence.sequence_ids": "util:SeqTensor",
    "ExLlamaV2DynamicJob.gen_settings": SETTINGS,
    "ExLlamaV2DynamicJob.generator": GENERATOR,
    "ExLlamaV2DynamicJob.receive_logits()": PLAIN,
    "ExLlamaV2DynamicJob.sequences": f"[] {SEQUENCE}",
    "ExLlamaV2DynamicGenerator.filter_pool": PLAIN,
    "ExLlamaV2DynamicGenerator.max_sampling_threads": PLAIN,
    "ExLlamaV2DynamicGenerator.sampling_pool": PLAIN,
    "ExLlamaV2Module.submodules": f"[] {MODULE}",
    "SeqTensor.torch()": PLAIN,
    "SeqTensor.torch_slice()": PLAIN,
}
"""By `Class.attribute` or `Class.method()`."""

GPU_ROWS: dict[str, str] = {
    "library: config_of()": CONFIG,
    "library: loaded_model()": MODEL,
    "library: generator_over()": GENERATOR,
    "direct: answer": PLAIN,  # what a process said, in JSON
    "direct: DirectProcess._read()": PLAIN,
    "ExLlamaV2.modules_dict": "[] linear:ExLlamaV2Linear",
    "ExLlamaV2Linear.get_weight_tensor_dq()": PLAIN,
}
"""Rows of both kinds for tests/gpu."""

DICTS: dict[str, str] = {RESULT: "generator.dynamic", KEYS: "architecture"}
"""Where the library writes the keys of its dicts."""

STARRED = frozenset({SETTINGS})
"""Constructors that get their arguments from a dict of ours, whose keys a test of its own checks."""

EVERYBODYS = frozenset(
    {"append", "children", "clone", "device", "dtype", "in_features", "modules", "name", "numel", "tensor", "tensors"}
)
"""Attributes of the library's classes that lists, files, tensors, layers of ours, psutil or sys have too, and that are
asked of them."""

FAKES: dict[str, tuple[str, frozenset[str]]] = {
    "exllama_generator:FakeGenerator": (
        GENERATOR,
        frozenset({"allocate", "faults", "logits", "page_filled", "prefill", "vocab_size"}),
    ),
    "exllama_job:FakeJob": (JOB, frozenset({"held_ids", "result"})),
    "exllama_job:FakeSequence": (SEQUENCE, frozenset()),
    "exllama_job:FakePage": (PAGE, frozenset()),
    "exllama_job:FakeIds": ("util:SeqTensor", frozenset({"ids"})),
}
"""Each fake's class, what it stands in for, and what it has for itself."""
