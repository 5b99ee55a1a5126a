"""A GGUF file as a Hugging Face checkpoint: its tensors under the model's own names, dequantised row by row.

Names and value transforms (un-permuted query rows, norms stored plus one, transposed matrices …) are
transformers' tables; nothing here knows a model family.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.errors import UserError
from llmc.frontend.checkpoint import TensorInfo
from llmc.frontend.config import build_config, normalise_config, quiet_transformers
from llmc.frontend.gguf_codes import block_codes, grid_format
from llmc.frontend.gguf_config import apply_positions, apply_rope_factors, gguf_config
from llmc.frontend.gguf_header import GgufTensor, read_gguf_header
from llmc.frontend.rawfile import RawFile, check_finite, row_range, sha256_of
from llmc.kernels.codes import Codes
from llmc.kernels.formats import W8

_ROPE_FACTORS = "rope_freqs.weight"
_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
_VALUES_AT_ONCE = 1 << 18
"""Values dequantised at once: gguf's temporaries are several times as large, and stay in the cache."""
_STOP_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True)
class _Recipe:
    """How a model tensor comes out of the file: from `sources`, and `as_stored` when no transform applies.
    order: the file's row for each row, where the transform of a matrix does no more than to reorder rows."""

    info: TensorInfo
    sources: tuple[GgufTensor, ...]
    as_stored: bool
    order: npt.NDArray[np.int64] | None = None


