"""Conversations as the demo model reads them: the chat template, rendered as every serving engine renders it.

The template has one source, `chat_template.jinja` beside this file; `tokenizer.py` writes it into `tokenizer_config.json`.
Knows no tokenizer and no model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2

from .tasks.examples import Example

TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")


def template_source() -> str:
    """The chat template's text."""
    return TEMPLATE_FILE.read_text(encoding="utf-8").rstrip("\n")


def compile_template(source: str) -> jinja2.Template:
    """`source`, compiled with the settings that the `transformers` library uses for chat templates."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source)


def render(template: jinja2.Template, messages: list[dict[str, Any]], example: Example, prompt: bool) -> str:
    """`messages` of `example` as text; with `prompt`, up to where the assistant is to speak."""
    return template.render(
        messages=messages, tools=example.tools, enable_thinking=example.thinking, add_generation_prompt=prompt
    )


def render_prompt(template: jinja2.Template, example: Example) -> str:
    """What the model reads before it answers `example`."""
    return render(template, example.messages, example, prompt=True)


def render_document(template: jinja2.Template, example: Example) -> str:
    """The whole conversation of `example`, its reference reply included."""
    return render(template, [*example.messages, example.reply], example, prompt=False)
