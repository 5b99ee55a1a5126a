"""The server as a process: what it loads, what it shares, clients that leave, and how it ends."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_harness import Server, assert_refused, command, environment, llmc, report, serving

pytestmark = pytest.mark.e2e

COMPILER = ("torch", "transformers", "onnx", "onnxruntime", "triton", "tensorrt", "safetensors", "gguf",
            "huggingface_hub", "sympy", "ziglang")  # fmt: skip
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}

SERVE_AND_TELL = """
import importlib, json, pkgutil, sys
import llmc.cli, llmc.runtime
for module in pkgutil.walk_packages(llmc.runtime.__path__, "llmc.runtime."):
    importlib.import_module(module.name)
llmc.cli.main(sys.argv[1:], standalone_mode=False)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_serving_loads_no_compiler(int8_plan: Path) -> None:
    """All of the runtime is imported, and a server answers a chat and a completion before the count is taken."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE_AND_TELL, "serve", str(int8_plan), "--port", "0"],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        for line in process.stderr:
            if found := re.match(r"llmc: serving (\S+) on (http\S+)", line):
                break
        else:
            pytest.fail("the server did not get ready")
        body = {"model": found[1], "max_tokens": 3, "logprobs": 1}
        chat = {"model": found[1], "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
        for path, payload in (("completions", body | {"prompt": "Hi"}), ("chat/completions", chat)):
            assert httpx.post(f"{found[2]}/v1/{path}", json=payload, timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        loaded = json.loads(process.stdout.read())
    assert process.returncode == 0
    assert "llmc" in loaded and "numpy" in loaded
    assert not set(COMPILER) & set(loaded)


def _mapped_files(process: int) -> set[str]:
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}


def test_serving_maps_no_compiler(int8_server: Server) -> None:
    files = _mapped_files(int8_server.process.pid)
    assert any("llmc-engine" in name for name in files), "the plan's code is not where this test thinks"
    wrong = [f for f in files if re.search(r"libtorch|libc10|onnx|triton|nvidia|libcuda|transformers", f)]
    assert not wrong


def _sizes(process: int, name: str) -> dict[str, int]:
    """KiB by field of smaps, summed over the mappings of the file `name`."""
    total: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(name)
        elif inside and (found := re.match(r"(\w+): +(\d+) kB", line)):
            total[found[1]] = total.get(found[1], 0) + int(found[2])
    return total


def test_two_servers_share_the_weights(fp32_server: Server, fp32_plan: Path) -> None:
    size = fp32_plan.stat().st_size // 1024
    with serving(fp32_plan) as other:
        report("ready after exec, fp32", f"{other.ready_after:.2f} s")
        for server in (fp32_server, other):
            assert server.post("/v1/completions", prompt="Hello", max_tokens=4).status_code == 200
        for server in (fp32_server, other):
            found = _sizes(server.process.pid, str(fp32_plan))
            assert found["Rss"] > 0.9 * size, found
            assert found["Pss"] < 0.6 * found["Rss"], f"the weights are not shared: {found}"
            assert found["Private_Dirty"] == found["Shared_Dirty"] == found["Anonymous"] == 0, found
            status = Path(f"/proc/{server.process.pid}/status").read_text()
            own = int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])  # type: ignore[index]
            assert own < 0.6 * size, f"{own} KiB of its own: a copy of the weights?"
    report("memory of a server's own, fp32", f"{own // 1024} MiB beside {size // 1024} MiB shared")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(int8_server: Server, path: str, stream: bool) -> None:
    body = LONG | {"model": int8_server.model, "stream": stream}
    if "chat" in path:
        body |= {"messages": [{"role": "user", "content": body.pop("prompt")}]}
    aborted = int8_server.metric("request_success_total")
    with httpx.Client(base_url=int8_server.url, timeout=2.0) as http:
        if stream:
            with http.stream("POST", path, json=body) as response:
                lines = response.iter_lines()
                for _ in range(8):
                    next(lines)
                assert int8_server.metric("kv_cache_usage") > 0
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(path, json=body)
    took = int8_server.wait_for("kv_cache_usage", 0.0, timeout=5.0)
    report(f"pages free after a client left{' a stream' if stream else ''}", f"{took * 1000:.0f} ms")
    assert int8_server.metric("num_requests_running") == 0
    assert int8_server.metric("request_success_total") == aborted + 1


def test_sigterm_lets_a_stream_finish(int8_plan: Path) -> None:
    with serving(int8_plan) as server:
        body = LONG | {"model": server.model, "stream": True, "max_tokens": 120}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            first = [next(lines) for _ in range(4)]
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            with contextlib.suppress(httpx.TransportError):
                assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=5).status_code == 503
            events = [line for line in (*first, *lines) if line]
        assert events[-1] == "data: [DONE]"
        answer = [json.loads(e.removeprefix("data: "))["choices"][0] for e in events[:-1]]
        assert answer[-1]["finish_reason"] == "length"
        assert server.process.wait(timeout=30) == 0
        assert "Traceback" not in server.log.read_text()


def test_sigterm_when_idle(int8_plan: Path) -> None:
    with serving(int8_plan, "--max-num-seqs", "4") as server:
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


def test_a_port_in_use(int8_plan: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = llmc("serve", int8_plan, "--port", port)
    assert_refused(done.returncode, done.stderr, f"127.0.0.1:{port}", "--port")


@pytest.mark.parametrize(
    "flags",
    [
        ("--port", "70000"), ("--host", "no.such.host.invalid"), ("--threads", "0"), ("--max-model-len", "8193"),
        ("--max-num-seqs", "0"), ("--max-num-batched-tokens", "0"), ("--kv-cache-memory", "1K"),
        ("--kv-cache-memory", "much"), ("--max-queue", "-1"),
    ],
    ids="=".join,
)  # fmt: skip
def test_flags_out_of_range(int8_plan: Path, flags: tuple[str, str]) -> None:
    port = () if flags[0] == "--port" else ("--port", "0")
    done = llmc("serve", int8_plan, *flags, *port)
    assert_refused(done.returncode, done.stderr, flags[1].removesuffix("K"))


def test_run_answers_on_the_terminal(int8_plan: Path) -> None:
    def run(*flags: str) -> tuple[str, str]:
        done = llmc("run", int8_plan, "Name a colour.", "--max-tokens", "12", *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    text, told = run("--seed", "3", "--temperature", "0.9")
    assert text.strip() and re.search(r"12 tokens at [\d.]+ tokens/s|tokens at [\d.]+ tokens/s", told)
    assert run("--seed", "3", "--temperature", "0.9")[0] == text
    assert run("--temperature", "0", "--threads", "1")[0] == run("--temperature", "0", "--top-p", "0.3")[0]
    assert run("--raw", "--temperature", "0")[0] != run("--temperature", "0")[0]


@pytest.mark.parametrize(
    "flags, words",
    [(("--max-tokens", "0"), "max_tokens"), (("--temperature", "-1"), "temperature"),
     (("--top-p", "0"), "top_p"), (("--max-model-len", "4"), "maximum context length is 4")],
    ids=["no-tokens", "cold", "no-mass", "too-long"],
)  # fmt: skip
def test_run_refuses(int8_plan: Path, flags: tuple[str, str], words: str) -> None:
    done = llmc("run", int8_plan, "What is the capital of France?", *flags)
    assert_refused(done.returncode, done.stderr, words)
    assert done.stdout == ""


def test_the_command_line_without_a_plan() -> None:
    for arguments in (("serve",), ("run",), ("verify",), ("build",)):
        done = subprocess.run(command(*arguments), env=environment(), capture_output=True, text=True)
        assert_refused(done.returncode, done.stderr, "Missing argument")
