"""llmc bench over a tiny plan: the figures hang together, outputs, mistakes. How fast it is is not tested."""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny_engines import lowered

from llmc import bench as benching
from llmc.bench import BenchOptions, Case, run_bench
from llmc.bench_cost import step_work
from llmc.bench_report import phase_group, profile_groups
from llmc.cli import main
from llmc.codegen.cpu.compile import compile_unit
from llmc.codegen.cpu.phases import phase_lines
from llmc.codegen.plan_writer import PlanWriter
from llmc.errors import UserError
from llmc.files import replace_file
from llmc.progress import TerminalProgress
from llmc.runtime.cpu.phases import parse_phases
from llmc.runtime.cpu.targets import parse_target
from llmc.runtime.plan import Plan

LONGEST = 128
SMALL = ("--input-len", "16,40", "--batch-size", "1,3", "--context-len", "20,64", "--output-len", "2", "--rounds", "2",
         "--max-num-batched-tokens", "32", "--threads", "2")  # fmt: skip
OPTIONS = BenchOptions((16, 40), (1, 3), (20, 64), 2, 2, 2, 32, True, 1 << 20)


def write_plan(path: Path, targets: tuple[str, ...]) -> Path:
    """A tiny int8 Llama; code of a GPU target is a few bytes that nothing reads."""
    model = lowered("llama", "int8")
    program, table = model.program, model.program.weights
    with PlanWriter(path) as writer:
        writer.add_blocks("weights", table.size, table.blocks(model.reader), lambda _: None)
        for name in targets:
            cpu = name.startswith("cpu:")
            writer.add(f"code/{name}", compile_unit(model.source, parse_target(name)) if cpu else b"archive")
        page = sum(slot.page_bytes for slot in program.kv_slots)
        writer.finish({
            "model": {"architecture": "Llama", "precision": "int8", "kv_dtype": "bf16", "max_model_len": LONGEST,
                      "kv_bytes_per_token": page // 16},
            "memory": {"arena_bytes_per_token": program.peaks["tokens"], "arena_bytes_per_row": program.peaks["rows"]},
            "provenance": {"checkpoint": {"name": "tiny"}},
            "targets": list(targets),
        })  # fmt: skip
    return path


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plan(tmp_path_factory.mktemp("bench") / "tiny.plan", (parse_target("native").name,))


@pytest.fixture(scope="module")
def result(plan: Path) -> dict[str, Any]:
    return run_bench(Plan.open(plan), OPTIONS, TerminalProgress())


@pytest.fixture
def small_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line reads as much memory as the machine needs; here a megabyte will do."""
    monkeypatch.setattr(benching, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(benching, "last_level_cache", lambda: None)


def llmc(*args: Any) -> Any:
    return CliRunner().invoke(main, [str(a) for a in args])


def refused(result: Any, *words: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    errors = [line for line in result.stderr.splitlines() if line.startswith("llmc: error: ")]
    assert len(errors) == 1 and result.stderr.splitlines()[-1] == errors[0], result.stderr
    assert all(word in errors[0] for word in words) and result.stdout == "", errors


# ---- figures


def test_every_case_is_there_once(result: dict[str, Any]) -> None:
    assert [case["input_len"] for case in result["prefill"]] == [16, 40]
    assert [(c["batch_size"], c["context_len"]) for c in result["decode"]] == [(1, 20), (3, 20), (1, 64)]
    assert result["notes"] == [] and json.loads(json.dumps(result, allow_nan=False)) == result


def test_figures_follow_from_samples_and_limits(result: dict[str, Any]) -> None:
    limits = result["limits"]
    assert limits["read_bandwidth"] == statistics.median(limits["samples"]["read_bandwidth"])
    for case in result["prefill"] + result["decode"]:
        seconds = case.get("seconds", case.get("seconds_per_step"))
        tokens = case.get("input_len", case.get("batch_size"))
        steps = -(-case["input_len"] // 32) if "input_len" in case else 2
        assert [len(steps_of_round) for steps_of_round in case["samples"]] == [steps] * 2
        assert math.isclose(case["tokens_per_second"], tokens / seconds)
        assert math.isclose(case["bandwidth_fraction"], case["bytes"] / seconds / limits["read_bandwidth"])
        ideal = sum(ops / limits["peak_ops"][kind] for kind, ops in case["ops"].items())
        assert math.isclose(case["peak_fraction"], ideal / seconds)


def test_a_decode_step_reads_weights_and_context(plan: Path, result: dict[str, Any]) -> None:
    manifest, model = Plan.open(plan).manifest, lowered("llama", "int8")
    table = next(e for e in model.program.weights.entries if e.ref is not None and e.ref.shape[0] == 211)
    matrices = [e for e in model.program.weights.entries if e.ref is not None and len(e.ref.shape) == 2]
    head = sum(e.size for e in matrices) - (0 if _tied(model.source, table.offset) else table.size)
    for case in result["decode"]:
        context = case["context_len"] + (case["output_len"] + 1) / 2  # the token's own position included
        kv = case["batch_size"] * context * manifest["model"]["kv_bytes_per_token"]
        rows = case["batch_size"] * table.size // 224  # 211 rows in tiles of 16
        assert case["bytes"] == head + kv + rows


def _tied(source: str, table: int) -> bool:
    return source.count(f"weight(e, {table:#x},") == 2


def test_the_profile_sums_to_the_step(result: dict[str, Any]) -> None:
    assert [p["name"] for p in result["profile"]] == [
        "prefill of 40", "decode at batch 1, context 20", "decode at batch 3, context 20",
        "decode at batch 1, context 64",
    ]  # fmt: skip
    for profile in result["profile"]:
        phases = sum(phase["seconds"] for phase in profile["phases"])
        assert all(phase["seconds"] > 0 for phase in profile["phases"])
        assert 0.05 * profile["seconds_per_step"] < phases <= profile["seconds_per_step"]
        groups = profile_groups(profile)
        assert math.isclose(sum(g["seconds"] for g in groups), profile["seconds_per_step"])
        names = [g["group"] for g in groups]
        assert len(set(names)) == len(names) and names[-1] == "outside"
        assert {"linear w8", "head w8", "attention", "norm/quantize", "embed", "sampling"} <= set(names)
        shapes = next(c for c in _PROFILED if c.name == profile["name"]).shapes(32)
        assert math.isclose(sum(g["bytes"] for g in groups), _bytes(shapes) / profile["steps"])


_PROFILED = [Case("prefill", 1, 40), Case("decode", 1, 20, 2), Case("decode", 3, 20, 2),
             Case("decode", 1, 64, 2)]  # fmt: skip


def _bytes(shapes: list[Any]) -> float:
    phases = parse_phases("\n".join(phase_lines(lowered("llama", "int8").program)))
    return sum(step_work(phases, shape).bytes for shape in shapes)


@pytest.mark.parametrize(
    ("label", "group"),
    [
        ("linear w8", "linear w8"), ("quantize+linear w4", "linear w4"), ("head w8", "head w8"),
        ("rope+kv_write+attention", "attention"), ("rope_table+embed+rms_norm+quantize", "embed"),
        ("rope+kv_write", "rope/kv"), ("select_rows+rms_norm+quantize", "norm/quantize"), ("sample", "sampling"),
        ("gated_act+add", "elementwise"), ("experts w4", "experts w4"), ("gather_pairs", "route/gather"),
        ("combine_pairs+add+rms_norm+quantize", "route/gather"),
    ],
)  # fmt: skip
def test_groups_of_phases(label: str, group: str) -> None:
    assert phase_group(label) == group


# ---- the command


@pytest.mark.usefixtures("small_read")
def test_the_command_prints_tables_and_writes_json(plan: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    found = llmc("bench", plan, *SMALL, "--profile", "--output-json", path)
    assert found.exit_code == 0, found.output
    for words in ("machine ", "limits ", "prefill", "decode, 2 steps", "of limit", "profile of prefill of 40"):
        assert words in found.stdout
    written = json.loads(path.read_text())
    assert written["plan"]["engine_id"] == Plan.open(plan).engine_id
    assert written["machine"]["threads"] == 2 and written["machine"]["target"] == parse_target("native").name
    assert {"llmc", "options", "limits", "prefill", "decode", "profile", "notes"} <= written.keys()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("small_read")
def test_the_plot_is_a_png(plan: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    found = llmc("bench", plan, *SMALL, "--plot", path)
    assert found.exit_code == 0, found.output
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("small_read")
def test_what_is_too_long_is_left_out_with_a_note(plan: Path) -> None:
    found = llmc("bench", plan, *SMALL, "--input-len", "16,129", "--context-len", "20,127", "--rounds", "1")
    assert found.exit_code == 0, found.output
    assert "note: prefill of 129 left out: the plan's longest sequence is 128" in found.stdout
    assert "note: decode at batch 1, context 127 left out: with 2 more tokens" in found.stdout


def test_what_does_not_fit_in_memory_is_left_out(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Plan.open(plan)
    page = 16 * opened.manifest["model"]["kv_bytes_per_token"]
    memory = opened.manifest["memory"]
    arena = 32 * (memory["arena_bytes_per_token"] + memory["arena_bytes_per_row"])
    free = (1 << 20) + arena + int(5.5 * page / benching._KV_SHARE)  # five pages: three sequences need six
    monkeypatch.setattr(benching, "available_memory", lambda: free)
    found = run_bench(opened, replace(OPTIONS, rounds=1, profile=False), TerminalProgress())
    assert [(c["batch_size"], c["context_len"]) for c in found["decode"]] == [(1, 20), (1, 64)]
    (note,) = found["notes"]
    assert note.startswith("decode at batch 3, context 20 left out: its keys and values take")
    monkeypatch.setattr(benching, "available_memory", lambda: 0)
    with pytest.raises(UserError, match="not enough free memory for any case"):
        run_bench(opened, OPTIONS, TerminalProgress())


# ---- mistakes


def test_a_file_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "x.json"
    with pytest.raises(UserError, match=r"x\.json: cannot be written: No such file"):
        replace_file(path, b"data")
    path = tmp_path / "is-a-directory"
    path.mkdir()
    with pytest.raises(UserError, match="is-a-directory: cannot be written"):
        replace_file(path, b"data")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--input-len", "0"], ["--input-len 0", "at least 1"]),
        (["--batch-size", "1,-4"], ["--batch-size 1,-4", "at least 1"]),
        (["--context-len", "0,64"], ["--context-len 0,64"]), (["--output-len", "0"], ["--output-len 0"]),
        (["--rounds", "0"], ["--rounds 0"]), (["--max-num-batched-tokens", "0"], ["--max-num-batched-tokens 0"]),
        (["--threads", "0"], ["--threads 0", "between 1 and 256"]), (["--threads", "257"], ["--threads 257"]),
        (["--input-len", "999", "--context-len", "999"], ["at most 128 tokens", "no case is short enough"]),
        (["--output-json", "/no/such/dir/x.json"], ["--output-json /no/such/dir/x.json", "there is no directory"]),
        (["--plot", "/"], ["--plot /", "is a directory"]),
    ],
)  # fmt: skip
def test_bad_values(plan: Path, flags: list[str], words: list[str]) -> None:
    refused(llmc("bench", plan, *flags), *words)


@pytest.mark.parametrize("flags", [["--input-len", "12,many"], ["--batch-size", ""], ["--device", "cuda"]])
def test_wrong_flags_show_the_usage(plan: Path, flags: list[str]) -> None:
    found = llmc("bench", plan, *flags)
    assert found.exit_code == 2 and "Usage: " in found.stderr and "\nError: " in found.stderr


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    refused(llmc("bench", tmp_path / "none.plan"), "none.plan", "no such file")


def test_a_plan_without_cpu_code(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "gpu.plan", ("cuda:sm_90",))
    refused(llmc("bench", path), str(path), "code for cuda:sm_90 only", "--target native")


def test_a_plot_without_matplotlib_says_how_to_get_it(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(llmc("bench", plan, "--plot", tmp_path / "x.png"), "matplotlib", "pip install 'llmc[bench]'")
    assert list(tmp_path.iterdir()) == []
