"""Bodies of one size that are made to hold a server up, by what they are made of, and where each is sent."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from typing import NamedTuple

from console.api.http.json_bounds import JsonBounds
from console.api.requests.sampling import MAX_TOKENS_NAMED
from engine.errors import InvalidRequest

BODY_BYTES = 8 * 2**20


class Hostile(NamedTuple):
    """A body and its endpoint. headers: besides those of JSON."""

    path: str
    body: bytes
    headers: Mapping[str, str] = {}


def _filled(start: str, unit: str | Callable[[int], str], end: str, size: int) -> bytes:
    """`unit`, again and again between the two; where it is made of its number, it is as long whatever that is."""
    first = unit if isinstance(unit, str) else unit(0)
    count = (size - len(start) - len(end)) // len(first)
    middle = unit * count if isinstance(unit, str) else "".join(map(unit, range(count)))
    return f"{start}{middle[:-1]}{end}".encode()


_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_TALK = '{"max_tokens":1,"messages":[{"role":"user","content":"x"}],'
_SAID = '{"role":"user","content":"x"},'
_PROMPT = '{"max_tokens":1,"prompt":"x",'
_CALL = '{"messages":[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"b","arguments":"'
_SCHEMA = (
    '"tool_choice":"required","tools":[{"type":"function","function":{"name":"a","parameters":{"type":"object",'
    '"properties":{'
)


def _of(path: str, start: str, unit: str | Callable[[int], str], end: str) -> Callable[[int], Hostile]:
    return lambda size: Hostile(path, _filled(start, unit, end, size))


def _short(path: str, body: str) -> Callable[[int], Hostile]:
    return lambda size: Hostile(path, body.encode())


def _some_prompts(size: int) -> Hostile:
    return Hostile(_TEXT, _filled('{"max_tokens":1,"prompt":[', f'"{"a " * 500}",', "]}", min(size, 500_000)))


def _packed(size: int) -> Hostile:
    return Hostile(_TEXT, gzip.compress(b'{"prompt":"' + b"a" * (size - 13) + b'"}', 1), {"Content-Encoding": "gzip"})


def _biased(size: int) -> Hostile:
    biases = ",".join(f'"{token_id}":1' for token_id in range(MAX_TOKENS_NAMED))
    return Hostile(_TEXT, f'{{"prompt":["a","b"],"n":32,"max_tokens":1,"logit_bias":{{{biases}}}}}'.encode())


KINDS: Mapping[str, Callable[[int], Hostile]] = {
    "token ids": _of("/detokenize", '{"tokens":[', "1,", "]}"),
    "a prompt of ids": _of(_TEXT, '{"prompt":[', "1,", "]}"),
    "a prompt of texts": _of(_TEXT, '{"prompt":[', '"a",', "]}"),
    "a prompt of lists": _of(_TEXT, '{"prompt":[', "[],", "]}"),
    "a prompt of objects": _of(_TEXT, '{"prompt":[', '{"a":0},', "]}"),
    "a long text": _of(_TEXT, '{"prompt":"', "hello, world ", ' "}'),
    "a text of quotes": _of(_TEXT, '{"prompt":"', '\\" [,', ' "}'),
    "500 prompts": _some_prompts,
    "messages": _of(_CHAT, '{"max_tokens":1,"messages":[', _SAID, "]}"),
    "Anthropic messages": _of("/v1/messages", '{"max_tokens":1,"messages":[', _SAID, "]}"),
    "Ollama messages": _of("/api/chat", '{"options":{"num_predict":1},"messages":[', _SAID, "]}"),
    "parts of a message": _of(
        _CHAT, '{"max_tokens":1,"messages":[{"role":"user","content":[', '{"type":"text","text":"x"},', "]}]}"
    ),
    "arguments of a call": _of(_CHAT, _CALL + '{\\"a\\":[', "[],", ']}"}}]}]}'),
    "tools": _of(_CHAT, _TALK + '"tools":[', '{"type":"function","function":{"name":"a"}},', "]}"),
    "a tool's schema": _of(_CHAT, _TALK + _SCHEMA, lambda i: f'"{i:06}":{{"type":"string"}},', "}}}}]}"),
    "template variables": _of(_CHAT, _TALK + '"chat_template_kwargs":{', lambda i: f'"{i:07}":0,', "}}"),
    "biases": _of(_TEXT, _PROMPT + '"logit_bias":{', lambda i: f'"{i + 10**6}":1,', "}}"),
    "unknown fields": _of(_TEXT, _PROMPT, lambda i: f'"{i:07}":0,', "}"),
    "banned strings": _of(_TEXT, _PROMPT + '"banned_strings":[', '"a",', "]}"),
    "stop strings": _of(_TEXT, _PROMPT + '"stop":[', '"a",', "]}"),
    "stop token ids": _of(_TEXT, _PROMPT + '"stop_token_ids":[', "1,", "]}"),
    "wrong stop token ids": _of(_TEXT, _PROMPT + '"stop_token_ids":[', '"",', "]}"),
    "banned tokens as text": _of(_TEXT, _PROMPT + '"custom_token_bans":"', "1,", '1"}'),
    "samplers as text": _of(_TEXT, _PROMPT + '"sampler_priority":"', "a,", 'a"}'),
    "breakers as text": _of(_TEXT, _PROMPT + '"dry_multiplier":1,"dry_sequence_breakers":"', '\\"a\\",', '\\"a\\""}'),
    "choices": _of(_TEXT, _PROMPT + '"guided_choice":[', '"a",', "]}"),
    "a schema": _of(_TEXT, _PROMPT + '"guided_json":{"enum":[', "1,", "]}}"),
    "texts to embed": _of("/v1/embeddings", '{"input":[', '"a",', "]}"),
    "Ollama's texts to embed": _of("/api/embed", '{"input":[', '"a",', "]}"),
    "Ollama's context": _of("/api/generate", '{"prompt":"x","context":[', "1,", "]}"),
    "Ollama's options": _of("/api/generate", '{"prompt":"x","options":{', lambda i: f'"{i:07}":0,', "}}"),
    "TGI's inputs": _of("/generate", '{"inputs":"', "hello ", ' "}'),
    "a text to tokenize": _of("/tokenize", '{"prompt":"', "hello ", ' "}'),
    "KoboldAI's prompt": _of("/api/v1/generate", '{"max_length":1,"prompt":"', "hello ", ' "}'),
    "packed": _packed,
    "packed, nothing": lambda size: Hostile(_TEXT, _empty_blocks(size), {"Content-Encoding": "deflate"}),
    "brackets": lambda size: Hostile(_TEXT, b"[" * size),
    "strings of brackets": _of(_TEXT, '{"prompt":[', '"[",', "]}"),
    "digits": _of(_TEXT, _PROMPT + '"seed":', "9", "9}"),
    "no JSON": lambda size: Hostile(_TEXT, b"\xff" * size),
    "512 answers": _short(_TEXT, '{"prompt":["a","b","c","d"],"n":128,"max_tokens":1}'),
    "64 biased answers": _biased,
    "64 echoes": _short(_TEXT, f'{{"prompt":"{"a " * 10_000}","n":64,"echo":true,"max_tokens":1}}'),
    "a stream of echoes": _short("/generate", f'{{"prompt":"{"a " * 30_000}","n":16,"stream":true,"max_tokens":8}}'),
    "32 KiB of messages": lambda size: KINDS["messages"](32_768),
    "32 KiB of lists": lambda size: KINDS["a prompt of lists"](32_768),
    "32 KiB of ids": lambda size: KINDS["a prompt of ids"](32_768),
}
"""What makes a body of about so many bytes of each kind; some kinds are short."""


def _empty_blocks(size: int) -> bytes:
    """A deflated body of blocks that come to nothing, each with tables that have to be made first (RFC 1951, 3.2.7)."""
    lengths = [0] * 18
    lengths[2] = lengths[17] = 1  # 18 is a run of zeros, 1 a code of one bit: for the end of the block, and a distance
    fields = [(0, 1), (2, 2), (0, 5), (0, 5), (14, 4), *((length, 3) for length in lengths)]
    fields += [(1, 1), (127, 7), (1, 1), (107, 7), (0, 1), (0, 1), (0, 1)]
    bits = "".join(format(value, f"0{count}b")[::-1] for value, count in fields) * 4  # 45 bytes
    blocks = bytes(int(bits[place : place + 8][::-1], 2) for place in range(0, len(bits), 8))
    return b"\x78\x9c" + blocks * (size // len(blocks))


def allowed_body(kind: str, bounds: JsonBounds) -> Hostile:
    """The longest body of a kind, or nearly, that is parsed at all."""
    size = BODY_BYTES
    while not _is_within(bounds, (hostile := KINDS[kind](size)).body):
        size = size * 7 // 8
    return hostile


def _is_within(bounds: JsonBounds, body: bytes) -> bool:
    try:
        bounds.check(body)
    except InvalidRequest:
        return False
    return True
