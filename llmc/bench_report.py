"""What `llmc bench` prints."""

from __future__ import annotations

from typing import Any

_HEAD = f"{'tokens/s':>9} {'ms':>9} {'GB/s':>8} {'of limit':>9} {'Gop/s':>8} {'of peak':>8}"
_GROUPS = {
    "sampling": ("sample",),
    "embed": ("embed",),
    "rope/kv": ("rope", "kv_write"),
    "route/gather": ("route", "gather_pairs", "combine_pairs"),
    "norm/quantize": ("rms_norm", "layer_norm", "rms_norm_add", "quantize"),
}
"""Kernels by the group that a phase with them counts as, the first that applies."""


def bench_report(result: dict[str, Any]) -> str:
    """The tables of a result of `run_bench`."""
    plan, machine, limits = result["plan"], result["machine"], result["limits"]
    used = {kind for case in result["prefill"] + result["decode"] for kind in case["ops"]}
    peaks = ", ".join(f"{rate / 1e9:.1f} Gop/s {kind}" for kind, rate in limits["peak_ops"].items() if kind in used)
    lines = [
        f"  plan         {plan['checkpoint']}, {plan['precision']}, KV {plan['kv_dtype']}, "
        f"engine {plan['engine_id'][:16]}",
        f"  machine      {machine['cpu']}, {machine['threads']} threads, {machine['target']}",
        f"  limits       reads {limits['read_bandwidth'] / 1e9:.2f} GB/s; {peaks} (measured in this run)",
    ]
    if result["prefill"]:
        lines += ["  prefill", f"    {'prompt':>15} {_HEAD}"]
        lines += [f"    {case['input_len']:>15} {_figures(case, case['seconds'])}" for case in result["prefill"]]
    if result["decode"]:
        lines += [f"  decode, {result['decode'][0]['output_len']} steps", f"    {'batch':>6} {'context':>8} {_HEAD}"]
        lines += [
            f"    {case['batch_size']:>6} {case['context_len']:>8} {_figures(case, case['seconds_per_step'])}"
            for case in result["decode"]
        ]
    for profile in result["profile"]:
        lines += _profile_lines(profile)
    return "\n".join([*lines, *(f"  note: {note}" for note in result["notes"])])


def _figures(case: dict[str, Any], seconds: float) -> str:
    return (
        f"{case['tokens_per_second']:>9.1f} {seconds * 1e3:>9.2f} {case['bytes_per_second'] / 1e9:>8.2f} "
        f"{case['bandwidth_fraction']:>9.1%} {case['ops_per_second'] / 1e9:>8.1f} {case['peak_fraction']:>8.1%}"
    )


def phase_group(label: str) -> str:
    """The line of the profile that a phase counts in: that of its dearest kernel."""
    kernels = label.split("+")
    for kernel in kernels:
        if kernel.startswith(("linear ", "head ", "experts ")):
            return kernel
    names = {kernel.split()[0] for kernel in kernels}
    if any(name.startswith("attention") for name in names):
        return "attention"
    return next((group for group, members in _GROUPS.items() if names & set(members)), "elementwise")


def profile_groups(profile: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds per step, bytes and operations of every group, dearest first; "outside" is what is left of the step:
    checking and handing over the batch."""
    groups: dict[str, dict[str, Any]] = {}
    for phase in profile["phases"]:
        name = phase_group(phase["label"])
        group = groups.setdefault(name, {"group": name, "seconds": 0.0, "bytes": 0.0, "ops": 0.0})
        for key in ("seconds", "bytes", "ops"):
            group[key] += phase[key]
    rest = profile["seconds_per_step"] - sum(group["seconds"] for group in groups.values())
    found = sorted(groups.values(), key=lambda group: -group["seconds"])
    return [*found, {"group": "outside", "seconds": rest, "bytes": 0.0, "ops": 0.0}]


def _profile_lines(profile: dict[str, Any]) -> list[str]:
    total = profile["seconds_per_step"]
    lines = [
        f"  profile of {profile['name']}: {total * 1e3:.2f} ms a step",
        f"    {'group':15} {'ms':>9} {'share':>7} {'GB/s':>8} {'Gop/s':>8}",
    ]
    for group in profile_groups(profile):
        seconds = group["seconds"]
        rates = [f"{group[key] / seconds / 1e9:.1f}" if group["ops"] else "" for key in ("bytes", "ops")]
        lines.append(
            f"    {group['group']:15} {seconds * 1e3:>9.3f} {seconds / total:>7.1%} {rates[0]:>8} {rates[1]:>8}"
        )
    return lines
