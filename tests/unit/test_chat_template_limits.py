"""Chat templates that never end, or make too much: each ends with a clear error, soon, and in little memory."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError, InvalidRequest
from engine.system.child_process import child_environment, python_command
from engine.text import chat_template
from engine.text.chat_template import ChatTemplate, TemplateLimits
from engine.text.template_sandbox import TemplateEnvironment
from engine.text.tokenizer import Tokenizer
from tests.fakes.bounds import outcome, within_bounds
from tests.fakes.engines import until
from tests.fakes.model import write_fake_model
from tests.fakes.renderers import renderers

pytestmark = pytest.mark.long

HELLO = [{"role": "user", "content": "hello"}]
DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = %s %}{% endfor %}{{ ns.x|length }}"
NESTED = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = %s %}{% endfor %}"

ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops with a condition": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "output in a loop": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "constant text in a loop": "{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "text gathered in a block": (
        "{% set b = 'x' * 99999 %}{% set t %}{% for a in range(99999) %}{{ b }}{% endfor %}{% endset %}"
    ),
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "a product": "{{ ('x' * 10000000000)|length }}",
    "a product the other way round": "{{ (10000000000 * 'x')|length }}",
    "a list's product": "{{ ([1] * 10000000000)|length }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a number that is squared again and again": (
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}"
    ),
    "text added to itself": DOUBLE.replace("%s", "ns.x + ns.x"),
    "text joined to itself": DOUBLE.replace("%s", "ns.x ~ ns.x"),
    "text joined by a method": DOUBLE.replace("%s", "ns.x.join([ns.x, ns.x, ns.x])"),
    "text joined by a filter": DOUBLE.replace("%s", "[ns.x, ns.x]|join(ns.x)"),
    "text replaced by itself": DOUBLE.replace("%s", "ns.x.replace('a', ns.x)"),
    "text replaced by a filter": DOUBLE.replace("%s", "ns.x|replace('a', ns.x)"),
    "text formatted": DOUBLE.replace("%s", "'%s%s' % (ns.x, ns.x)"),
    "text formatted by a method": DOUBLE.replace("%s", "'{0}{0}'.format(ns.x)"),
    "a wide field": "{{ '%9999999999d' % 1 }}",
    "a field as wide as is given": "{{ '%*d' % (9999999999, 1) }}",
    "a wide field of a method": "{{ '{:>9999999999}'.format(1) }}",
    "a field of a method as wide as is given": "{{ '{:>{}}'.format(1, 9999999999) }}",
    "padding": "{{ 'x'.ljust(9999999999) }}",
    "zeros": "{{ 'x'.zfill(9999999999) }}",
    "tabs": "{{ ('\t' * 9999).expandtabs(9999999) }}",
    "an indent": "{{ 'x\ny'|indent(9999999999, true) }}",
    "an indent by name": "{{ 'x\ny'|indent(first=true, width=9999999999) }}",
    "tabs by name": "{{ '\t'.expandtabs(tabsize=9999999999) }}",
    "text replaced by name": DOUBLE.replace("%s", "ns.x|replace(new=ns.x, old='a')"),
    "a list that is replaced in": "{{ ['a' * 9999] | replace('a', 'b' * 99999) }}",
    "a dict's keys joined": "{{ dict(a=1, b=2)|join('x' * 99999999) }}",
    "fields formatted many times": "{{ ('{0}' * 99999).format('x' * 99999) }}",
    "a name formatted many times": "{{ ('%(a)s' * 99999) % {'a': 'x' * 99999} }}",
    "an object's field": "{{ ('{0}' * 99999).format(['x' * 9999]) }}",
    "bytes": "{{ 'x'.encode() * 9999999999 }}",
    "a number's bytes": "{{ (1).to_bytes(9999999999, 'big') }}",
    "batches by name": "{{ [1]|batch(fill_with=0, linecount=9999999999)|list }}",
    "an indent of JSON": "{{ messages|tojson(indent=9999999999) }}",
    "batches": "{{ [1]|batch(9999999999, 0)|list }}",
    "slices": "{{ [1]|slice(9999999999)|list }}",
    "a sum of lists": "{{ [[1], [2]]|sum(start=[]) }}",
    "splits": "{{ ('x ' * 9999999).split() }}",
    "a list of characters": "{{ ('x' * 99999999)|list }}",
    "a list in itself": NESTED.replace("%s", "[ns.x, ns.x]") + "{{ ns.x }}",
    "a tuple in itself, as JSON": NESTED.replace("%s", "(ns.x, ns.x)") + "{{ ns.x|tojson }}",
    "a dict in itself, compared": (NESTED.replace("%s", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x == ns.x.copy() }}"),
    "a dict made by a call": NESTED.replace("%s", "dict(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "a loop that calls itself": "{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "sleeping text": "{{ lipsum(n=9999999) }}",
    "a file": "{% include '/etc/passwd' %}",
    "python": "{{ ''.__class__.__mro__ }}",
    "centred": "{{ 'x'|center(9999999999) }}",
    "text translated": "{{ ('a' * 9999).translate({97: 'b' * 99999})|length }}",
    "a number of all too many digits": ("{{ ('f' * 9999999)|int(0, 16) // ('f' * 4999999)|int(0, 16) }}"),
    "a number made of bytes": "{{ (0).from_bytes([255] * 999999, 'big') // 3 }}",
    "a namespace in itself": NESTED.replace("%s", "namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "one attribute joined many times": (
        "{% set ns = namespace(x='x' * 99999) %}{{ ([ns] * 9999)|join('', attribute='x')|length }}"
    ),
    "a list between many": "{{ ([1] * 9999)|join(['x' * 99999])|length }}",
    "a number's digits replaced": "{{ 11111111111111111111|replace('1', 'x' * 49999999)|length }}",
    "text replaced by a long number": "{{ ('a' * 999999)|replace('a', 10 ** 1000)|length }}",
    "a field's name without end": "{{ ('{' ~ ':' * 999999).format(1) }}",
    "a wide field in other digits": "{{ '{:>９９９９９９９９９}'.format(1)|length }}",
    "batches filled with themselves": NESTED.replace("%s", "ns.x|batch(2, ns.x)|list") + "{{ ns.x == ns.x|list }}",
    "slices filled with themselves": NESTED.replace("%s", "ns.x|slice(2, ns.x)|list") + "{{ ns.x == ns.x|list }}",
    "arguments of arguments": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1, varargs, varargs) }}{% endif %}{% endmacro %}{{ m(60, 1, 1) }}"
    ),
    "a cycle of cycles": NESTED.replace("%s", "cycler(ns.x, ns.x).items"),
    "long text stripped of long text": "{{ ('a' * 9999999).strip('b' * 9999999 ~ 'a')|length }}",
    "long text trimmed of long text": "{{ ('a' * 9999999)|trim('b' * 9999999 ~ 'a')|length }}",
    "long text looked for from the end": "{{ ('a' * 999999).rfind('ab' ~ 'a' * 499999) }}",
    "JSON indented by long text": "{{ ([1] * 99999)|tojson(indent='x' * 9999)|length }}",
    "JSON parted by long text": "{{ ([1] * 99999)|tojson(separators=('x' * 9999, ':'))|length }}",
}


TWICE = (
    "{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}{% for i in range(40) %}"
    "{% set a.x = %s %}{% set b.x = %s %}{% endfor %}{{ a.x == b.x }}"
)
EVASIONS = {
    "two lists that batches doubled, compared": (
        TWICE.replace("%s", "(a.x + a.x)|batch(2)|list", 1).replace("%s", "(b.x + b.x)|batch(2)|list")
    ),
    "two nested lists, compared": TWICE.replace("%s", "[a.x, a.x]", 1).replace("%s", "[b.x, b.x]"),
    "slices of long text": ("{% set s = 'x' * 2**24 %}" + "".join(f"{{% set v{i} = s[1:] %}}" for i in range(60))),
    "a wide date": "{{ strftime_now('x' * 2**23 ~ '%0900000000Y') }}",
    "long text searched again and again": (
        "{% set s = 'b' * 2**25 %}{% for i in range(9999) %}{% if 'ab' in s %}{% endif %}{% endfor %}"
    ),
}
"""Programs that a count of what filters, calls and operators make does not see."""

LIMITS = TemplateLimits(cpu_s=0.2)


def rendered(source: str, messages: Sequence[dict[str, Any]] = HELLO, **variables: str) -> str:
    """What a template makes, in a process of its own."""
    return asyncio.run(ChatTemplate(source, variables, LIMITS).render(messages))


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_template_that_would_not_end_or_would_fill_memory_is_soon_over(source: str) -> None:
    assert len(outcome(lambda: rendered(source), 0, InvalidRequest)) < 2000


@pytest.mark.parametrize("source", EVASIONS.values(), ids=EVASIONS.keys())
async def test_the_loop_turns_on_while_a_template_takes_all_it_can(source: str) -> None:
    template, longest_s = ChatTemplate(source, {}, LIMITS), 0.0
    rendering = asyncio.ensure_future(template.render(HELLO))
    with within_bounds():
        while not rendering.done():
            began_s = time.thread_time()
            await asyncio.sleep(0.001)  # a loop with nothing to do takes no processor time, however long it waits
            longest_s = max(longest_s, time.thread_time() - began_s)
    assert longest_s < 0.05
    with pytest.raises(InvalidRequest, match=r"0.2 s of processor time|64 MiB of memory"):
        await rendering


async def test_a_template_that_was_killed_renders_the_next_conversation() -> None:
    source = "{% for i in range(99999) if messages|length > 1 %}{% for j in range(99999) %}{% endfor %}{% endfor %}fine"
    template = ChatTemplate(source, {}, LIMITS)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"it takes longer than 0.2 s of processor time$"):
            await template.render(HELLO * 2)
        assert await template.render(HELLO) == "fine"


def test_a_template_is_ended_though_its_starter_had_that_signal_blocked() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    try:
        template = ChatTemplate(ENDLESS["loops in loops"], {}, TemplateLimits(cpu_s=0.2, wait_s=10))
        with pytest.raises(InvalidRequest, match=r"it takes longer than 0.2 s of processor time$"):
            asyncio.run(template.render(HELLO))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def test_a_template_that_cannot_be_compiled_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template, started = ChatTemplate("{% broken", {}, LIMITS), []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: started.append(args) or popen(*args, **options))
    for _ in range(3):
        with pytest.raises(InvalidRequest, match=r"Encountered unknown tag 'broken'. \(line 1\)$"):
            await template.render(HELLO)
    assert len(started) == 1


async def test_a_template_that_takes_too_long_to_compile_is_refused_and_tried_once() -> None:
    template = ChatTemplate(
        "{{ " + "(" * 60 + "1" + ")" * 60 + " }}" + "{% if a %}{{ b ~ c }}{% endif %}" * 7_000, {}, LIMITS
    )
    for _ in range(2):
        with within_bounds(), pytest.raises(InvalidRequest, match=r"processor time|nested too deeply|memory"):
            await template.render(HELLO)


async def test_what_a_killed_renderer_left_is_nothing() -> None:
    before, template = renderers(), ChatTemplate(ENDLESS["loops in loops"], {}, LIMITS)
    with pytest.raises(InvalidRequest):
        await template.render(HELLO)
    assert renderers() <= before


async def test_a_renderer_ends_with_its_template() -> None:
    before, template = renderers(), ChatTemplate("{{ messages[0].content }}", {})
    template.warm_up().result()
    [process] = renderers() - before
    assert await template.render(HELLO) == "hello"
    del template
    gc.collect()
    assert process not in renderers()


async def test_a_renderer_that_is_starting_ends_with_the_close_of_its_template() -> None:
    before, template = renderers(), ChatTemplate("{{ messages[0].content }}", {})
    template.warm_up()
    await asyncio.wrap_future(template.close())
    assert renderers() <= before


async def test_a_warm_up_that_takes_long_ends_with_the_close_of_its_template() -> None:
    source = "{% if a %}{{ b ~ c }}{% endif %}" * 7_000
    before, template = renderers(), ChatTemplate(source, {}, TemplateLimits(cpu_s=600, wait_s=600))
    template.warm_up()
    await until(lambda: bool(renderers() - before))
    [process] = renderers() - before
    os.kill(process, signal.SIGSTOP)
    async with asyncio.timeout(60):
        await asyncio.wrap_future(template.close())
    assert process not in renderers()


async def test_a_closed_template_renders_what_waits_and_what_still_comes_and_leaves_no_process() -> None:
    before, template, begins = renderers(), ChatTemplate("{{ messages[0].content }}", {}), threading.Event()
    template._thread.submit(begins.wait)
    waiting = [asyncio.create_task(template.render(HELLO)) for _ in range(3)]
    await asyncio.sleep(0)
    closed = asyncio.wrap_future(template.close())
    begins.set()
    assert await asyncio.gather(*waiting) == ["hello"] * 3
    await closed
    assert renderers() <= before
    assert await template.render(HELLO) == "hello"
    await asyncio.wrap_future(template.close())
    assert renderers() <= before


async def test_a_renderer_whose_machine_stands_still_is_given_up() -> None:
    before, template = renderers(), ChatTemplate("{{ messages[0].content }}", {})
    template.warm_up().result()
    [process] = renderers() - before
    os.kill(process, signal.SIGSTOP)
    assert template._process is not None
    template._process._limits = TemplateLimits(wait_s=0.05)
    with pytest.raises(EngineError, match=r"it took longer than 0.05 s$") as given_up:
        await template.render(HELLO)
    assert given_up.value.http_status == 500, "the request is not to blame"
    assert process not in renderers()
    assert await template.render(HELLO) == "hello"


LIES = {
    "a length beyond all memory": "answer(2**63, b'')",
    "a length that is not there": "answer(9, b'')",
    "half a length": "os.write(1, b'xyz')",
    "half an answer, and no end": "answer(9, b'half'); signal.pause()",
    "an answer before the question": "answer(6, b'\\0early'); signal.pause()",
    "an answer that does not end": "answer(2**23, b''); [os.write(1, bytes(2**20)) for _ in range(2**20)]",
    "another kind of answer": "answer(2, b'\\x09x')",
    "no text": "answer(2, b'\\0\\xff')",
    "nothing at all": "answer(0, b''); signal.pause()",
}
"""What a renderer could do that a template had taken over."""


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_renderer_that_lies_ends_with_an_error_and_costs_little(monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    program = (
        "import os, signal, struct\n"
        "def answer(length, data): os.write(1, struct.pack('!Q', length) + data)\n"
        "answer(1, b'\\0')  # that the template is compiled\n" + lie
    )
    monkeypatch.setattr(chat_template, "python_command", lambda *_: [sys.executable, "-c", program])
    template = ChatTemplate("", {}, TemplateLimits(wait_s=1.0))
    long = [{"role": "user", "content": "x" * 2**20}]  # more than the pipe holds
    assert "template" in outcome(lambda: asyncio.run(template.render(long)), 2**20, EngineError)
    assert template._process is None or template._process.has_ended


async def test_a_renderer_that_cannot_be_started_is_no_fault_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    template = ChatTemplate("{{ messages[0].content }}", {})
    with monkeypatch.context() as patched, pytest.raises(EngineError, match=r"\(Resource temp.*\)$") as failed:
        patched.setattr(subprocess, "Popen", full)
        await template.render(HELLO)
    assert failed.value.http_status == 500
    assert await template.render(HELLO) == "hello"


async def test_a_short_conversation_is_rendered_before_long_ones_that_came_first() -> None:
    template, begins, done = ChatTemplate("{{ messages|length }}", {}), threading.Event(), list[str]()
    template._thread.submit(begins.wait)

    async def render(messages: list[dict[str, Any]]) -> None:
        done.append(await template.render(messages))

    waiting = [asyncio.create_task(render(HELLO * length)) for length in (900, 1000, 1, 800)]
    await asyncio.sleep(0)
    begins.set()
    await asyncio.gather(*waiting)
    assert done == ["1", "800", "900", "1000"]


async def test_clients_whose_conversations_wait_take_turns_however_short_those_of_one_are() -> None:
    template, begins, done = ChatTemplate("{{ messages|length }}", {}), threading.Event(), list[str]()
    template._thread.submit(begins.wait)

    async def render(client: str, messages: list[dict[str, Any]]) -> None:
        done.append(client + await template.render(messages, client))

    asked = [("a", 2), ("a", 1), ("b", 900), ("a", 3), ("b", 800), ("c", 1000)]
    waiting = [asyncio.create_task(render(client, HELLO * length)) for client, length in asked]
    await asyncio.sleep(0)
    begins.set()
    await asyncio.gather(*waiting)
    assert done == ["a1", "b800", "c1000", "a2", "b900", "a3"]


async def test_a_rendering_that_nobody_waits_for_any_more_is_not_begun() -> None:
    source = "{% for a in range(99999 // messages|length ** 9) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    before, template, begins = renderers(), ChatTemplate(source, {}, LIMITS), threading.Event()
    assert await template.render(HELLO * 9) == ""
    [process] = renderers() - before
    template._thread.submit(begins.wait)
    waiting = [asyncio.create_task(template.render(HELLO)) for _ in range(9)]
    await asyncio.sleep(0)
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
    begins.set()
    assert await template.render(HELLO * 9) == ""
    assert process in renderers(), "none was begun, so none was ended"


def test_a_renderer_lives_with_the_limit_of_memory_that_this_process_has(tmp_path: Path) -> None:
    program = (
        "import asyncio, resource; from engine.text.chat_template import ChatTemplate; "
        "resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32)); "
        "print(asyncio.run(ChatTemplate('{{ messages[0].content }}', {}).render([{'content': 'hello'}])))"
    )
    ran = subprocess.run(
        python_command("-c", program), env=child_environment(), cwd=tmp_path, capture_output=True, text=True
    )
    assert (ran.stdout, ran.stderr) == ("hello\n", "")


def test_only_templates_that_are_used_have_renderers(tmp_path: Path) -> None:
    folder = write_fake_model(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    templates = [{"name": name, "template": "{{ messages }}"} for name in ("default", "tool_use", "rag", "other")]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": templates}))
    before, tokenizer = renderers(), Tokenizer.from_folder(folder)
    tokenizer.warm_up()
    for template in tokenizer._templates.values():
        template._thread.submit(lambda: None).result()
    assert len(renderers() - before) == 2


def test_a_text_far_longer_than_its_messages_explain_is_refused() -> None:
    template = ChatTemplate("{{ 'x' * 9999999 }}", {})
    with pytest.raises(InvalidRequest, match=r"its output has 10,000,000 bytes$"):
        asyncio.run(template.render(HELLO))


def test_a_template_can_open_nothing_whatever_it_gets_hold_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "only-for-its-parent")
    before, template = renderers(), ChatTemplate("{{ messages[0].content }}", {})
    template.warm_up().result()
    [process] = renderers() - before
    limits = Path(f"/proc/{process}/limits").read_text().splitlines()
    assert [line.split()[3:5] for line in limits if line.startswith(("Max open files", "Max file size"))] == [
        ["0", "0"]
    ] * 2
    environment = Path(f"/proc/{process}/environ").read_text()
    assert "HF_TOKEN" not in environment and "only-for-its-parent" not in environment


@pytest.mark.parametrize("pattern", ["%Y-%m-%d", "%d %b %Y", "%A", "%Z"])
def test_a_renderer_tells_the_date_though_it_can_open_no_file(pattern: str) -> None:
    assert rendered("{{ strftime_now('" + pattern + "') }}") == datetime.now().strftime(pattern)


def test_a_renderer_knows_characters_by_name_though_it_can_open_no_file() -> None:
    assert rendered(r"{{ '\N{BULLET}' }}") == "•"


def test_every_filter_and_test_of_jinja_is_at_hand_in_the_renderer() -> None:
    environment = TemplateEnvironment()
    for name in sorted(environment.filters):
        source = f"{{{{ 'a b'|{name} }}}}"
        try:
            expected = environment.from_string(source).render()
        except Exception as error:
            expected = type(error).__name__
        try:
            found = rendered(source)
        except InvalidRequest as error:
            assert "Errno" not in str(error) and "Import" not in str(error), name
        else:
            assert found == expected or "generator" in found or name == "random", name


def test_a_long_conversation_is_rendered() -> None:
    source = (
        "{% set ns = namespace(out=[]) %}{% for m in messages %}{% set ns.out = ns.out + [m] %}{% endfor %}"
        "{% for m in ns.out %}<{{ m.role }}>{{ m['content'] | trim }}\n{% endfor %}"
    )
    messages = [{"role": "user", "content": f"message {i} " + "x" * 500} for i in range(1000)]
    assert rendered(source, messages).count("<user>message") == 1000


def test_a_prompt_of_megabytes_is_rendered() -> None:
    source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + eos_token }}{% endfor %}"
    long: dict[str, Any] = {"role": "user", "content": "x" * (8 * 2**20)}
    assert len(rendered(source, [long], eos_token="</s>")) == 8 * 2**20 + 10


def test_what_templates_do_is_as_it_was() -> None:
    source = (
        "{%- set a, b = (1, 2) -%}{{ a ~ b }}{% for k, v in {'x': 1}|items %}{{ k }}{{ v }}{% endfor %}"
        "{% for x in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
        "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join('-') }}"
        "{{ '%s of %02d' % ('one', 2) }}{{ '{} {:>3} {}'.format('a', 'b', 1700000000) }}{{ [3, 1]|sort|first }}"
        "{{ 'a,b'.split(',')[1] }}{{ missing|default('none') }}{{ messages[0].get('content')|upper }}"
        "{% macro m(x) %}({{ x }}){% endmacro %}{{ m(1) }}{% generation %}g{% endgeneration %}"
        "{{ {'b': [1, none], 'a': '<é>'}|tojson }}{{ messages|length }}"
        "{{ [1]|tojson(indent=2) }}{{ [1, 2]|tojson(separators=(',', ':')) }}{{ ' a '|trim }}"
        "{{ 'aXbX'|replace('X', 0) }}{{ '7f'|int(0, 16) }}"
        "{{ missing|replace('a', 'b') }}{{ messages|join(' ', attribute='role') }}{{ missing|join }}"
        "{% if 'ell' in messages[0].content %}!{% endif %}"
    )
    assert rendered(source) == (
        '12x11/3,2/3,3/3helloone of 02a   b 17000000001bnoneHELLO(1)g{"b": [1, null], "a": "<é>"}1'
        "[\n  1\n][1,2]aa0b0127user!"
    )
