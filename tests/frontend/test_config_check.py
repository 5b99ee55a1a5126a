"""frontend/config_check.py: numbers that no model can have."""

from __future__ import annotations

import math
from typing import Any

import pytest
from families import FAMILIES, tiny_config

from llmc.errors import UserError
from llmc.frontend.config import build_config

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 211}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tested_family_passes(family: str) -> None:
    raw = tiny_config(family).to_dict()
    assert build_config(raw, "config.json").model_type == family


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be a whole number from 1 to 4096"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide num_attention_heads, 4"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"rope_theta": math.nan}, "rope_theta is not a number"),
        ({"rope_theta": 0.0}, "rope_theta is 0; it must be a positive number"),
        ({"rope_theta": -10000}, "rope_theta is -10000"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is not a number"),
    ],
)
def test_what_no_model_can_have_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        build_config(LLAMA | change, "config.json")
    assert "\n" not in str(caught.value) and str(caught.value).startswith("config.json")


def test_names_of_a_familys_own_are_looked_at_too() -> None:
    with pytest.raises(UserError, match="num_hidden_layers is 0"):
        build_config({"model_type": "gpt2", "n_layer": 0}, "config.json")
