"""Device memory of an executor: weights, scratch, the KV pool, and the address of every argument in them.

Order: weights and scratch first, so that the pool can take what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmc.errors import UserError
from llmc.kv_page import PAGE_SIZE
from llmc.runtime.cuda.archive import Archive, Arg
from llmc.runtime.cuda.devices import Bytes, Device, OutOfMemory
from llmc.runtime.cuda.upload import BLOCK, BatchBuffer, BatchLayout

_LOGITS, _STATS, _OUT = 4, 4 * 2 * 64, 4 + 4
"""Bytes: of a logit; per row of the sampler's scratch; per row of token and log-probability."""
_EXTRA_WORDS = 1 << 16
"""For penalties and biases in the first batch buffer; it grows when a step needs more."""


@dataclass(frozen=True)
class CudaConfig:
    """max_num_tokens, max_num_seqs, max_num_rows: T, S and R of the largest step. max_model_len: positions of a
    sequence.

    num_pages: of the KV pool, or None for what is left of memory_utilization (0 to 1) times the device's memory.
    """

    max_num_tokens: int
    max_num_seqs: int
    max_num_rows: int
    max_model_len: int
    num_pages: int | None
    memory_utilization: float


@dataclass(frozen=True)
class PoolSize:
    """pages: of the KV pool. items: work items of split attention that there is scratch for at first."""

    pages: int
    items: int


def row_bytes(arena: int, vocab_size: int) -> int:
    """Device memory that one more row of a step takes, in bytes. arena: of the activations of sampled rows."""
    return arena + 2 * _LOGITS * vocab_size + _STATS + _OUT


