"""codegen/triton/compile.py: kernels for a GPU that is not there, cached, reproducible, and clear about what fails."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc.codegen.triton import compile as compiling
from llmc.codegen.triton import team as teams
from llmc.codegen.triton.compile import HIP_TARGETS, CompiledKernel, KernelSpec, compile_kernels
from llmc.codegen.triton.resources import nvdisasm, ptxas_report
from llmc.errors import UserError
from llmc.runtime.cuda.cubin import check_cubin
from llmc.runtime.cuda.occupancy import resident_blocks
from llmc.runtime.cuda.targets import CUDA_TARGETS, CudaTarget, find_cuda_target

SM_90 = find_cuda_target("cuda:sm_90")


def linear(op: str, types: dict[str, str], **constants: Any) -> KernelSpec:
    """The smallest product that uses a warp group's tensor-core instructions: 64 outputs of 16 tokens."""
    sizes = dict.fromkeys(["N", "K", "LDX", "LDR", "LDY", "ROWS", "KP", "BN", "BK"], 64)
    absent = dict.fromkeys({"xs", "xsum", "ws", "bias", "residual", "ys", "ysum"} - set(types))
    rest = {"COUNT": 0, "GATED": False, "OUT": "f32", "HALF": "bf16", "BT": 16, "WIDEN": False, "STAGES": 2}
    known = sizes | absent | rest | {"ACT": "none"} | constants
    return KernelSpec(op, "linear.linear", tuple(types.items()), tuple(known.items()), num_warps=4, num_stages=2)


BF16 = linear("linear bf16", {"x": "*bf16", "w": "*bf16", "y": "*fp32", "meta": "*i32"}, FORMAT="bf16")
W8 = linear(
    "linear w8", {"x": "*i8", "xs": "*fp32", "w": "*i8", "ws": "*i32", "y": "*fp32", "meta": "*i32"}, FORMAT="w8"
)
WRONG = replace(BF16, op="wrong", constants=(*(c for c in BF16.constants if c[0] != "ACT"), ("ACT", "nonsense")))


@dataclass
class Built:
    """What one real run of the compiler made, shared by the tests."""

    kernels: dict[str, CompiledKernel]
    refusal: object
    advances: list[int]
    cache: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    cache = tmp_path_factory.mktemp("kernels")
    advances: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setenv("TRITON_INTERPRET", "1")  # as in the kernels' tests: the compiler must not see it
        bf16, w8, again, wrong = compile_kernels(
            [BF16, W8, replace(BF16, op="another label"), WRONG], SM_90, advances.append
        )
    assert isinstance(bf16, CompiledKernel) and isinstance(w8, CompiledKernel) and again == bf16
    yield Built({"bf16": bf16, "w8": w8}, wrong, advances, cache)


