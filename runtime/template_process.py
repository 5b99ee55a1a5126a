"""Chat templates rendered in a process of their own, which the kernel ends when one takes too long.

A template is a program from a checkpoint. Jinja's sandbox keeps it from the system, but bounds neither its time nor
its memory, and a thread that runs it cannot be stopped. Nothing in the template has to cooperate here: the process
renders under a timer of CPU time whose signal ends it, whatever it is doing, and within a limit of its address space.
It also ends with its parent. A new one is started then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import llmc
from llmc.errors import UserError
from llmc.runtime.chat import NO_MARKS, ChatTemplate, TemplateRefusal
from llmc.runtime.request import RequestError
from llmc.runtime.special_text import Marks, Prompt

log = logging.getLogger(__name__)

# Rendering a conversation of 128k tokens takes some 10 ms.
CPU_SECONDS = 1.0
ADDRESS_SPACE = 2**30
MAX_PROMPT_BYTES = 2**25
TOO_LONG = "the model's chat template takes too long for this conversation"
TOO_LARGE = f"the model's chat template makes more than {MAX_PROMPT_BYTES >> 20} MiB of this conversation"

_LENGTH = struct.Struct("<Q")
_TEXT, _MARKED, _REFUSAL, _ERROR = b"T", b"M", b"R", b"E"
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from llmc.runtime.template_process import main; main()"


class TemplateProcess:
    """Renders one template's conversations, one at a time; any thread may ask. Close it when done."""

    def __init__(self, template: ChatTemplate, marks: Marks = NO_MARKS) -> None:
        """Starts nothing yet: see `start`. marks: of the tokenizer that encodes the prompts."""
        self._template, self._marks = template, marks
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Starts the process, so that the first conversation need not wait for it. Does not wait itself."""
        with self._lock:
            self._started()

    def close(self) -> None:
        """Ends the process, and with it what is being rendered."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """As `ChatTemplate.render` does it with the marks. Raises RequestError also for what takes too much time or
        memory. Blocks."""
        question = _packed(messages, add_generation_prompt, tools, variables)
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            answer = None
            with contextlib.suppress(BrokenPipeError):
                _send(process.stdin, question)
                answer = _receive(process.stdout)
            if answer is None:
                status = process.wait()
                self._process = None
                if status != -signal.SIGPROF:
                    log.error("the process that renders chat templates ended with status %d", status)
                raise RequestError(TOO_LONG, param="messages")
        kind, text = answer[:1], str(memoryview(answer)[1:], "utf-8")
        if kind in (_TEXT, _MARKED):
            return Prompt(text, kind == _MARKED)
        param, _, message = text.partition(":")
        raise (TemplateRefusal if kind == _REFUSAL else RequestError)(message, param=param)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            if self._is_closed:
                raise RequestError("the server is shutting down")
            root = str(Path(llmc.__file__).parents[1])
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, root],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # the terminal's Ctrl-C is for the server, which drains
            )
            assert self._process.stdin is not None
            first = self._template.source, self._template.special_tokens, self._marks.of, self._marks.cut
            _send(self._process.stdin, _packed(*first))
        return self._process


def probe_template(source: str, special_tokens: Mapping[str, str]) -> None:
    """Raises UserError for a template that does not parse or fails on a conversation of one user message. One that
    refuses it by `raise_exception` is none."""
    try:
        template = ChatTemplate(source, special_tokens)
        with contextlib.closing(TemplateProcess(template)) as process, contextlib.suppress(TemplateRefusal):
            process.render([{"role": "user", "content": "Hello"}])
    except UserError as error:
        raise UserError(f"the checkpoint's chat template does not work: mend it or remove it ({error})") from error


def main() -> None:
    """The process: takes a template, then conversations until its parent is gone."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    source, output = sys.stdin.buffer, sys.stdout.buffer
    first = _receive(source)
    if first is None:
        return
    text, special_tokens, marks_of, cut = json.loads(first)
    template, marks = ChatTemplate(text, special_tokens), Marks(marks_of, cut)
    while (question := _receive(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends a process that does not handle it
        answer = _answer(template, marks, question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(output, answer)


def _answer(template: ChatTemplate, marks: Marks, question: bytes) -> bytes:
    try:
        messages, add_generation_prompt, tools, variables = json.loads(question)
        prompt = template.render(messages, add_generation_prompt, tools, variables, marks)
        text = prompt.text.encode()
    except RequestError as error:
        kind = _REFUSAL if isinstance(error, TemplateRefusal) else _ERROR
        message = error.message[:10_000].encode("utf-8", "backslashreplace")
        return kind + (error.param or "messages").encode() + b":" + message
    except UnicodeEncodeError:
        return _ERROR + b"messages:the model's chat template writes characters that are no text"
    except RecursionError:
        return _ERROR + b"messages:the messages are nested too deeply"
    except MemoryError:
        return _ERROR + b"messages:" + TOO_LARGE.encode()
    kind = _MARKED if prompt.marked else _TEXT
    return kind + text if len(text) <= MAX_PROMPT_BYTES else _ERROR + b"messages:" + TOO_LARGE.encode()


def _packed(*values: Any) -> bytes:
    return json.dumps(values, default=dict).encode()  # dict: of what is a mapping but no dict


def _send(stream: BinaryIO | Any, data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def _receive(stream: BinaryIO | Any) -> bytes | None:
    """The next message, or None when the other side has ended."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data: bytes = stream.read(length)
    return data if len(data) == length else None
