"""From messages to a prompt, by a program that came with the model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.fakes import tiny_tokenizers

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, Any]] = HELLO, **kwargs: Any) -> str:
    return asyncio.run(ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **kwargs))


def with_template(folder: Path, value: object) -> Tokenizer:
    files = {"tokenizer_config": {"chat_template": value}} if value is not None else {}
    return Tokenizer.from_folder(tiny_tokenizers.save(tiny_tokenizers.byte_level(), folder, **files))


def test_a_template_sees_messages_special_tokens_and_the_callers_variables() -> None:
    source = "{{ bos_token }}{{ messages[0]['content'] }}{% if add_generation_prompt %}:{% endif %}{{ thinking }}"
    assert render(source, thinking=True) == "<s>hello:True"
    assert render(source, add_generation_prompt=False) == "<s>hello"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}") == "hello\n"


def test_templates_may_leave_loops_and_mark_generated_words() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(source, HELLO * 2) == "hello"


def test_json_in_a_prompt_is_not_escaped_for_html() -> None:
    assert render("{{ messages[0] | tojson }}", [{"role": "user", "content": "<é & 'x'>"}]) == json.dumps(
        {"role": "user", "content": "<é & 'x'>"}, ensure_ascii=False
    )
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_an_answer_that_goes_on_ends_the_prompt_where_the_template_renders_it_unchanged() -> None:
    chat = [*HELLO, {"role": "assistant", "content": "Once upon "}]
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert render(source, chat, continue_final=True) == "<hello><Once upon "
    for content, change in (("", source), ("Once", "{{ messages[0].content }}")):
        with pytest.raises(InvalidRequest, match="the last message cannot be continued"):
            render(change, [*HELLO, {"role": "assistant", "content": content}], continue_final=True)


def test_tools_reach_the_template() -> None:
    assert render("{{ tools is none }}") == "True"
    assert render("{{ tools[0].name }}", tools=[{"name": "search"}]) == "search"


def test_the_date_is_there_for_templates_that_ask() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_a_templates_own_complaint_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.details["param"] == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{% broken",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
    ids=["type", "missing", "syntax", "sandbox", "mutation", "endless"],
)
def test_whatever_a_template_trips_over_is_one_sentence(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^the model's chat template cannot render these messages: ."):
        render(source)


def test_a_model_without_template_points_to_completions(tmp_path: Path) -> None:
    subject = with_template(tmp_path, None)
    assert not subject.has_chat_template
    with pytest.raises(InvalidRequest, match=r"no chat template.*completions endpoint"):
        asyncio.run(subject.apply_chat_template(HELLO))


def test_named_templates_are_chosen_by_use(tmp_path: Path) -> None:
    subject = with_template(
        tmp_path, [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    )
    assert subject.has_chat_template
    assert asyncio.run(subject.apply_chat_template(HELLO)) == "plain"
    assert asyncio.run(subject.apply_chat_template(HELLO, tools=[{"name": "search"}])) == "tools"


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert asyncio.run(with_template(tmp_path, "from config").apply_chat_template(HELLO)) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("from folder")
    subject = with_template(tmp_path, "from config")
    assert asyncio.run(subject.apply_chat_template(HELLO)) == "from jinja"
    assert asyncio.run(subject.apply_chat_template(HELLO, tools=[{"name": "search"}])) == "from folder"


def test_the_template_is_given_the_tokenizers_special_tokens(tmp_path: Path) -> None:
    files = {"tokenizer_config": {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}|{{ eos_token }}"}}
    subject = Tokenizer.from_folder(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, **files))
    assert asyncio.run(subject.apply_chat_template(HELLO)) == "<s>|"
