"""Any bytes in place of a GGUF file's header are a row, a plan and a tokenizer, or one sentence, at little cost."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from console.tui.screens.models.table import parameters
from engine.backends.checkpoints.checkpoint import Checkpoint
from engine.config import ModelSpec
from engine.errors import EngineError
from engine.models.gguf.config import FAMILIES
from engine.models.gguf.file import GgufModel
from engine.models.gguf.header import FORMATS, read_gguf
from engine.models.inspect import inspect
from engine.placement.model_facts import read_facts
from engine.text.tokenizer_config import TokenizerFolder
from engine.text.tokenizer_file import read_tokenizer
from tests.fakes import gguf_headers as made
from tests.fakes.bounds import outcome, within_bounds
from tests.fakes.gguf_models import write_gguf
from tests.fakes.tiny_models import make_tiny_model

pytestmark = pytest.mark.long

ODD_NUMBERS = (0, 1, 2, 9, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
PLACES = st.sampled_from(range(4096)).map(lambda part: part / 4096)
"""Where in the header: floats would be 0 most of the time."""
CHANGES = st.one_of(
    st.tuples(st.just("byte"), PLACES, st.binary(min_size=1, max_size=1)),
    st.tuples(st.just("bytes"), PLACES, st.binary(min_size=2, max_size=12)),
    st.tuples(st.just("bytes"), PLACES, st.sampled_from(ODD_NUMBERS).map(lambda number: struct.pack("<Q", number))),
    st.tuples(st.just("bytes"), PLACES, st.sampled_from(range(42)).map(lambda number: struct.pack("<I", number))),
    st.tuples(st.just("more"), PLACES, st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("twice"), PLACES, st.binary(min_size=1, max_size=200)),
    st.tuples(st.just("less"), PLACES, st.binary(min_size=1, max_size=50)),
    st.tuples(st.just("end"), PLACES, st.just(b"")),
)
KEYS = (
    *("general.architecture", "general.alignment", "general.name", "tokenizer.chat_template"),
    *(f"llama.{key}" for key in ("block_count", "embedding_length", "feed_forward_length", "context_length")),
    *(f"llama.attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "layer_norm_rms_epsilon")),
    *(f"llama.rope.{key}" for key in ("freq_base", "dimension_count", "scaling.type", "scaling.factor")),
    *("llama.expert_count", "llama.expert_used_count", "llama.attention.sliding_window"),
    *(f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "merges", "scores", "token_type")),
    *(f"tokenizer.ggml.{key}" for key in ("bos_token_id", "eos_token_id", "add_bos_token", "add_space_prefix")),
)
WORDS = st.sampled_from((b"", b"a", b"ab", b"a b", b"llama", b"gpt2", b"yarn", b"default", b"\xff", "é😀".encode()))
VALUES = st.one_of(
    st.sampled_from((*range(9), *ODD_NUMBERS)).map(lambda number: (10, struct.pack("<Q", number))),
    st.sampled_from((*range(9), 2**32 - 1)).map(lambda number: (made.U32, struct.pack("<I", number))),
    st.floats(width=32).map(lambda number: (made.F32, struct.pack("<f", number))),
    st.booleans().map(lambda flag: (7, struct.pack("<?", flag))),
    WORDS.map(lambda word: (made.STRING, made.text(word))),
    st.lists(WORDS, max_size=6).map(lambda words: made.texts("", words)[1:]),
    st.lists(st.floats(width=32), max_size=6).map(
        lambda found: (made.LIST, struct.pack(f"<IQ{len(found)}f", made.F32, len(found), *found))
    ),
    st.lists(st.integers(0, 6), max_size=6).map(
        lambda found: (made.LIST, struct.pack(f"<IQ{len(found)}I", made.U32, len(found), *found))
    ),
)
PARTS = (
    *("attn_norm", "attn_q", "attn_k", "attn_qkv", "attn_q_norm", "attn_output", "post_attention_norm"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_up_exps", "ffn_gate_inp", "ffn_gate_inp_shexp", "ffn_down_shexp"),
)
LAYERS = st.integers(0, 2) | st.integers(0, 10**30)
NAMES = st.one_of(
    st.sampled_from(
        (
            "token_embd.weight",
            "output.weight",
            "output_norm.weight",
            "rope_freqs.weight",
            "rope_factors_long.weight",
            "x",
        )
    ),
    st.builds("blk.{}.{}.{}".format, LAYERS, st.sampled_from(PARTS), st.sampled_from(("weight", "bias"))),
)
SHAPES = st.lists(st.sampled_from((1, 2, 3, 8, 32, 256)), max_size=3)
USUAL = (
    *made.SHAPE,
    made.field("tokenizer.ggml.model", "gpt2"),
    made.texts("tokenizer.ggml.tokens", [b"a", b"b", b"ab", b"<|im_end|>"]),
    made.texts("tokenizer.ggml.merges", [b"a b"]),
    (b"tokenizer.ggml.scores", made.LIST, struct.pack("<IQ4f", made.F32, 4, -2, -1, 0, 0)),
    (b"tokenizer.ggml.token_type", made.LIST, struct.pack("<IQ4I", made.U32, 4, 1, 1, 1, 3)),
    made.field("tokenizer.ggml.eos_token_id", 3),
    made.field("tokenizer.chat_template", "{{ messages }}"),
)
"""The fields of a model that can be computed."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.gguf"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """A file's header, and its weights."""
    folder = tmp_path_factory.mktemp("whole")
    file = write_gguf(make_tiny_model(folder / "model", num_hidden_layers=1), folder / "model.gguf")
    num_bytes, content = read_gguf(file).num_bytes, file.read_bytes()
    return content[:num_bytes], content[-(-num_bytes // 32) * 32 :]


def read(path: Path, content: bytes) -> None:
    """All that is read of the file, within bounds."""
    path.write_bytes(content)
    size = len(content)
    found = outcome(lambda: read_gguf(path), size, EngineError)
    if not isinstance(found, str):
        places = sorted((tensor.offset, tensor.num_bytes) for tensor in found.tensors.values())
        assert all(found.num_bytes <= begin <= begin + length <= size for begin, length in places)
    with within_bounds(size):
        entry = inspect(path)
    assert parameters(entry)  # what the table makes of it
    assert entry.problem.isprintable()
    assert len(entry.problem) < 1000
    assert "Error: " not in entry.problem, "it was foreseen"
    assert "config.json" not in entry.problem, "a file has fields of its own"
    assert isinstance(found, str) <= bool(entry.problem)
    spec = ModelSpec(path=path, name="m")
    outcome(lambda: str(len(str(GgufModel(path).config))), size, EngineError)
    outcome(lambda: str(len(str(read_facts(spec)))), size, EngineError)
    outcome(lambda: str(TokenizerFolder.read(path).eos_token_ids(len)), size, EngineError)
    outcome(lambda: str(read_tokenizer(path).get_vocab_size()), size, EngineError)
    outcome(lambda: read_weights(path), size, EngineError)


def read_weights(path: Path) -> str:
    checkpoint = Checkpoint.open(path)
    return str(sum(checkpoint.read(name)[0].numel() for name in checkpoint))


def changed(content: bytes, changes: Sequence[tuple[str, float, bytes]]) -> bytes:
    """`content` with some of its bytes replaced, removed or doubled."""
    found = bytearray(content)
    for kind, place, value in changes:
        at = int(place * len(found))
        match kind:
            case "byte" | "bytes":
                found[at : at + len(value)] = value
            case "more":
                found[at:at] = value
            case "twice":
                found[at:at] = found[at : at + len(value)]
            case "less":
                del found[at : at + len(value)]
            case _:
                del found[at:]
    return bytes(found)


@settings(derandomize=True, max_examples=700, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=st.lists(CHANGES, min_size=1, max_size=4), is_cut=st.booleans())
def test_a_real_header_with_other_bytes_is_read_or_refused(
    path: Path, whole: tuple[bytes, bytes], changes: list[tuple[str, float, bytes]], is_cut: bool
) -> None:
    header, weights = whole
    found = changed(header, changes)
    read(path, found if is_cut else made.file(found, weights))


@settings(derandomize=True, max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    fields=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
    tensors=st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(list(FORMATS))), max_size=6),
    is_model=st.sampled_from((True, True, True, False)),
    family=st.sampled_from(sorted(name for name in FAMILIES if " " not in name)),
)
def test_any_fields_and_tensors_are_read_or_refused(
    path: Path,
    fields: dict[str, tuple[int, bytes]],
    tensors: dict[str, tuple[list[int], int]],
    is_model: bool,
    family: str,
) -> None:
    entries = {name: (kind, value) for name, kind, value in (USUAL if is_model else ())}
    entries[b"general.architecture"] = made.STRING, made.text(family.encode())
    entries |= {name.encode(): value for name, value in fields.items()}
    own = family.encode() + b"."
    places, end = ([made.EMBEDDING], 128) if is_model else ([], 0)
    for name, (shape, kind) in tensors.items():
        block = FORMATS[kind]
        if math.prod(shape) < 2**12 and not (is_model and name == "token_embd.weight"):
            places.append(made.tensor(name, (*shape, block.values), end, kind))
            end += math.prod(shape) * block.num_bytes
    read(
        path,
        made.file(
            made.header([(name.replace(b"llama.", own), *value) for name, value in entries.items()], places), bytes(end)
        ),
    )
