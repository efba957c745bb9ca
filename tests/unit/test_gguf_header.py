"""The header of a GGUF file is read as the package gguf reads it; a bad file is one sentence, at little cost."""

from __future__ import annotations

import asyncio
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES

from engine.config import ModelSpec
from engine.errors import EngineError, InvalidRequest, ModelLoadFailed, UnsupportedModel
from engine.models.discover import discover
from engine.models.gguf import header as reading
from engine.models.gguf.config import _NUMBERS, _ROPE, _SIZES
from engine.models.gguf.file import GgufModel
from engine.models.gguf.header import FORMATS, GgufHeader, read_gguf
from engine.models.inspect import inspect
from engine.placement.model_facts import read_facts
from engine.text.chat_template import ChatTemplate, TemplateLimits
from engine.text.tokenizer_config import TokenizerFolder
from tests.fakes import gguf_headers as made
from tests.fakes.bounds import outcome, within_bounds

NUMBERS: dict[GGUFValueType, tuple[Any, ...]] = {
    GGUFValueType.UINT8: (0, 255),
    GGUFValueType.INT8: (-128, 127),
    GGUFValueType.UINT16: (0, 2**16 - 1),
    GGUFValueType.INT16: (-(2**15), 2**15 - 1),
    GGUFValueType.UINT32: (0, 2**32 - 1),
    GGUFValueType.INT32: (-(2**31), 2**31 - 1),
    GGUFValueType.FLOAT32: (0.1, -1e30),
    GGUFValueType.BOOL: (True, False),
    GGUFValueType.UINT64: (0, 2**64 - 1),
    GGUFValueType.INT64: (-(2**63), 2**63 - 1),
    GGUFValueType.FLOAT64: (0.1, 1e300),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def values(header: GgufHeader, name: str) -> Any:
    """A field's value, lists as such."""
    value = header.fields[name]
    if isinstance(value, str | bool | int | float):
        return value
    is_texts = isinstance(value, reading._Texts)
    return list((header.texts(name) if is_texts else header.numbers(name)) or ())


def read(path: Path) -> str:
    return str(len(read_gguf(path).tensors))


# What is read.


def test_fields_of_every_type_are_those_that_gguf_reads(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    for kind, each in NUMBERS.items():
        for number, value in enumerate(each):
            writer.add_key_value(f"a.{kind.name}.{number}", value, kind)
        writer.add_key_value(f"a.{kind.name}.list", list(each) * 3, GGUFValueType.ARRAY, kind)
    writer.add_string("a.text", "naïve \N{GRINNING FACE}\n")
    writer.add_string("a.nothing", "")
    writer.add_array("a.texts", ["", "a", "\N{GRINNING FACE}", "é" * 300])
    write(writer)
    header, theirs = read_gguf(path), GGUFReader(path).fields
    names = [name for name in theirs if not name.startswith("GGUF.")]
    assert list(header.names()) == names
    for name in names:
        assert values(header, name) == theirs[name].contents(), name


def test_an_empty_list_is_one_of_nothing(path: Path) -> None:
    empty = [(name, made.LIST, struct.pack("<IQ", kind, 0)) for name, kind in ((b"n", made.F32), (b"t", made.STRING))]
    path.write_bytes(made.header(empty))
    header = read_gguf(path)
    assert (list(header.numbers("n") or [1]), list(header.texts("t") or [1])) == ([1], [1])
    assert header.numbers("n") is not None
    assert header.texts("t") is not None


def test_texts_are_found_by_number_and_by_range(path: Path) -> None:
    path.write_bytes(made.header([made.texts("t", [b"a", b"b", b"", b"d"])]))
    found = read_gguf(path).texts("t")
    assert found is not None
    assert (len(found), found[0], found[-1], found[1:3], list(found)) == (4, "a", "d", ["b", ""], ["a", "b", "", "d"])
    with pytest.raises(IndexError):
        found[4]


@pytest.mark.parametrize("alignment", [None, 1, 8, 64, 4096])
def test_tensors_lie_where_gguf_finds_them(path: Path, alignment: int | None) -> None:
    writer = GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    random = np.random.default_rng(0)
    for number, block in FORMATS.items():
        kind = GGMLQuantizationType(number)
        raw = random.integers(0, 256, (3, 5, block.num_bytes * 2), dtype=np.uint8)
        if block.values == 1:
            raw = raw.view({"F32": np.float32, "F16": np.float16}.get(block.name, np.uint8))
        writer.add_tensor(f"blk.0.{kind.name}.weight", raw, raw_dtype=kind)
    writer.add_tensor("norm.weight", np.arange(7, dtype=np.float32))
    write(writer)
    header, theirs = read_gguf(path), GGUFReader(path).tensors
    assert list(header.tensors) == [tensor.name for tensor in theirs]
    for tensor in theirs:
        ours = header.tensors[tensor.name]
        assert (ours.offset, ours.num_bytes, ours.format.name, ours.shape) == (
            tensor.data_offset,
            tensor.n_bytes,
            tensor.tensor_type.name,
            tuple(reversed(tensor.shape.tolist())),
        )
        assert path.read_bytes()[ours.offset : ours.offset + ours.num_bytes] == tensor.data.tobytes()


def test_formats_have_the_sizes_that_gguf_gives_them() -> None:
    for number, block in FORMATS.items():
        kind = GGMLQuantizationType(number)
        assert (block.name, block.values, block.num_bytes) == (kind.name, *GGML_QUANT_SIZES[kind])


def test_version_2_is_read_as_version_3_is(path: Path) -> None:
    path.write_bytes(made.WHOLE)
    third = read_gguf(path)
    path.write_bytes(made.model(version=2))
    second = read_gguf(path)
    assert list(second.names()) == list(third.names())
    assert all(values(second, name) == values(third, name) for name in third.names())
    assert second.tensors == third.tensors


def write_parts(path: Path, parts: int, shapes: dict[str, tuple[int, ...]] = made.SHAPES) -> list[Path]:
    writer = GGUFWriter(path, "llama", split_max_tensors=-(-len(shapes) // parts))
    writer.add_block_count(1)
    for name in ("embedding_length", "context_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{name}", 8)
    writer.add_head_count(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", "<|im_end|>"])
    writer.add_token_merges(["a b"])
    for number, (name, shape) in enumerate(shapes.items()):
        writer.add_tensor(name, np.full(shape, number, dtype=np.float32))
    write(writer)
    return sorted(path.parent.glob(f"{path.stem}-*.gguf"))


def test_a_split_file_has_the_tensors_of_all_parts_and_the_metadata_of_the_first(path: Path) -> None:
    files = write_parts(path, 3)
    assert len(files) == 3
    model = GgufModel(files[0])
    theirs = {tensor.name: (file, tensor.data_offset) for file in files for tensor in GGUFReader(file).tensors}
    assert {name: (tensor.file, tensor.offset) for name, tensor in model.tensors.items()} == theirs
    assert model.config["hidden_size"] == 8
    assert [any("llama" in name for name in header.names()) for header in model.headers] == [True, False, False]
    assert inspect(files[0]).problem == ""
    assert inspect(files[0]).weights_bytes == 4 * sum(map(math.prod, made.SHAPES.values()))


def test_a_split_file_whose_part_is_missing_or_damaged_is_one_sentence(path: Path) -> None:
    files = write_parts(path, 3)
    whole = files[2].read_bytes()
    files[2].write_bytes(whole[:-1])
    assert "is truncated or damaged" in inspect(files[0]).problem
    files[2].unlink()
    assert inspect(files[0]).problem == "1 of 3 parts is missing: model-00003-of-00003.gguf"


def test_a_split_file_whose_first_part_is_missing_is_listed_with_the_parts_that_are(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(path.parent / "none"))
    files = write_parts(path, 3)
    for left, problem in (
        (files[1:], "1 of 3 parts is missing: model-00001-of-00003.gguf"),
        (files[2:], "2 of 3 parts are missing: model-00001-of-00003.gguf, model-00002-of-00003.gguf"),
    ):
        for file in set(files) - set(left):
            file.unlink(missing_ok=True)
        (row,) = (row for row in discover([path.parent]) if row.name == "model")
        assert (row.path, row.problem) == (files[0], problem)
        assert row.weights_bytes == sum(file.stat().st_size for file in left)
        with pytest.raises(ModelLoadFailed, match=problem):
            read_facts(ModelSpec(path=row.path, name="m"))


def test_parts_that_are_not_of_one_split_are_refused_by_what_each_says_it_is(path: Path) -> None:
    files = write_parts(path, 3)
    parts = [file.read_bytes() for file in files]
    files[2].write_bytes(parts[1])
    assert inspect(files[0]).problem == (
        "model-00003-of-00003.gguf says that it is part 2 of 3; its name makes it part 3 of 3"
    )
    two = [path.with_name(f"two-0000{number}-of-00002.gguf") for number in (1, 2)]
    for file, part in zip(two, parts, strict=False):
        file.write_bytes(part)
    assert inspect(two[0]).problem == (
        "two-00001-of-00002.gguf says that it is part 1 of 3; its name makes it part 1 of 2"
    )
    for whole in (path, path.with_name("m-00004-of-00003.gguf")):
        whole.write_bytes(parts[1])
        assert inspect(whole).problem == f"{whole.name} says that it is part 2 of 3; its name makes it a whole file"
    other = write_parts(path.with_name("other.gguf"), 3, made.SHAPES | {"output.weight": (4, 8)})
    files[2].write_bytes(other[2].read_bytes())
    assert inspect(files[0]).problem == (
        "model-00001-of-00003.gguf is of a model of 11 tensors, and the 3 parts have 12: they are not of the same split"
    )


def test_parts_that_say_nothing_of_their_split_are_taken_by_their_names_and_a_merged_file_is_whole(path: Path) -> None:
    merged = (made.field("split.no", 0), made.field("split.count", 0), made.field("split.tensors.count", 99))
    path.write_bytes(made.model(*merged))
    assert inspect(path).problem == ""
    files = [path.with_name(f"m-0000{number}-of-00002.gguf") for number in (1, 2)]
    files[0].write_bytes(made.model())
    files[1].write_bytes(made.file(made.header([], [made.tensor("output.weight", (4, 8))]), made.DATA))
    assert inspect(files[0]).problem == ""
    files[1].write_bytes(made.file(made.header([], [made.EMBEDDING]), made.DATA))
    assert inspect(files[0]).problem == "token_embd.weight is in two parts of m-00002-of-00002.gguf"


@pytest.mark.parametrize(
    ("fields", "without", "problem"),
    [
        ((), ("tokenizer.ggml.model", "tokenizer.ggml.tokens"), "has no tokenizer: it lacks tokenizer.ggml.model"),
        ((), ("tokenizer.ggml.tokens",), "has no tokenizer: it lacks tokenizer.ggml.tokens"),
        ((made.texts("tokenizer.ggml.tokens", []),), (), "has no tokenizer: it lacks tokenizer.ggml.tokens"),
        ((), ("tokenizer.ggml.merges",), "has no tokenizer.ggml.merges for its tokenizer"),
        ((made.field("tokenizer.ggml.model", "rwkv"),), (), "is of the kind rwkv; gpt2, llama and t5 are read"),
        ((made.field("tokenizer.ggml.pre", "another"),), (), "splits words as another does; known are"),
        (
            (made.field("tokenizer.ggml.model", "llama"),),
            ("tokenizer.ggml.merges",),
            "has 0 entries in tokenizer.ggml.scores for 4 tokens",
        ),
        (
            ((b"tokenizer.ggml.token_type", made.LIST, struct.pack("<IQI", made.U32, 1, 1)),),
            (),
            "has 1 entries in tokenizer.ggml.token_type for 4 tokens",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_read_or_is_missing_is_said_where_the_file_is_listed_and_as_a_load_says_it(
    path: Path, fields: tuple[made.Entry, ...], without: tuple[str, ...], problem: str
) -> None:
    path.write_bytes(made.model(*fields, without=without))
    assert problem in inspect(path).problem
    with pytest.raises(UnsupportedModel, match=re.escape(inspect(path).problem)):
        GgufModel(path).tokenizer()


def test_a_backend_that_does_not_read_gguf_is_said_where_the_file_is_listed(path: Path) -> None:
    path.write_bytes(made.WHOLE)
    entry = inspect(path, lambda quantisation, path: "exllamav2")
    assert (entry.backend, entry.problem) == ("exllamav2", "exllamav2 does not read GGUF; --backend auto or torch does")


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("blk.0.attn_q.weight", (), "model.gguf has no tensor blk.0.attn_q.weight, which its"),
        ("blk.0.ffn_up.weight", (), "no tensor blk.0.ffn_up.weight"),
        ("output_norm.weight", (), "no tensor output_norm.weight"),
        (
            "blk.0.attn_v.weight",
            (4, 8),
            "the tensor blk.0.attn_v.weight in model.gguf is 4x8; its metadata makes it 8x8",
        ),
        ("output_norm.weight", (9,), "the tensor output_norm.weight in model.gguf is 9; its metadata makes it 8"),
    ],
)
def test_tensors_that_are_not_those_of_the_metadata_are_said_where_the_file_is_listed_and_before_a_load(
    path: Path, name: str, shape: tuple[int, ...], problem: str
) -> None:
    content = made.model(**{name: shape})
    path.write_bytes(content)
    with within_bounds(len(content)):
        assert problem in inspect(path).problem
    with within_bounds(len(content)), pytest.raises(ModelLoadFailed, match=re.escape(problem)):
        read_facts(ModelSpec(path=path, name="m"))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("stablelm", {"attention.head_count": 2**24, "attention.head_count_kv": 2**24, "attention.key_length": 8}),
        ("qwen3moe", {"attention.head_count": 2, "expert_count": 2**24, "expert_feed_forward_length": 8}),
        ("llama", {"attention.head_count": 2, "block_count": 2**24}),
    ],
)
def test_metadata_that_counts_any_number_of_tensors_is_refused_at_the_first_that_there_is_not(
    path: Path, name: str, fields: dict[str, int]
) -> None:
    sizes = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 8, "context_length": 64, **fields}
    entries = [
        made.field("general.architecture", name),
        *(made.field(f"{name}.{key}", value) for key, value in sizes.items()),
    ]
    shapes = {"token_embd.weight": (4, 8), "output_norm.weight": (8,), "output_norm.bias": (8,)}
    shapes |= {f"blk.0.attn_{part}.weight": (8, 8) for part in ("q_norm", "norm")}
    content = made.file(made.header(entries, made.tensors(shapes)), bytes(4096))
    path.write_bytes(content)
    with within_bounds(len(content)):
        assert inspect(path).problem
    with within_bounds(len(content)), pytest.raises(EngineError):
        read_facts(ModelSpec(path=path, name="m"))


def test_a_listed_file_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []

    def open_file(file: Path) -> Any:
        opened.append(file)
        return file.open("rb")

    monkeypatch.setattr(reading, "open_file", open_file)
    path.write_bytes(made.WHOLE)
    assert inspect(path).problem == ""
    assert opened == [path]


def test_no_more_is_read_of_a_file_than_its_header_and_what_comes_in_the_same_block(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(made.WHOLE)
    with path.open("r+b") as stream:
        stream.truncate(2**40)
    with within_bounds():
        assert read_gguf(path).num_bytes == len(made.WHOLE_HEADER)


# What is refused.


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"attention.head_count": 0}, "llama.attention.head_count = 0; it must be a whole number of at least 1"),
        ({"attention.head_count": -4}, "llama.attention.head_count = -4; it must be a whole number of at least 1"),
        ({"attention.head_count": 16}, "llama.attention.head_count = 16; its llama.embedding_length is 8"),
        (
            {"attention.head_count_kv": 3},
            "llama.attention.head_count = 2, llama.attention.head_count_kv = 3 and heads of 4 elements ",
        ),
        ({"attention.head_count_kv": 0}, "llama.attention.head_count_kv = 0; it must be a whole number"),
        (
            {"attention.key_length": 3},
            "llama.attention.head_count = 2, llama.attention.head_count_kv = 2 and heads of 3 elements "
            "(llama.attention.key_length); ",
        ),
        ({"attention.key_length": 0}, "llama.attention.key_length = 0; it must be a whole number of at least 1"),
        ({"block_count": 10_001}, "llama.block_count = 10001; more than 10000 are not supported"),
        ({"context_length": 2**32 - 1}, "llama.context_length = 4294967295; more than 2147483647 are not supported"),
        ({"feed_forward_length": -1}, "llama.feed_forward_length = -1; it must be a whole number of at least 1"),
        ({"attention.layer_norm_rms_epsilon": math.nan}, "a llama.attention.layer_norm_rms_epsilon that is not a numb"),
        ({"attention.layer_norm_rms_epsilon": -0.5}, "llama.attention.layer_norm_rms_epsilon = -0.5; it must be 0 or"),
        ({"rope.freq_base": 0.0}, "llama.rope.freq_base = 0.0; it must be more than 0"),
        ({"rope.dimension_count": 3}, "llama.rope.dimension_count = 3; it must be an even number up to the 4 elements"),
        ({"rope.dimension_count": 2}, "llama.rope.dimension_count; LlamaForCausalLM rotates whole heads"),
        ({"rope.scaling.factor": -2.0}, "llama.rope.scaling.factor = -2.0; it must be more than 0"),
        ({"rope.scale_linear": -2.0}, "llama.rope.scale_linear = -2.0; it must be more than 0"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_log_multiplier": -1.0},
            "llama.rope.scaling.yarn_log_multiplier = -1.0; it must be 0 or more",
        ),
        (
            {"rope.scaling.factor": 4.0, "context_length": 2**30},
            "llama.context_length, scaled for RoPE, = 4294967296; more than 2147483647 are not supported",
        ),
        ({"expert_count": 4}, "llama.expert_used_count"),
        ({"expert_count": 4, "expert_used_count": 5}, "llama.expert_used_count = 5; a layer has 4 experts"),
    ],
    ids=str,
)
def test_an_odd_number_is_refused_by_the_names_of_the_file_and_of_its_field(
    path: Path, fields: dict[str, str | float], problem: str
) -> None:
    path.write_bytes(made.model(*(made.field(f"llama.{name}", value) for name, value in fields.items())))
    assert re.match(f"model.gguf (has|sets|lacks) {re.escape(problem)}", inspect(path).problem)


