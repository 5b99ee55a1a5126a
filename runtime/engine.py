"""The engine: one thread that schedules, runs and answers, and the thread-safe door to it.

Read it from `_run`: take new commands, schedule a step, run it, hand each sampled token to its request, end
what is done. Everything but the command queue (`commands.py`) and the counters belongs to that thread. A request
that fails, fails alone: its pages are freed, its client is told, the thread goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llmc.runtime.batch import Executor, ExecutorLost, StepOutput
from llmc.runtime.batching import accepted_tokens, build_batch
from llmc.runtime.commands import Command, CommandQueue
from llmc.runtime.config import EngineConfig
from llmc.runtime.detokenizer import TextCodec
from llmc.runtime.kv import BlockAllocator
from llmc.runtime.output import Track
from llmc.runtime.request import (
    EngineUnavailable,
    FinishReason,
    Request,
    RequestError,
    RequestOutput,
    output_limit,
    random_seed,
    sequence_seed,
)
from llmc.runtime.scheduler import Chunk, Scheduler
from llmc.runtime.stats import EngineObserver, EngineStats, NoObserver
from llmc.runtime.stream import AsyncStream, BlockingStream, Sink, wake_all

log = logging.getLogger(__name__)


@dataclass
class _Live:
    """A request that has not finished: `open` are the indices of its sequences that have not."""

    request: Request
    sink: Sink
    open: set[int]
    tracks: dict[int, Track] = field(default_factory=dict)


class _Sampled(NamedTuple):
    """A token that a step gave a sequence: row `row` of its output, at `time` (of the monotonic clock, in seconds). It
    is the `number`-th of the sequence's output, counted from 1."""

    live: _Live
    track: Track
    output: StepOutput
    row: int
    token: int
    number: int
    time: float


