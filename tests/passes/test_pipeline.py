"""Every family through export, import and all passes, against transformers in float32; counts per rewrite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, VOCAB, own_weights, tiny_config, tiny_model

from llmc.frontend.export import build_meta_model, export_model
from llmc.frontend.tokens_major import import_graph
from llmc.kernels.dialect import OPS
from llmc.kernels.formats import W8
from llmc.kernels.interpret import run_graph
from llmc.passes.pipeline import PIPELINE, listing, probe_batch, run_pipeline
from llmc.passes.result import PassContext
from llmc.passes.verify import VIEWS

EXPECTED = {  # family: (norms, rope, activations, merged linears, epilogues)
    "llama": (5, 4, 4, 4, 4), "qwen2": (5, 4, 4, 4, 4), "qwen3": (9, 4, 4, 4, 4), "mistral": (5, 4, 4, 4, 4),
    "phi3": (5, 4, 4, 2, 4), "gemma2": (9, 4, 4, 4, 4), "gemma3_text": (13, 4, 4, 4, 4), "gpt2": (5, 0, 2, 0, 6),
    "opt": (5, 0, 2, 2, 6), "olmo2": (9, 4, 4, 4, 4), "gpt_neox": (5, 4, 2, 0, 4),
    "cohere": (3, 4, 4, 4, 4), "glm": (5, 4, 4, 4, 4), "nemotron": (5, 4, 2, 2, 6),
}  # fmt: skip


def _reader(model: Any) -> Any:
    values = {k: v.detach().numpy() for k, v in model.state_dict().items()}
    return lambda name, start, stop: values[name][start:stop]


def _import(family: str, **overrides: Any) -> Any:
    meta = build_meta_model(tiny_config(family, **overrides))
    return import_graph(export_model(meta), own_weights(meta))


@pytest.mark.parametrize("family", FAMILIES)
def test_family_lowers_to_the_dialect_and_keeps_its_logits(family: str) -> None:
    model = tiny_model(family)
    graph = _import(family)
    reader, probe = _reader(model), probe_batch(VOCAB)
    report = run_pipeline(graph, PassContext(), (probe, reader))

    counts = report.counts
    found = tuple(counts[n] for n in ("norms", "rope", "activations", "merge_linears", "epilogue"))
    assert found == EXPECTED[family]
    assert counts["kv_layout"] == 2 and counts["select_rows"] == 1
    assert all(n.target in {*OPS.values(), *VIEWS} for n in graph.nodes if n.op == "call_function")
    logits = run_graph(graph, probe, reader)
    with torch.no_grad():
        parts = [model(part[None]).logits[0] for part in probe["tokens"].split([7, 4])]
    torch.testing.assert_close(logits, torch.cat(parts)[probe["rows"]], rtol=0, atol=1e-4)


def test_quantised_graph_stays_near_the_float_graph() -> None:
    model, graph = tiny_model("llama"), _import("llama")
    report = run_pipeline(graph, PassContext(W8, W8, "bf16"), (probe_batch(VOCAB), _reader(model)))
    assert report.counts["quantize"] == 2 * 4 + 2  # qkv, o, gate+up, down per layer; head and embedding
    assert 0 < report.changes["quantize"] < 0.05


def test_a_tied_table_is_one_weight() -> None:
    graph = _import("llama", tie_word_embeddings=True)
    run_pipeline(graph, PassContext())
    tables = [n for n in graph.nodes if "weight" in n.meta and n.meta["weight"].shape == (VOCAB, 64)]
    assert len(tables) == 1 and len(tables[0].users) == 2


def test_the_listing_is_stable() -> None:
    listings = []
    for _ in range(2):
        graph = _import("qwen3")
        run_pipeline(graph, PassContext())
        listings.append(listing(graph))
    assert listings[0] == listings[1]


def test_dump_writes_a_file_per_pass_with_counts(tmp_path: Any) -> None:
    graph = _import("gpt_neox")
    run_pipeline(graph, PassContext(), dump=tmp_path)
    files = sorted(p.name for p in tmp_path.iterdir())
    assert len(files) == len(PIPELINE) + 1 and files[0] == "00_import.txt"
    assert (tmp_path / "10_split_heads.txt").read_text().startswith("# pass split_heads: 2 rewrites")


def test_reading_weights_in_blocks_gives_the_same_rows() -> None:
    model = tiny_model("gpt_neox")
    graph = _import("gpt_neox")
    run_pipeline(graph, PassContext())
    reader = _reader(model)
    for node in graph.nodes:
        ref = node.meta.get("weight")
        if ref is None:
            continue
        whole = ref.read(reader)
        assert whole.shape == ref.shape
        pieces = [ref.read(reader, i, min(i + 5, ref.shape[0])) for i in range(0, ref.shape[0], 5)]
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