def test_no_number_of_a_file_is_refused_in_the_words_of_a_config_json(path: Path) -> None:
    tables = (_SIZES, _NUMBERS, _ROPE)
    keys = [key for table in tables for key in table]
    foreign = {name for table in tables for name in table.values() if not any(name in key for key in keys)}
    refused = 0
    for key in keys:
        for value in (0, -1, 1, 3, 2**32 - 1, 0.0, -1.5, 1e30, math.inf, math.nan, "x"):
            for kind in ("linear", "yarn"):
                fields = {"rope.scaling.type": kind, "rope.scaling.factor": 2.0, "expert_used_count": 1, key: value}
                path.write_bytes(made.model(*(made.field(f"llama.{name}", each) for name, each in fields.items())))
                problem = inspect(path).problem
                refused += bool(problem)
                assert not problem or "model.gguf" in problem, (key, value)
                assert not [word for word in ("config.json", *foreign) if word in problem], (key, value, problem)
    assert refused > 100


@pytest.mark.parametrize(("content", "problem"), made.BAD.values(), ids=made.BAD)
def test_a_bad_file_is_refused_in_one_sentence_at_little_cost(path: Path, content: bytes, problem: str) -> None:
    path.write_bytes(content)
    assert problem in outcome(lambda: read(path), 0, ModelLoadFailed, UnsupportedModel)


