"""The CUDA executor: one upload, one launch list (or a captured graph of it), one download per step."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from llmc.errors import UserError
from llmc.kv_page import PAGE_SIZE
from llmc.runtime.batch import Batch, StepOutput, nothing
from llmc.runtime.batch_check import check_batch
from llmc.runtime.cuda.archive import Archive, read_archive
from llmc.runtime.cuda.devices import Bytes, Device, DeviceError, DeviceLost, OutOfMemory
from llmc.runtime.cuda.launches import NOTHING, Launcher
from llmc.runtime.cuda.memory import CudaConfig as CudaConfig
from llmc.runtime.cuda.memory import DeviceMemory, most_items
from llmc.runtime.cuda.upload import Step, derive_step

log = logging.getLogger(__name__)
_SMALL_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_BUCKET_STEP = 32


def bucket_of(tokens: int, most: int) -> int:
    """The number of sequences that a graph for `tokens` decoding sequences is captured for, at most `most`."""
    if tokens <= _SMALL_BUCKETS[-1]:
        size = _SMALL_BUCKETS[bisect.bisect_left(_SMALL_BUCKETS, tokens)]
    else:
        size = -(-tokens // _BUCKET_STEP) * _BUCKET_STEP
    return min(size, most)


def buckets(most: int) -> list[int]:
    """The numbers of sequences that graphs are captured for when at most `most` decode."""
    return sorted({bucket_of(tokens, most) for tokens in range(1, most + 1)})


class CudaExecutor:
    """Implements `Executor` (runtime/batch.py) over the launch list of one plan on one device, which it owns."""

    page_size = PAGE_SIZE

    def __init__(
        self, archive: memoryview, weights: memoryview, config: CudaConfig, device: Device, choices: Mapping[str, int]
    ) -> None:
        """archive, weights: plan segments, read here only. choices: tuned kernels, by `archive.choice_key`.

        Raises UserError for an archive that cannot be run, and for memory that cannot be had; the device is closed.
        """
        self.device, self._closed = device, False
        self._lost: str | None = None
        self._graphs: dict[tuple[int, bool], Any] = {}
        self._host_logits: Bytes | None = None
        self.max_num_tokens, self.max_num_rows = config.max_num_tokens, config.max_num_rows
        self.max_num_seqs, self._most_items = config.max_num_seqs, most_items(config)
        self._most_decodes = min(config.max_num_tokens, config.max_num_seqs, config.max_num_rows)
        with self._closed_on_failure():
            device.activate()
            self._load(read_archive(archive, len(weights)), weights, config, choices)

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """For what comes before the first step."""
        try:
            yield
        except OutOfMemory as error:
            self.close()
            raise UserError(f"the GPU or its driver is out of memory: {error}; free some and try again") from error
        except BaseException:
            self.close()
            raise

    def capture_graphs(self) -> None:
        """Captures the graph of every decode step there can be, so that no request waits for one.

        Raises UserError where the driver has no memory for them; the device is closed then.
        """
        with self._closed_on_failure():
            self.device.activate()
            for bucket in buckets(self._most_decodes):
                for adjusted in (False, True):
                    self._graph(bucket, adjusted)

    def _load(self, archive: Archive, weights: memoryview, config: CudaConfig, choices: Mapping[str, int]) -> None:
        self.vocab_size, self.page_bytes = archive.vocab_size, archive.page_bytes
        self.archive = archive
        self.memory = DeviceMemory(self.device, archive, config)
        self._launcher = Launcher(self.device, archive, choices, {"T": config.max_num_tokens, "R": config.max_num_rows})
        self._load_weights(weights)
        self.num_pages = self.memory.add_pool().pages
        self._launches = self._launcher.bind(archive.calls, self.memory.address)

    def _load_weights(self, weights: memoryview) -> None:
        """Copies the plan's weights to the device; those with calls are repacked there, one after another."""
        region, staged = self.memory.area("weight"), any(item.calls for item in self.archive.weights)
        if staged:
            self.memory.add_staging()
        for item in self.archive.weights:
            data = weights[item.source : item.source + item.size]
            self.device.upload(self.memory.area("staging") if item.calls else region + item.device, data)
            self._launcher.run(self._launcher.bind(item.calls, self.memory.address), NOTHING, adjusted=False)
        self.device.synchronize()
        if staged:
            self.memory.free_staging()

    def step(self, batch: Batch, meanwhile: Callable[[], None] = nothing) -> StepOutput:
        """Runs a batch, without the GIL while the device works; `meanwhile` is called when all is launched.

        Raises ValueError for one that is inconsistent or too large: nothing of it reaches the device; DeviceError for
        a call that the driver refuses; DeviceLost when the device is gone, and from then on at once.
        """
        if self._closed:
            raise RuntimeError("the executor is closed")
        if self._lost is not None:
            raise DeviceLost(self._lost)
        check_batch(batch, self)
        step = derive_step(batch, self.archive.tile_tokens)
        if step.items > self._most_items:
            raise ValueError(f"a batch of {step.sizes['S']} sequences and {step.items} blocks does not fit the engine")
        try:
            self.device.activate()
            return self._run(step, batch.want_logits, meanwhile)
        except DeviceError as error:
            if (lost := self._diagnose(error)) is None:
                raise
            self._lost = lost
            raise DeviceLost(lost) from error

    def _diagnose(self, error: DeviceError) -> str | None:
        """Why the device is lost, or None when it takes other work; then nothing reads this step's buffers any more."""
        if not isinstance(error, DeviceLost):
            try:
                self.device.synchronize()
                return None
            except DeviceError as second:
                error = second
        return str(error)

    def _run(self, step: Step, want_logits: bool, meanwhile: Callable[[], None]) -> StepOutput:
        if len(step.tail) > self.memory.batch.tail_words or step.items > self.memory.items:
            self._grow(len(step.tail), step.items)
        self.device.upload_async(self.memory.area("batch"), self.memory.batch.write(step))
        if step.decode:
            self.device.replay(self._graph(step.sizes["T"], step.adjusted))
        else:
            self._launcher.run(self._launches, step.sizes, step.adjusted)
        return self._outputs(step.sizes["R"], want_logits, meanwhile)

    def _grow(self, tail_words: int, items: int) -> None:
        """A batch buffer of so many words, and scratch for so many work items of split attention. Graphs hold the
        addresses of the old ones."""
        for graph in self._graphs.values():
            self.device.discard(graph)
        self._graphs.clear()
        if tail_words > self.memory.batch.tail_words:
            self.memory.grow_batch(tail_words)
        if items > self.memory.items:
            self.memory.grow_partials(min(2 * items, self._most_items))
        self._launches = self._launcher.bind(self.archive.calls, self.memory.address)

    def _graph(self, tokens: int, adjusted: bool) -> Any:
        """The graph of a decode step. Its grids are those of the whole bucket; the programs of tokens, rows and
        sequences that the step does not have return at once, as the batch's `meta` tells them."""
        bucket = bucket_of(tokens, self._most_decodes)
        key = (bucket, adjusted)
        if key not in self._graphs:
            tiles = {f"tiles{i}": 0 for i in range(len(self.archive.tile_tokens))}
            sizes = dict.fromkeys("TRSD", bucket) | tiles
            self._graphs[key] = self.device.capture(lambda: self._launcher.run(self._launches, sizes, adjusted))
            log.debug("captured the decode step of %d sequences%s", bucket, ", adjusted" if adjusted else "")
        return self._graphs[key]

    def _outputs(self, rows: int, want_logits: bool, meanwhile: Callable[[], None]) -> StepOutput:
        host, address = self.memory.outputs
        self.device.download_async(host, address)
        used = self._download_logits(rows) if want_logits else None
        meanwhile()
        self.device.synchronize()
        logits = used.view(np.float32).reshape(rows, self.vocab_size).copy() if used is not None else None
        tokens, logprobs = host.view(np.int32).reshape(2, -1)[:, :rows]
        return StepOutput(tokens.copy(), logprobs.view(np.float32).copy(), logits)

    def _download_logits(self, rows: int) -> Bytes:
        if self._host_logits is None:
            self._host_logits = self.device.host_buffer(4 * self.vocab_size * self.max_num_rows)
        used = self._host_logits[: 4 * self.vocab_size * rows]
        if rows:
            self.device.download_async(used, self.memory.area("logits"))
        return used

    def close(self) -> None:
        """Frees the device's memory; safe to call twice."""
        if not self._closed:
            self._closed = True
            self._graphs.clear()
            self.device.close()
