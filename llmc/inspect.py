"""What `llmc inspect` prints."""

from __future__ import annotations

from typing import Any

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