@pytest.mark.parametrize(("content", "problem"), (made.BAD | made.UNFIT).values(), ids=made.BAD | made.UNFIT)
def test_a_bad_file_is_a_row_of_the_catalogue_with_its_reason(
    path: Path, content: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(content)
    with within_bounds(len(content)):
        entry = inspect(path)
    assert problem in entry.problem
    assert entry.problem.isprintable()
    assert len(entry.problem) < 1000
    assert entry.weights_bytes > 0 or not content
    monkeypatch.setenv("HF_HUB_CACHE", str(path.parent / "none"))
    rows = [row.problem for row in discover([path.parent]) if row.name == "model"]
    assert rows == ([entry.problem] if content else [])
    for reads in (lambda: str(read_facts(ModelSpec(path=path, name="m"))), lambda: str(TokenizerFolder.read(path))):
        outcome(reads, len(content), EngineError)


def test_a_file_that_is_cut_off_anywhere_is_refused_in_one_sentence(path: Path) -> None:
    for length in range(len(made.WHOLE)):
        path.write_bytes(made.WHOLE[:length])
        assert isinstance(outcome(lambda: read_gguf(path), 0, ModelLoadFailed), str), length


def test_a_file_of_the_other_byte_order_is_refused_as_such(path: Path) -> None:
    writer = GGUFWriter(path, "llama", endianess=GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), dtype=np.float32))
    write(writer)
    assert "is big-endian" in outcome(lambda: read(path), 0, UnsupportedModel)


