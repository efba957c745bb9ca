"""What somebody else may have made of a model folder, and what is said of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.models.headers import MAX_TENSORS
from tests.fakes.model_folders import LLAMA

Entry = Mapping[str, Any]

HUGE = 2**63 - 1


def header(entries: Mapping[str, Entry] | bytes, data: bytes = b"") -> bytes:
    """A safetensors file of just this header."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> Entry:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def many(count: int, shape: Any = (0, 300)) -> bytes:
    """Tensors that take no bytes."""
    each = json.dumps(tensor(shape=shape, offsets=(0, 0)))
    return header(
        ("{" + ",".join(f'"model.layers.{i}.mlp.up_proj.{i:06}":{each}' for i in range(count)) + "}").encode()
    )


HEADERS: dict[str, tuple[bytes, str]] = {
    "400 dimensions": (header({"w": tensor(shape=[HUGE] * 400)}), "<= 281474976710656"),
    "a dimension beyond any disk": (header({"w": tensor(shape=[0, HUGE], offsets=(0, 0))}), "<= 281474976710656"),
    "60,000 dimensions": (header({"w": tensor(shape=[2**40] * 60_000)}), "length <= 8"),
    "a dimension of 5,000 digits": (header(b'{"w":{"shape":[' + b"9" * 5000 + b"]}}"), "out of range"),
    "a shape below nothing": (header({"w": tensor(shape=[-4])}, bytes(4)), "int` >= 0"),
    "a shape that is not its size": (header({"w": tensor(shape=[5])}, bytes(4)), "[5] does not take 4 bytes"),
    "offsets turned around": (header({"w": tensor(offsets=(4, 0))}), "overlap or leave a gap"),
    "offsets below nothing": (header({"w": tensor(offsets=(-4, 0))}), "int` >= 0"),
    "an overlap": (header({"a": tensor(), "b": tensor(offsets=(2, 6))}, bytes(6)), "overlap or leave a gap at byte 2"),
    "a gap": (header({"a": tensor(), "b": tensor(offsets=(6, 10))}, bytes(10)), "overlap or leave a gap at byte 4"),
    "more than the file": (header({"w": tensor(shape=[99], offsets=(0, 99))}, bytes(4)), "truncated or damaged"),
    "less than the file": (header({"w": tensor()}, bytes(9)), "truncated or damaged"),
    "an unknown dtype": (
        header({"w": tensor(dtype="\x1b[31mX" * 999)}, bytes(4)),
        "an unknown dtype",
    ),
    "one name twice": (
        header(b'{"w":%b,"w":%b}' % ((json.dumps(tensor()).encode(),) * 2), bytes(8)),
        "is truncated or damaged",
    ),
    "wrong types": (header(b'{"w":{"dtype":5}}'), "its header is not valid"),
    "no UTF-8": (header(b'{"\xff":1}'), "its header is not valid"),
    "NaN": (header(b'{"w":{"shape":[NaN]}}'), "its header is not valid"),
    "deep nesting": (header(b'{"w":{"x":' + b"[" * 10**6 + b"]" * 10**6 + b"}}"), "its header is not valid"),
    "more tensors than a file may have": (many(100_001), "holds more than 100,000 tensors"),
    "a shape of two million numbers": (header({"w": tensor(shape=[999] * 2_000_000)}), "holds more than 100,000"),
    "a header that the file has not": (
        (10**8).to_bytes(8, "little") + b"{}",
        "does not begin with a safetensors header",
    ),
    "wide characters": (header(b'{"' + b"a" * 2**23 + "😀".encode() + b'":{}}'), "not pure ASCII"),
}


Spoil = Callable[[Path], object]


def as_weights(content: bytes) -> Spoil:
    return as_file("model.safetensors", content)


def as_config(**changes: Any) -> Spoil:
    return as_file("config.json", json.dumps(LLAMA | changes).encode())


def as_file(name: str, content: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content)


