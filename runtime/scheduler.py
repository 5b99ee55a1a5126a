"""Which tokens of which sequences run in the next step.

Continuous batching over a paged KV pool: pure decisions on plain Python values, no clock, no arrays, no
threads.

Invariants, checked by `check_integrity`:
 1. A step has at most `max_num_batched_tokens` tokens and at most `max_num_seqs` sequences.
 2. `running` and `waiting` are each in the order of service, that of a key which the policy gives a sequence when it
    is added. Sequences are admitted in that order only, and the last running one is the one preempted. So a waiting
    sequence that comes before a running one was added after it. The key of `order_of_arrival` makes that first come,
    first served: every running sequence is older than every waiting one, and none starves.
 3. A waiting sequence holds no pages. A running one holds exactly the pages of its computed positions (within a
    step: of the positions computed when it ends). Of those, the full ones are sealed with a hash of their content,
    unless the prefix cache is off.
 4. While there is work, a step is never empty: the first sequence always advances. It can be refused pages
    only when it is alone, and alone every accepted sequence fits the pool.

Order within a step: sequences with one token left to compute (decodes) first, then prefills in chunks, both in the
order of service, then admissions. A preempted sequence keeps its tokens; they are computed again as if they were a
prompt, and only the next one is sampled: a token is never sampled twice.

Prefix cache: a sequence that is admitted takes the full pages that others have computed for the same tokens, and
computes the rest: at least its last token. While a running sequence is computing the next page that it needs, it waits.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from llmc.runtime.kv import BlockAllocator, page_hash, root_hash
from llmc.runtime.request import Request, RequestError
from llmc.runtime.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Positions start .. start+count-1 of a sequence in one step.

    sampled: which of them, counted from `start`, have a row each: none, or the last ones, from the last token that is
    known on. What follows it are `drafts`, guesses that the rows verify.
    """

    sequence: Sequence
    start: int
    count: int
    sampled: range
    drafts: tuple[int, ...] = ()


ServiceKey = tuple[int, ...]
"""Sequences are served by rising key."""


def order_of_arrival(sequence: Sequence) -> ServiceKey:
    """The key of first come, first served."""
    return (sequence.seq_id,)


def _key(sequence: Sequence) -> ServiceKey:
    return sequence.service_key


