"""`llmc tune`: the choice among a plan's alternative kernels, made on the GPU that will run them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

from llmc.codegen.plan_writer import PlanWriter
from llmc.errors import UserError
from llmc.runtime.config import LoadOptions
from llmc.runtime.cuda.load import open_cuda_executor
from llmc.runtime.plan import Plan


def tune_plan(plan: Plan, output: Path, options: LoadOptions, say: Callable[[str], None]) -> str:
    """Writes `plan` with the fastest kernels for this GPU to `output` (which may be the plan's own path); returns the
    new engine id. The choice stands in the manifest, key "tuning", by target.

    Raises UserError where there is no GPU that the plan has code for.
    """
    from llmc.runtime.cuda.tune import alternatives, choose, time_alternatives

    executor, target = open_cuda_executor(plan, options)
    try:
        found = alternatives(executor)
        if not found:
            raise UserError(f"{plan.path}: the code for {target.name} has no alternative kernels; nothing to tune")
        seconds = time_alternatives(executor, found)
    finally:
        executor.close()
    choices = choose(seconds)
    for key, times in seconds.items():
        shown = ", ".join(f"{t * 1e6:.1f}" + ("*" if i == choices.get(key, 0) else "") for i, t in enumerate(times))
        say(f"{key}: {shown} us")
    manifest = copy.deepcopy(plan.manifest)
    manifest["tuning"] = manifest.get("tuning", {}) | {target.name: choices}
    return write_copy(plan, output, manifest)


def write_copy(plan: Plan, output: Path, manifest: dict[str, object]) -> str:
    """The plan's segments under another manifest; returns the engine id."""
    with PlanWriter(output) as writer:
        for segment in plan.segments.values():
            writer.add_blocks(segment.name, segment.size, [(0, plan.segment(segment.name))])
        return writer.finish({k: v for k, v in manifest.items() if k not in ("abi", "segments")})
