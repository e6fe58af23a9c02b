"""Chat templates that behave as published ones do."""

from __future__ import annotations

THINKING = r"""
{%- macro said(content) %}
    {%- if content is string %}{{ content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == 'text' %}{{ part.text }}
            {%- else %}{{ '<|vision_start|><|' ~ part.type ~ '_pad|><|vision_end|>' }}{% endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ said(messages[0].content) + '\n\n' }}{% endif %}
    {{- 'You may call <tools>' }}
    {%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + said(messages[0].content) + '<|im_end|>\n' }}
{%- endif %}
{%- set asked = namespace(at=-1) %}
{%- for message in messages if message.role == 'user' %}{% set asked.at = asked.at + 1 %}{% endfor %}
{%- set seen = namespace(at=-1) %}
{%- for message in messages %}
    {%- set content = said(message.content) %}
    {%- if message.role == 'user' %}
        {%- set seen.at = seen.at + 1 %}
        {{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.reasoning_content is string %}{% set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.rpartition('</think>')[0].strip().removeprefix('<think>') %}
            {%- set content = content.rpartition('</think>')[2].lstrip('\n') %}
        {%- else %}{% set thought = '' %}{% endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if seen.at == asked.at and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip() + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{ content }}{% endif %}
        {%- for call in message.tool_calls or () %}
            {{- '\n' if content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}
""".strip()
"""Of a reasoning model that calls tools: a prompt begins a thought, answers before the last question lose theirs, and
calls of tools without one have none.
"""
