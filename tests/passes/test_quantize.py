"""Which format a weight takes: what was asked for, or that of the grid which its checkpoint stores it on."""

from __future__ import annotations

from typing import Any

from families import VOCAB, own_weights, tiny_config, tiny_model

from llmc.frontend.export import build_meta_model, export_model
from llmc.frontend.tokens_major import import_graph
from llmc.kernels.formats import BF16, F32, W4, W4A16, W8, W8A16, Format
from llmc.kernels.ops import Embed, Linear
from llmc.kernels.weights import Stored, Zeros, concat
from llmc.passes.pipeline import probe_batch, run_pipeline
from llmc.passes.quantize import format_of
from llmc.passes.result import PassContext


def test_the_format_of_a_weight() -> None:
    grids = {"four": W4, "eight": W8}
    four, eight, plain = (Stored((32, 64), name) for name in ("four", "eight", "plain"))
    ctx = PassContext(W8, W8, grids=grids)
    assert [format_of(ref, W8, ctx) for ref in (four, eight, plain, None)] == [W4, W8, W8, W8]
    assert format_of(four, W8, PassContext(W8, W8)) is W8, "grids are not kept"
    assert [format_of(ref, BF16, ctx) for ref in (four, plain)] == [W4, BF16]
    assert [format_of(ref, W4A16, ctx) for ref in (four, eight, plain)] == [W4A16, W8A16, W4A16]
    assert format_of(concat((four, eight)), W4, ctx) is W8, "one matrix, the widest of its parts"
    assert format_of(concat((four, plain)), F32, ctx) is F32
    assert format_of(Zeros((32, 64)), W4, ctx) is W4


def _formats(grids: dict[str, Format], **overrides: Any) -> tuple[dict[str, str], Any]:
    """({tensors of a matrix: its format} after all passes, the pipeline's report)."""
    model = tiny_model("llama", **overrides)
    values = {k: v.detach().numpy() for k, v in model.state_dict().items()}
    meta = build_meta_model(tiny_config("llama", **overrides))
    graph = import_graph(export_model(meta), own_weights(meta))
    probe = (probe_batch(VOCAB), lambda name, start, stop: values[name][start:stop])
    report = run_pipeline(graph, PassContext(W8, W8, "bf16", grids), probe)
    found = {}
    for node in graph.nodes:
        op = Linear.match(node) or Embed.match(node)
        if op is not None:
            names = (name.removesuffix(".weight") for name in op.weight.meta["weight"].tensors())
            found[" ".join(name.removeprefix("model.layers.") for name in names)] = op.format.name
    return found, report


def test_weights_on_grids_of_different_formats_are_not_merged() -> None:
    grids = {f"model.layers.0.self_attn.{x}_proj.weight": W4 for x in "qk"} | {
        "model.layers.0.self_attn.v_proj.weight": W8, "model.layers.0.mlp.gate_proj.weight": W4,
        "model.layers.1.mlp.gate_proj.weight": W4, "model.layers.1.mlp.up_proj.weight": W4,
    }  # fmt: skip
    found, report = _formats(grids)
    assert {name: format for name, format in found.items() if name.startswith("0.")} == {
        "0.self_attn.q_proj 0.self_attn.k_proj": "w4", "0.self_attn.v_proj": "w8", "0.self_attn.o_proj": "w8",
        "0.mlp.gate_proj": "w4", "0.mlp.up_proj": "w8", "0.mlp.down_proj": "w8",
    }  # fmt: skip
    assert found["1.mlp.gate_proj 1.mlp.up_proj"] == "w4"
    assert found["1.self_attn.q_proj 1.self_attn.k_proj 1.self_attn.v_proj"] == "w8"
    assert any("different formats" in why for _, why in report.skipped["merge_linears"])


def test_a_tied_table_on_a_grid_is_one_weight_in_its_format() -> None:
    tables = ("lm_head", "model.embed_tokens")
    found, _ = _formats({f"{name}.weight": W4 for name in tables}, tie_word_embeddings=True)
    assert [format for name, format in found.items() if name in tables] == ["w4"], "one recipe"