@pytest.fixture
def cache(built: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the warm cache: its entries."""
    shutil.copytree(built.cache, tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llmc" / "objects"


@pytest.fixture
def asked(built: Built, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels of the jobs that would be compiled: instead, the answers are those of `built`."""
    labels: list[str] = []

    def answer(self: Any, job: dict[str, Any], label: str) -> tuple[dict[str, Any], bytes]:
        labels.append(label)
        fields = asdict(built.kernels[job["constants"]["FORMAT"]])
        del fields["instructions"]
        return fields, fields.pop("cubin")

    opcodes = {kernel.cubin: kernel.instructions for kernel in built.kernels.values()}
    monkeypatch.setattr(compiling, "tensor_opcodes", lambda cubins, capability: [opcodes[cubin] for cubin in cubins])
    monkeypatch.setattr(teams.Team, "compile", answer)
    return labels


def ignore(count: int) -> None:
    """For progress that a test does not look at."""


# ---- results


def test_kernels_come_with_what_they_take(built: Built) -> None:
    for kernel, opcode in ((built.kernels["bf16"], "HGMMA"), (built.kernels["w8"], "IGMMA")):
        assert kernel.cubin[:4] == b"\x7fELF" and kernel.name == "linear" and b"\0linear\0" in kernel.cubin
        assert kernel.instructions == (opcode,)
        assert (kernel.warps, kernel.spill_bytes, kernel.tmem) == (4, 0, 0)
        assert 16 <= kernel.registers <= 255 and 0 < kernel.shared <= SM_90.shared_limit
        assert resident_blocks(SM_90, kernel.warps, kernel.registers, kernel.shared) >= 4


def test_the_loader_knows_what_the_compiler_makes(built: Built) -> None:
    """runtime/cuda/cubin.py on a real file: whole, for another GPU, under another name, and cut anywhere."""
    code = memoryview(built.kernels["bf16"].cubin)
    check_cubin(code, "linear", 90)
    for damaged, name, capability, words in (
        (code, "linear", 80, "it is code for sm_90, this GPU is sm_80"),
        (code, "linea", 90, "it has no kernel of that name"),
        (code[:63], "linear", 90, "it is no ELF file of 64 bits"),
        (code[:-1], "linear", 90, "headers do not lie in it"),
    ):
        with pytest.raises(UserError, match=words):
            check_cubin(damaged, name, capability)


@pytest.mark.parametrize("target", CUDA_TARGETS, ids=lambda t: t.name)
def test_the_oldest_driver_is_that_of_the_ptxas(target: CudaTarget) -> None:
    """Drivers run code of their own major version of CUDA, and of older ones."""
    tool = nvdisasm().with_name("ptxas-blackwell" if target.capability >= 100 else "ptxas")  # as Triton chooses
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.", said)
    assert release is not None and target.oldest_driver == 1000 * int(release[1])


def test_a_refusal_of_the_compiler_is_one_line_with_its_place(built: Built) -> None:
    assert built.refusal == 'unknown activation (at: tl.static_assert(ACT == "none", "unknown activation"))'


def test_progress_counts_specs(built: Built) -> None:
    """A label changes nothing: the same kernel is compiled once, and counted twice."""
    assert built.advances[0] == 0 and sorted(built.advances[1:]) == [1, 1, 2]


def test_a_block_may_not_take_more_than_the_gpu_has(built: Built, cache: Path, asked: list[str]) -> None:
    shared = built.kernels["bf16"].shared
    (reason,) = compile_kernels([BF16], replace(SM_90, shared_limit=shared - 1), ignore)
    assert reason == f"needs {shared} bytes of shared memory, a block of cuda:sm_90 has {shared - 1}"
    assert compile_kernels([BF16], replace(SM_90, shared_limit=shared), ignore) == [built.kernels["bf16"]]
    assert not asked


def test_an_amd_gpu_gets_a_code_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (kernel,) = compile_kernels([W8], HIP_TARGETS[0], ignore)
    assert isinstance(kernel, CompiledKernel) and kernel.name == "linear" and 0 < kernel.shared <= 64 * 1024
    assert kernel.cubin[:4] == b"\x7fELF" and kernel.cubin[18:20] == b"\xe0\0"  # EM_AMDGPU
    assert (kernel.registers, kernel.spill_bytes, kernel.tmem, kernel.instructions) == (0, 0, 0, ())


def test_spills_are_told_from_other_local_memory() -> None:
    log = "ptxas info    : Function properties for f\n    {} bytes stack frame, {} bytes spill stores, "
    log += "{} bytes spill loads\n"
    used = "ptxas info    : Used {} registers, used 1 barriers, 424 bytes cmem[0]\n"
    assert ptxas_report(log.format(48, 0, 0) + used.format(61)) == (61, 0)
    assert ptxas_report(log.format(48, 20, 24) + used.format(255)) == (255, 44)
    with pytest.raises(RuntimeError, match="no report of ptxas"):
        ptxas_report("ptxas info    : 0 bytes gmem\n")


# ---- the cache


def test_a_warm_cache_starts_no_process(built: Built, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    advances: list[int] = []
    kernels = compile_kernels([W8, BF16, W8], SM_90, advances.append)
    assert kernels == [built.kernels[name] for name in ("w8", "bf16", "w8")] and advances == [3]


def test_the_key_holds_all_that_can_change_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(spec: KernelSpec = BF16, target: Any = SM_90) -> str:
        return str(compiling._keys([spec], target)[0])

    assert key() == key(replace(BF16, op="other", constants=BF16.constants[::-1]))
    others = [
        key(replace(BF16, function="linear.other")), key(replace(BF16, args=BF16.args[::-1])),
        key(replace(BF16, constants=(*BF16.constants, ("BT", 32)))), key(replace(BF16, num_warps=8)),
        key(replace(BF16, num_stages=3)), key(target=find_cuda_target("cuda:sm_80")), key(target=HIP_TARGETS[0]),
    ]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: "0.0.0")
        others.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "KERNEL_DIR", compiling.KERNEL_DIR.parent)
        others.append(key())
    assert len({key(), *others}) == 1 + len(others)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:40] + b"?" + b[41:], lambda b: b"", lambda b: b + b"\0"]
)
def test_a_damaged_entry_is_made_again(built: Built, cache: Path, asked: list[str], damage: Any) -> None:
    (entry,) = [path for path in cache.iterdir() if path.stem == compiling._keys([W8], SM_90)[0]]
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    for _ in range(2):
        assert compile_kernels([BF16, W8], SM_90, ignore) == [built.kernels["bf16"], built.kernels["w8"]]
    assert asked == ["linear w8 for cuda:sm_90"] and entry.read_bytes() == whole
    assert len(list(cache.iterdir())) == 2, "no temporary file is left"


