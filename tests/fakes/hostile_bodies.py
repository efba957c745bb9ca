"""Bodies of one size that are made to hold a server up, by what they are made of, and where each is sent."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from typing import NamedTuple

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
        "brackets": Hostile(text, b"[" * size),
        "strings of brackets": Hostile(text, _filled('{"prompt":[', '"[",', "]}", size)),
        "digits": Hostile(text, _filled(raw + '"seed":', "9", "9}", size)),
        "no JSON": Hostile(text, b"\xff" * size),
    }
