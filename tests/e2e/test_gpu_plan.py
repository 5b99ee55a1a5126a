"""A plan for CPU and GPUs, built where there is no GPU: the same bytes twice, served on the CPU, refused on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_harness import MODEL, assert_refused, environment, llmc, report, serving

from llmc.frontend.pypi import _cache_root
from llmc.runtime.plan import Plan

pytestmark = pytest.mark.e2e

TARGETS = ("--target", "cpu:native", "--target", "cuda:sm_80", "--target", "cuda:sm_90")


@dataclass
class FatPlans:
    first: Path
    second: Path


@pytest.fixture(scope="module")
def fat(tmp_path_factory: pytest.TempPathFactory, int8_plan: Path) -> FatPlans:
    """Two builds with the same flags in two places, with two cold caches; `int8_plan` brings the model."""
    plans = []
    for name, seed in (("here", "1"), ("there", "2")):
        home = tmp_path_factory.mktemp(name)
        (home / "cache" / "llmc").mkdir(parents=True)
        (home / "cache" / "llmc" / "pypi").symlink_to(_cache_root())
        env = environment(XDG_CACHE_HOME=str(home / "cache"), HOME=str(home), PYTHONHASHSEED=seed)
        start = time.monotonic()
        done = llmc("build", MODEL, "--int8", *TARGETS, "--no-eval", "-o", home / "fat.plan", cwd=home, env=env)
        assert done.returncode == 0, done.stderr
        report(f"fat plan ({name}: cold caches, two capabilities)", f"{time.monotonic() - start:.0f} s")
        plans.append(home / "fat.plan")
    start = time.monotonic()
    env = environment(XDG_CACHE_HOME=str(plans[1].parent / "cache"))
    again = plans[1].parent / "again.plan"
    done = llmc("build", MODEL, "--int8", *TARGETS, "--no-eval", "-o", again, env=env)
    assert done.returncode == 0, done.stderr
    assert again.read_bytes() == plans[1].read_bytes()
    report("fat plan (warm cache)", f"{time.monotonic() - start:.0f} s")
    return FatPlans(*plans)


def test_two_builds_are_the_same_file(fat: FatPlans) -> None:
    first, second = fat.first.read_bytes(), fat.second.read_bytes()
    if first != second:
        ours, theirs = Plan.open(fat.first), Plan.open(fat.second)
        pytest.fail(f"segments {[s.name for s in ours.segments.values() if s != theirs.segments.get(s.name)]} differ")


def test_a_fat_plan_names_no_place(fat: FatPlans) -> None:
    data = fat.first.read_bytes()
    for secret in (str(fat.first.parent), str(Path.home()), "/tmp/", "site-packages", "kernels/triton"):
        assert secret.encode() not in data, secret


def test_weights_are_held_once(fat: FatPlans, int8_plan: Path) -> None:
    both, alone = Plan.open(fat.first), Plan.open(int8_plan)
    assert both.segments["weights"].chunks == alone.segments["weights"].chunks
    assert both.manifest["targets"][1:] == ["cuda:sm_80", "cuda:sm_90"]


def test_it_serves_on_the_cpu_with_neither_triton_nor_torch(fat: FatPlans, int8_plan: Path) -> None:
    """--device auto finds no driver, says so in the log and goes on; the answer is that of the plan for the CPU."""
    question = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 24, "temperature": 0}
    answers = []
    for plan in (fat.first, int8_plan):
        with serving(plan) as server:
            answers.append(server.post("/v1/chat/completions", **question).json()["choices"][0]["message"]["content"])
            maps = Path(f"/proc/{server.process.pid}/maps").read_text()
            assert "torch" not in maps and "triton" not in maps
            if plan == fat.first:
                assert "runs on the CPU: no NVIDIA driver was found" in server.log.read_text()
    assert answers[0] == answers[1] and len(answers[0]) > 20


def test_without_a_driver_cuda_is_refused_in_one_line(fat: FatPlans) -> None:
    for command in (("serve", fat.first), ("run", fat.first, "Hello")):
        done = llmc(*command, "--device", "cuda")
        assert_refused(done.returncode, done.stderr, "no NVIDIA driver was found")
    done = llmc("tune", fat.first)
    assert_refused(done.returncode, done.stderr, "no NVIDIA driver was found")


def test_a_plan_without_gpu_code_says_what_it_has(int8_plan: Path) -> None:
    done = llmc("serve", int8_plan, "--device", "cuda")
    assert_refused(done.returncode, done.stderr, "--device cuda", "the plan has code for cpu:", "--target cuda:sm_90")


def test_unknown_targets_are_refused_with_those_that_are_known(tmp_path: Path) -> None:
    done = llmc("build", MODEL, "--target", "cuda:sm_75", "-o", tmp_path / "x.plan")
    assert_refused(done.returncode, done.stderr, "cuda:sm_75", "cuda:sm_80", "cuda:sm_120")
    done = llmc("build", MODEL, "--weight-only", "--no-eval", "-o", tmp_path / "x.plan")
    assert_refused(done.returncode, done.stderr, "weight-only", "name GPU targets only (--target)")
    assert not list(tmp_path.iterdir())


def test_inspect_shows_every_kernel_with_its_resources(fat: FatPlans) -> None:
    done = llmc("inspect", fat.first)
    assert done.returncode == 0, done.stderr
    for words in ("cuda:sm_80: ", "cuda:sm_90: ", "A100", "H100", "IGMMA", "attention decode", "sample 49152"):
        assert words in done.stdout, words
    manifest = json.loads(llmc("inspect", fat.first, "--json").stdout)
    assert manifest["provenance"]["tools"]["triton"]


def test_serving_a_gpu_imports_only_the_driver_s_bindings() -> None:
    """What `--device cuda` loads before it touches the driver."""
    code = (
        "import sys, llmc.runtime.cuda.executor, llmc.runtime.cuda.driver, llmc.runtime.load, llmc.tune\n"
        "bad = [m for m in ('torch', 'triton', 'transformers', 'onnx', 'cuda.core') if m in sys.modules]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)