def most_items(config: CudaConfig) -> int:
    """Work items of split attention that the largest step has."""
    return config.max_num_seqs * -(-config.max_model_len // BLOCK)


def pool_size(archive: Archive, config: CudaConfig, free: int, total: int) -> PoolSize:
    """free, total: bytes of the device, when weights and scratch are allocated.

    The pool never exceeds what max_num_seqs sequences of max_model_len can fill. Each page brings a share of the
    scratch of split attention: a sequence of n positions has ceil(n / 64) items. That is enough while no two sequences
    of a step share pages; when they do, the scratch grows (`DeviceMemory.grow_partials`).
    Raises UserError when not one sequence of max_model_len fits in what is left.
    """
    per_sequence = -(-config.max_model_len // PAGE_SIZE)
    item_bytes = 4 * archive.partials
    pages_per_item = BLOCK // PAGE_SIZE
    pages = config.num_pages
    if pages is None:
        if not 0 < config.memory_utilization <= 1:
            raise UserError(f"--gpu-memory-utilization {config.memory_utilization}: must be above 0 and at most 1")
        left = max(0, int(total * config.memory_utilization) - (total - free))
        per_item = pages_per_item * archive.page_bytes + item_bytes
        fit = max(0, left - config.max_num_seqs * item_bytes) * pages_per_item // per_item
        if fit < per_sequence:
            raise UserError(
                f"GPU memory: {_gib(left)} are left for the KV pool (of {_gib(total)}, at --gpu-memory-utilization "
                f"{config.memory_utilization:g}), one sequence of {config.max_model_len} tokens takes "
                f"{_gib(per_sequence * archive.page_bytes)}; raise --gpu-memory-utilization or lower --max-model-len"
            )
        pages = min(fit, config.max_num_seqs * per_sequence)
    return PoolSize(pages, min(most_items(config), pages // pages_per_item + config.max_num_seqs))


class DeviceMemory:
    """Everything that stays allocated, but the pool (`add_pool`). tokens, rows: the capacities, rounded up to 16."""

    def __init__(self, device: Device, archive: Archive, config: CudaConfig) -> None:
        """Raises UserError when something does not fit."""
        self._device, self._archive, self._config = device, archive, config
        self.items = 0
        """Work items of split attention that there is scratch for."""
        self.tokens, self.rows = _round(config.max_num_tokens), _round(config.max_num_rows)
        self.layout = BatchLayout(self.tokens, config.max_num_seqs, config.max_num_rows, archive.tile_tokens)
        smaller = "free GPU memory, or build the plan with smaller weights (--int8, --int4)"
        activations = "lower --max-num-batched-tokens"
        fewer = "lower --max-num-seqs"
        logits = _LOGITS * archive.vocab_size * config.max_num_rows
        self._areas: dict[str, int] = {
            "weight": self._reserve(archive.weight_bytes, "the weights", smaller),
            "tokens": self._reserve(archive.arena["tokens"] * self.tokens, "activations", activations),
            "rows": self._reserve(archive.arena["rows"] * self.rows, "activations of sampled rows", fewer),
            "logits": self._reserve(logits, "logits", fewer),
            "adjusted": self._reserve(logits, "logits with penalties", fewer),
            "stats": self._reserve(_STATS * config.max_num_rows, "the sampler", fewer),
            "out": self._reserve(_OUT * self.rows, "outputs", fewer),
        }
        self._host_out = device.host_buffer(_OUT * self.rows)
        words = config.max_num_seqs * -(-config.max_model_len // PAGE_SIZE) + _EXTRA_WORDS
        self.batch = self._new_batch(self._reserve(self.layout.size(words), "batches", activations), words)

    def area(self, name: str) -> int:
        """The address of an area: "weight", "staging", "batch", "logits"."""
        return self._areas[name]

    @property
    def outputs(self) -> tuple[Bytes, int]:
        """Tokens [rows] int32, then log probabilities [rows] float32: the host's buffer and the device's address."""
        return self._host_out, self._areas["out"]

    def add_staging(self) -> None:
        """Room for one weight that is repacked on the device; `free_staging` ends it."""
        need = "free GPU memory"
        self._areas["staging"] = self._reserve(self._archive.staging, "repacking weights", need)

    def free_staging(self) -> None:
        self._device.free(self._areas.pop("staging"))

    def add_pool(self) -> PoolSize:
        """Allocates the KV pool and the scratch of split attention. Raises UserError when it does not fit."""
        size = pool_size(self._archive, self._config, *self._device.memory_info())
        flag = "--gpu-memory-utilization" if self._config.num_pages is None else "--kv-cache-memory"
        self._areas["partials"] = self._reserve(self._partial_bytes(size.items), "attention", f"lower {flag}")
        self.items = size.items
        self._areas["kv"] = self._reserve(self._archive.page_bytes * size.pages, "the KV pool", f"lower {flag}")
        self._pages = size.pages
        return size

    def grow_batch(self, tail_words: int) -> None:
        """A larger batch buffer; every address in it changes. The old ones are kept when this raises OutOfMemory."""
        words = max(tail_words, 2 * self.batch.tail_words)
        old = self._areas["batch"]
        address = self._device.allocate(self.layout.size(words))
        try:
            self.batch = self._new_batch(address, words)
        except OutOfMemory:
            self._device.free(address)
            raise
        self._device.free(old)

    def grow_partials(self, items: int) -> None:
        """Scratch of split attention for so many items; its address changes. The old one is kept when this raises
        OutOfMemory."""
        address = self._device.allocate(self._partial_bytes(items))
        self._device.free(self._areas["partials"])
        self._areas["partials"], self.items = address, items

    def _partial_bytes(self, items: int) -> int:
        return max(16, 4 * self._archive.partials * items)

    def address(self, arg: Arg) -> int:
        """Where an argument lies. An area that does not exist any more or yet is a KeyError: ours."""
        if arg.kind == "batch":
            return self._areas["batch"] + self.layout.offsets[arg.name]
        base = self._areas[arg.kind]
        if arg.kind == "kv":
            layers = self._archive.kv
            offset = layers[arg.at].offsets[arg.name]
            assert offset is not None  # read_archive refuses an argument that the layer does not have
            return base + (sum(layer.page_bytes for layer in layers[: arg.at]) + offset) * self._pages
        if arg.kind == "out":
            return base + (4 * self.rows if arg.name == "logprobs" else 0)
        scale = {"tokens": self.tokens, "rows": self.rows}.get(arg.kind, 1)
        return base + arg.at * scale

    def _new_batch(self, address: int, tail_words: int) -> BatchBuffer:
        buffer = BatchBuffer(self.layout, self._device.host_buffer(self.layout.size(tail_words)))
        self._areas["batch"] = address
        return buffer

    def _reserve(self, size: int, purpose: str, advice: str) -> int:
        try:
            return self._device.allocate(max(size, 16))
        except OutOfMemory as error:
            free, total = self._device.memory_info()
            raise UserError(
                f"GPU memory: no {_gib(size)} for {purpose}: {_gib(free)} of {_gib(total)} are free; {advice}"
            ) from error


def _round(count: int) -> int:
    return -(-count // 16) * 16


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 24 else f"{size / 2**10:.0f} KiB"
