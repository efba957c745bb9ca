"""Chat templates of the smallest kind that writes tools and calls as published ones do, and models that have them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from engine.text.chat_template import ChatTemplate
from tests.fakes.model import VOCAB_SIZE, write_fake_model

_TURNS = (
    "{% for m in messages %}{% if m.role == 'tool' %}result {{ m.name }} {{ m.tool_call_id }}: {{ m.content }}\n"
    "{% elif m.tool_calls is defined %}assistant: {{ m.content or '' }}%CALLS%{{ '\\n' }}"
    "{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_TOOLS = "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"

HERMES = (
    _TOOLS
    + '{# <tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call> #}'
    + _TURNS.replace(
        "%CALLS%",
        '{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", '
        '"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}',
    )
)
MISTRAL = _TOOLS + _TURNS.replace(
    "%CALLS%",
    "[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}"
    "{% endif %}{{ c.function | tojson }}{{ c.id }}{% endfor %}]",
)
LLAMA = (
    _TOOLS
    + "{# <|start_header_id|> #}"
    + _TURNS.replace(
        "%CALLS%",
        '{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", '
        '"parameters": {{ c.function.arguments | tojson }}}{% endfor %}',
    )
)
DEEPSEEK = _TOOLS + _TURNS.replace(
    "%CALLS%",
    "{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name "
    "+ '<｜tool▁sep｜>' + c.function.arguments + "
    "'<｜tool▁call▁end｜>' }}{% endfor %}",
)
CODER = (
    _TOOLS
    + "{# <tool_call><function=name><parameter=key>value</parameter></function></tool_call> #}"
    + _TURNS.replace(
        "%CALLS%",
        "{% for c in m.tool_calls %}<tool_call><function={{ c.function.name }}>"
        "{% for k, v in c.function.arguments|items %}"
        "<parameter={{ k }}>{{ v }}</parameter>{% endfor %}</function></tool_call>{% endfor %}",
    )
)
UNKNOWN = _TOOLS + _TURNS.replace("%CALLS%", "<|call_begin|>{{ m.tool_calls }}")


FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@cache
def published_template(name: str) -> ChatTemplate:
    """A template as it is published."""
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text(), TOKENS)


def write_tool_model(folder: Path, template: str, control_tokens: tuple[str, ...] = ()) -> Path:
    """A fake model with this template, whose tokenizer has these control tokens, from id VOCAB_SIZE on."""
    write_fake_model(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    common = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        common | {"id": VOCAB_SIZE + i, "content": token} for i, token in enumerate(control_tokens)
    ]
    file.write_text(json.dumps(tokenizer))
    return folder
