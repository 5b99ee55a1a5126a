"""The plot of `llmc bench --plot`. Only this file needs matplotlib."""

from __future__ import annotations

import io
from typing import Any

from llmc.errors import UserError


def require_matplotlib() -> None:
    """Raises UserError where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"--plot needs the package {error.name}: pip install 'llmc[bench]'") from error


def bench_plot(result: dict[str, Any]) -> bytes:
    """A PNG of a result of `run_bench`: prefill by length, and decode by batch size below its roofline."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _prefill(left, result)
    _decode(right, result)
    plan, machine = result["plan"], result["machine"]
    figure.suptitle(
        f"{plan['checkpoint']}, {plan['precision']}: {machine['cpu']}, {machine['threads']} threads, "
        f"{machine['target']}",
        fontsize=10,
    )
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    return image.getvalue()


def _prefill(axes: Any, result: dict[str, Any]) -> None:
    cases = sorted(result["prefill"], key=lambda case: case["input_len"])
    lengths = [case["input_len"] for case in cases]
    rates = [case["tokens_per_second"] for case in cases]
    axes.bar([str(length) for length in lengths], rates, width=0.6, color="C0")
    for x, rate in enumerate(rates):
        axes.annotate(f"{rate:.0f}", (x, rate), ha="center", va="bottom")
    _labels(axes, "prefill", "tokens in the prompt")


def _decode(axes: Any, result: dict[str, Any]) -> None:
    decode = result["decode"]
    shortest = min((case["context_len"] for case in decode), default=0)
    cases = sorted((c for c in decode if c["context_len"] == shortest), key=lambda case: case["batch_size"])
    batches = [case["batch_size"] for case in cases]
    rates = [case["tokens_per_second"] for case in cases]
    # the nearer of the two limits stands at a fraction of 1
    bounds = [case["tokens_per_second"] / max(case["bandwidth_fraction"], case["peak_fraction"]) for case in cases]
    bandwidth = result["limits"]["read_bandwidth"] / 1e9
    axes.plot(batches, bounds, "--", color="C7", label=f"roofline: {bandwidth:.1f} GB/s, then arithmetic")
    axes.plot(batches, rates, "o-", color="C0", label="measured")
    for batch, rate in zip(batches, rates, strict=True):
        axes.annotate(f"{rate:.0f}", (batch, rate), textcoords="offset points", xytext=(0, 6), ha="center")
    axes.set_xticks(batches)
    _labels(axes, f"decode at context {shortest}", "sequences in the batch")
    if cases:
        axes.legend(frameon=False)


def _labels(axes: Any, title: str, x: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