def header_of_100_mb(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.write((10**8).to_bytes(8, "little") + b"{}")
        file.truncate(10**8 + 8)


def two_files_of_too_many(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / f"{name}.safetensors").write_bytes(many(99_999, (0, ord(name))).replace(b"layers", name.encode() * 6))


FOLDERS: dict[str, tuple[Spoil, str]] = {
    **{name: (as_weights(content), problem) for name, (content, problem) in HEADERS.items()},
    "a header of 100 MB": (header_of_100_mb, "has a header of 100000000 bytes"),
    "more tensors than a model may have": (two_files_of_too_many, f"hold more than {MAX_TENSORS:,} tensors"),
    "ten million layers": (as_config(num_hidden_layers=10**7), "more than 10000 are not supported"),
    "layers of 300 digits": (as_config(num_hidden_layers=10**300), "more than 10000 are not supported"),
    "a width of 40 digits": (as_config(hidden_size=10**40), "hidden_size"),
    "a vocabulary of 40 digits": (as_config(vocab_size=10**40), "vocab_size"),
    "a context of 40 digits": (as_config(max_position_embeddings=10**40), "max_position_embeddings"),
    "a window of 40 digits": (as_config(architectures=["MistralForCausalLM"], sliding_window=10**40), "sliding_window"),
    "a window below nothing": (as_config(architectures=["Phi3ForCausalLM"], sliding_window=-1), "sliding_window"),
    "a base of 300 digits": (as_config(rope_theta=10**300), "rope_theta"),
    "a scaling beyond any context": (as_config(rope_scaling={"type": "linear", "factor": 1e12}), "scaled for RoPE"),
    "a scaling of nothing": (as_config(rope_scaling={"type": "linear", "factor": 0}), "factor"),
    "part of a head that is not a number": (as_config(partial_rotary_factor=1e300), "partial_rotary_factor"),
    "logits divided by nothing": (as_config(architectures=["GraniteForCausalLM"], logits_scaling=0), "logits_scaling"),
    "scores times less than nothing": (
        as_config(architectures=["GraniteForCausalLM"], attention_multiplier=-1),
        "attention_multiplier",
    ),
    "a root of nothing": (
        as_config(architectures=["Gemma2ForCausalLM"], query_pre_attn_scalar=0),
        "query_pre_attn_scalar",
    ),
    "an activation that is a list": (as_config(hidden_act=[]), "unsupported activation: []"),
    "a checkpoint format that is an object": (
        as_config(quantization_config={"quant_method": "gptq", "checkpoint_format": {"a": 1}}),
        "the checkpoint format {",
    ),
    "a group of 40 digits": (
        as_config(quantization_config={"quant_method": "awq", "group_size": 10**40}),
        "a group_size of 1000",
    ),
    "ten thousand architectures": (as_config(architectures=["X" * 99] * 9999), "unsupported architecture: XXX"),
    "an architecture that is a novel": (as_config(architectures=[["X"] * 90_000]), "unsupported architecture"),
    "experts times layers": (
        as_config(
            architectures=["Qwen3MoeForCausalLM"],
            num_hidden_layers=10_000,
            num_experts=10_001,
            num_experts_per_tok=1,
            moe_intermediate_size=9,
        ),
        "num_experts = 10001; more than 10000",
    ),
    "a config of 5 MiB": (as_file("config.json", b'{"a":"' + b" " * 5 * 2**20 + b'"}'), "is larger than 4 MiB"),
    "a config of many values": (
        as_file("config.json", b'{"a":[' + b"{}," * 10**6 + b"{}]}"),
        "more than 100,000 values",
    ),
    "a config in a thousand layers": (as_file("config.json", b'{"a":' * 40_000), "nested too deeply"),
    "a config of no text": (as_file("config.json", b'{"a":"\xff"}'), "is not valid JSON"),
    "a config of no number": (as_file("config.json", b'{"a":NaN}'), "is not valid JSON"),
    "an index of everything": (
        as_file("model.safetensors.index.json", b'{"weight_map":{' + b",".join(b'"%d":"a"' % i for i in range(10**6))),
        "more than 381,000 values",
    ),
    "an index that leaves the folder": (
        as_file("model.safetensors.index.json", b'{"weight_map":{"a":"../../x.safetensors"}}'),
        "names ../../x.safetensors, which is not a safetensors file in the same folder",
    ),
    "an index with escapes": (
        as_file("model.safetensors.index.json", b'{"weight_map":{"a":"\\u001b]52;c;QQ==\\u0007.safetensors"}}'),
        r"\x1b]52",
    ),
    "a template of 2 MiB": (as_file("chat_template.jinja", b"x" * 2**21), "is larger than 1 MiB"),
    "a tokenizer's template of 6 MiB": (
        as_file("tokenizer_config.json", json.dumps({"chat_template": "é" * 2**20}).encode()),
        "not pure ASCII",
    ),
    "a tokenizer's settings in layers": (
        as_file("tokenizer_config.json", b'{"x":' + b"[" * 10**6 + b"]" * 10**6 + b"}"),
        "nested too deeply",
    ),
}


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
