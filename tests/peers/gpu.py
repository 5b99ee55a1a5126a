#!/usr/bin/env python3
"""Measures a plan on this machine's GPU beside its peers: prefill, decode, and the share of the memory's bandwidth.

Engines take turns in every round, each on the same random token ids, and give exactly the tokens asked for. Decoding
is the time of prompt and tokens minus the time of prompt and first token. llmc is measured as `llmc serve` runs it,
without HTTP and text; transformers (static cache, torch.compile) and vLLM run in bfloat16 through their own `generate`,
in processes of their own. "of bandwidth": the weights, keys and values that a step reads, over its time, over the rate
of a large copy on the same GPU (bytes read and written).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # llmc, from a checkout that is not installed

from gpu_engines import Measured, Ours, Peer, Skipped
from gpu_rounds import StepBytes, figures, measure, table, workloads

from llmc.errors import UserError
from llmc.runtime.config import LoadOptions
from llmc.runtime.cuda.archive_format import read_header
from llmc.runtime.cuda.driver import CudaDevice, open_device
from llmc.runtime.cuda.targets import choose_cuda_target
from llmc.runtime.load import load_engine
from llmc.runtime.plan import Plan

COPY_BYTES, COPIES = 1 << 30, 20
MEMORY_SHARE = 0.3
"""Of the GPU for llmc; the peers need some too."""


def copy_bandwidth(device: CudaDevice) -> float:
    """Bytes/s of device-to-device copies, read and written ones counted; the best of five runs."""
    from cuda.bindings import driver

    device.activate()
    source, target = device.allocate(COPY_BYTES), device.allocate(COPY_BYTES)
    device.synchronize()
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(COPIES):
            _check(driver.cuMemcpyDtoDAsync(target, source, COPY_BYTES, 0))
        _check(driver.cuStreamSynchronize(0))
        best = max(best, 2 * COPY_BYTES * COPIES / (time.perf_counter() - start))
    device.free(source)
    device.free(target)
    return best


def _check(result: tuple[Any, ...]) -> None:
    if result[0]:
        raise RuntimeError(f"a copy on the GPU failed: {result[0]}")


def environment(device: CudaDevice) -> dict[str, Any]:
    """The GPU, its driver, and the versions of what runs here."""
    found: dict[str, Any] = {
        "gpu": device.name, "capability": f"sm_{device.capability}", "multiprocessors": device.multiprocessors,
        "python": platform.python_version(),
    }  # fmt: skip
    version = Path("/proc/driver/nvidia/version")
    found["driver"] = version.read_text().splitlines()[0] if version.exists() else "unknown"
    for package in ("cuda-bindings", "numpy"):
        found[package] = metadata.version(package)
    return found


def start_peers(checkpoint: Path | None, length: int, batch: int) -> tuple[list[Peer], dict[str, str]]:
    """The peers that run here, and why the others do not."""
    started, skipped = [], {}
    for name in ("transformers", "vllm"):
        if checkpoint is None:
            skipped[name] = "needs --checkpoint"
            continue
        try:
            started.append(Peer(name, checkpoint, "cuda", length, batch))
        except Skipped as reason:
            skipped[name] = str(reason)
    return started, skipped


def run(plan: Plan, checkpoint: Path | None, rounds: int, decode: int) -> dict[str, Any]:
    """All that the script says, as JSON has it. Raises UserError where there is no GPU that the plan has code for."""
    device = open_device()
    try:
        target = choose_cuda_target(list(plan.manifest["targets"]), device.capability)
        read = StepBytes.of(read_header(plan.segment(f"code/{target.name}")))
        around, bandwidth = environment(device), copy_bandwidth(device)
    finally:
        device.close()
    limit = int(plan.manifest["model"]["max_model_len"])
    what = [w for w in workloads(decode) if w.length <= limit]
    length, batch = max(w.length for w in what), max(w.batch for w in what)
    options = LoadOptions(max_model_len=length, max_num_seqs=batch, device="cuda", gpu_memory_utilization=MEMORY_SHARE,
                          prefix_cache=False)  # fmt: skip
    engines: list[Measured] = [Ours(load_engine(plan, None, options))]
    try:
        peers, skipped = start_peers(checkpoint, length, batch)
        engines += peers
        vocab = int(plan.manifest["model"]["vocab_size"])
        results = measure(engines, what, rounds, vocab, lambda line: print(line, file=sys.stderr))
    finally:
        for engine in engines:
            engine.close()
    names = [engine.name for engine in engines]
    for peer in peers:
        around |= peer.versions
    return {
        "environment": around, "plan": {"engine_id": plan.engine_id, "target": target.name, **plan.manifest["model"]},
        "copy_bandwidth": bandwidth, "weight_bytes": read.weights, "rounds": rounds, "engines": names,
        "skipped": skipped | results.skipped,
        "workloads": figures(results, names, Ours.name, read, bandwidth),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="with code for this machine's GPU")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="the plan's model for the peers, as Hugging Face"
    )
    parser.add_argument("--rounds", type=int, default=3, help="at least 3 (default: 3)")
    parser.add_argument("--decode", type=int, default=64, help="tokens decoded after the first (default: 64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    given = parser.parse_args(arguments)
    if given.rounds < 3 or given.decode < 1:
        parser.error("--rounds must be at least 3, --decode at least 1")
    if given.checkpoint is not None and not (given.checkpoint / "config.json").is_file():
        parser.error(f"--checkpoint {given.checkpoint}: there is no config.json")
    try:
        found = run(Plan.open(given.plan), given.checkpoint, given.rounds, given.decode)
    except UserError as error:
        print(f"gpu.py: error: {error}", file=sys.stderr)
        return 2
    around = found["environment"]
    print(", ".join(f"{key} {value}" for key, value in around.items()))
    print(f"copy {found['copy_bandwidth'] / 1e9:.0f} GB/s; {found['plan']['precision']}, {found['plan']['target']}")
    print(table(found["workloads"], found["engines"], Ours.name))
    for name, reason in found["skipped"].items():
        print(f"{name}: skipped: {reason}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
