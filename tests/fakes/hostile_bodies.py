"""Bodies of one size that are made to hold a server up, by what they are made of, and where each is sent."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from typing import NamedTuple

from console.api.biases import MAX_TOKENS_NAMED
from console.api.json_bounds import JsonBounds
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


def hostile_bodies(size: int = BODY_BYTES) -> dict[str, Hostile]:
    """A body of about `size` bytes of each kind."""
    chat, talk = "/v1/chat/completions", '{"messages":[{"role":"user","content":"x"}],'
    text, raw = "/v1/completions", '{"prompt":"x",'
    say = '{"role":"user","content":"x"},'
    call = '{"messages":[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"b","arguments":"'
    bias = ",".join(f'"{token_id}":1' for token_id in range(MAX_TOKENS_NAMED))
    packed = gzip.compress(b'{"prompt":"' + b"a" * (size - 13) + b'"}', 1)
    return {
        "token ids": Hostile("/detokenize", _filled('{"tokens":[', "1,", "]}", size)),
        "a prompt of ids": Hostile(text, _filled('{"prompt":[', "1,", "]}", size)),
        "a prompt of texts": Hostile(text, _filled('{"prompt":[', '"a",', "]}", size)),
        "a prompt of lists": Hostile(text, _filled('{"prompt":[', "[],", "]}", size)),
        "a prompt of objects": Hostile(text, _filled('{"prompt":[', '{"a":0},', "]}", size)),
        "a long text": Hostile(text, _filled('{"prompt":"', "hello, world ", ' "}', size)),
        "a text of quotes": Hostile(text, _filled('{"prompt":"', '\\" [,', ' "}', size)),
        "500 prompts": Hostile(text, _filled('{"prompt":[', f'"{"a " * (size // 1010)}",', "]}", size)),
        "messages": Hostile(chat, _filled('{"messages":[', say, "]}", size)),
        "Anthropic messages": Hostile("/v1/messages", _filled('{"max_tokens":1,"messages":[', say, "]}", size)),
        "Ollama messages": Hostile("/api/chat", _filled('{"messages":[', say, "]}", size)),
        "parts of a message": Hostile(
            chat, _filled('{"messages":[{"role":"user","content":[', '{"type":"text","text":"x"},', "]}]}", size)
        ),
        "arguments of a call": Hostile(chat, _filled(call + '{\\"a\\":[', "[],", ']}"}}]}]}', size)),
        "tools": Hostile(chat, _filled(talk + '"tools":[', '{"type":"function","function":{"name":"a"}},', "]}", size)),
        "a tool's schema": Hostile(
            chat,
            _filled(
                talk + '"tool_choice":"required","tools":[{"type":"function","function":{"name":"a","parameters":{'
                '"type":"object","properties":{',
                lambda i: f'"{i:06}":{{"type":"string"}},',
                "}}}}]}",
                size,
            ),
        ),
        "template variables": Hostile(
            chat, _filled(talk + '"chat_template_kwargs":{', lambda i: f'"{i:07}":0,', "}}", size)
        ),
        "biases": Hostile(text, _filled(raw + '"logit_bias":{', lambda i: f'"{i + 10**6}":1,', "}}", size)),
        "unknown fields": Hostile(text, _filled(raw, lambda i: f'"{i:07}":0,', "}", size)),
        "banned strings": Hostile(text, _filled(raw + '"banned_strings":[', '"a",', "]}", size)),
        "stop strings": Hostile(text, _filled(raw + '"stop":[', '"a",', "]}", size)),
        "stop token ids": Hostile(text, _filled(raw + '"stop_token_ids":[', "1,", "]}", size)),
        "wrong stop token ids": Hostile(text, _filled(raw + '"stop_token_ids":[', '"",', "]}", size)),
        "banned tokens as text": Hostile(text, _filled(raw + '"custom_token_bans":"', "1,", '1"}', size)),
        "samplers as text": Hostile(text, _filled(raw + '"sampler_priority":"', "a,", 'a"}', size)),
        "breakers as text": Hostile(
            text, _filled(raw + '"dry_multiplier":1,"dry_sequence_breakers":"', '\\"a\\",', '\\"a\\""}', size)
        ),
        "choices": Hostile(text, _filled(raw + '"guided_choice":[', '"a",', "]}", size)),
        "a schema": Hostile(text, _filled(raw + '"guided_json":{"enum":[', "1,", "]}}", size)),
        "texts to embed": Hostile("/v1/embeddings", _filled('{"input":[', '"a",', "]}", size)),
        "Ollama's texts to embed": Hostile("/api/embed", _filled('{"input":[', '"a",', "]}", size)),
        "Ollama's context": Hostile("/api/generate", _filled('{"prompt":"x","context":[', "1,", "]}", size)),
        "Ollama's options": Hostile(
            "/api/generate", _filled('{"prompt":"x","options":{', lambda i: f'"{i:07}":0,', "}}", size)
        ),
        "TGI's inputs": Hostile("/generate", _filled('{"inputs":"', "hello ", ' "}', size)),
        "a text to tokenize": Hostile("/tokenize", _filled('{"prompt":"', "hello ", ' "}', size)),
        "KoboldAI's prompt": Hostile("/api/v1/generate", _filled('{"prompt":"', "hello ", ' "}', size)),
        "packed": Hostile(text, packed, {"Content-Encoding": "gzip"}),
        "packed, nothing": Hostile(text, _empty_blocks(size), {"Content-Encoding": "deflate"}),
        "512 answers": Hostile(text, b'{"prompt":["a","b","c","d"],"n":128}'),
        "512 biased answers": Hostile(text, f'{{"prompt":["a","b","c","d"],"n":128,"logit_bias":{{{bias}}}}}'.encode()),
        "64 echoes": Hostile(text, _filled('{"prompt":"', "a ", ' ","n":64,"echo":true}', 120_000)),
        "a stream of echoes": Hostile(
            "/generate", _filled('{"prompt":"', "a ", ' ","n":16,"stream":true,"max_tokens":100}', 60_000)
        ),
        "32 KB of messages": Hostile(chat, _filled('{"messages":[', say, "]}", 32_768)),
        "32 KB of lists": Hostile(text, _filled('{"prompt":[', "[],", "]}", 32_768)),
        "32 KB of ids": Hostile(text, _filled('{"prompt":[', "1,", "]}", 32_768)),
        "brackets": Hostile(text, b"[" * size),
        "strings of brackets": Hostile(text, _filled('{"prompt":[', '"[",', "]}", size)),
        "digits": Hostile(text, _filled(raw + '"seed":', "9", "9}", size)),
        "no JSON": Hostile(text, b"\xff" * size),
    }


def _empty_blocks(size: int) -> bytes:
    """A deflated body of blocks that come to nothing, each with tables that have to be made first (RFC 1951, 3.2.7)."""
    lengths = [0] * 18
    lengths[2] = lengths[17] = 1  # 18 is a run of zeros, 1 a code of one bit: for the end of the block, and a distance
    fields = [(0, 1), (2, 2), (0, 5), (0, 5), (14, 4), *((length, 3) for length in lengths)]
    fields += [(1, 1), (127, 7), (1, 1), (107, 7), (0, 1), (0, 1), (0, 1)]
    bits = "".join(format(value, f"0{count}b")[::-1] for value, count in fields) * 4  # 45 bytes
    blocks = bytes(int(bits[place : place + 8][::-1], 2) for place in range(0, len(bits), 8))
    return b"\x78\x9c" + blocks * (size // len(blocks))


def allowed_bodies(bounds: JsonBounds) -> dict[str, Hostile]:
    """Of each kind the longest body, or nearly, that is parsed at all."""
    allowed: dict[str, Hostile] = {}
    size = BODY_BYTES
    while len(allowed) < len(kinds := hostile_bodies(size)):
        for kind, hostile in kinds.items():
            if kind not in allowed and _is_within(bounds, hostile.body):
                allowed[kind] = hostile
        size = size * 7 // 8
    return allowed


def _is_within(bounds: JsonBounds, body: bytes) -> bool:
    try:
        bounds.check(body)
    except InvalidRequest:
        return False
    return True
