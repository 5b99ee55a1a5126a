"""SmolLM2 cut into a mixture of four experts that are all chosen, each a quarter of every MLP: the same function."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from e2e_harness import llmc
from e2e_prompts import PROMPTS
from e2e_reference import Reference
from tiny_engines import Sequences

from llmc.runtime.cpu.executor import CpuExecutor, ExecutorConfig
from llmc.runtime.plan import Plan

pytestmark = pytest.mark.e2e
EXPERTS = 4
DECODED = 24


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, reference: Reference) -> Path:
    """A checkpoint: experts are slices of gate, up and down; the router's weights are 0, so every expert has a quarter
    of the weight, and down is four times as large."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dense = reference.model
    config = dense.config
    width = config.intermediate_size // EXPERTS
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings")  # fmt: skip
    settings = {name: getattr(config, name) for name in same}
    mixed = AutoConfig.for_model(
        "mixtral", **settings, intermediate_size=width, num_local_experts=EXPERTS, num_experts_per_tok=EXPERTS
    )
    model = AutoModelForCausalLM.from_config(mixed, dtype=torch.float32)
    state = {name: value for name, value in dense.state_dict().items() if ".mlp." not in name}
    for i, layer in enumerate(dense.model.layers):
        gate, up, down = (getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
        stacks = [w.view(EXPERTS, width, -1) for w in (gate, up)]
        prefix = f"model.layers.{i}.mlp."
        state[f"{prefix}gate.weight"] = torch.zeros(EXPERTS, config.hidden_size)
        state[f"{prefix}experts.gate_up_proj"] = torch.cat(stacks, 1)
        state[f"{prefix}experts.down_proj"] = EXPERTS * down.view(-1, EXPERTS, width).transpose(0, 1)
    model.load_state_dict(state)
    directory = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(directory)
    return directory


def _generated(plan: Plan, prompts: list[list[int]]) -> Sequences:
    (target,) = plan.manifest["targets"]
    engine = CpuExecutor(plan.segment(f"code/{target}"), plan.segment("weights"), ExecutorConfig(256, 256, 64, 2))
    try:
        s = Sequences(engine, [list(p) for p in prompts])
        s.decode(s.step({i: len(p) for i, p in enumerate(prompts)}), DECODED)
        return s
    finally:
        engine.close()


def test_a_mixture_of_all_quarters_gives_the_dense_models_tokens(
    mixture: Path, fp32_plan: Path, tmp_path: Path, reference: Reference
) -> None:
    done = llmc("build", mixture, "--target", "native", "-o", tmp_path / "mixture.plan", "--fp32", "--no-eval")
    assert done.returncode == 0, done.stderr
    prompts = [reference.codec.encode(text)[:60] for text in PROMPTS[4:8]]
    dense, mixed = (_generated(Plan.open(path), prompts) for path in (fp32_plan, tmp_path / "mixture.plan"))
    assert mixed.tokens == dense.tokens and len(mixed.tokens[0]) == len(prompts[0]) + DECODED
    for i in range(len(prompts)):
        np.testing.assert_allclose(mixed.rows(i), dense.rows(i), rtol=0, atol=2e-3)
