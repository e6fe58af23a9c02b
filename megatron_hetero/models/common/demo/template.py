"""The chat template and the special tokens of small models, as those of published ones."""

from __future__ import annotations

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
IMAGE_TOKENS = {
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "image_token_id": IMAGE_PAD,
    "video_token_id": VIDEO_PAD,
}
"""The tokens that show images, by what `config.json` calls their numbers."""

_SYSTEM_TURN = """\
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nSYSTEM_PROMPT<|im_end|>\\n' -}}
{%- endif -%}
"""
_TEMPLATE = """\
{%- for message in messages -%}
SYSTEM_TURN{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def chat_template(system_prompt: str = "") -> str:
    """The template, with this prompt before conversations that have none; with none, where it is empty."""
    turn = _SYSTEM_TURN.replace("SYSTEM_PROMPT", system_prompt) if system_prompt else ""
    return _TEMPLATE.replace("SYSTEM_TURN", turn)
