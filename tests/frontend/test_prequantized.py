"""Quantised safetensors checkpoints: values and codes to the bit, and refusals by name."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frontend_builders import meta_model, tiny_llama
from quantised_builders import DIMS, FORMATS, awq, configure, gptq, quantised_llama, words
from safetensors.torch import load_file, save_file

from llmc.errors import UserError
from llmc.frontend.open import match_parameters, open_checkpoint
from llmc.frontend.source import Source
from llmc.kernels.formats import W4, W8
from llmc.kernels.weights import concat

INT4 = ("GPTQ", "GPTQ v2", "GPTQ, groups of 64", "AWQ", "packed int4", "packed int4, zeros")
"""Those whose grids int4 holds; the others' are taken in 8 bits."""
PROJECTION = "model.layers.1.mlp.down_proj.weight"


def open_dir(path: Path) -> Any:
    return open_checkpoint(Source(path, "dir", path.name))


@pytest.mark.parametrize("name", FORMATS)
def test_values_and_codes_are_those_that_were_packed(name: str, tmp_path: Path) -> None:
    grids = quantised_llama(tmp_path, name)
    ckpt = open_dir(tmp_path)
    recipes = match_parameters(ckpt, meta_model(ckpt))
    assert getattr(ckpt.hf_config(), "quantization_config", None) is None
    assert set(grids) == {n for n, info in ckpt.tensors.items() if info.grid is not None} and len(grids) == 14
    for parameter, grid in grids.items():
        ref, (n, k) = recipes[parameter], grid.values.shape
        np.testing.assert_array_equal(ref.read(ckpt.read), grid.values, err_msg=parameter)
        np.testing.assert_array_equal(ref.read(ckpt.read, 5, 19), grid.values[5:19])
        assert ckpt.tensors[parameter].grid is (W4 if name in INT4 else W8)
        for rows in (slice(0, n), slice(3, 21)):
            codes = ref.codes(ckpt.codes, rows.start, rows.stop)
            if grid.q is None:
                assert codes is None
                continue
            assert codes is not None and grid.scale is not None and codes.k == k
            np.testing.assert_array_equal(codes.q.reshape(len(codes), k), grid.q[rows])
            wanted = np.repeat(grid.scale[rows], k // 32 // grid.scale.shape[1], axis=1)
            np.testing.assert_array_equal(codes.scale.astype(np.float64), wanted.astype(np.float64))
    ckpt.close()


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("GPTQ int8", "GPTQ act-order")])
def test_grids_are_held_by_their_formats(name: str, tmp_path: Path) -> None:
    """8 bits hold all of them; int4 holds its own, with zeros but for the rounding of the minimum in float16."""
    grids = quantised_llama(tmp_path, name)
    ckpt = open_dir(tmp_path)
    for parameter, grid in grids.items():
        codes = ckpt.codes(parameter, 0, len(grid.values))
        if codes is None:
            continue
        eight = codes.held_by(W8)
        assert eight is not None
        np.testing.assert_array_equal(eight.values(), grid.values)
        if name in INT4:
            four = codes.held_by(W4)
            assert four is not None
            limit = 0 if name == "packed int4" else 2.0**-11 * 15 * float(codes.scale.max())
            np.testing.assert_allclose(four.values(), grid.values, rtol=1e-6, atol=limit)
    ckpt.close()


