"""Chat templates show what transformers shows, and no hostile one takes memory."""

import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_hetero.data import template
from megatron_hetero.data.time_limit import time_limit
from megatron_hetero.models.qwen2_5_vl.demo import CHAT_TEMPLATE

MESSAGES = [
    {"role": "system", "content": "You are <b>terse</b> & exact."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Où ? “Là”\n\n"}]},
    {
        "role": "assistant",
        "content": "<think>\nhm\n</think>\n\n a \t",
        "tool_calls": [{"name": "f", "x": [1, 2.5, None]}],
    },
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "b"},
]
# One each for what published templates do.
ORDINARY = {
    "demo": CHAT_TEMPLATE,
    "trimmed": "{%- for m in messages %}\n    {{ m.content | trim if m.content is string else '' }}\n{% endfor %}\n",
    "concatenated": "{% for m in messages %}{{ '<|' + m['role'] + '|>' ~ loop.index ~ m.content }}{% endfor %}",
    "json": "{{ messages | tojson(indent=2) }}{{ messages[2].tool_calls | tojson }}{{ messages[0] | tojson | safe }}",
    "thought": "{{ messages[2].content.split('</think>')[-1].lstrip('\\n') }}{{ messages[2].content.strip()[2:-3:2] }}",
    "reversed": "{% for m in messages[::-1] %}{{ loop.index0 }}{{ m.role.upper() }}"
    "{% if loop.last %}!{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, s='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.s = ns.s ~ m.role[0] %}{% if ns.n == 3 %}{% break %}{% endif %}{% endfor %}{{ ns.n * 2 % 4 }}{{ ns.s }}",
    "macro": "{% macro show(m, sep=': ') %}{{ m.role ~ sep }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text | default('[image]') }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ show(m) | replace('\\n', ' ') }}{{ show(m, sep='=') }}{% endfor %}",
    "selected": "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages | map(attribute='role') | join(', ') }}"
    "{{ (messages | rejectattr('role', 'in', ['user']) | first).role }}",
    "items": "{% for k, v in messages[2].items() %}{{ k }}={{ v }};{% endfor %}{% set a, b = (1, [2]) %}{{ a }}{{ b }}"
    "{% for k, v in {'y': 1, 'x': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}{{ dict(a=1)['a'] }}",
    "block": "{% set text %}a{{ messages | length }}b{% endset %}{{ text.replace('a', 'cc') | upper }}{{ bos_token }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}"
    "{{ none }}{{ tools }}",
    "undefined": "{{ nothing }}{% if nothing is defined %}x{% endif %}{{ messages[99] }}{{ messages[0].nothing }}.",
    "tests": "{{ messages is iterable }}{{ 'a' in 'abc' }}{{ messages[0] is mapping }}{{ 7 // 2 }}"
    "{{ 2 ** 5 }}{{ 1 / 4 }}",
    "indented": "{{ 'a\\nb' | indent(4) }}{{ 'ab' | title }}{{ ['b', 'a'] | sort | join }}"
    "{{ 'x' * 3 }}{{ [1] * 2 + [3] }}",
}


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_text_is_that_of_transformers(name: str, prompt: bool) -> None:
    values = {"bos_token": "<s>", "add_generation_prompt": prompt}
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=ORDINARY[name], **values)
    ours = values | {"messages": MESSAGES, "tools": None, "documents": None}
    assert template.render(ORDINARY[name], ours) == expected and expected