class Engine:
    """Serves requests over one executor. `open_stream`, `abort`, `stats` and the rest of the public side may be
    called from any thread; the executor is used by the engine's own thread only, and closed by `close`."""

    def __init__(self, executor: Executor, config: EngineConfig, codec: TextCodec | None) -> None:
        """Without a codec the outputs have tokens but no text, and stop strings are refused."""
        tokens = min(config.max_num_batched_tokens, executor.max_num_tokens)
        self.max_model_len = min(config.max_model_len, executor.num_pages * executor.page_size)
        self.observer: EngineObserver = NoObserver()
        self._executor = executor
        self._vocab_size = executor.vocab_size
        self._codec = codec
        self._eos = config.eos_token_ids
        self._config = config
        # Each needs a row: all of them may be in the same step at their last token.
        self._max_num_seqs = min(config.max_num_seqs, tokens, executor.max_num_seqs, executor.max_num_rows)
        self._max_num_batched_tokens = tokens
        self._scheduler = self._new_scheduler()
        self._queue = CommandQueue(self._max_num_seqs + config.max_queue)
        self._live: dict[str, _Live] = {}
        self._touched: set[Sink] = set()
        self._unanswered: list[_Sampled] = []
        self._lost = False
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._finished: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._thread = threading.Thread(target=self._run, name="llmc-engine", daemon=True)

    # --- The public side ---

    def start(self) -> None:
        """Starts the engine's thread. Call once."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """The engine's thread runs, and its executor has not lost its device."""
        return self._thread.is_alive() and not self._lost

    @property
    def is_draining(self) -> bool:
        return self._queue.is_draining

    def check_count(self, sequences: int) -> None:
        """Raises RequestError for more sequences in one request than the engine ever holds."""
        capacity = self._queue.capacity
        if sequences > capacity:
            raise RequestError(f"{sequences} sequences in one request are more than this server holds ({capacity})")

    def open_stream(self, requests: Sequence[Request]) -> AsyncStream:
        """Submits requests, all or none, and returns the stream of their outputs. Call in an event loop.

        Raises RequestError (400), QueueFull (429) or EngineUnavailable (503). Close the stream when done with
        it.
        """
        stream = AsyncStream(sum(r.params.n for r in requests), lambda: self.abort(*(r.request_id for r in requests)))
        self._submit(requests, stream)
        return stream

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come; leaving the iteration aborts it. Raises as `open_stream`."""
        stream = self.open_stream([request])
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def generate_blocking(self, request: Request) -> Generator[RequestOutput, None, None]:
        """As `generate`, for an ordinary thread."""
        stream = BlockingStream(request.params.n, lambda: self.abort(request.request_id))
        self._submit([request], stream)
        try:
            yield from stream
        finally:
            stream.close()

    def abort(self, *request_ids: str) -> None:
        """Ends requests with "abort" before the next step; ids that are unknown or finished are ignored."""

        def end() -> None:
            for request_id in request_ids:
                self._end_request(request_id, "abort")

        self._queue.put(end)

    def begin_drain(self) -> None:
        """From now on new requests get EngineUnavailable; those that are in, go on."""
        self._queue.begin_drain()

    def wait_idle(self, timeout: float) -> bool:
        """Blocks until no request is unfinished, at most `timeout` seconds. Returns whether none is."""
        return self._queue.wait_idle(timeout)

    def drain(self, timeout: float) -> bool:
        """Stops taking requests, lets the others finish for `timeout` seconds, then aborts what is left.

        Returns whether all finished by themselves. Blocks: from a coroutine, use asyncio.to_thread.
        """
        self.begin_drain()
        finished = self.wait_idle(timeout)
        if not finished:
            self._queue.put(lambda: self._end_all("abort", "the server is shutting down"))
        return finished

    def close(self) -> None:
        """Aborts what is unfinished, ends the thread and closes the executor. A second call does nothing."""
        if not self._queue.close():
            return
        if self._thread.ident is not None:
            self._thread.join()
        self._executor.close()

    def stats(self) -> EngineStats:
        """A snapshot, read without stopping the engine: each figure is true, if not of the same instant."""
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=scheduler.allocator.usage,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.num_prefix_queries,
            prefix_hits=scheduler.num_prefix_hits,
            finished=dict(self._finished),
        )

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            BlockAllocator(self._executor.num_pages, self._executor.page_size, self._config.kv_eviction),
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            prefix_cache=self._config.prefix_cache,
        )

    def _submit(self, requests: Sequence[Request], sink: Sink) -> None:
        limits = [
            output_limit(request, max_model_len=self.max_model_len, vocab_size=self._vocab_size) for request in requests
        ]
        if self._codec is None and any(request.params.stop for request in requests):
            raise RequestError("stop strings need a tokenizer, and this plan holds none", param="stop")
        count = sum(request.params.n for request in requests)
        self.check_count(count)
        if self._lost:
            raise EngineUnavailable("the device is lost; restart the server", code="service_unavailable")
        if not self._thread.is_alive():
            raise EngineUnavailable("the server is shutting down", code="service_unavailable")
        ids = [request.request_id for request in requests]
        self._queue.admit(ids, count, lambda: self._begin(requests, limits, sink))

    # --- The engine's thread ---

    def _run(self) -> None:
        while (commands := self._queue.take(wait=not self._scheduler.has_work)) is not None:
            if commands:
                self._guard(self._flush)
            for command in commands:
                self._guard(command)
            self._guard(self._step)
            if not self._scheduler.has_work:
                self._guard(self._flush)
        self._guard(self._flush)
        for command in self._queue.take_rest():  # what came together with the end is told so, too
            self._guard(command)
        self._end_all("abort", "the server is shutting down")
        self._deliver()

    def _guard(self, action: Command) -> None:
        """Runs a part of the loop. If it raises, not a request has failed but the engine: everything starts
        afresh.
        """
        try:
            action()
        except Exception:
            log.exception("the engine failed; all its requests end with an error")
            before, self._scheduler = self._scheduler, self._new_scheduler()
            self._scheduler.take_counts(before)
            for live in self._live.values():
                live.tracks.clear()  # their sequences belong to the scheduler that is gone
            self._end_all("error", "internal error: the engine failed")

    def _begin(self, requests: Sequence[Request], limits: Sequence[int], sink: Sink) -> None:
        for request in requests:
            self._live[request.request_id] = _Live(request, sink, set(range(request.params.n)))
        for request, limit in zip(requests, limits, strict=True):
            base = random_seed() if request.params.seed is None else request.params.seed
            stop_ids = request.params.stop_ids(self._eos)
            for index in range(request.params.n):
                sequence = self._scheduler.add(request, index, sequence_seed(base, index), limit, stop_ids)
                self._live[request.request_id].tracks[index] = Track(sequence, self._codec)

    def _step(self) -> None:
        chunks = self._scheduler.schedule()
        if not chunks:
            self._flush()
            return
        try:
            output = self._executor.step(build_batch(chunks), self._flush)
            tokens = accepted_tokens(chunks, output.tokens.tolist())
        except Exception as error:
            self._lost = self._lost or isinstance(error, ExecutorLost)
            self._flush()
            ids = list(dict.fromkeys(chunk.sequence.request.request_id for chunk in chunks))
            log.exception("a step failed; its requests end with an error: %s", ", ".join(ids))
            for request_id in ids:
                self._end_request(request_id, "error", "internal error: a step of the model failed")
        else:
            self._scheduler.commit(chunks, tokens)
            self._answer(chunks, output, tokens)
        if self._config.check_integrity:
            self._scheduler.check_integrity()

    def _answer(self, chunks: list[Chunk], output: StepOutput, tokens: list[list[int]]) -> None:
        """Ends what ends with this step; the text of sequences that go on is made while the next step runs."""
        now = time.monotonic()
        first = 0
        for chunk, got in zip(chunks, tokens, strict=True):
            row, first = first, first + len(chunk.sampled)
            sequence = chunk.sequence
            live = self._live.get(sequence.request.request_id)
            if not got or live is None:
                continue  # no row, or another of its sequences failed in this very step
            track, before = live.tracks[sequence.index], sequence.num_output - len(got)
            samples = [
                _Sampled(live, track, output, row + i, token, before + i + 1, now) for i, token in enumerate(got)
            ]
            if not sequence.request.params.stop and all(self._goes_on(sample) for sample in samples):
                self._unanswered += samples
            else:
                self._try(samples)

    def _goes_on(self, sample: _Sampled) -> bool:
        """Whether a sequence without stop strings goes on after a token; one that is no token is an error."""
        return 0 <= sample.token < self._vocab_size and sample.track.ending(sample.token, sample.number) is None

    def _flush(self) -> None:
        """Gives out what the last step left to be said. Called while a step runs, or when none will follow."""
        unanswered, self._unanswered = self._unanswered, []
        self._try(unanswered)
        self._deliver()

    def _try(self, samples: Sequence[_Sampled]) -> None:
        """Answers them in order, but for those of sequences that have ended."""
        for sample in samples:
            if sample.live.tracks.get(sample.track.sequence.index) is not sample.track:
                continue
            try:
                self._answer_one(*sample)
            except Exception:
                request_id = sample.live.request.request_id
                log.exception("request %s failed", request_id)
                self._end_request(request_id, "error", "internal error: the output could not be processed")

    def _answer_one(
        self, live: _Live, track: Track, output: StepOutput, row: int, token: int, number: int, now: float
    ) -> None:
        sequence = track.sequence
        if not 0 <= token < self._vocab_size:
            raise RuntimeError(f"the executor sampled token {token} of a vocabulary of {self._vocab_size}")
        self._generation_tokens += 1
        if track.last_token_time:
            self.observer.next_token(now - track.last_token_time)
        else:
            self._prompt_tokens += sequence.num_prompt if sequence.index == 0 else 0
            self.observer.first_token(now - live.request.arrival)
        track.last_token_time = now
        text, reason, is_output = track.advance(token, number)
        logprob = track.logprob(token, output, row) if is_output else None
        if reason is not None:
            self._end_sequence(live, sequence.index, reason)
        self._send(
            live,
            RequestOutput(
                live.request.request_id,
                sequence.index,
                text,
                (token,),
                sequence.num_prompt,
                number,
                () if logprob is None else (logprob,),
                reason,
                num_cached=min(sequence.num_cached or 0, sequence.num_prompt),
            ),
        )

    def _end_sequence(self, live: _Live, index: int, reason: FinishReason) -> None:
        """Frees what a sequence holds. Comes before its last output, so that who reads that finds the pages
        free.
        """
        track = live.tracks.pop(index, None)
        if track is not None:
            self._scheduler.finish(track.sequence)
        live.open.discard(index)
        self._finished[reason] += 1
        if not live.open:
            del self._live[live.request.request_id]
            self.observer.finished(time.monotonic() - live.request.arrival)
        self._queue.sequence_ended(live.request.request_id, is_last=not live.open)

    def _end_request(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """Ends what is left of a request; does nothing when it has finished."""
        live = self._live.get(request_id)
        if live is None:
            return
        for index in sorted(live.open):
            track = live.tracks.get(index)
            num_output = track.sequence.num_output if track is not None else 0
            self._end_sequence(live, index, reason)
            self._send(
                live,
                RequestOutput(
                    request_id,
                    index,
                    "",
                    (),
                    len(live.request.prompt),
                    num_output,
                    finish_reason=reason,
                    error=error,
                ),
            )

    def _end_all(self, reason: FinishReason, error: str) -> None:
        for request_id in list(self._live):
            self._end_request(request_id, reason, error)

    def _send(self, live: _Live, output: RequestOutput) -> None:
        live.sink.push(output)
        self._touched.add(live.sink)

    def _deliver(self) -> None:
        touched, self._touched = self._touched, set()
        wake_all(touched)
