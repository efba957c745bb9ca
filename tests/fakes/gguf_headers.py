"""Headers of GGUF files byte by byte, and those that no reader should accept."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate

U8, U32, I32, F32, STRING, LIST = 0, 4, 5, 6, 8, 9

Entry = tuple[bytes, int, bytes]
"""A field: its name, the type of its value, and that as it is in the file."""


def text(value: bytes) -> bytes:
    """A text as it is in the file."""
    return struct.pack("<Q", len(value)) + value


def field(name: str, value: str | float) -> Entry:
    """A text, or a number of 32 bits."""
    if isinstance(value, int):
        return (name.encode(), *((I32, struct.pack("<i", value)) if value < 0 else (U32, struct.pack("<I", value))))
    if isinstance(value, float):
        return name.encode(), F32, struct.pack("<f", value)
    return name.encode(), STRING, text(value.encode())


def texts(name: str, values: Iterable[bytes], count: int | None = None) -> Entry:
    """A list of texts, which says that it has `count`."""
    each = list(map(text, values))
    return name.encode(), LIST, struct.pack("<IQ", STRING, len(each) if count is None else count) + b"".join(each)


def tensor(name: str, shape: tuple[int, ...], offset: int = 0, kind: int = 0) -> bytes:
    """What says where a tensor is. shape: in torch's order."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name.encode()) + sizes + struct.pack("<IQ", kind, offset)