DOUBLED = "{{% set ns = namespace(s={start}) %}}{{% for i in range(60) %}}{{% set ns.s = {grown} %}}{{% endfor %}}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}"
TEXT = "'" + "a" * 5000 + "'"
HOSTILE = {
    "product": "{{ 'a' * 10**9 }}",
    "product, turned": "{% set s = 10**9 * 'a' %}",
    "list": "{% set l = [1] * 10**9 %}",
    "list of a long text": f"{{% set l = [{TEXT}] * 10**5 %}}{{{{ l | length }}}}",
    "doubled by +": DOUBLED.format(start="'a'", grown="ns.s + ns.s"),
    "doubled by ~": DOUBLED.format(start="'a'", grown="ns.s ~ ns.s"),
    "doubled list": DOUBLED.format(start="[1]", grown="ns.s + ns.s"),
    "doubled by join": DOUBLED.format(start="'a'", grown="[ns.s, ns.s] | join"),
    "doubled by the method join": DOUBLED.format(start="'ab'", grown="ns.s.join([ns.s, ns.s])"),
    "doubled by replace": DOUBLED.format(start="'aa'", grown="ns.s | replace('a', ns.s)"),
    "doubled by replace, named": DOUBLED.format(start="'aa'", grown="ns.s | replace(new=ns.s, old='a')"),
    "doubled by the method replace": DOUBLED.format(start="'aa'", grown="ns.s.replace('a', ns.s)"),
    "nested": DOUBLED.format(start="[1]", grown="[ns.s, ns.s]") + "{{ ns.s }}",
    "nested, compared": DOUBLED.format(start="[1]", grown="[ns.s, ns.s]") + "{{ ns.s == ns.s + [1] }}",
    "nested tuples": DOUBLED.format(start="(1,)", grown="(ns.s, ns.s)") + "{{ ns.s | string }}",
    "nested dicts": DOUBLED.format(start="{}", grown="{'a': ns.s, 'b': ns.s}") + "{{ ns.s | tojson }}",
    "nested by dict": DOUBLED.format(start="{}", grown="dict(a=ns.s, b=ns.s)") + "{{ ns.s | tojson }}",
    "held text": DOUBLED.format(start="[]", grown=f"ns.s + [{TEXT} ~ i]").replace("60", "9999"),
    "slices": DOUBLED.format(start="[]", grown=f"ns.s + [({TEXT})[i:]]").replace("60", "4000"),
    "written": ENDLESS + "{{ i }}" + "{% endfor %}" * 2,
    "written in a block": "{% set s %}" + ENDLESS + "{{ i }}" + "{% endfor %}" * 2 + "{% endset %}",
    "written in a macro": "{% macro m() %}" + ENDLESS + "{{ i }}" + "{% endfor %}" * 2 + "{% endmacro %}{{ m() }}",
    "mapped": f"{{{{ range(99999) | map('replace', '1', {TEXT}) | join }}}}",
    "joined views": f"{{% set d = dict(a={TEXT}) %}}{{{{ d.items() | join({TEXT} * 9) }}}}"
    f"{{{{ [d.values()] * 10**5 }}}}",
    "joined": f"{{{{ range(99999) | join({TEXT}) }}}}",
    "indented": f"{{% set s = {TEXT} | replace('a', '\\n') | indent(10**7, true, true) %}}",
    "json": "{{ [[1, 2], 3] | tojson(indent=10**9) }}",
    "width": "{{ 'a'.ljust(10**9) }}",
    "width of a filter": "{{ 'a' | center(10**9) }}",
    "tabs": "{{ '\\t'.expandtabs(10**9) }}",
    "translated": "{{ 'aaaa'.translate({97: 'a' * 1000}) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format of a filter": "{{ '%1000000000d' | format(1) }}",
    "format operator": "{{ '%1000000000d' % 1 }}",
    "format, fetched": "{{ ('{:1000000000}' | attr('format'))(1) }}",
    "format, by item": "{{ 'a'['ljust'](10**9) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "power": "{{ 2 ** 9999999999 }}",
    "squares": DOUBLED.format(start="3", grown="ns.s * ns.s"),
    "bytes": "{{ (5).to_bytes(10**9) }}",
    "rounded": "{{ 5 | round(-1000000000) }}",
    "latin": "{{ lipsum(10**9) }}",
    "namespaces": DOUBLED.format(start="1", grown="namespace(a=ns.s, b=ns.s)") + "{{ [ns.s] * 10**9 }}",
    "private": "{{ namespace(__class__=1) }}",
    "internals": "{{ ''.__class__.__mro__ }}",
    "changed": "{% set _ = messages.append(1) %}",
}


@contextmanager
def peak() -> Iterator[list[int]]:
    """Bytes at the peak of what is allocated inside."""
    found: list[int] = []
    tracemalloc.start()
    try:
        yield found
        found.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_takes_no_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MADE", 2**20)
    with peak() as found, time_limit(20), pytest.raises(TemplateError):
        template.render(HOSTILE[name], {"messages": MESSAGES})
    assert found[0] < 40 * 2**20


def test_each_rendering_has_all_of_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MADE", 10_000)
    values: dict[str, Any] = {"messages": [{"role": "user", "content": "a" * 4000}]}
    for _ in range(3):
        assert template.render("{{ messages[0].content }}", values) == "a" * 4000
    with pytest.raises(TemplateError, match="makes more than 10,000 characters"):
        template.render("{{ messages[0].content }}" * 2, values)
    assert template.render("{{ messages[0].content }}", values) == "a" * 4000


FIRST_USE = """
import random, threading, time
from megatron_hetero.data import template
made = template._Environment.__init__
def slowly(self):
    time.sleep(random.random() / 20)
    made(self)
template._Environment.__init__ = slowly
barrier, texts = threading.Barrier(8), []
def work():
    barrier.wait()
    texts.append(template.render("{% for i in range(3) %}{{ i }}{% endfor %}", {}))
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(texts == ["012"] * 8)
"""


def test_threads_may_render_the_first_text_at_once() -> None:
    """As the loader's do. Whatever is made at the first use takes its time, in each of them."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_the_longest_record_is_rendered() -> None:
    """A record of 4 Mi characters in 1,000 turns, by a template that copies each of them a few times."""
    messages = [{"role": "user", "content": "é" * 4096} for _ in range(1000)]
    for name, shown in {"demo": 1, "trimmed": 1, "macro": 2, "concatenated": 1, "namespace": 0}.items():
        assert template.render(ORDINARY[name], {"messages": messages}).count("é") == shown * 4096 * 1000, name
