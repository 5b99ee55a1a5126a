#!/usr/bin/env python3
"""Measures llmc on this machine's CPU beside its peers, int8 and int4: prefill 512, and decoding for 1, 8 and 16
sequences of 64 tokens of context.

Every engine runs in a process of its own and is stopped while it is not its turn. In every round each runs each work
once, on the same random token ids, and must give exactly the tokens asked for; decoding is timed from the first token
of the last sequence on. llmc is measured as `llmc serve` runs it, without HTTP and text. Models are converted once into
the work directory; ours is built again when its compiler is newer. A peer that is not given is skipped, by name. The
result goes to stdout and, as the section of its model, to docs/benchmarks.md, which says how to install the peers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # llmc, from a checkout that is not installed

from cpu_checkpoints import SHAPES
from cpu_engines import Limits, LlamaCpp, Measured, Worker
from cpu_models import FORMATS, MAX_LENGTH, Command, Models, Peers, llama_cpp_version
from cpu_report import DOCS, section, section_name, this_machine, write
from cpu_rounds import figures, measure, step_bytes, workloads
from gpu_engines import Skipped

from llmc.errors import UserError
from llmc.runtime.plan import Plan
from llmc.runtime.threads import default_threads

OURS = "llmc"
BANDWIDTH_MIB, BANDWIDTH_PASSES = 512, 8


class Bandwidth:
    """Measures how fast this machine reads memory, in a process of its own."""

    def __init__(self, folder: Path, threads: int) -> None:
        """Compiles the program into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._program, self._threads = folder / "cpu_bandwidth", threads
        source = Path(__file__).with_name("cpu_bandwidth.c")
        command: Command = [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            "-O3",
            "-march=native",
            "-o",
            self._program,
            source,
            "-lpthread",
        ]
        subprocess.run(command, check=True)

    def measure(self) -> float:
        """Bytes/s, all threads together."""
        command: Command = [self._program, str(self._threads), str(BANDWIDTH_MIB), str(BANDWIDTH_PASSES)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def starters(models: Models, peers: Peers, precision: str, limits: Limits) -> dict[str, Callable[[], Measured]]:
    """By name for people, in the order of the table: what converts the model if need be and starts the engine."""
    kind = {"int8": "Q8_0", "int4": "Q4_0"}[precision]

    def llama_cpp() -> Measured:
        model, build = models.llama_cpp(precision), peers.llama_cpp
        assert build is not None  # else there is no model
        return LlamaCpp(f"llama.cpp {kind}", build, llama_cpp_version(build), model, limits)

    return {
        OURS: lambda: Worker(OURS, sys.executable, "llmc", models.plan(precision), limits),
        "OpenVINO GenAI": lambda: Worker(
            "OpenVINO GenAI", str(peers.openvino), "openvino", models.openvino(precision), limits
        ),
        "ONNX Runtime GenAI": lambda: Worker(
            "ONNX Runtime GenAI", str(peers.onnxruntime), "onnxruntime", models.onnxruntime(precision), limits
        ),
        f"llama.cpp {kind}": llama_cpp,
        "transformers fp32": lambda: Worker(
            "transformers fp32", str(peers.transformers), "transformers", models.transformers(precision), limits
        ),
    }


def run_format(
    models: Models, peers: Peers, precision: str, threads: int, rounds: int, decode: int, bandwidth: Bandwidth
) -> dict[str, Any]:
    """What cpu_rounds.figures says of one format, with peak memory, versions and the accuracy of our plan."""
    what = workloads(decode)
    length, batch = max(w.length for w in what), max(w.batch for w in what)
    limits = Limits(threads, length, batch, max(w.batch * w.context for w in what))
    manifest = Plan.open(models.plan(precision)).manifest
    engines: list[Measured] = []
    skipped: dict[str, str] = {}
    rates: list[float] = []

    def say(line: str) -> None:
        print(f"{models.name} {precision}: {line}", file=sys.stderr)
        rates.append(bandwidth.measure())

    begin = starters(models, peers, precision, limits)
    try:
        for name, start in begin.items():
            try:
                engines.append(start())
            except Skipped as reason:
                skipped[name] = str(reason)
        results = measure(engines, what, rounds, int(manifest["model"]["vocab_size"]), say)
        found = figures(results, list(begin), OURS, step_bytes(manifest), statistics.median(rates))
        for engine in engines:
            if engine.name in found["engines"]:
                found["engines"][engine.name]["peak_bytes"] = engine.peak_bytes()
    finally:
        for engine in engines:
            engine.close()
    found["skipped"] = skipped | found["skipped"]
    versions = {package: version for engine in engines for package, version in engine.versions.items()}
    return found | {"ours": OURS, "accuracy": manifest["accuracy"], "versions": versions}


def run(
    models: Models, peers: Peers, formats: list[str], threads: int, rounds: int, decode: int, command: str
) -> dict[str, Any]:
    """All that the script says, as JSON has it."""
    bandwidth = Bandwidth(models.folder, threads)
    results = {p: run_format(models, peers, p, threads, rounds, decode, bandwidth) for p in formats}
    return {
        "model": models.name, "date": datetime.date.today().isoformat(), "machine": this_machine(), "threads": threads,
        "rounds": rounds, "command": command, "workloads": [w.name for w in workloads(decode)], "formats": results,
        "versions": {package: v for result in results.values() for package, v in result["versions"].items()},
    }  # fmt: skip


def prepare(models: Models, peers: Peers, formats: list[str]) -> None:
    """Converts every model that `run` would, and says which cannot be."""
    for precision in formats:
        for make in (models.plan, models.openvino, models.onnxruntime, models.llama_cpp, models.transformers):
            try:
                print(make(precision))
            except Skipped as reason:
                print(f"{make.__name__} {precision}: skipped: {reason}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("checkpoint", nargs="?", type=Path, metavar="DIR", help="a Hugging Face directory")
    what.add_argument("--shape", choices=SHAPES, help="smollm2: the real one; the others have random weights")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="for converted models; kept")
    parser.add_argument("--format", action="append", choices=FORMATS, help="may be repeated (default: both)")
    parser.add_argument("--rounds", type=int, default=3, help="at least 3 for docs (default: 3)")
    parser.add_argument("--decode", type=int, default=64, help="tokens decoded after the first (default: 64)")
    parser.add_argument("--threads", type=int, default=default_threads(), help="of every engine (default: cores)")
    parser.add_argument("--prepare", action="store_true", help="only convert the models")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="FILE", help="default: docs/benchmarks.md")
    parser.add_argument("--no-docs", action="store_true", help="leave the documentation as it is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    for peer, meaning in (
        ("llama-cpp", "llama.cpp's build directory"),
        ("openvino-python", "Python with OpenVINO GenAI and optimum-intel"),
        ("onnxruntime-python", "Python with ONNX Runtime GenAI, onnx-ir and torch"),
        ("transformers-python", "Python with torch and transformers"),
    ):
        variable = "PEER_" + peer.upper().replace("-", "_")
        parser.add_argument(f"--{peer}", default=os.environ.get(variable), help=f"{meaning}; also ${variable}")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.rounds < 1 or given.threads < 1 or not 1 <= given.decode <= MAX_LENGTH - 512:
        parser.error(f"--rounds and --threads must be at least 1, --decode 1 to {MAX_LENGTH - 512}")
    if given.rounds < 3 and not (given.no_docs or given.prepare):
        parser.error("--rounds must be at least 3, or --no-docs be given")
    if given.checkpoint is not None and not (given.checkpoint / "config.json").is_file():
        parser.error(f"{given.checkpoint}: there is no config.json")
    llama_cpp = Path(given.llama_cpp).absolute() if given.llama_cpp else None
    peers = Peers(llama_cpp, given.openvino_python, given.onnxruntime_python, given.transformers_python)
    checkpoint = given.checkpoint.absolute() if given.checkpoint else None
    name = given.shape or given.checkpoint.absolute().name
    models = Models(name, checkpoint, given.work.absolute(), peers)
    formats = given.format or list(FORMATS)
    what = ["--shape", name] if given.shape else [name]
    what += ["--threads", str(given.threads), "--rounds", str(given.rounds), "--decode", str(given.decode)]
    command = shlex.join(["tests/peers/cpu.py", *what, *(f"--format={p}" for p in formats)])
    try:
        if given.prepare:
            prepare(models, peers, formats)
            return 0
        found = run(models, peers, formats, given.threads, given.rounds, given.decode, command)
        text = section(found)
        if not given.no_docs:
            write(given.docs, section_name(found), text)
    except (UserError, Skipped) as error:
        print(f"cpu.py: error: {error}", file=sys.stderr)
        return 2
    print(text)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