def header(
    fields: Iterable[Entry] = (),
    tensors: Iterable[bytes] = (),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """All of it. counts: of tensors and fields, where these are said to be others."""
    entries, places = list(fields), list(tensors)
    num_tensors, num_fields = counts or (len(places), len(entries))
    written = [text(name) + struct.pack("<I", kind) + value for name, kind, value in entries]
    return b"".join([b"GGUF", struct.pack("<IQQ", version, num_tensors, num_fields), *written, *places])


def file(begin: bytes, data: bytes, alignment: int = 32) -> bytes:
    """A file of that header and these weights."""
    return begin + bytes(-len(begin) % alignment) + data


SHAPE: tuple[Entry, ...] = (
    field("general.architecture", "llama"),
    field("llama.block_count", 1),
    field("llama.embedding_length", 8),
    field("llama.feed_forward_length", 8),
    field("llama.context_length", 64),
    field("llama.attention.head_count", 2),
)
TOKENIZER: tuple[Entry, ...] = (
    field("tokenizer.ggml.model", "gpt2"),
    texts("tokenizer.ggml.tokens", [b"a", b"b", b"ab", b"<|im_end|>"]),
    texts("tokenizer.ggml.merges", [b"a b"]),
)
EMBEDDING = tensor("token_embd.weight", (4, 8))
DATA = bytes(128)

SHAPES = {
    "output_norm.weight": (8,),
    "blk.0.attn_norm.weight": (8,),
    "blk.0.ffn_norm.weight": (8,),
    **{f"blk.0.attn_{part}.weight": (8, 8) for part in ("q", "k", "v", "output")},
    **{f"blk.0.ffn_{part}.weight": (8, 8) for part in ("gate", "up", "down")},
    "token_embd.weight": (4, 8),
}
"""The tensors that SHAPE requires."""


def tensors(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> list[bytes]:
    """What says where tensors of 32-bit floats are, each behind the one before."""
    sizes = [4 * math.prod(shape) for shape in shapes.values()]
    starts = accumulate(sizes, initial=0)
    return [tensor(name, shape, start) for (name, shape), start in zip(shapes.items(), starts, strict=False)]


def model(*fields: Entry, version: int = 3, without: Collection[str] = (), **changed: tuple[int, ...]) -> bytes:
    """A file of SHAPE's model with TOKENIZER. fields: in place of those of their names, or more.  without: names of
    fields.  changed: other shapes of tensors, of which an empty one leaves the tensor out."""
    shapes = {name: shape for name, shape in (SHAPES | changed).items() if shape}
    entries = {each[0]: each for each in (*SHAPE, *TOKENIZER, *fields)}
    left = [each for name, each in entries.items() if name.decode() not in without]
    return file(header(left, tensors(shapes), version=version), bytes(4 * sum(map(math.prod, shapes.values()))))


WHOLE_HEADER = header((*SHAPE, *TOKENIZER), tensors())
WHOLE = model()
"""A file that is read, of a whole model."""


def _with(*more: Entry) -> bytes:
    return file(header((*SHAPE, *more), [EMBEDDING]), DATA)


def _of(*tensors: bytes, data: bytes = bytes(1024)) -> bytes:
    return file(header(SHAPE, tensors), data)


_MANY = 2**64 - 1

BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "it does not begin with GGUF"),
    "three bytes": (b"GGU", "it does not begin with GGUF"),
    "the magic of another format": (b"GGML" + WHOLE[4:], "it does not begin with GGUF"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "it does not begin with GGUF"),
    "version 1": (header(version=1), "version 1; 2 and 3 are read"),
    "a version to come": (header(version=4), "version 4; 2 and 3 are read"),
    "version 0": (header(version=0), "version 0; 2 and 3 are read"),
    "big-endian": (header(version=3 << 24), "is big-endian"),
    "absurdly many tensors": (header(counts=(_MANY, 0)), "more than 50,000 tensors"),
    "absurdly many fields": (header(counts=(0, _MANY)), "more than 10,000 fields"),
    "more fields than there are": (header(SHAPE, counts=(0, 99)), "in the middle of its header"),
    "more tensors than there are": (header(SHAPE, [EMBEDDING], counts=(99, 6)), "in the middle of its header"),
    "a name as long as all memory": (header(counts=(0, 1)) + struct.pack("<Q", _MANY), "a name of 18,446"),
    "a name that is not UTF-8": (header([(b"\xff", U32, bytes(4))]), "is not UTF-8"),
    "a text as long as all memory": (header([(b"a", STRING, struct.pack("<Q", _MANY))]), "in the middle of its header"),
    "a text that is not UTF-8": (_with((b"a", STRING, text(b"\xff"))), "is not UTF-8"),
    "a list as long as all memory": (
        header([(b"a", LIST, struct.pack("<IQ", F32, _MANY))]),
        "in the middle of its header",
    ),
    "a list of absurdly many texts": (header([texts("a", [], _MANY)]), "more than 1,000,000 texts"),
    "a list of texts that are not there": (header([texts("a", [b"x"], 10**6)]), "in the middle of its header"),
    "a list with a text as long as all memory": (
        header([(b"a", LIST, struct.pack("<IQQ", STRING, 2, _MANY))]),
        "in the middle of its header",
    ),
    "a list of lists": (header([(b"a", LIST, struct.pack("<IQIQ", LIST, 1, U32, 0))]), "a list of lists"),
    "a list of an unknown type": (header([(b"a", LIST, struct.pack("<IQ", 99, 1))]), "a list of the unknown type 99"),
    "a value of an unknown type": (header([(b"a", 13, bytes(8))]), "a value of the unknown type 13"),
    "a field twice": (_with(field("a", 1), field("a", 2)), "its header has a twice"),
    "an alignment that is no power of two": (_with(field("general.alignment", 48)), "general.alignment is no power"),
    "an alignment of nothing": (_with(field("general.alignment", 0)), "general.alignment is no power"),
    "an alignment that is a list": (_with(texts("general.alignment", [b"32"])), "general.alignment is no power"),
    "a tensor twice": (
        _of(EMBEDDING, tensor("token_embd.weight", (4, 8), 128)),
        "the tensor token_embd.weight twice",
    ),
    "tensors that overlap": (
        _of(EMBEDDING, tensor("output.weight", (4, 8), 127)),
        "its tensor output.weight overlaps another",
    ),
    "tensors in one place": (_of(EMBEDDING, tensor("output.weight", (4, 8))), "overlaps another"),
    "a tensor beyond the file": (_of(tensor("token_embd.weight", (4, 8), 897)), "its tensor token_embd.weight ends at"),
    "a tensor beyond all files": (
        _of(tensor("token_embd.weight", (4, 8), _MANY)),
        "its tensor token_embd.weight ends at",
    ),
    "a tensor larger than all files": (
        _of(tensor("token_embd.weight", (_MANY, _MANY))),
        "its tensor token_embd.weight ends at",
    ),
    "weights that are cut off": (WHOLE[:-1], "its tensor token_embd.weight ends at"),
    "a tensor of no dimensions": (_of(tensor("token_embd.weight", ())), "has 0 dimensions"),
    "a tensor of five dimensions": (_of(tensor("token_embd.weight", (1,) * 5)), "has 5 dimensions"),
    "a tensor of billions of dimensions": (
        header(SHAPE, [text(b"x") + struct.pack("<I", 2**32 - 1)]),
        "has 4294967295 dimensions",
    ),
    "a tensor of nothing": (_of(tensor("token_embd.weight", (0, 8))), "its tensor token_embd.weight has no numbers"),
    "rows that blocks do not fill": (_of(tensor("token_embd.weight", (4, 8), kind=2)), "rows of 8, which blocks of 32"),
    "a tensor of an unknown type": (_of(tensor("token_embd.weight", (4, 8), kind=999)), "is stored as type 999"),
    "a tensor of a type that is not read": (_of(tensor("token_embd.weight", (4, 256), kind=16)), "stored as IQ2_XXS"),
}
"""Files, and a part of the sentence that refuses each."""

