"""A tiny hand-made archive, batches for it, and subprocesses that run over the recording fake of libcuda.so.1."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from llmc.runtime.batch import Batch, RowSampling
from llmc.runtime.cuda.archive_format import VERSION
from llmc.runtime.cuda.executor import CudaConfig, CudaExecutor
from llmc.runtime.plan import canonical_json

HERE = Path(__file__).parent
VOCAB = 50
GREEDY = RowSampling(temperature=0.0)
CONFIG: dict[str, Any] = {
    "max_num_tokens": 40, "max_num_seqs": 6, "max_num_rows": 6, "max_model_len": 100, "num_pages": 32,
    "memory_utilization": 0.9,
}  # fmt: skip
WEIGHTS = np.random.default_rng(1).integers(0, 256, 256, np.uint8).tobytes()
META, TOKENS, ROWS = ["batch", "meta"], ["batch", "tokens"], ["batch", "rows"]
REPACKED = 64


def kernel(name: str, args: int, grid: list[Any], op: str = "", warps: int = 4, shared: int = 0) -> dict[str, Any]:
    return {
        "name": name, "op": op or name, "warps": warps, "shared": shared, "registers": 32, "spill_bytes": 0,
        "grid": grid, "args": ["*i32"] * args, "constants": {}, "max_tokens": None,
    }  # fmt: skip


def call(op: str, kernels: Any, args: list[Any], when: str = "always", rows: str = "T") -> dict[str, Any]:
    variants = kernels if isinstance(kernels, list) else [{"max": None, "kernels": [kernels]}]
    return {"op": op, "path": f"model.{op}", "rows": rows, "when": when, "variants": variants, "args": args}


def description() -> dict[str, Any]:
    """Two layers of a model that computes nothing but `sample`; the caller's to change."""
    layer = {"page_bytes": 512, "value_offset": 192, "key_scale_offset": 384, "value_scale_offset": 448}
    plain = {"page_bytes": 256, "value_offset": 128, "key_scale_offset": None, "value_scale_offset": None}
    data = {
        "abi": VERSION, "vocab_size": VOCAB, "half": "bf16", "arena": {"tokens": 96, "rows": 48}, "partials": 10,
        "tile_tokens": [4, 16], "kv": [layer, plain], "staging": REPACKED,
        "weights": {"bytes": 512, "items": [
            {"source": 0, "source_size": 100, "device": 16, "calls": []},
            {"source": 128, "source_size": REPACKED, "device": 256,
             "calls": [call("repack", 8, [["staging", 0], ["weight", 256]])]},
        ]},
        "kernels": [
            kernel("embed", 3, [["T", 4], 2, 1]),
            kernel("linear_small", 3, [["T", 16], 3, 1], op="linear 8x8", shared=1024),
            kernel("linear_tuned", 3, [["T", 8], 3, 1], op="linear 8x8 tuned", shared=60000),
            kernel("linear_large", 3, [["T", 32], 3, 1], op="linear 8x8 large", warps=8, shared=50000),
            kernel("decode", 5, [["programs", 1], 1, 1]),
            kernel("prefill", 6, [["tiles0", 1], ["tiles1", 2], 1]),
            kernel("adjust", 3, [["R", 1], 1, 1]),
            kernel("sample", 5, [["R", 1], 1, 1], warps=1),
            kernel("repack", 2, [5, ["programs", 4], 1]),
        ],
        "calls": [
            call("embed", 0, [META, TOKENS, ["tokens", 0]]),
            call("linear", [{"max": 16, "kernels": [1, 2]}, {"max": None, "kernels": [3]}],
                 [["tokens", 32], ["weight", 256], ["rows", 16]]),
            call("decode", 4, [["kv", 0, "key"], ["kv", 1, "value"], ["kv", 0, "value_scale"], ["partials"],
                               ["batch", "decode_blocks"]], when="decode"),
            call("prefill", 5, [["batch", "tiles0"], ["batch", "tiles1"], ["batch", "tables"], ["batch", "seqs"],
                                ["kv", 0, "key_scale"], ["kv", 1, "key"]], when="prefill"),
            call("adjust", 6, [["batch", "extra"], ["logits"], ["adjusted"]], when="adjust", rows="R"),
            call("sample", 7, [META, TOKENS, ROWS, ["out", "tokens"], ["out", "logprobs"]], rows="R"),
        ],
    }  # fmt: skip
    return deepcopy(data)


