"""The flags of `llmc build` as values, and what they ask of the passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmc.errors import UserError
from llmc.kernels.formats import BF16, F32, W4, W8, Format
from llmc.passes.result import PassContext

PRECISIONS = {"fp32": (F32, F32, "f32"), "bf16": (BF16, BF16, "bf16"), "int8": (W8, W8, "bf16"),
              "int4": (W4, W8, "bf16")}  # fmt: skip
"""precision -> (format of linears, format of head and token embedding, KV dtype)"""
KV_DTYPES = {"fp32": "f32", "bf16": "bf16", "int8": "int8"}
"""--kv-cache-dtype -> KV dtype"""


@dataclass(frozen=True)
class BuildOptions:
    """The flags of `llmc build`; see its help. targets: names as the user wrote them, () is DEFAULT_TARGETS.

    precision: None is as stored, and int8 for what is not quantised. as_stored: True keeps every grid of a quantised
    checkpoint in the format that holds it, False quantises its values, None keeps grids where the precision that was
    asked for holds them.
    """

    precision: str | None = None
    as_stored: bool | None = None
    weight_only: bool = False
    kv_cache_dtype: str | None = None
    targets: tuple[str, ...] = ()
    max_model_len: int | None = None
    check_passes: bool = False
    dump_ir: Path | None = None
    evaluate: bool = True
    eval_text: Path | None = None
    max_kl: float | None = None
    max_weight_bytes: int | None = None
    calibrate: bool = True
    calibration_text: Path | None = None
    sha256: str | None = None
    revision: str | None = None
    cxx: str | None = None


def pass_context(options: BuildOptions, grids: Mapping[str, Format] | None = None) -> PassContext:
    """grids: of the checkpoint's quantised tensors. Raises UserError for flags that do not go together."""
    if options.max_weight_bytes is not None and (options.precision or options.as_stored or options.weight_only):
        raise UserError("--max-weight-bytes: chooses between 4 and 8 bits by itself; leave out other precisions")
    body, head, kv = PRECISIONS[options.precision or ("int8" if options.max_weight_bytes is None else "int4")]
    if options.weight_only:
        weights, head_weights = body.weight_only, head.weight_only
        if weights is None or head_weights is None:
            raise UserError("--weight-only: needs --int8 or --int4; other weights are not quantised")
        body, head = weights, head_weights
    unasked = options.precision is None and options.max_weight_bytes is None
    kept = unasked if options.as_stored is None else options.as_stored
    kv = KV_DTYPES[options.kv_cache_dtype] if options.kv_cache_dtype else kv
    return PassContext(body, head, kv, (grids or {}) if kept else {})
