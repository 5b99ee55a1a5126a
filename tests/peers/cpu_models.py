"""The models that `cpu.py` measures: for every engine and format one file or directory, converted once, kept under the
work directory. A conversion appears whole or not at all; what it printed is beside it in `logs/`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_checkpoints import SHAPES
from gpu_engines import Skipped

REPOSITORY = Path(__file__).resolve().parents[2]
FORMATS = ("int8", "int4")
Command = list[str | Path]
MAX_LENGTH = 2048
"""Longest sequence of our plans, tokens."""
_LLAMA_TYPES = {"int8": "Q8_0", "int4": "Q4_0"}
_OPENVINO_FLAGS = {
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--sym", "--group-size", "128", "--group-size-fallback", "adjust"],
}
_ONNXRUNTIME_OPTIONS = ["block_size=32", "accuracy_level=4"]

# llama.cpp's converter knows tokenizers by a hash that depends on the architecture, and no token is encoded here.
_CONVERT = """
import runpy, sys
source = sys.argv.pop(1)
sys.path.insert(0, source)
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda model, tokenizer: "smollm"
sys.argv[0] = source + "/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Peers:
    """Where the peers live on this machine; None: not installed. llama_cpp: its build directory. The others: the Python
    of the environment that has them."""

    llama_cpp: Path | None = None
    openvino: str | None = None
    onnxruntime: str | None = None
    transformers: str | None = None


class Models:
    """The models of one checkpoint."""

    def __init__(self, name: str, checkpoint: Path | None, work: Path, peers: Peers) -> None:
        """name: of the folder under `work`; one of SHAPES, unless `checkpoint` is given, a Hugging Face directory."""
        self.name, self.folder, self._given, self._peers = name, work / name, checkpoint, peers

    def checkpoint(self) -> Path:
        """Raises Skipped when it cannot be made."""
        if self._given is not None:
            return self._given
        assert self.name in SHAPES
        script = Path(__file__).with_name("cpu_checkpoints.py")
        return self._make("checkpoint", lambda out: [[sys.executable, script, self.name, out]])

    def plan(self, precision: str) -> Path:
        """Ours for this machine, built anew when a source of llmc is newer. precision: of FORMATS. With an accuracy
        report where the weights are not random. Raises Skipped when the build fails."""
        plan = self.folder / f"llmc-{precision}.plan"
        if plan.exists() and plan.stat().st_mtime < newest_source():
            plan.unlink()
        checkpoint = self.checkpoint()
        command: Command = [
            sys.executable,
            "-m",
            "llmc.cli",
            "build",
            checkpoint,
            f"--{precision}",
            "--target",
            "native",
        ]
        command += ["--max-model-len", str(MAX_LENGTH)]
        if self.name in SHAPES and self.name != "smollm2":
            command.append("--no-eval")
        return self._make(plan.name, lambda out: [[*command, "-o", out]], {"PYTHONPATH": str(REPOSITORY)})

    def llama_cpp(self, precision: str) -> Path:
        """A GGUF file. Raises Skipped when llama.cpp is not there, or the conversion fails; so do the others."""
        build = self._peers.llama_cpp
        if build is None:
            raise Skipped("not given (--llama-cpp)")
        kind = _LLAMA_TYPES[precision]
        return self._make(
            f"{kind}.gguf", lambda out: [[build / "bin" / "llama-quantize", self._unquantised(build), out, kind]]
        )

    def _unquantised(self, build: Path) -> Path:
        checkpoint = self.checkpoint()
        kind = "f32" if json.loads((checkpoint / "config.json").read_text()).get("dtype") == "float32" else "bf16"
        command: Command = [sys.executable, "-c", _CONVERT, llama_cpp_source(build), checkpoint, "--outtype", kind]
        command = [*command, "--outfile"]
        return self._make(f"{kind}.gguf", lambda out: [[*command, out]])

    def openvino(self, precision: str) -> Path:
        """A directory as `optimum-cli export openvino` writes it."""
        if self._peers.openvino is None:
            raise Skipped("not given (--openvino-python)")
        tool = Path(self._peers.openvino).with_name("optimum-cli")
        command: Command = [tool, "export", "openvino", "-m", self.checkpoint(), "--task", "text-generation-with-past"]
        return self._make(f"openvino-{precision}", lambda out: [[*command, *_OPENVINO_FLAGS[precision], out]])

    def onnxruntime(self, precision: str) -> Path:
        """A directory as the model builder of ONNX Runtime GenAI writes it."""
        python = self._peers.onnxruntime
        if python is None:
            raise Skipped("not given (--onnxruntime-python)")
        command: Command = [python, "-m", "onnxruntime_genai.models.builder", "-i", self.checkpoint(), "-p", precision]
        command += ["-e", "cpu", "-c", self.folder / "onnxruntime-cache"]
        return self._make(
            f"onnxruntime-{precision}", lambda out: [[*command, "-o", out, "--extra_options", *_ONNXRUNTIME_OPTIONS]]
        )

    def transformers(self, precision: str) -> Path:
        """The checkpoint itself, whatever the precision."""
        if self._peers.transformers is None:
            raise Skipped("not given (--transformers-python)")
        return self.checkpoint()

    def _make(
        self, name: str, commands: Callable[[Path], Sequence[Command]], variables: Mapping[str, str] = {}
    ) -> Path:
        """folder/name; when it is not there the commands for a temporary path of it are run first."""
        made = self.folder / name
        if made.exists():
            return made
        unfinished = made.with_name("unfinished-" + name)
        _remove(unfinished)
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"makes {made}", file=sys.stderr)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment |= {"HF_HUB_OFFLINE": "1", **variables}
        with log.open("wb") as output:
            for command in commands(unfinished):
                output.write((" ".join(map(str, command)) + "\n").encode())
                output.flush()
                done = subprocess.run(
                    list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=self.folder,
                    check=False,
                )  # fmt: skip
                if done.returncode:
                    _remove(unfinished)
                    raise Skipped(f"{Path(command[0]).name} ended with code {done.returncode}, see logs/{log.name}")
        unfinished.rename(made)
        return made


def llama_cpp_source(build: Path) -> Path:
    """Where the sources of a build lie, as CMake noted it. Raises Skipped when it did not."""
    cache = build / "CMakeCache.txt"
    lines = cache.read_text().splitlines() if cache.exists() else []
    for line in lines:
        if line.startswith("CMAKE_HOME_DIRECTORY:"):
            return Path(line.partition("=")[2])
    raise Skipped(f"{build} is no build directory of CMake")


def llama_cpp_version(build: Path) -> str | None:
    """The version of the sdist that the sources of a build came in; None when they came otherwise."""
    made = llama_cpp_source(build).parent / "PKG-INFO"
    lines = made.read_text().splitlines() if made.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("Version: ")), None)


def newest_source() -> float:
    """When a source that can change a plan was last written, seconds since the epoch."""
    rooms = ("llmc", "frontend", "passes", "codegen", "kernels", "runtime")
    files = (f for room in rooms for kind in ("*.py", "*.h") for f in (REPOSITORY / room).rglob(kind))
    return max(f.stat().st_mtime for f in files)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