class GgufCheckpoint:
    """`Checkpoint` over one GGUF file. Weights stay on disk until `read`."""

    def __init__(self, path: Path, label: str) -> None:
        """Raises UserError for anything malformed, truncated, split or of an unsupported architecture."""
        self.path = path
        self.source_label = label
        self._file = RawFile(path)
        try:
            self._header = read_gguf_header(self._file)
            self._raw_config = gguf_config(self._header, path)
            self._hf_config = build_config(self._raw_config, str(path))
            apply_positions(self._hf_config, self._header, path)
            if factors := self._header.tensors.get(_ROPE_FACTORS):
                apply_rope_factors(self._hf_config, self._dequantise(factors, 0, None), path)
        except BaseException:
            self.close()
            raise
        self._transformed: tuple[str, npt.NDArray[np.float32]] | None = None

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's metadata, e.g. metadata["tokenizer.ggml.tokens"]."""
        return self._header.metadata

    @cached_property
    def config(self) -> dict[str, Any]:
        return normalise_config(self._hf_config)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The stop ids that the file states (end of sequence, of turn, of message)."""
        found = (self.metadata.get(f"tokenizer.ggml.{key}") for key in _STOP_IDS)
        stops = list(dict.fromkeys(int(value) for value in found if value is not None))
        return {"eos_token_id": stops} if stops else {}

    def hf_config(self) -> Any:
        return copy.deepcopy(self._hf_config)

    @property
    def is_multimodal(self) -> bool:
        return False

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: recipe.info for name, recipe in sorted(self._recipes.items())}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        recipe = self._recipes[name]
        if recipe.as_stored:
            values = self._dequantise(recipe.sources[0], start, stop)
            check_finite(values, name, self.path)
            return values
        first, rows, _ = row_range(name, recipe.info.shape, start, stop)
        return self._whole(name, recipe)[first : first + rows].copy()

    def codes(self, name: str, start: int, stop: int) -> Codes | None:
        recipe = self._recipes[name]
        tensor = recipe.sources[0]
        if recipe.info.grid is None or not (recipe.as_stored or recipe.order is not None):
            return None
        first, rows, k = row_range(name, tensor.shape, start, stop)
        wanted = np.arange(first, first + rows) if recipe.order is None else recipe.order[first : first + rows]
        first, last = (int(wanted.min()), int(wanted.max())) if rows else (0, -1)
        raw = self._file.read(tensor.begin + first * tensor.row_bytes, (last + 1 - first) * tensor.row_bytes)
        return block_codes(tensor.kind.name, raw.reshape(-1, tensor.row_bytes)[wanted - first], k)

    def _whole(self, name: str, recipe: _Recipe) -> npt.NDArray[np.float32]:
        """All of a transformed tensor; the last one is kept, since its rows are usually asked for in turn."""
        kept = self._transformed
        if kept is None or kept[0] != name:
            arrays = [self._dequantise(source, 0, None) for source in recipe.sources]
            values = np.ascontiguousarray(self._transform(recipe.sources, arrays)[name], dtype=np.float32)
            check_finite(values, name, self.path)
            self._transformed = kept = (name, values)
        return kept[1]

    def _dequantise(self, tensor: GgufTensor, start: int, stop: int | None) -> npt.NDArray[np.float32]:
        """Rows start:stop of a tensor as the file holds it, in float32."""
        from gguf.quants import dequantize

        if len(tensor.shape) < 2:  # a block may span what would be rows
            raw = self._file.read(tensor.begin, tensor.end - tensor.begin)
            values = self._call(dequantize, tensor, raw).reshape(tensor.shape)
            return values[start:stop] if tensor.shape else values
        first, rows, width = row_range(tensor.name, tensor.shape, start, stop)
        values = np.empty((rows, *tensor.shape[1:]), dtype=np.float32)
        step = max(1, _VALUES_AT_ONCE // max(width, 1))
        for at in range(0, rows, step):
            count = min(step, rows - at)
            raw = self._file.read(tensor.begin + (first + at) * tensor.row_bytes, count * tensor.row_bytes)
            values[at : at + count] = self._call(dequantize, tensor, raw).reshape(count, *tensor.shape[1:])
        return values

    def _call(self, dequantize: Any, tensor: GgufTensor, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        if plain := _PLAIN.get(tensor.kind.name):
            return raw.view(plain).astype(np.float32, copy=False)
        try:
            return np.asarray(dequantize(raw, tensor.kind), dtype=np.float32)
        except NotImplementedError as error:
            raise UserError(
                f"tensor {tensor.name} in {self.path} is stored as {tensor.kind.name}, which the gguf "
                "package cannot dequantise: use another quantisation of the model"
            ) from error

    @cached_property
    def _name_map(self) -> dict[str, str]:
        """GGUF tensor name -> the model's parameter name, by transformers' table over a meta-device model."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

        try:
            with torch.device("meta"), quiet_transformers(), _one_name_table():
                model = AutoModelForCausalLM.from_config(self.hf_config())
                return dict(get_gguf_hf_weights_map(model, self._processor))
        except Exception as error:  # transformers and gguf raise what they like for a table that has no entry
            reason = " ".join(str(error).split())
            raise UserError(
                f"{self.path}: no table gives this architecture's tensor names ({reason[:200]}): "
                "use the model's safetensors checkpoint instead"
            ) from error

    @cached_property
    def _processor(self) -> Any:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        kind = TENSOR_PROCESSORS.get(self.metadata["general.architecture"], TensorProcessor)
        return kind(config=self._raw_config)

    @cached_property
    def _recipes(self) -> dict[str, _Recipe]:
        """A recipe for each tensor; what the table does not name stays under its own name, as stored."""
        grouped: dict[str, list[GgufTensor]] = {}
        for name, tensor in self._header.tensors.items():
            if name != _ROPE_FACTORS:
                grouped.setdefault(self._target(name), []).append(tensor)
        return {name: self._recipe(name, tuple(sources)) for name, sources in grouped.items()}

    def _target(self, name: str) -> str:
        # Stacked experts stand in the table without their suffix.
        return self._name_map.get(name) or self._name_map.get(name.removesuffix(".weight")) or name

    def _recipe(self, name: str, sources: tuple[GgufTensor, ...]) -> _Recipe:
        """Tries the transform on one-byte stand-ins: their identity and shape tell what it does."""
        stored = sources[0]
        stand_ins: list[npt.NDArray[Any]] = [np.broadcast_to(np.int8(0), source.shape) for source in sources]
        if name == stored.name and name not in self._name_map.values():
            made: dict[str, Any] = {name: stand_ins[0]}
        else:
            made = self._transform(sources, stand_ins)
        if name not in made:
            raise UserError(f"{self.path}: tensor {stored.name} could not be turned into {name}: use the safetensors")
        as_stored = len(sources) == 1 and made[name] is stand_ins[0]
        shape = tuple(made[name].shape)
        grid = grid_format(stored.kind.name) if len(shape) == 2 else None
        order = None
        if grid is not None and not as_stored:
            order = self._row_order(name, sources) if len(sources) == 1 and shape == stored.shape else None
            grid = W8 if order is None else grid  # made of values
        return _Recipe(TensorInfo(name, shape, stored.kind.name, grid), sources, as_stored, order)

    def _row_order(self, name: str, sources: tuple[GgufTensor, ...]) -> npt.NDArray[np.int64] | None:
        """The row of the file for each row of a matrix, if its transform only reorders rows: tried on a few columns of
        numbers that name their place."""
        rows, columns = sources[0].shape[0], min(4, sources[0].shape[1])
        places = np.arange(rows * columns).reshape(rows, columns)
        narrow = replace(sources[0], shape=(rows, columns))
        try:
            found = self._transform((narrow,), [places]).get(name)
        except ValueError:  # it looks at the columns, too
            return None
        if found is None or found.shape != places.shape:
            return None
        order: npt.NDArray[np.int64] = found[:, 0] // columns
        same = np.array_equal(found, places[np.clip(order, 0, rows - 1)])
        return order if same and np.array_equal(np.sort(order), np.arange(rows)) else None

    def _transform(self, sources: tuple[GgufTensor, ...], arrays: list[Any]) -> dict[str, Any]:
        """transformers' value transforms over the sources of one model tensor: {model name: array}."""
        made: dict[str, Any] = {}
        parsed: dict[str, Any] = {"tensors": made}
        for source, values in zip(sources, arrays, strict=True):
            result = self._processor.process(
                weights=values, name=source.name, tensor_key_mapping=self._name_map, parsed_parameters=parsed
            )
            if result.name is not None:  # None: the processor stored its result in `parsed` itself
                made[self._name_map.get(result.name, result.name)] = result.weights
        return {name: value.numpy() if hasattr(value, "numpy") else value for name, value in made.items()}

    @cached_property
    def digest(self) -> str:
        """sha256 of the file, which holds weights, configuration, tokenizer and template."""
        return sha256_of(self.path)

    def close(self) -> None:
        self._file.close()


@contextmanager
def _one_name_table() -> Iterator[None]:
    """Lets gguf make its table of names once: transformers asks for the same one in every module of the model, which
    takes longer than all else that is read from a file."""
    import gguf

    make = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = cache(make)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = make