class _Step:
    """A step while it is put together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: dict[int, Chunk] = {}

    def add(self, sequence: Sequence, count: int) -> None:
        sampled = range(count - 1, count) if count == sequence.remaining else range(0)
        self.chunks[sequence.seq_id] = Chunk(sequence, sequence.num_computed, count, sampled)
        self.budget -= count

    def discard(self, sequence: Sequence) -> None:
        chunk = self.chunks.pop(sequence.seq_id, None)
        if chunk is not None:
            self.budget += chunk.count


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recompute. Used by one thread."""

    def __init__(
        self, allocator: BlockAllocator, *, max_num_seqs: int, max_num_batched_tokens: int,
        policy: Callable[[Sequence], ServiceKey] = order_of_arrival, prefix_cache: bool = True,
    ) -> None:  # fmt: skip
        """max_num_seqs must not exceed max_num_batched_tokens, so that all decodes fit one step (else
        ValueError). policy: the key of a sequence, another for each, asked for when it is added. prefix_cache: whether
        full pages are shared, and kept when nobody holds them.
        """
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(f"need 1 <= max_num_seqs ({max_num_seqs}) <= tokens per step ({max_num_batched_tokens})")
        self.allocator: Final = allocator
        self.max_num_seqs: Final = max_num_seqs
        self.max_num_batched_tokens: Final = max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._policy: Final = policy
        self._prefix_cache: Final = prefix_cache
        # Contents of pages that running sequences are going to fill, as they know the tokens already.
        self._coming: Counter[bytes] = Counter()
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        """Tokens of the sequences that were admitted for the first time, and of those the ones found computed."""
        self.num_prefix_hits = 0
        self._next_id = 0

    def take_counts(self, other: Scheduler) -> None:
        """Goes on counting where another left off."""
        self.num_preemptions = other.num_preemptions
        self.num_prefix_queries, self.num_prefix_hits = other.num_prefix_queries, other.num_prefix_hits

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def fits(self, num_prompt: int, max_tokens: int) -> bool:
        """Whether a sequence could run with the pool to itself. Its last token is never computed."""
        return self.allocator.pages_for(num_prompt + max_tokens - 1) <= self.allocator.num_pages

    def add(
        self, request: Request, index: int, seed: int, max_tokens: int, stop_ids: frozenset[int] = frozenset()
    ) -> Sequence:
        """Queues sequence `index` of a request. stop_ids: the tokens that end it. Raises RequestError when it could
        never fit the pool."""
        if not self.fits(len(request.prompt), max_tokens):
            capacity = self.allocator.num_pages * self.allocator.page_size
            raise RequestError(
                f"{len(request.prompt)} prompt tokens and {max_tokens} output tokens can never fit the KV "
                f"cache of {capacity} tokens; ask for fewer tokens or serve with a larger KV cache",
                param="max_tokens",
                code="context_length_exceeded",
            )
        sequence = Sequence(self._next_id, request, index, seed, max_tokens, stop_ids)
        self._next_id += 1
        sequence.service_key = self._policy(sequence)
        insort(self.waiting, sequence, key=_key)
        return sequence

    def schedule(self) -> list[Chunk]:
        """Chooses the next step and gives its sequences the pages it writes. Empty only when there is no
        work.

        The caller runs the chunks, then calls `commit`; or, if the run failed, `finish` for each of their
        sequences.
        """
        step = _Step(self.max_num_batched_tokens)
        decodes = [s for s in self.running if s.remaining == 1]
        prefills = [s for s in self.running if s.remaining > 1]
        for sequence in decodes + prefills:
            if not sequence.running:
                continue  # preempted a moment ago by one before it
            if step.budget == 0:
                break
            count = min(sequence.remaining, step.budget)
            if self._grow(sequence, sequence.num_computed + count, step):
                step.add(sequence, count)
        self._admit(step)
        if self.has_work and not step.chunks:
            raise AssertionError("the scheduler found nothing to run although there is work")
        return list(step.chunks.values())

    def commit(self, chunks: list[Chunk], tokens: list[list[int]]) -> list[Sequence]:
        """Records that the step ran: tokens holds for each chunk those that its sequence gets, of its first rows; none
        for a chunk without rows.

        What was computed of drafts behind them does not count. Returns the sequences that got tokens. The caller ends
        those that are done with `finish`.
        """
        for chunk, got in zip(chunks, tokens, strict=True):
            if not min(len(chunk.sampled), 1) <= len(got) <= len(chunk.sampled):
                raise ValueError(f"{len(got)} tokens for a chunk with {len(chunk.sampled)} rows")
        for chunk, got in zip(chunks, tokens, strict=True):
            sequence = chunk.sequence
            before = sequence.num_computed
            sequence.num_computed += chunk.sampled.start + len(got) if got else chunk.count
            if len(got) < len(chunk.sampled):
                self._trim(sequence)
            for token in got:
                sequence.append(token)
            if self._prefix_cache:
                self._seal(sequence, before)
        return [chunk.sequence for chunk, got in zip(chunks, tokens, strict=True) if got]

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, whatever its state, and frees its pages."""
        if sequence.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def _seal(self, sequence: Sequence, before: int) -> None:
        """Says what is in the pages that have become full since `before` positions were computed."""
        size = self.allocator.page_size
        self._announce(sequence, before, sequence.num_computed, -1)
        for index in range(before // size, sequence.num_computed // size):
            self.allocator.seal(sequence.pages[index], sequence.page_hash(index, size))

    def _announce(self, sequence: Sequence, start: int, stop: int, sign: int) -> None:
        """Adds the pages that positions [start, stop) of a sequence fill to those that are coming, or takes them out.
        What it samples is not announced: nobody can know it."""
        size = self.allocator.page_size
        for index in range(start // size, min(stop, sequence.num_announced) // size):
            content = sequence.page_hash(index, size)
            self._coming[content] += sign
            if not self._coming[content]:
                del self._coming[content]

    def _find_prefix(self, sequence: Sequence) -> list[int] | None:
        """The pages that are computed of a sequence that waits; None while the next one is being computed. Its last
        token must be left to compute."""
        size, pages = self.allocator.page_size, list[int]()
        if not self._prefix_cache:
            return pages
        for index in range((len(sequence.tokens) - 1) // size):
            content = sequence.page_hash(index, size)
            page = self.allocator.find(content)
            if page is None:
                return None if content in self._coming else pages
            pages.append(page)
        return pages

    def _trim(self, sequence: Sequence) -> None:
        """Gives back the pages behind the computed positions: those of drafts that were refused."""
        kept = self.allocator.pages_for(sequence.num_computed)
        if kept < len(sequence.pages):
            self.allocator.free(sequence.seq_id, sequence.pages[kept:])
            del sequence.pages[kept:]

    def _grow(self, sequence: Sequence, num_tokens: int, step: _Step) -> bool:
        """Gives a running sequence pages for `num_tokens` positions, preempting from the last.

        False when the sequence itself was the last and had to go.
        """
        need = self.allocator.pages_for(num_tokens) - len(sequence.pages)
        while need > self.allocator.num_free:
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is sequence:
                return False
        sequence.pages.extend(self.allocator.allocate(sequence.seq_id, need))
        return True

    def _preempt(self, victim: Sequence, step: _Step) -> None:
        step.discard(victim)
        self.running.remove(victim)
        self._release(victim)
        victim.num_computed = 0
        insort(self.waiting, victim, key=_key)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        if self._prefix_cache:
            self._announce(sequence, sequence.num_computed, len(sequence.tokens), -1)
        # The last page first: it is the first to go, as it is of no use without those before it.
        self.allocator.free(sequence.seq_id, reversed(sequence.pages))
        sequence.pages = array("i")
        sequence.running = False

    def _admit(self, step: _Step) -> None:
        """Starts waiting sequences while there is room for all tokens they and the running ones know of.

        Room for the whole sequence, not just its first chunk: else a half-done prefill would soon be
        preempted again.
        """
        if not self.waiting:
            return
        allocator = self.allocator
        promised = sum(allocator.pages_for(len(s.tokens)) - len(s.pages) for s in self.running)
        while self.waiting and step.budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            prefix = self._find_prefix(sequence)
            if prefix is None:
                break
            need = allocator.pages_for(len(sequence.tokens))
            in_use = sum(1 for page in prefix if allocator.references(page))
            if need - in_use > allocator.num_free - promised:
                break
            del self.waiting[0]
            insort(self.running, sequence, key=_key)
            self._start(sequence, prefix)
            count = min(sequence.remaining, step.budget)
            more = allocator.pages_for(sequence.num_computed + count) - len(sequence.pages)
            sequence.pages.extend(allocator.allocate(sequence.seq_id, more))
            promised += need - len(sequence.pages)
            step.add(sequence, count)

    def _start(self, sequence: Sequence, prefix: list[int]) -> None:
        """Makes a sequence run that has these pages computed."""
        sequence.running = True
        self.allocator.share(sequence.seq_id, prefix)
        sequence.pages.extend(prefix)
        sequence.num_computed = len(prefix) * self.allocator.page_size
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            self.num_prefix_queries += len(sequence.tokens)
            self.num_prefix_hits += sequence.num_cached
        sequence.num_announced = len(sequence.tokens)
        if self._prefix_cache:
            self._announce(sequence, sequence.num_computed, sequence.num_announced, 1)

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant does not hold. To be called between steps."""
        self.allocator.check_integrity({s.seq_id: s.pages for s in self.running})
        for queue in (self.running, self.waiting):
            keys = [s.service_key for s in queue]
            if keys != sorted(set(keys)):
                raise AssertionError(f"sequences are out of the order of service: {keys}")
        for w in self.waiting:
            for r in self.running:
                if w.service_key < r.service_key and w.seq_id < r.seq_id:
                    raise AssertionError(f"sequence {r.seq_id} runs, although {w.seq_id} waits and comes before it")
        if len(self.running) > self.max_num_seqs:
            raise AssertionError(f"{len(self.running)} sequences run, {self.max_num_seqs} may")
        for s in self.running:
            if not s.running or s.remaining < 1 or s.at_length:
                raise AssertionError(f"sequence {s.seq_id} runs with {s.remaining} tokens to compute")
            if len(s.pages) != self.allocator.pages_for(s.num_computed):
                raise AssertionError(f"sequence {s.seq_id}: {len(s.pages)} pages, {s.num_computed} computed positions")
            self._check_contents(s)
        for s in self.waiting:
            if s.running or s.pages or s.num_computed:
                raise AssertionError(f"sequence {s.seq_id} waits but holds pages")
        coming = Counter(
            s.page_hash(index, self.allocator.page_size)
            for s in self.running
            for index in range(s.num_computed // self.allocator.page_size, s.num_announced // self.allocator.page_size)
        )
        if self._coming != (coming if self._prefix_cache else Counter()):
            raise AssertionError("the pages that are coming are not those that running sequences will fill")

    def _check_contents(self, s: Sequence) -> None:
        """Every full page says what its sequence has there, no other says anything."""
        size, before = self.allocator.page_size, root_hash(s.request.cache_salt)
        for index, page in enumerate(s.pages):
            full = self._prefix_cache and (index + 1) * size <= s.num_computed
            before = page_hash(before, s.tokens[index * size : (index + 1) * size])
            if self.allocator.content(page) != (before if full else None):
                raise AssertionError(f"sequence {s.seq_id}: page {page} does not say what is in it")