def cubin(name: str, text: bytes, capability: int = 90) -> bytes:
    """An ELF file with the least that a cubin has: `text` as the machine code of a kernel, at byte 64. The ABI is that
    of the capability's ptxas."""
    names = b"\0.names\0.text." + name.encode() + b"\0"
    abi, flags = (b"\x41\x08", capability << 8) if capability >= 100 else (b"\x33\x07", capability)
    sections = [(0, 0, 0, 0), (1, 3, 64 + len(text), len(names)), (8, 1, 64, len(text))]
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01" + abi, 2, 190, 1, 0, 0,
                         64 + len(text) + len(names), flags, 64, 56, 0, 64, len(sections), 1)  # fmt: skip
    table = (struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, start, size, 0, 0, 1, 0) for at, kind, start, size in sections)
    return header + text + names + b"".join(table)


def binaries(data: dict[str, Any]) -> bytes:
    """A binary for each kernel that the fake driver understands; writes their places into the description."""
    found = b""
    for entry in data["kernels"]:
        code = cubin(entry["name"], f"FAKE {entry['name']} {len(entry['args'])} {REPACKED}\0".encode())
        entry["offset"], entry["size"] = len(found), len(code)
        found += code + bytes(-len(code) % 16)
    return found


def segment(data: dict[str, Any], binary: bytes) -> memoryview:
    head = canonical_json(data)
    head = len(head).to_bytes(8, "little") + head
    return memoryview(head + bytes(-len(head) % 16) + binary)


def archive(data: dict[str, Any] | None = None) -> memoryview:
    data = description() if data is None else data
    return segment(data, binaries(data))


def executor(device: Any, data: Any = None, choices: Any = None, **config: Any) -> CudaExecutor:
    return CudaExecutor(
        archive(data), memoryview(WEIGHTS), CudaConfig(**{**CONFIG, **config}), device, choices or {}
    )  # fmt: skip


def batch(*chunks: tuple[int, int], columns: int = 7, sampling: RowSampling = GREEDY, logits: bool = False) -> Batch:
    """Sequences that run positions [start, stop); the last token of each is sampled. Tokens are 0, 1, 2, …"""
    counts = [stop - start for start, stop in chunks]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    tables = np.arange(len(chunks) * columns, dtype=np.int32).reshape(-1, columns) % 32
    positions = np.concatenate([np.arange(*c, dtype=np.int32) for c in chunks])
    tokens = np.arange(starts[-1], dtype=np.int32)
    return Batch(tokens, positions, starts, tables, starts[1:] - 1, (sampling,) * len(chunks), logits)


def decode(count: int, **changes: Any) -> Batch:
    return batch(*[(9 + i, 10 + i) for i in range(count)], **changes)


@cache
def library_folder() -> str:
    """Where libcuda.so.1 was built; the folder stays until the tests end."""
    folder = tempfile.TemporaryDirectory()
    _folders.append(folder)
    compiler = ["cc"] if shutil.which("cc") else [sys.executable, "-m", "ziglang", "cc"]
    target = Path(folder.name) / "libcuda.so.1"
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", target, HERE / "fake_libcuda.c", "-ldl"], check=True)
    return folder.name


_folders: list[tempfile.TemporaryDirectory[str]] = []


@dataclass(frozen=True)
class Ran:
    """result: what the script put into `result`. log: the driver's calls, each a list of words."""

    result: Any
    log: list[list[str]]
    stderr: str

    def calls(self, *names: str) -> list[list[str]]:
        return [line for line in self.log if line[0] in names]

    @property
    def marks(self) -> list[list[list[str]]]:
        """The log cut at the script's `mark()`: what came before the first, between them, and after the last."""
        parts: list[list[list[str]]] = [[]]
        for line in self.log:
            if line[0] == "mark":
                parts.append([])
            else:
                parts[-1].append(line)
        return parts


_PRELUDE = """
import json, os, sys
sys.path.insert(0, {here!r})
import numpy as np
from cuda_fakes import *
from llmc.errors import UserError
from llmc.runtime.cuda.driver import open_device
from llmc.runtime.cuda.devices import DeviceError, DeviceLost
def mark():
    with open(os.environ["FAKE_CUDA_LOG"], "a") as file:
        print("mark", file=file)
def refusal(action):
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None
result = None
"""


def run(script: str, driver: bool = True, **environment: str) -> Ran:
    """Runs a script in a process of its own, with the fake driver (or none) in its library path."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.touch()
        path = library_folder() if driver else folder
        done = subprocess.run(
            [sys.executable, "-c", _PRELUDE.format(here=str(HERE)) + script + "\nprint(json.dumps(result))"],
            capture_output=True, text=True, timeout=120,
            env={**os.environ, "LD_LIBRARY_PATH": path, "FAKE_CUDA_LOG": str(log), **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = [line.split() for line in log.read_text().splitlines()]
        return Ran(json.loads(done.stdout.splitlines()[-1]), lines, done.stderr)
