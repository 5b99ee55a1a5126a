"""Chat templates as Hugging Face runs them, and what a client hears when one refuses."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from llmc.errors import UserError
from llmc.runtime.chat import ChatTemplate
from llmc.runtime.request import RequestError

CHATML = (
    "{%- for m in messages %}\n"
    "  {%- if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}\n"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def render(template: str, messages: list[dict[str, Any]] | None = None, **more: Any) -> str:
    return ChatTemplate(template, {"bos_token": "<s>"}).render(messages or HELLO, **more).text


def test_chatml() -> None:
    head = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    assert render(CHATML) == head + "<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == head


def test_what_hugging_face_gives_a_template() -> None:
    assert render("{{ bos_token }}{% for m in messages %}{% break %}x{% endfor %}") == "<s>"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1, 2] | tojson(indent=1) }}") == "[\n 1,\n 2\n]"
    assert render("{% generation %}a{% endgeneration %}b") == "ab"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{{ flag }}{{ tools is none }}", variables={"flag": "x"}) == "xTrue"
    assert render("  {% if true %}\na\n  {% endif %}\n") == "a\n"


def test_a_refusal_is_the_clients_error_in_the_templates_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.status == 400 and caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[7].content }}",  # undefined
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",  # the sandbox
        "{{ messages.append(1) }}",  # immutable
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_errors_inside_a_template(template: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        render(template)


def test_reserved_names_cannot_be_set() -> None:
    with pytest.raises(RequestError, match="documents"):
        render("x", variables={"documents": []})


def test_a_template_that_does_not_parse_is_the_plans_fault() -> None:
    with pytest.raises(UserError, match="does not parse"):
        ChatTemplate("{% if %}", {})