UNFIT: dict[str, tuple[bytes, str]] = {
    "no architecture": (file(header(SHAPE[1:], [EMBEDDING]), DATA), "unsupported architecture: none named"),
    "an unknown architecture": (
        file(header((field("general.architecture", "x\x1b[31m"), *SHAPE[1:]), [EMBEDDING]), DATA),
        "unsupported architecture",
    ),
    "an architecture that is a number": (
        file(header((field("general.architecture", 1), *SHAPE[1:]), [EMBEDDING]), DATA),
        "general.architecture that is not a text",
    ),
    "no layers": (file(header((*SHAPE[:1], *SHAPE[2:]), [EMBEDDING]), DATA), "model.gguf lacks llama.block_count"),
    "no context": (file(header((*SHAPE[:4], *SHAPE[5:]), [EMBEDDING]), DATA), "model.gguf lacks llama.context_length"),
    "layers that are a text": (
        file(header((*SHAPE[:1], field("llama.block_count", "1"), *SHAPE[2:]), [EMBEDDING]), DATA),
        "llama.block_count that is not a number",
    ),
    "four billion layers": (
        file(header((*SHAPE[:1], field("llama.block_count", 2**32 - 1), *SHAPE[2:]), [EMBEDDING]), DATA),
        "model.gguf has llama.block_count = 4294967295; more than 10000 are not supported",
    ),
    "no heads": (
        file(header((*SHAPE[:5], field("llama.attention.head_count", 0)), [EMBEDDING]), DATA),
        "model.gguf has llama.attention.head_count = 0; it must be a whole number of at least 1",
    ),
    "no embedding": (_of(tensor("output.weight", (4, 8))), "no matrix token_embd.weight"),
    "an embedding that is a vector": (_of(tensor("token_embd.weight", (8,))), "no matrix token_embd.weight"),
    "an embedding of another width": (_of(tensor("token_embd.weight", (4, 16))), "token_embd.weight has rows of 16"),
    "RoPE factors that are a matrix": (
        _of(EMBEDDING, tensor("rope_freqs.weight", (2, 2), 128)),
        "RoPE factors are no short list",
    ),
    "RoPE factors for long texts alone": (
        _of(EMBEDDING, tensor("rope_factors_long.weight", (2,), 128)),
        "model.gguf has longrope without its tensor rope_factors_short.weight",
    ),
    "two scalings of RoPE": (
        file(
            header(
                (*SHAPE, field("llama.rope.scaling.factor", 4)), [EMBEDDING, tensor("rope_freqs.weight", (2,), 128)]
            ),
            bytes(256),
        ),
        "a scaling beside rope_freqs (llama.rope.scaling.factor)",
    ),
    "attention sinks": (model(**{"blk.0.attn_sinks.weight": (2,)}), "has a tensor blk.0.attn_sinks.weight, which its"),
    "a bias of the head": (model(**{"output.bias": (4,)}), "has a tensor output.bias, which its"),
    "a bias of one matrix alone": (
        model(**{"blk.0.attn_output.bias": (8,)}),
        "has a tensor blk.0.attn_output.bias, which its",
    ),
    "a layer too many": (model(**{"blk.1.attn_norm.weight": (8,)}), "has a tensor blk.1.attn_norm.weight, which its"),
    "an adapter": (_with(field("general.type", "adapter")), "is of the type adapter, and no model"),
    "tokens that see later ones": (_with((b"llama.attention.causal", 7, bytes(1))), "(llama.attention.causal)"),
    "a scaling that is a number": (_with(field("llama.rope.scaling.type", 1)), "rope.scaling.type that is not a text"),
    "a template that is a number": (_with(field("tokenizer.chat_template", 1)), "chat_template that is not a text"),
    "a template of two megabytes": (
        _with(field("tokenizer.chat_template", "x" * 2**21)),
        "chat_template that is not a text",
    ),
    "a token that is not UTF-8": (
        _with(texts("tokenizer.ggml.tokens", [b"\xff"]), field("tokenizer.ggml.bos_token_id", 0)),
        "is not UTF-8",
    ),
    "tokens that are a number": (_with(field("tokenizer.ggml.tokens", 1)), "tokens that is not a list of texts"),
}
"""Files whose header is whole, and whose model cannot be computed or has no template that could be used."""
