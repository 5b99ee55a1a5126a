"""A process that compiles kernels: the only place where the compiler meets Triton.

`python -m llmc.codegen.triton.worker` reads jobs from standard input, one line of JSON each, and answers each on
standard output with a line of JSON:

    {"name", "shared", "warps", "tmem", "registers", "spill_bytes", "size"}   then `size` bytes of machine code
    {"refused": reason}     the compiler says no to this kernel, in one line
    {"fault": traceback}    anything else, which is llmc's fault or the machine's

A job: {"function", "args", "constants", "num_warps", "num_stages", "target": {"backend", "arch", "warp_size"}}.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import sys
import traceback
from typing import Any, BinaryIO

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from llmc.codegen.triton.resources import ptxas_report

_DTYPES = {"bf16": tl.bfloat16, "f16": tl.float16, "f32": tl.float32}
# Constants that hold a type. (FORMAT, which may also be "bf16", is compared as a string.)
_DTYPE_CONSTANTS = frozenset(["HALF"])
_ALIGNED = [["tt.divisibility", 16]]
_KILLED = re.compile(r"failed with error code -\d+")
_TOOL_ERROR = re.compile(r"^.*?\b(?:error|fatal)\s*:\s*(.+)$", re.MULTILINE)


class Refused(Exception):
    """The compiler cannot make this kernel; the message is one line."""


def compile_job(job: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """The answer to a job and the machine code. Raises Refused; any other exception is a fault."""
    source = _source(job)
    target = GPUTarget(*(job["target"][key] for key in ("backend", "arch", "warp_size")))
    # Without fusion a kernel rounds as it is written, in every tile shape: what is to be fused says tl.fma.
    options = {key: job[key] for key in ("num_warps", "num_stages")} | {"enable_fp_fusion": False}
    log = io.StringIO()  # Triton prints ptxas's log
    try:
        with contextlib.redirect_stdout(log):
            kernel = triton.compile(source, target=target, options=options)
    except CompilationError as error:
        raise Refused(_innermost(error)) from error
    except OutOfResources as error:
        raise Refused(_one_line(str(error))) from error
    except PTXASError as error:
        if _KILLED.search(str(error)):  # by a signal: no verdict on the kernel
            raise
        raise Refused("ptxas: " + _tool_error(str(error).partition("stderr:")[2])) from error
    scratch = getattr(kernel.metadata, "global_scratch_size", 0)  # AMD has none
    if scratch:
        raise Refused(f"needs {scratch} bytes of global scratch memory per block, which is not provided")
    cuda = target.backend == "cuda"
    registers, spill_bytes = ptxas_report(log.getvalue()) if cuda else (0, 0)
    code: bytes = kernel.asm["cubin" if cuda else "hsaco"]
    metadata = kernel.metadata
    answer = {
        "name": metadata.name, "shared": metadata.shared, "warps": metadata.num_warps,
        "tmem": getattr(metadata, "tmem_size", 0) or 0, "registers": registers, "spill_bytes": spill_bytes,
        "size": len(code),
    }  # fmt: skip
    return answer, code


def _source(job: dict[str, Any]) -> ASTSource:
    """The kernel with the types of its runtime arguments and its constants; every pointer is aligned to 16 bytes."""
    module, _, name = job["function"].rpartition(".")
    function = getattr(importlib.import_module(f"llmc.kernels.triton.{module}"), name)
    names: list[str] = function.arg_names
    types = dict(job["args"])
    constants = {key: _constant(key, value) for key, value in job["constants"].items()}
    runtime = [key for key in names if key not in constants]
    if runtime != list(types) or len(types) + len(constants) != len(names):
        raise TypeError(
            f"{job['function']} takes {names}; given the arguments {list(types)} and the constants {list(constants)}"
        )
    signature = {key: types.get(key, "constexpr") for key in names}
    aligned = {(i,): _ALIGNED for i, key in enumerate(names) if signature[key].startswith("*")}
    return ASTSource(function, signature, constants, aligned)


def _constant(name: str, value: Any) -> Any:
    return _DTYPES[value] if name in _DTYPE_CONSTANTS and value is not None else value


def _innermost(error: CompilationError) -> str:
    """What is wrong, and the line of source: Triton wraps an error once for every call of a function around it."""
    inner: BaseException = error
    while isinstance(inner.__cause__, CompilationError):
        inner = inner.__cause__
    assert isinstance(inner, CompilationError)
    line = getattr(inner.node, "lineno", 0)
    source = inner.src.split("\n")[line - 1].strip() if inner.src and line else "unknown source"
    return _one_line(f"{inner.error_message or type(inner).__name__} (at: {source})")


def _tool_error(text: str) -> str:
    found = _TOOL_ERROR.search(text)
    return _one_line(found[1] if found else text)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]


def _answer(job: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    printed_before = os.fstat(2).st_size
    try:
        return compile_job(job)
    except Refused as error:
        return {"refused": str(error)}, b""
    except Exception as error:
        printed = os.pread(2, 1 << 16, printed_before).decode(errors="replace")
        if isinstance(error, RuntimeError) and _TOOL_ERROR.search(printed):
            # A pass of Triton's compiler says what is wrong on standard error; the exception says only that it failed
            return {"refused": _tool_error(printed)}, b""
        return {"fault": traceback.format_exc() + printed[-2000:]}, b""


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Answers jobs until there are no more."""
    for line in jobs:
        answer, code = _answer(json.loads(line))
        answers.write(json.dumps(answer).encode() + b"\n" + code)
        answers.flush()


def _main() -> None:
    """Takes the pipes for itself: what Triton and its tools print goes to standard error, a file of the parent's."""
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    serve(jobs, answers)


if __name__ == "__main__":
    _main()
