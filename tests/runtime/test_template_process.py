"""A template that runs for ever or fills the memory is ended, and the next conversation is rendered."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from server_harness import running_server

from llmc.errors import UserError
from llmc.runtime.chat import ChatTemplate, TemplateRefusal
from llmc.runtime.request import RequestError
from llmc.runtime.template_process import TemplateProcess, probe_template

HELLO = [{"role": "user", "content": "hello"}]
# Each does what it says when the conversation says "hello".
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "{{ (messages | length + 2) ** (10**9) }}",
    "{{ ('a' * 10**7).replace('a', 'b' * 100).count('bc') + (messages | length + 2) ** (10**8) }}",
]
HUGE = [
    "{{ 'a' * 10**11 }}",
    "{{ '%099999999d' % 1 }}",
    "{{ 'a' | center(10**10) }}",
    "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
]


@contextlib.contextmanager
def started(source: str) -> Iterator[TemplateProcess]:
    process = TemplateProcess(ChatTemplate(source, {"bos_token": "<s>"}))
    try:
        yield process
    finally:
        process.close()


def _only_for_hello(source: str) -> str:
    return "{% if messages[0].content == 'hello' %}" + source + "{% endif %}[{{ messages[0].content }}]"


def test_it_renders_as_the_template_does() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ x }}{% if add_generation_prompt %}>{% endif %}"
    with started(source) as process:
        message = [{"role": "user", "content": "\u00e9\U0001f600\x00"}]
        for arguments in ((message,), (message, False), (message, True, None, {"x": [1, None]})):
            assert process.render(*arguments) == ChatTemplate(source, {"bos_token": "<s>"}).render(*arguments)
        with pytest.raises(RequestError) as caught:
            process.render(message, True, None, {"messages": []})
        assert caught.value.param == "chat_template_kwargs"


def test_errors_come_back_as_they_are() -> None:
    with started("{{ raise_exception('no: never') }}") as process, pytest.raises(TemplateRefusal, match=r"no: never$"):
        process.render(HELLO)
    with (
        started("{{ messages[7].content.x }}") as process,
        pytest.raises(RequestError, match="chat template") as caught,
    ):
        process.render(HELLO)
    assert not isinstance(caught.value, TemplateRefusal)
    with started("{{ '\\ud800' }}") as process, pytest.raises(RequestError, match="no text"):
        process.render(HELLO)


@pytest.mark.parametrize("source", [*ENDLESS, *HUGE])
def test_what_takes_too_much_is_ended(source: str) -> None:
    with started(_only_for_hello(source)) as process:
        begun = time.perf_counter()
        with pytest.raises(RequestError, match=r"too long|more than|MemoryError|OverflowError"):
            process.render(HELLO)
        assert time.perf_counter() - begun < 20
        assert process.render([{"role": "user", "content": "x"}]).text == "[x]"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ messages | no_such_filter }}", "{{ messages[3].content.x }}", ENDLESS[0], HUGE[0]]
)
def test_the_build_refuses_a_template_that_fails(source: str) -> None:
    with pytest.raises(UserError, match="chat template does not work"):
        probe_template(source, {})


def test_the_build_takes_a_template_that_refuses() -> None:
    probe_template("{{ raise_exception('a system message, please') }}", {})
    probe_template("{{ bos_token }}", {"bos_token": "<s>"})


def test_a_process_that_was_killed_is_replaced() -> None:
    with started("{{ messages[0].content }}") as process:
        assert process.render(HELLO).text == "hello"
        assert process._process is not None
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(RequestError):
            process.render(HELLO)
        assert process.render(HELLO).text == "hello"


def test_close_ends_what_is_being_rendered() -> None:
    errors: list[RequestError] = []

    def render() -> None:
        try:
            process.render(HELLO)
        except RequestError as error:
            errors.append(error)

    with started(ENDLESS[0]) as process:
        process.start()
        thread = threading.Thread(target=render)
        thread.start()
        time.sleep(0.2)
    thread.join(timeout=5)
    assert not thread.is_alive() and errors


def test_a_server_with_an_endless_template_answers_everything_else() -> None:
    body = {"model": "org/toy", "messages": HELLO}
    with running_server(template=_only_for_hello(ENDLESS[0])) as server:
        answers: list[int] = []
        chat = threading.Thread(target=lambda: answers.append(server.post("/v1/chat/completions", body).status_code))
        chat.start()
        while chat.is_alive():
            begun = time.perf_counter()
            assert server.http.get("/health").status_code == 200
            assert time.perf_counter() - begun < 0.5
        assert answers == [400]
        body["messages"] = [{"role": "user", "content": "x"}]
        assert server.post("/v1/chat/completions", body).status_code == 200
