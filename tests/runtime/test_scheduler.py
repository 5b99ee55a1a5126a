"""The scheduler over a pseudo-model whose tokens betray any wrong page, position or forgotten recompute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from runtime_fakes import FakeExecutor, solo_tokens

from llmc.runtime.batching import accepted_tokens, build_batch
from llmc.runtime.kv import BlockAllocator
from llmc.runtime.request import Request, RequestError, SamplingParams
from llmc.runtime.scheduler import Chunk, Scheduler, order_of_arrival
from llmc.runtime.sequence import Sequence

Policy = Callable[[Sequence], tuple[int, ...]]


def shortest_first(sequence: Sequence) -> tuple[int, ...]:
    """A policy that lets sequences overtake each other."""
    return (sequence.num_prompt + sequence.max_tokens, sequence.seq_id)


class Harness:
    """A scheduler, a fake executor and the loop between them."""

    def __init__(
        self, num_pages: int = 8, max_num_seqs: int = 4, max_num_batched_tokens: int = 7,
        policy: Policy = order_of_arrival, prefix_cache: bool = True,
    ) -> None:  # fmt: skip
        self.executor = FakeExecutor(num_pages, max_num_tokens=64, max_num_rows=64)
        self.scheduler = Scheduler(
            BlockAllocator(num_pages, 16),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
            prefix_cache=prefix_cache,
        )
        self.live: list[Sequence] = []
        self.finished: list[Sequence] = []

    def add(self, prompt: list[int], max_tokens: int, seed: int = 0, salt: bytes = b"") -> Sequence:
        request = Request(f"r{len(self.live)}", tuple(prompt), SamplingParams(seed=seed), cache_salt=salt)
        sequence = self.scheduler.add(request, 0, seed, max_tokens)
        self.live.append(sequence)
        return sequence

    def step(self, drafts: str = "") -> list[Chunk]:
        """drafts: for each guess that follows a single token, as far as its page has room, whether it is right (r)."""
        chunks = self.scheduler.schedule()
        if chunks:
            assert sum(c.count for c in chunks) <= self.scheduler.max_num_batched_tokens
            assert len(chunks) <= self.scheduler.max_num_seqs
            chunks = [with_drafts(c, drafts) if c.count == 1 and c.sampled else c for c in chunks]
            output = self.executor.step(build_batch(chunks))
            tokens = accepted_tokens(chunks, output.tokens.tolist())
            for sequence in self.scheduler.commit(chunks, tokens):
                if sequence.at_length:
                    self.scheduler.finish(sequence)
                    self.live.remove(sequence)
                    self.finished.append(sequence)
        self.scheduler.check_integrity()
        return chunks

    def run(self) -> None:
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("the scheduler does not finish")

    def check_tokens(self) -> None:
        for s in self.finished:
            assert s.tokens[s.num_prompt :].tolist() == solo_tokens(list(s.request.prompt), s.num_output, s.seed)


def with_drafts(chunk: Chunk, drafts: str) -> Chunk:
    s = chunk.sequence
    room = -(chunk.start + 1) % 16
    coming = solo_tokens(list(s.request.prompt), s.num_output + len(drafts), s.seed)[s.num_output :]
    guesses = tuple(t if d == "r" else t + 1 for t, d in zip(coming, drafts, strict=True))[:room]
    return replace(chunk, count=1 + len(guesses), sampled=range(1 + len(guesses)), drafts=guesses)


def prompt(length: int, salt: int) -> list[int]:
    return [(7 * i + salt) % 250 for i in range(length)]


def test_prefill_comes_in_chunks_after_the_decodes() -> None:
    h = Harness()
    first = h.add(prompt(3, 1), 8)
    h.step()
    second = h.add(prompt(20, 2), 2)
    taken = [[(c.sequence, c.count) for c in h.step()] for _ in range(4)]
    assert taken[0] == [(first, 1), (second, 6)]
    assert taken[1] == [(first, 1), (second, 6)]
    assert taken[2] == [(first, 1), (second, 6)]
    assert taken[3] == [(first, 1), (second, 2)]
    h.run()
    h.check_tokens()


def test_the_newest_is_preempted_and_keeps_its_tokens() -> None:
    h = Harness(num_pages=4, max_num_batched_tokens=64)
    old, new = h.add(prompt(30, 1), 20, seed=1), h.add(prompt(30, 2), 20, seed=2)
    while not h.scheduler.num_preemptions:
        h.step()
    kept = new.tokens[:]
    assert old.running and not new.running and new.num_output > 0
    h.run()
    assert new.tokens[: len(kept)] == kept
    assert h.scheduler.num_preemptions == 1
    assert [s is old for s in h.finished] == [True, False]
    h.check_tokens()


def test_a_sequence_that_fits_only_alone_runs_and_a_larger_one_is_refused() -> None:
    h = Harness(num_pages=4)
    h.add(prompt(40, 1), 25)  # 64 computed positions: exactly the pool
    h.add(prompt(40, 2), 25)
    h.run()
    assert len(h.finished) == 2
    h.check_tokens()
    with pytest.raises(RequestError, match="can never fit"):
        h.add(prompt(40, 1), 26)


def test_the_policy_s_key_is_the_order_of_service() -> None:
    """The shortest overtakes all that wait and, where there is no room, sends the last of those that run back."""
    h = Harness(num_pages=8, max_num_seqs=3, max_num_batched_tokens=64, policy=shortest_first)
    long, middle = h.add(prompt(60, 1), 20), h.add(prompt(40, 2), 9)
    h.step()
    assert h.scheduler.running == [middle, long]
    also_long, short = h.add(prompt(60, 3), 19), h.add(prompt(15, 4), 3)
    assert h.scheduler.waiting == [short, also_long]
    chunks = h.step()
    assert [c.sequence for c in chunks] == [middle, long, short] and h.scheduler.running == [short, middle, long]
    h.run()
    assert h.finished == [short, middle, also_long, long] and h.scheduler.num_preemptions > 0
    h.check_tokens()


def test_a_prompt_that_was_computed_before_is_shared_but_for_its_last_page() -> None:
    h = Harness(num_pages=20, max_num_batched_tokens=64)
    first = h.add(prompt(50, 1), 3)
    h.step()
    second = h.add([*prompt(40, 1), 7, 7], 3)
    third = h.add(prompt(48, 1), 3)  # its own last token must be computed
    chunks = {c.sequence: c for c in h.step()}
    assert (chunks[second].start, chunks[second].count) == (32, 10)
    assert (chunks[third].start, chunks[third].count) == (32, 16)
    assert second.pages[:2] == third.pages[:2] == first.pages[:2] and second.pages[2] != first.pages[2]
    assert (second.num_cached, third.num_cached) == (32, 32)
    h.run()
    fourth = h.add(prompt(50, 1), 3)  # of sequences that have ended
    assert h.step()[0].start == 48 and fourth.num_cached == 48
    h.run()
    h.check_tokens()
    assert (h.scheduler.num_prefix_queries, h.scheduler.num_prefix_hits) == (50 + 42 + 48 + 50, 32 + 32 + 48)
    assert h.scheduler.allocator.num_used == 0 and h.scheduler.allocator.num_kept > 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_equal_prompts_that_come_together_are_computed_once(prefix_cache: bool) -> None:
    h = Harness(num_pages=30, max_num_batched_tokens=32, prefix_cache=prefix_cache)
    for seed in range(4):
        h.add(prompt(65, 1), 3, seed)
    h.run()
    h.check_tokens()
    computed = sum(h.executor.steps)
    assert computed == (65 + 3 * 1 if prefix_cache else 4 * 65) + 4 * 2
    assert h.scheduler.num_prefix_hits == (3 * 64 if prefix_cache else 0)


def test_other_salts_share_nothing() -> None:
    h = Harness(num_pages=30, max_num_batched_tokens=64)
    for salt in (b"", b"a", b"b", b"a"):
        h.add(prompt(40, 1), 2, salt=salt)
        h.run()
    assert h.scheduler.num_prefix_hits == 32
    h.check_tokens()


def test_a_preempted_sequence_finds_what_is_left_of_its_pages() -> None:
    h = Harness(num_pages=6, max_num_batched_tokens=64)
    h.add(prompt(40, 1), 30, seed=1)
    new = h.add(prompt(40, 2), 20, seed=2)
    while not h.scheduler.num_preemptions:
        assert h.step()
    while not new.running:
        assert h.step()
    assert new.num_cached == 0 and 0 < h.executor.steps[-1] < 40
    h.run()
    h.check_tokens()


def test_kept_pages_are_room_for_others() -> None:
    """Prompts of which no two fit the pool, one after the other: what is kept of one makes way for the next."""
    h = Harness(num_pages=5, max_num_batched_tokens=64)
    for salt in range(6):
        h.add(prompt(60, salt % 3), 10)
    h.run()
    assert len(h.finished) == 6 and h.scheduler.num_preemptions == 0
    h.check_tokens()


def test_a_step_that_failed_leaves_no_page() -> None:
    h = Harness()
    h.add(prompt(20, 1), 3)
    for chunk in h.scheduler.schedule():
        h.scheduler.finish(chunk.sequence)
    assert h.scheduler.allocator.num_used == 0
    h.scheduler.check_integrity()


@pytest.mark.parametrize(("drafts", "steps"), [("", 11), ("r", 6), ("rrrr", 3), ("w", 11), ("rw", 6), ("wrr", 11)])
def test_drafts_change_no_token_and_right_ones_save_steps(drafts: str, steps: int) -> None:
    """Ten more tokens after the first, on one page."""
    h = Harness(num_pages=4)
    sequence = h.add(prompt(3, 1), 11, seed=5)
    count = 0
    while h.live:
        h.step(drafts)
        count += 1
    assert count == steps and sequence.num_output >= 11
    h.check_tokens()


def test_pages_of_refused_drafts_are_given_back() -> None:
    """A token and a guess on the first page, three guesses on the second; only the first one is right."""
    h = Harness(max_num_batched_tokens=32)
    sequence = h.add(prompt(14, 1), 20, seed=5)
    h.step()
    (chunk,) = h.scheduler.schedule()
    sequence.pages.extend(h.scheduler.allocator.allocate(sequence.seq_id, 1))
    chunk = replace(chunk, count=5, sampled=range(5), drafts=(1, 2, 3, 4))
    h.scheduler.commit([chunk], [[1, 7]])
    h.scheduler.check_integrity()
    assert sequence.num_computed == 16 and len(sequence.pages) == 1 and sequence.tokens[-2:].tolist() == [1, 7]


def test_a_chunk_gets_a_token_for_one_row_at_least_and_for_all_at_most() -> None:
    h = Harness()
    h.add(prompt(3, 1), 8)
    (chunk,) = h.scheduler.schedule()
    for tokens in ([], [1, 2]):
        with pytest.raises(ValueError, match=f"{len(tokens)} tokens for a chunk with 1 rows"):
            h.scheduler.commit([chunk], [tokens])
    with pytest.raises(ValueError, match="2 tokens for the rows of 1 chunks"):
        accepted_tokens([chunk], [1, 2])
    assert h.live[0].num_computed == 0 and h.live[0].num_output == 0


def test_more_sequences_than_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        Scheduler(BlockAllocator(4, 16), max_num_seqs=8, max_num_batched_tokens=7)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts and steps over a pool so small that preemption is common, in either order of service. Prompts
    are often the start of each other, under one of two salts."""

    h: Harness

    @initialize(
        policy=st.sampled_from([order_of_arrival, shortest_first]), prefix_cache=st.sampled_from([True, True, False])
    )  # fmt: skip
    def begin(self, policy: Policy, prefix_cache: bool) -> None:
        self.h = Harness(
            num_pages=6, max_num_seqs=4, max_num_batched_tokens=7, policy=policy, prefix_cache=prefix_cache
        )  # fmt: skip
        self.added = 0

    @precondition(lambda self: len(self.h.live) < 8)
    @rule(
        length=st.integers(1, 60), max_tokens=st.integers(1, 30), seed=st.integers(0, 3), kind=st.integers(0, 3),
        salt=st.sampled_from([b"", b"", b"x"]),
    )  # fmt: skip
    def arrive(self, length: int, max_tokens: int, seed: int, kind: int, salt: bytes) -> None:
        self.added += 1
        self.h.add(prompt(length, self.added if kind == 0 else 1000 + kind), max_tokens, seed, salt)

    @precondition(lambda self: self.h.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(range(len(self.h.live))))
        self.h.scheduler.finish(self.h.live.pop(sequence))

    @rule(count=st.integers(1, 12), drafts=st.sampled_from(["", "", "r", "rrr", "w", "rwr"]))
    def steps(self, count: int, drafts: str) -> None:
        for _ in range(count):
            self.h.step(drafts)

    @invariant()
    def holds(self) -> None:
        self.h.scheduler.check_integrity()

    def teardown(self) -> None:
        self.h.run()
        assert not self.h.live
        assert self.h.scheduler.allocator.num_used == 0
        self.h.check_tokens()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=25, deadline=None, derandomize=True)
