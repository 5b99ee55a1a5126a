"""What `llmc inspect` prints."""

from __future__ import annotations

from typing import Any

from llmc.roofline import CONTEXT, PROMPT, KernelEstimate, kernel_estimates, step_seconds
from llmc.runtime.cuda.archive_format import read_header
from llmc.runtime.cuda.occupancy import resident_blocks
from llmc.runtime.cuda.targets import CUDA_TARGETS, CudaTarget
from llmc.runtime.plan import Plan


def summary(manifest: dict[str, Any]) -> str:
    """The manifest in a few lines for people."""
    model, memory, made = manifest["model"], manifest["memory"], manifest["provenance"]
    lines = [
        f"  checkpoint   {made['checkpoint']['name']}  sha256 {made['checkpoint']['sha256'][:16]}",
        f"  model        {model['architecture']}, {model['num_layers']} layers, vocabulary {model['vocab_size']}, "
        f"context {model['max_model_len']}",
        f"  precision    {model['precision']}, KV {model['kv_dtype']} ({model['kv_bytes_per_token']} bytes a token)",
        f"  weights      {memory['weight_bytes'] / 2**20:.1f} MiB",
        f"  targets      {', '.join(manifest['targets'])}",
        f"  built with   llmc {made['llmc']}, " + ", ".join(f"{k} {v}" for k, v in made["tools"].items()),
        "  passes       " + ", ".join(f"{p['name']} {p['count']}" for p in made["passes"]),
    ]
    found = manifest["accuracy"]
    if found is None:
        return "\n".join([*lines, "  accuracy     not measured"])
    change = found["perplexity"] / found["perplexity_float32"] - 1
    lines.append(
        f"  accuracy     mean KL {found['mean_kl']:.4g}, perplexity {found['perplexity']:.4g} "
        f"(float32 {found['perplexity_float32']:.4g}, {change:+.2%}), top-1 agreement {found['top1_agreement']:.2%}, "
        f"{found['tokens']} tokens of {found['text']}"
    )
    return "\n".join(lines)


def segments(plan: Plan) -> str:
    """The segment table."""
    rows = [f"  {s.name:28} {s.size:>12} bytes at {s.offset}" for s in plan.segments.values()]
    return "\n".join(["  segments", *("  " + r for r in rows)])


def gpu_kernels(plan: Plan) -> str:
    """For every CUDA target: each kernel with its resources and its time at the roofline, and what steps come to."""
    lines: list[str] = []
    for target in CUDA_TARGETS:
        if target.name in plan.manifest["targets"]:
            header = read_header(plan.segment(f"code/{target.name}"))
            lines += _target_lines(header, target, plan.manifest.get("tuning", {}).get(target.name))
    return "\n".join(lines)


def _target_lines(header: dict[str, Any], target: CudaTarget, tuning: dict[str, int] | None) -> list[str]:
    decode = step_seconds(header, target, 1, 1, prompt=False)
    batch = step_seconds(header, target, 16, 16, prompt=False)
    prefill = step_seconds(header, target, PROMPT, 1, prompt=True)
    tuned = f", tuned ({len(tuning)} choices)" if tuning is not None else ""
    return [
        f"  {target.name}{tuned}: {len(header['kernels'])} kernels, {len(header['calls'])} launches in a step; at the "
        f"roofline of {target.example} (context {CONTEXT}, no launch overhead):",
        f"    decode {1 / decode:.0f} tokens/s at batch 1, {16 / batch:.0f} at batch 16; prefill of {PROMPT}: "
        f"{PROMPT / prefill:.0f} tokens/s",
        f"    {'kernel':44} {'rows':>6} {'warps':>5} {'shared':>7} {'regs':>4} {'spill':>5} {'blocks':>6} {'us':>8}  "
        "bound   per step  tensor core",
        *(_kernel_line(e, target) for e in kernel_estimates(header, target)),
    ]


def _kernel_line(estimate: KernelEstimate, target: CudaTarget) -> str:
    k = estimate.kernel
    blocks = resident_blocks(target, k["warps"], k["registers"], k["shared"])
    limit = f"<={k['max_tokens']}" if k["max_tokens"] else "any"
    return (
        f"    {k['op'][:44]:44} {limit:>6} {k['warps']:>5} {k['shared']:>7} {k['registers']:>4} {k['spill_bytes']:>5} "
        f"{blocks:>6} {estimate.seconds * 1e6:>8.2f}  {estimate.bound:7} {estimate.launches:>8}  "
        f"{' '.join(k['instructions'])}"
    )
