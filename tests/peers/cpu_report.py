"""What `cpu.py` and `serving.py` found, as Markdown, and its place in docs/benchmarks.md: a section for each, between
markers, so that a run replaces its own section and no other."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_engines import Skipped

from llmc.errors import UserError
from llmc.files import replace_file
from llmc.machine import cpu_model
from llmc.runtime.cpu.targets import host_features

DOCS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")


def this_machine() -> dict[str, Any]:
    """The CPU, its cores and extensions, memory and kernel."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_model(), "cores": os.cpu_count(),
        "features": [f for f in _FEATURES if f in host_features()], "memory_gib": memory / 2**30,
        "kernel": platform.release(),
    }  # fmt: skip


def machine_line(found: Mapping[str, Any]) -> str:
    """When and where it was measured. found: "date", "machine" and "threads"."""
    machine = found["machine"]
    return (
        f"{found['date']}. {machine['cpu']}, {found['threads']} threads on {machine['cores']} cores "
        f"({', '.join(machine['features']) or 'no vector extensions of note'}), {machine['memory_gib']:.0f} GiB, "
        f"Linux {machine['kernel']}."
    )


def section_name(found: Mapping[str, Any]) -> str:
    """Of a model on machines with one instruction set: runs on another kind of machine have sections of their own."""
    features = found["machine"]["features"]
    widest = next((f for f in ("amx_int8", "avx512_vnni", "avx_vnni", "avx2") if f in features), platform.machine())
    return f"{found['model']}, {widest}"


def section(found: Mapping[str, Any]) -> str:
    """found: as `cpu.run` returns it."""
    lines = [
        f"## {section_name(found)}",
        "",
        f"{machine_line(found)} {found['rounds']} rounds, medians.",
        "",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in found["versions"].items()) + ".",
        "",
        "    " + found["command"],
    ]
    for precision, result in found["formats"].items():
        lines += ["", f"### {precision}", "", *_table(result, found["workloads"]), ""]
        lines += [f"- {remark}" for remark in _remarks(result)]
    return "\n".join(lines) + "\n"


def _table(result: Mapping[str, Any], workloads: Sequence[str]) -> list[str]:
    rows = [["tokens/s", *workloads, "peak memory", "spread"], ["---", *["---:"] * (len(workloads) + 2)]]
    for name, engine in result["engines"].items():
        cells = []
        for workload in workloads:
            rate, ratio = engine["tokens_per_s"].get(workload), engine["ratio"].get(workload)
            cell = f"{rate:.{_decimals(rate)}f}" if rate else ""
            cells.append(cell if ratio is None or name == result["ours"] else f"{cell} ({ratio:.2f})")
        rows.append([name, *cells, f"{engine['peak_bytes'] / 1e9:.2f} GB", f"{engine['spread']:.0%}"])
    return ["| " + " | ".join(row) + " |" for row in rows]


def _decimals(rate: float) -> int:
    return 0 if rate >= 100 else 1


def _remarks(result: Mapping[str, Any]) -> list[str]:
    share = ", ".join(f"{name} {value:.0%}" for name, value in result["bandwidth_share"].items())
    lines = [
        f"Memory reads {result['bandwidth'] / 1e9:.1f} GB/s; of that llmc takes, with "
        f"{result['step_bytes'] / 1e6:.0f} MB of weights a step: {share}."
    ]
    if accuracy := result["accuracy"]:
        lines.append(
            f"llmc's plan: mean KL {accuracy['mean_kl']:.4g} against float32, top-1 agreement "
            f"{accuracy['top1_agreement']:.2%}, {accuracy['tokens']} tokens."
        )
    return lines + [f"{name}: skipped: {reason}." for name, reason in result["skipped"].items()]


def put(document: str, name: str, text: str) -> str:
    """The document with `text` between the markers of `name`; at the end when it has none yet. Raises UserError for a
    document whose markers do not pair."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if (document.count(begin), document.count(end)) not in ((0, 0), (1, 1)):
        raise UserError(f"the markers {begin} and {end} do not pair; mend or delete them")
    block = f"{begin}\n{text}{end}"
    if begin not in document:
        return f"{document.rstrip()}\n\n{block}\n".lstrip("\n")
    found = re.compile(re.escape(begin) + ".*" + re.escape(end), re.DOTALL)
    if not found.search(document):
        raise UserError(f"{end} stands before {begin}; mend or delete them")
    return found.sub(lambda match: block, document)


def write(path: Path, name: str, text: str) -> None:
    """Replaces the section of `name` in the file."""
    replace_file(path, put(path.read_text() if path.exists() else "", name, text).encode())


def publish(script: str, name: str, make: Callable[[], str], docs: bool) -> int:
    """Prints the section that `make` returns and, with docs, puts it into DOCS. Returns the script's exit code: 2 where
    the user can mend what is wrong."""
    try:
        text = make()
        if docs:
            write(DOCS, name, text)
    except (UserError, Skipped) as error:
        print(f"{script}: error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0
