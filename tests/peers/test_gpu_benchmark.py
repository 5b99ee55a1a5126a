"""The benchmark of GPUs where there is none: our part over an interpreted GPU, a peer on the CPU, its refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from families import save_checkpoint, tiny_model
from gpu_engines import Ours, Peer, Prompts, Skipped
from gpu_rounds import Results, StepBytes, Workload, figures, measure, table, workloads
from interpreted_models import gpu_executor, interpreted_model

from llmc.runtime.config import EngineConfig
from llmc.runtime.cuda.archive_format import read_header
from llmc.runtime.engine import Engine

SCRIPT = Path(__file__).with_name("gpu.py")
WHAT = [Workload(1, 20, 0), Workload(2, 5, 3)]


@pytest.fixture
def ours() -> Iterator[Ours]:
    engine = Engine(gpu_executor("llama"), EngineConfig(max_model_len=64, max_num_seqs=4), None)
    running = Ours(engine)
    yield running
    running.close()


def test_our_part_on_an_interpreted_gpu(ours: Ours) -> None:
    what = [Workload(1, 6, 0), Workload(2, 5, 2)]
    results = measure([ours], what, 1, 200, warm_up=False)
    read = StepBytes.of(read_header(memoryview(interpreted_model("llama").archive)))
    prefill, decode = figures(results, ["llmc"], "llmc", read, 1e9)
    (first,) = results.seconds[what[0]]["llmc"]
    (rest,) = results.seconds[what[1]]["llmc"]
    assert prefill["tokens_per_s"]["llmc"] == 6 / first
    assert decode["tokens_per_s"]["llmc"] == 2 * 2 / rest
    assert decode["step_bytes"] == read.weights + read.context * 2 * (5 + 1)
    assert decode["bandwidth_share"] == pytest.approx(decode["step_bytes"] / (rest / 2) / 1e9)
    lines = table([prefill, decode], ["llmc"], "llmc").splitlines()
    assert len(lines) == 3 and lines[1].startswith("prefill 6") and lines[2].startswith("decode 2 x 5")
    assert len({len(line) for line in lines}) == 1


def test_bytes_of_a_step_are_those_of_the_model() -> None:
    """Two layers of 128 x 64 (q, k, v), 64 x 64, twice 96 x 64 and 64 x 128 (96 padded to 64s), and the head of 211
    rows (padded to 224): int8 and a float16 scale per 32. Keys and values of two heads of 16 in 16 bits."""
    read = StepBytes.of(read_header(memoryview(interpreted_model("llama", "int8").archive)))
    elements = 2 * (128 * 64 + 64 * 64 + 2 * 96 * 64 + 64 * 128) + 224 * 64
    assert read.weights == elements + elements // 16
    assert read.context == 2 * 2 * 2 * 16 * 2


class Scripted:
    """An engine that takes one second a token, and gives `short` tokens too few."""

    def __init__(self, name: str, short: int = 0, fails_at: int = 1 << 30) -> None:
        self.name, self.short, self.left = name, short, fails_at
        self.asked: list[Prompts] = []

    def run(self, prompts: Prompts, new: int) -> tuple[float, Prompts]:
        self.left -= 1
        if self.left < 0:
            raise Skipped("out of memory")
        self.asked.append(prompts)
        return float(new), [[1] * (new - self.short) for _ in prompts]

    def close(self) -> None:
        return


def test_rounds_interleave_engines_over_the_same_prompts() -> None:
    a, b = Scripted("a"), Scripted("b", fails_at=4)
    results = measure([a, b], WHAT, 3, 200)
    assert results.seconds == {
        WHAT[0]: {"a": [1.0] * 3, "b": [1.0]},
        WHAT[1]: {"a": [3.0] * 3},
    }
    assert results.skipped == {"b": "decode 2 x 5: out of memory"}
    assert a.asked[:4] == b.asked[:4] and a.asked[0] != a.asked[3]
    entries = figures(Results(results.seconds), ["a", "b"], "a", StepBytes(100, 1), 1.0)
    assert "b" not in entries[1]["tokens_per_s"] and table(entries, ["a", "b"], "a")


def test_an_engine_that_gives_fewer_tokens_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"cheat, prefill 20: gave \[0\] tokens, asked for 1"):
        measure([Scripted("cheat", short=1)], WHAT, 3, 200)


def test_the_workloads_are_those_of_the_documentation() -> None:
    names = [w.name for w in workloads(64)]
    assert names[:2] == ["prefill 512", "prefill 2048"] and len(names) == 10
    assert {"decode 1 x 64", "decode 32 x 1024"} <= set(names)


@pytest.mark.slow
def test_a_peer_in_its_own_process(tmp_path: Path) -> None:
    """transformers, uncompiled on the CPU: the same tokens each time, its cache reused; and without CUDA it is skipped,
    as is what is not installed."""
    checkpoint = save_checkpoint(tiny_model("llama"), tmp_path)
    peer = Peer("transformers", checkpoint, "cpu", 64, 4)
    try:
        prompts = [[11, 7, 3, 150], [9, 2, 77, 31]]
        seconds, tokens = peer.run(prompts, 6)
        assert seconds > 0 and [len(t) for t in tokens] == [6, 6]
        assert peer.run(prompts, 1)[1] == [t[:1] for t in tokens]
        assert peer.run(prompts, 6)[1] == tokens
        assert peer.versions["transformers"]
    finally:
        peer.close()
    with pytest.raises(Skipped, match=r"finds no CUDA|vllm is not installed"):
        Peer("vllm", checkpoint, "cuda", 64, 4)
    with pytest.raises(Skipped, match=r"it ended with code 1: .*no_such_peer"):
        Peer("no_such_peer", checkpoint, "cuda", 64, 4)


def test_the_script_without_a_gpu(tmp_path: Path) -> None:
    help_text = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert help_text.returncode == 0 and "--checkpoint" in help_text.stdout
    done = subprocess.run([sys.executable, SCRIPT, "no.plan"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("gpu.py: error: no.plan") and done.stderr.count("\n") == 1