def test_a_cache_that_cannot_be_written_is_one_warning(
    built: Built, asked: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert compile_kernels([BF16, W8], SM_90, ignore) == [built.kernels["bf16"], built.kernels["w8"]]
    assert len(caplog.messages) == 1 and "GPU kernels are not cached" in caplog.messages[0]
    assert len(asked) == 2


def test_nothing_is_cached_when_a_source_changed_meanwhile(
    built: Built, asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    digests = iter(["as the keys say", "as the keys say", "edited"])
    monkeypatch.setattr(compiling, "source_digest", lambda: next(digests))
    assert compile_kernels([W8], SM_90, ignore) == [built.kernels["w8"]]
    assert not list(tmp_path.rglob("*.bin"))


# ---- reproducible


_MORE_KERNELS = """
import triton
import triton.language as tl

@triton.jit
def bad_instruction(x):
    at = x + tl.arange(0, 128)
    tl.store(at, tl.inline_asm_elementwise("bogus $0, $1;", "=r,r", [tl.load(at)], tl.int32, is_pure=True, pack=1))

@triton.jit
def bad_pack(x):
    at = x + tl.arange(0, 128)
    tl.store(at, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(at)], tl.int32, is_pure=True, pack=3))
"""
_BUILD = """
import hashlib, json, sys
from llmc.codegen.triton import compile as compiling
from llmc.runtime.cuda.cubin import check_cubin
from llmc.runtime.cuda.occupancy import resident_blocks
from llmc.runtime.cuda.targets import CUDA_TARGETS, CudaTarget, find_cuda_target
compiling.default_threads = lambda: 1
fields = [spec | {k: tuple(map(tuple, spec[k])) for k in ("args", "constants")} for spec in json.load(sys.stdin)]
specs = [compiling.KernelSpec(**spec) for spec in fields]
kernels = compiling.compile_kernels(specs, find_cuda_target("cuda:sm_90"), lambda count: None)
assert not {"triton", "torch"} & set(sys.modules), "the worker imports them, if anyone"
print(json.dumps([k if isinstance(k, str) else hashlib.sha256(k.cubin).hexdigest() for k in kernels]))
"""


def test_another_copy_of_llmc_makes_the_same_bytes(built: Built, tmp_path: Path) -> None:
    """In another directory, in another order, one after the other in one process. And what ptxas or a pass of the
    compiler refuses is one line, without paths."""
    root = tmp_path / "elsewhere"
    package = root / "llmc"
    shutil.copytree(Path(llmc.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "kernels" / "triton" / "more.py").write_text(_MORE_KERNELS)
    more = [KernelSpec(name, f"more.{name}", (("x", "*i32"),), (), 4, 1) for name in ("bad_instruction", "bad_pack")]
    done = subprocess.run(
        [sys.executable, "-c", _BUILD], input=json.dumps([asdict(spec) for spec in (*more, W8, BF16)]), cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root), "XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    bad_instruction, bad_pack, *digests = json.loads(done.stdout)
    assert digests == [hashlib.sha256(built.kernels[name].cubin).hexdigest() for name in ("w8", "bf16")]
    assert bad_instruction == "ptxas: Not a name of any known instruction: 'bogus'"
    assert bad_pack == "number of input elements 128 must be a multiple of the op's packed_element attribute, 3"


def test_no_name_of_a_place_gets_into_the_code(built: Built) -> None:
    places = [Path(llmc.__file__).resolve().parents[1], Path.home(), Path(tempfile.gettempdir()), Path(sys.prefix)]
    for kernel in built.kernels.values():
        assert not [place for place in places if str(place).encode() in kernel.cubin]
        assert b"llmc" not in kernel.cubin and b".py" not in kernel.cubin


# ---- processes


def fake_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    monkeypatch.setattr(teams, "_COMMAND", [sys.executable, "-S", "-c", script])
    monkeypatch.setattr(compiling, "default_threads", lambda: 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        (
            "import os; os.kill(os.getpid(), 11)",
            RuntimeError,
            "ended by signal SIGSEGV while it compiled linear w8 for cuda",
        ),
        ("import os; input(); os.kill(os.getpid(), 9)", UserError, "killed while it compiled linear w8 for cuda:sm_90"),
        ("import sys; input(); sys.exit('LLVM ERROR: no')", RuntimeError, r"with exit code 1 .*\nLLVM ERROR: no"),
        ("input(); print('{\"size\": 10}'); print('short', flush=True)", RuntimeError, "ended with exit code 0"),
        ('input(); print(\'{"fault": "KeyError: x"}\', flush=True); input()', RuntimeError, "linear w8.*\nKeyError: x"),
    ],
)
def test_a_process_that_dies_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, error: type[Exception], message: str
) -> None:
    fake_worker(monkeypatch, tmp_path, script)
    with pytest.raises(error, match=message):
        compile_kernels([W8], SM_90, ignore)
    assert not list(tmp_path.iterdir()), "its directory is removed, nothing is cached"


def test_an_error_does_not_wait_for_other_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = "import sys, time\njob = sys.stdin.readline()\ntime.sleep(0 if 'w8' in job else 1000)\nsys.exit(3)"
    fake_worker(monkeypatch, tmp_path, script)
    with pytest.raises(RuntimeError, match="exit code 3 while it compiled linear w8"):
        compile_kernels([BF16, W8, WRONG], SM_90, ignore)
    assert not list(tmp_path.iterdir())


def test_workers_run_without_what_changes_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TRITON_INTERPRET", "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "MLIR_ENABLE_DUMP", "USE_IR_LOC", "LANG"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PYTHONPATH", f"relative{os.pathsep}{tmp_path}")
    env = teams._environment(tmp_path)
    assert not {"TRITON_INTERPRET", "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "MLIR_ENABLE_DUMP", "USE_IR_LOC"} & set(env)
    assert env["LANG"] == "x" and env["TRITON_CACHE_DIR"].startswith(str(tmp_path))
    assert env["PYTHONPATH"].split(os.pathsep)[1:] == [str(Path.cwd() / "relative"), str(tmp_path)]


def test_kernels_load_no_torch() -> None:
    script = (
        "import importlib, pkgutil, sys\nimport llmc.codegen.triton.worker, llmc.kernels.triton as kernels\n"
        "for module in pkgutil.walk_packages(kernels.__path__, 'llmc.kernels.triton.'):\n"
        "    importlib.import_module(module.name)\n"
        "assert 'llmc.kernels.triton.linear' in sys.modules and 'torch' not in sys.modules\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_missing_triton_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UserError, match=r"^building for a GPU needs the package triton: pip install 'llmc\[build\]'$"):
        compile_kernels([W8], SM_90, ignore)
