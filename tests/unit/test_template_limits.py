"""Chat templates that never end, or make too much: each ends with a clear error, soon, and in little memory."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.text import template_budget
from engine.text.chat_template import ChatTemplate
from engine.text.template_budget import Budget, TooMuchWork

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


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_template_that_would_not_end_or_would_fill_memory_is_an_error(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(source, {}).render(HELLO)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 600


def test_time_ends_a_template_that_spends_little(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(template_budget.time, "monotonic", lambda: float(next(clock)))
    budget = Budget()
    with pytest.raises(TooMuchWork, match="longer than 5 s"):
        for _ in range(10**4):
            budget.spend()


def test_a_template_that_was_slow_once_is_known_to_be() -> None:
    quick, slow = ChatTemplate("{{ messages[0].content }}", {}), ChatTemplate(ENDLESS["loops in loops"], {})
    quick.render(HELLO)
    quick.render(HELLO)
    with pytest.raises(InvalidRequest):
        slow.render(HELLO)
    assert (quick.is_quick, slow.is_quick) == (True, False)


def test_every_rendering_has_a_budget_of_its_own() -> None:
    template = ChatTemplate("{% for i in range(9999) %}{{ 'x' * 999 }}{% endfor %}", {})
    for _ in range(20):
        assert len(template.render(HELLO)) == 9999 * 999


def test_a_long_conversation_is_rendered() -> None:
    source = (
        "{% set ns = namespace(out=[]) %}{% for m in messages %}{% set ns.out = ns.out + [m] %}{% endfor %}"
        "{% for m in ns.out %}<{{ m.role }}>{{ m['content'] | trim }}\n{% endfor %}"
    )
    messages = [{"role": "user", "content": f"message {i} " + "x" * 500} for i in range(1000)]
    assert ChatTemplate(source, {}).render(messages).count("<user>message") == 1000


def test_a_prompt_of_megabytes_is_rendered() -> None:
    source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + eos_token }}{% endfor %}"
    long: dict[str, Any] = {"role": "user", "content": "x" * (8 * 2**20)}
    assert len(ChatTemplate(source, {"eos_token": "</s>"}).render([long])) == 8 * 2**20 + 10


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
    assert ChatTemplate(source, {}).render(HELLO) == (
        '12x11/3,2/3,3/3helloone of 02a   b 17000000001bnoneHELLO(1)g{"b": [1, null], "a": "<é>"}1'
        "[\n  1\n][1,2]aa0b0127user!"
    )