@pytest.mark.parametrize("kind", GGMLQuantizationType, ids=lambda kind: kind.name)
def test_a_tensor_of_any_type_is_read_or_refused_by_its_name(path: Path, kind: GGMLQuantizationType) -> None:
    values, num_bytes = GGML_QUANT_SIZES[kind]
    tensors = [made.tensor("token_embd.weight", (1, values), kind=kind)]
    path.write_bytes(made.file(made.header(made.SHAPE, tensors), bytes(num_bytes)))
    found = outcome(lambda: read(path), 0, UnsupportedModel)
    assert found == "1" if kind in FORMATS else f"is stored as {kind.name}; " in found


def test_a_vocabulary_of_half_a_million_texts_is_passed_within_bounds(path: Path) -> None:
    tokens = made.texts("tokenizer.ggml.tokens", (b"%d" % number for number in range(250_000)))
    merges = made.texts("tokenizer.ggml.merges", (b"%d %d" % (number, number) for number in range(250_000)))
    path.write_bytes(made.model(tokens, merges))
    with within_bounds():
        header = read_gguf(path)
    found = header.texts("tokenizer.ggml.tokens")
    assert found is not None
    assert (len(found), found[249_999]) == (250_000, "249999")
    with within_bounds():
        assert inspect(path).problem == ""


