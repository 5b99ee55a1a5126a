"""Launches that turn the logits of a step into tokens (kernels/triton/sampling.py)."""

from __future__ import annotations

from llmc.codegen.triton.builder import Args, Builder
from llmc.codegen.triton.launch import Arg, pow2
from llmc.runtime.cost import Cost

MAX_CHUNKS = 64
"""Pieces of a row in `stats`; equal to MAX_CHUNKS of kernels/triton/sampling.py."""


def emit_sampling(out: Builder, vocab: int) -> None:
    """For [R, vocab] float32 logits: statistics of each row, penalties where the step has any, and the draw."""
    chunk = pow2(-(-vocab // MAX_CHUNKS), 256)
    logits: Args = {"logits": ("*fp32", ("logits",))}
    adjusted: Args = {"adjusted": ("*fp32", ("adjusted",))}
    stats: Args = {"stats": ("*fp32", ("stats",))}
    batch = {n: ("*i32", ("batch", n)) for n in ("sampling", "extra", "positions", "rows")}
    outputs: dict[str, tuple[str, Arg]] = {
        "out_tokens": ("*i32", ("out", "tokens")), "out_logprobs": ("*fp32", ("out", "logprobs")),
    }  # fmt: skip
    row = Cost("R", activation_bytes=4 * vocab)
    constants = {"V": vocab, "CHUNK": chunk}
    out.emit(
        f"sample stats {vocab}", "sampling.sample_stats", logits | stats, constants, None, [],
        (("R", 1), -(-vocab // chunk)), tiles="sample stats", cost=row,
    )  # fmt: skip
    out.emit(
        f"adjust logits {vocab}", "sampling.adjust_logits",
        logits | adjusted | {n: batch[n] for n in ("sampling", "extra")}, {"V": vocab}, None, [],
        (("R", 1), (f"={vocab}", "BLOCK")), tiles="sample adjust", when="adjust", cost=row,
    )  # fmt: skip
    read = {n: batch[n] for n in ("sampling", "positions", "rows")}
    out.emit(
        f"sample {vocab}", "sampling.sample_rows", logits | adjusted | stats | read | outputs,
        constants, None, [], (("R", 1),), tiles="sample rows", cost=row,
    )  # fmt: skip
