"""A real server on a free port, over the fake model, for tests that talk HTTP to it."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from fastapi import FastAPI
from runtime_fakes import EOS, FakeExecutor, byte_tokenizer

from llmc.runtime.chat import ChatTemplate
from llmc.runtime.config import EngineConfig
from llmc.runtime.detokenizer import TextCodec
from llmc.runtime.engine import Engine
from llmc.runtime.server.app import create_app
from llmc.runtime.server.model import SamplingDefaults, ServedModel
from llmc.runtime.server.serve import listen, make_server

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CODEC = TextCodec(byte_tokenizer())
PRINTABLE = {str(i): -100 for i in range(300) if not 0x20 <= i < 0x7F}
"""A logit_bias under which the fake model speaks ASCII."""


@dataclass
class Running:
    """A server under test."""

    url: str
    app: FastAPI
    engine: Engine
    executor: FakeExecutor
    client: openai.OpenAI
    http: httpx.Client

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def metric(self, name: str) -> float:
        found = re.search(rf"^llmc:{name}{{[^}}]*}} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def wait_for(self, name: str, value: float, timeout: float = 5.0) -> None:
        """Waits until a metric has a value."""
        deadline = time.monotonic() + timeout
        while (got := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {got}, not {value}"
            time.sleep(0.01)


def build_app(
    executor: FakeExecutor,
    *,
    api_key: str | None = None,
    max_body_bytes: int = 2**20,
    template: str = TEMPLATE,
    codec: TextCodec = CODEC,
    **config: Any,
) -> Any:
    """An app over a started engine; `config` replaces fields of EngineConfig."""
    limits: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 64, "check_integrity": True}
    engine = Engine(executor, EngineConfig(**(limits | config), eos_token_ids=frozenset({EOS})), codec)
    engine.start()
    model = ServedModel("org/toy", codec, ChatTemplate(template, {}), SamplingDefaults(), created=1)
    return create_app(engine, model, api_key=api_key, max_body_bytes=max_body_bytes)


@contextlib.contextmanager
def running_server(executor: FakeExecutor | None = None, **options: Any) -> Iterator[Running]:
    """A server in a thread; see build_app for the options."""
    executor = executor or FakeExecutor(num_pages=128)
    app = build_app(executor, **options)
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = make_server(app, drain_timeout=5)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        key = options.get("api_key") or "none"
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20) as client,
            httpx.Client(base_url=url, timeout=20) as http,
        ):
            yield Running(url, app, app.state.engine, executor, client, http)
    finally:
        server.should_exit = True
        thread.join()
        app.state.engine.close()