def write_long(path: Path, num_bytes: int) -> None:
    """A file with a list of so many small numbers in its header, which takes no space on the disk."""
    begin = made.header([*made.SHAPE, (b"a", made.LIST, struct.pack("<IQ", made.U8, num_bytes))], counts=(1, 7))
    with path.open("wb") as stream:
        stream.write(begin)
        stream.seek(num_bytes, 1)
        stream.write(made.EMBEDDING)
        stream.write(bytes(-stream.tell() % 32) + made.DATA)


def test_the_longest_header_takes_less_than_64_mib_and_a_longer_one_nothing(path: Path) -> None:
    write_long(path, 47 * 2**20)
    with within_bounds():
        header = read_gguf(path)
        numbers = header.numbers("a")
        assert numbers is not None
        assert (len(numbers), numbers[-1]) == (47 * 2**20, 0)
    del header, numbers
    write_long(path, 48 * 2**20)
    assert "has a header of more than 48 MiB" in outcome(lambda: read(path), 0, UnsupportedModel)


def test_the_headers_of_all_parts_take_no_more_than_one_may(tmp_path: Path) -> None:
    files = [tmp_path / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for file in files:
        write_long(file, 20 * 2**20)
    assert "has a header of more than 48 MiB" in outcome(lambda: str(GgufModel(files[0])), 0, UnsupportedModel)
    assert "more than 48 MiB" in inspect(files[0]).problem


def test_a_million_texts_and_fifty_thousand_tensors_are_read_within_bounds(path: Path) -> None:
    texts = made.texts("t", [b""] * 10**6)
    tensors = [made.tensor(f"blk.0.{number}", (1,), 4 * number) for number in range(50_000)]
    path.write_bytes(made.file(made.header((texts,), tensors), bytes(200_000)))
    with within_bounds():
        header = read_gguf(path)
    assert (len(header.texts("t") or ()), len(header.tensors)) == (10**6, 50_000)


def test_texts_outside_lists_of_more_than_four_megabytes_are_refused_and_a_long_one_is_passed_over(path: Path) -> None:
    long = made.field("a", "😀" * 2**20)
    path.write_bytes(made.file(made.header((*made.SHAPE, long), [made.EMBEDDING]), made.DATA))
    with within_bounds():
        header = read_gguf(path)
    with pytest.raises(UnsupportedModel, match="has a a that is not a text"):
        header.text("a")
    path.write_bytes(made.header([made.field(f"a{number}", "😀" * 2**18) for number in range(5)]))
    assert "has more than 4 MiB of texts" in outcome(lambda: read(path), 0, UnsupportedModel)


def test_experts_without_end_are_refused_and_not_gone_through(path: Path) -> None:
    experts = made.field("llama.expert_count", 2)
    begin = made.header(
        [*made.SHAPE, experts], [made.EMBEDDING, made.tensor("blk.0.ffn_up_exps.weight", (2**33, 8, 8), 128)]
    )
    with path.open("wb") as stream:
        stream.write(begin)
        stream.truncate(len(begin) + 32 + 128 + 2**33 * 8 * 8 * 4)
    found = outcome(lambda: str(len(GgufModel(path).pieces)), 0, EngineError)
    assert "holds more than 100,000 tensors" in found
    outcome(lambda: str(read_facts(ModelSpec(path=path, name="m"))), 0, EngineError)


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ([b"a" * 100_000], "are too long"),
        ([b"%0200d" % number for number in range(20_001)], "are too long"),
        ([b"a" * (1 + number % 250) for number in range(9_000)], "more than 1,000,000 ways"),
    ],
    ids=["a token of 100,000 characters", "tokens of four million characters", "tokens that all merge"],
)
def test_tokens_that_could_be_merged_without_end_are_refused(path: Path, tokens: list[bytes], problem: str) -> None:
    scores = struct.pack(f"<IQ{len(tokens)}f", made.F32, len(tokens), *range(len(tokens)))
    fields = [made.field("tokenizer.ggml.model", "llama"), made.texts("tokenizer.ggml.tokens", tokens)]
    path.write_bytes(made.header([*made.SHAPE, *fields, (b"tokenizer.ggml.scores", made.LIST, scores)]))
    with pytest.raises(UnsupportedModel, match=problem):
        GgufModel(path).tokenizer()


def test_a_template_that_loops_is_ended_by_the_limits_of_templates(path: Path) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    fields = (*made.SHAPE, made.field("tokenizer.chat_template", loops))
    path.write_bytes(made.file(made.header(fields, [made.EMBEDDING]), made.DATA))
    assert inspect(path).chat_template == "own"
    source = TokenizerFolder.read(path).chat_templates()["default"]
    template = ChatTemplate(source, {}, TemplateLimits(cpu_s=0.2, wait_s=10))
    with pytest.raises(InvalidRequest):
        asyncio.run(template.render([{"role": "user", "content": "hello"}]))