def test_the_first_version_of_gptq_carries_between_zeros(tmp_path: Path) -> None:
    """A zero stored as 15 becomes 0 and adds one to the next, as in the libraries, which add to whole words."""
    quantised_llama(tmp_path, "GPTQ")
    edit(tmp_path, lambda s: s[PROJECTION.replace("weight", "qzeros")].fill_(0x0000000F))
    ckpt = open_dir(tmp_path)
    codes = ckpt.codes(PROJECTION, 0, 8)
    packed = load_file(tmp_path / "model.safetensors")[PROJECTION.replace("weight", "qweight")].numpy()
    u = (packed[0, :8].view(np.uint32)[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    zeros = np.array([0, 2, 1, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(codes.q.reshape(8, -1)[:, :8], u.astype(int) - zeros[:, None])


def test_merged_projections_keep_their_codes(tmp_path: Path) -> None:
    grids = quantised_llama(tmp_path, "AWQ")
    ckpt = open_dir(tmp_path)
    recipes = match_parameters(ckpt, meta_model(ckpt))
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    codes = concat(tuple(recipes[name] for name in names)).codes(ckpt.codes, 50, 110)
    assert codes is not None
    q = np.concatenate([grids[name].q for name in names])[50:110]  # type: ignore[misc]
    np.testing.assert_array_equal(codes.q.reshape(60, -1), q)


def test_modules_that_store_the_transpose_get_it(tmp_path: Path) -> None:
    """GPT-2's Conv1D holds [in, out]; quantised, its matrix is [out, in] as any linear layer's, also where square."""
    from frontend_builders import model_of
    from transformers import GPT2Config

    model = model_of(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=64, n_positions=64))
    model.save_pretrained(tmp_path)
    state = {k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    rng, grids = np.random.default_rng(0), {}
    for name in [n for n in state if n.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))]:
        grids[name] = gptq(4, 1)(rng, *state.pop(name).T.shape)
        state |= {name.removesuffix(".weight") + suffix: t for suffix, t in grids[name].tensors.items()}
    save_file(state, tmp_path / "model.safetensors")
    configure(tmp_path, quantization_config=FORMATS["GPTQ"][0])
    ckpt = open_dir(tmp_path)
    recipes = match_parameters(ckpt, meta_model(ckpt))
    assert len(grids) == 4
    for name, grid in grids.items():
        np.testing.assert_array_equal(recipes[name].read(ckpt.read), grid.values.T, err_msg=name)


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes the tensors of a checkpoint."""
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors")


def named(suffix: str) -> str:
    return PROJECTION.replace("weight", suffix)


def _replaced(suffix: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[named(suffix)] = value(state[named(suffix)]).contiguous()

    return change


def _without(suffix: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(state: dict[str, torch.Tensor]) -> None:
        del state[named(suffix)]

    return change


DAMAGES: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], None], str]] = {
    "no zeros": ("GPTQ", _without("qzeros"), r"has no qzeros beside it for model.layers.1.mlp.down_proj, .*GPTQ"),
    "no scales": ("AWQ", _without("scales"), "has no scales beside it"),
    "no levels": ("GPTQ", _without("qweight"), "has no qweight beside it"),
    "no order": ("GPTQ act-order", _without("g_idx"), "has no g_idx beside it"),
    "no shape": ("packed int4", _without("weight_shape"), "has no weight_shape beside it"),
    "no FP8 scales": ("FP8", _without("weight_scale_inv"), "has no weight_scale_inv beside it"),
    "no global scale": ("NVFP4", _without("weight_global_scale"), "weight_scale .* is F8_E4M3 .*needs U8"),
    "short scales": ("GPTQ", _replaced("scales", lambda t: t[:-1]), r"scales .* is F16 \[3, 64\], .*needs .*\[4, 64\]"),
    "wide zeros": ("AWQ", _replaced("qzeros", lambda t: t.repeat(1, 2)), r"qzeros .* is I32 \[4, 16\]"),
    "float levels": ("GPTQ", _replaced("qzeros", lambda t: t.float()), "qzeros .* is F32"),
    "3 bits": ("GPTQ", _replaced("qzeros", lambda t: t[:, :6]), "zeros of 3 bits"),
    "other bits": (
        "GPTQ int8",
        _replaced("qzeros", lambda t: t[:, :8]),
        "has 4 groups in rows of 256, and the configuration says groups of 32",
    ),
    "order out of range": ("GPTQ", _replaced("g_idx", lambda t: t + 1), "g_idx 4, out of range for 4 groups"),
    "negative order": ("GPTQ", _replaced("g_idx", lambda t: t - 1), "g_idx -1, out of range"),
    "short order": ("GPTQ", _replaced("g_idx", lambda t: t[:-1]), r"g_idx .* is I32 \[127\]"),
    "wrong shape": ("packed int4", _replaced("weight_shape", lambda t: t * 1000), "words for a matrix"),
    "zeros along K": (
        "packed int4, zeros",
        _replaced("weight_zero_point", lambda t: t.T),
        "weight_zero_point .* needs",
    ),
    "scales of blocks": ("FP8", _replaced("weight_scale_inv", lambda t: t[:1, :2]), r"is F32 \[1, 2\], .*\[2, 4\]"),
    "blocks of 15": ("MXFP4", _replaced("weight_blocks", lambda t: t[..., :15]), "16 bytes must hold 32 elements"),
    "twice": ("GPTQ", lambda s: s.update({PROJECTION: torch.zeros(64, 128)}), "is stored twice"),
    "plain with scales": ("int8", _replaced("weight", lambda t: t.float()), "has no weight_packed beside it"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_companions_are_refused_on_opening(case: str, tmp_path: Path) -> None:
    name, change, message = DAMAGES[case]
    quantised_llama(tmp_path, name)
    edit(tmp_path, change)
    with pytest.raises(UserError, match=message):
        open_dir(tmp_path)


@pytest.mark.parametrize("group", [16, 24, 48])
def test_groups_that_are_no_multiple_of_32_are_refused(group: int, tmp_path: Path) -> None:
    quantised_llama(tmp_path, "GPTQ")
    grid = gptq(4, 1, 16)(np.random.default_rng(0), 64, 128)
    edit(tmp_path, lambda s: s.update({named("")[:-1] + suffix: t for suffix, t in grid.tensors.items()}))
    configure(tmp_path, quantization_config=FORMATS["GPTQ"][0] | {"group_size": group})
    with pytest.raises(UserError, match=f"groups of {group}: only multiples of 32"):
        open_dir(tmp_path)


@pytest.mark.parametrize(
    ("name", "suffix", "scale"), [("int8", "weight_scale", 1e6), ("GPTQ", "scales", float("inf")),
                                  ("packed int4", "weight_scale", float("nan"))]
)  # fmt: skip
def test_scales_beyond_float16_are_refused_by_name(name: str, suffix: str, scale: float, tmp_path: Path) -> None:
    quantised_llama(tmp_path, name)
    edit(tmp_path, lambda s: s[named(suffix)].view(-1)[3:4].fill_(scale))
    ckpt = open_dir(tmp_path)
    for read in (ckpt.read, ckpt.codes):
        with pytest.raises(UserError, match=f"down_proj.{suffix} .* holds a scale of .*beyond float16"):
            read(PROJECTION, 0, 64)


def test_a_level_that_is_no_number_is_refused(tmp_path: Path) -> None:
    quantised_llama(tmp_path, "FP8")
    edit(tmp_path, lambda s: s[PROJECTION].view(torch.uint8)[0, :1].fill_(0x7F))
    with pytest.raises(UserError, match=f"tensor {PROJECTION} .* NaN"):
        open_dir(tmp_path).read(PROJECTION, 0, 1)


def test_a_format_has_its_own_names_for_its_variants(tmp_path: Path) -> None:
    """compressed-tensors' version is that of the library, AutoAWQ's the layout."""
    for name, more in (("packed int4", {"version": "0.10.2"}), ("AWQ", {"version": "GEMM", "format": "gemm"}),
                       ("GPTQ", {"format": "gptq", "version": "1.0"})):  # fmt: skip
        quantised_llama(tmp_path, name)
        configure(tmp_path, quantization_config=FORMATS[name][0] | more)
        open_dir(tmp_path).close()


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised with bitsandbytes"),
    "HQQ": ({"quant_method": "hqq"}, "quantised with hqq"),
    "AQLM": ({"quant_method": "aqlm"}, "quantised with aqlm"),
    "no name": ({"bits": 4}, "quantised with unknown"),
    "marlin": (FORMATS["GPTQ"][0] | {"checkpoint_format": "marlin"}, "quantised with GPTQ marlin"),
    "old marlin": (FORMATS["GPTQ"][0] | {"is_marlin_format": True}, "GPTQ in marlin's layout"),
    "3 bits": (FORMATS["GPTQ"][0] | {"bits": 3}, "quantised with GPTQ with bits = 3"),
    "gemv": (FORMATS["AWQ"][0] | {"version": "gemv"}, "quantised with AWQ gemv"),
    "AWQ in 8 bits": (FORMATS["AWQ"][0] | {"bits": 8}, "quantised with AWQ with bits = 8"),
    "sparse": (FORMATS["int8"][0] | {"format": "sparse-24-bitmask"}, "compressed-tensors sparse-24-bitmask"),
    "sparsity": (FORMATS["int8"][0] | {"sparsity_config": {"format": "sparse-bitmask"}}, "with sparsity"),
    "transforms": (FORMATS["int8"][0] | {"transform_config": {"config_groups": {"R3": {}}}}, "with transforms"),
    "no object": ("awq", "must be a JSON object"),
    "long": ({"quant_method": "x" * 5000}, "quantised with x{100}, which"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_other_formats_are_refused_by_name(case: str, tmp_path: Path) -> None:
    settings, message = UNSUPPORTED[case]
    tiny_llama(tmp_path)
    configure(tmp_path, quantization_config=settings)
    with pytest.raises(UserError, match=message):
        open_dir(tmp_path)


def test_settings_that_the_tensors_contradict_are_refused(tmp_path: Path) -> None:
    quantised_llama(tmp_path, "packed int4")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    configure(tmp_path, quantization_config=config)
    with pytest.raises(UserError, match="is int4, which none of config_groups describes"):
        open_dir(tmp_path)
    tiny_llama(tmp_path)
    configure(tmp_path, quantization_config=FORMATS["GPTQ"][0])
    with pytest.raises(UserError, match=r"weights are quantised \(GPTQ\), but none is"):
        open_dir(tmp_path)
    quantised_llama(tmp_path, "GPTQ int8")
    configure(tmp_path, quantization_config=FORMATS["GPTQ"][0])
    with pytest.raises(UserError, match="is GPTQ int8, and the configuration says 4 bits"):
        open_dir(tmp_path)
    mixed = FORMATS["GPTQ"][0] | {"dynamic": {"+:.*": {"bits": 8}}}
    configure(tmp_path, quantization_config=mixed)
    assert open_dir(tmp_path).tensors[PROJECTION].dtype == "GPTQ int8"
    quantised_llama(tmp_path, "FP8")
    for block in ([0, 128], [128], "128", [1.5, 2]):
        configure(tmp_path, quantization_config=FORMATS["FP8"][0] | {"weight_block_size": block})
        with pytest.raises(UserError, match="must be two positive numbers"):
            open_dir(tmp_path)


def test_what_only_quantised_activations_need_is_left_out(tmp_path: Path) -> None:
    quantised_llama(tmp_path, "compressed FP8")
    attention = "model.layers.0.self_attn."
    extra = {attention + "k_scale": torch.ones(1), attention + "q_proj.input_scale": torch.ones(1)}
    edit(tmp_path, lambda s: s.update(extra))
    ckpt = open_dir(tmp_path)
    assert not set(extra) & ckpt.tensors.keys()
    match_parameters(ckpt, meta_model(ckpt))


def test_a_block_that_is_wider_than_its_rows_takes_no_memory(tmp_path: Path) -> None:
    grids = quantised_llama(tmp_path, "FP8")
    settings = FORMATS["FP8"][0] | {"weight_block_size": [48, (1 << 20) - 1]}
    edit(tmp_path, lambda s: s.update({k: v[:, :1].contiguous() for k, v in s.items() if k.endswith("_inv")}))
    configure(tmp_path, quantization_config=settings)
    tracemalloc.start()
    found = open_dir(tmp_path).read(PROJECTION, 0, 64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(found[:, :40], grids[PROJECTION].values[:, :40])
    assert peak < 4 << 20


def test_large_matrices_are_read_by_columns(tmp_path: Path, monkeypatch: Any) -> None:
    from llmc.frontend import raw_tensor

    grids = quantised_llama(tmp_path, "AWQ")
    ckpt = open_dir(tmp_path)
    monkeypatch.setattr(raw_tensor, "_WHOLE", 0)
    np.testing.assert_array_equal(ckpt.read(PROJECTION, 9, 33), grids[PROJECTION].values[9:33])


def test_the_packers_of_these_tests(tmp_path: Path) -> None:
    """By hand: the eight elements of a word, low bits first, and in AWQ's order."""
    fields = np.arange(1, 9)[None]
    assert words(fields, 4).numpy().view(np.uint32).item() == 0x87654321
    assert words(fields, 4, [0, 2, 4, 6, 1, 3, 5, 7]).numpy().view(np.uint32).item() == 0x86427531
    assert DIMS["hidden_size"] == 64 and awq(np.random.default_rng(0), 8, 32).tensors[".qweight"].shape == (32, 1)
