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
        policy: Policy = order_of_arrival,
    ) -> None:  # fmt: skip
        self.executor = FakeExecutor(num_pages, max_num_tokens=64, max_num_rows=64)
        self.scheduler = Scheduler(
            BlockAllocator(num_pages, 16),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
        )
        self.live: list[Sequence] = []
        self.finished: list[Sequence] = []

    def add(self, prompt: list[int], max_tokens: int, seed: int = 0) -> Sequence:
        request = Request(f"r{len(self.live)}", tuple(prompt), SamplingParams(seed=seed))
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
    """Arrivals, aborts and steps over a pool so small that preemption is common, in either order of service."""

    h: Harness

    @initialize(policy=st.sampled_from([order_of_arrival, shortest_first]))
    def begin(self, policy: Policy) -> None:
        self.h = Harness(num_pages=6, max_num_seqs=4, max_num_batched_tokens=7, policy=policy)
        self.added = 0

    @precondition(lambda self: len(self.h.live) < 8)
    @rule(length=st.integers(1, 60), max_tokens=st.integers(1, 30), seed=st.integers(0, 3))
    def arrive(self, length: int, max_tokens: int, seed: int) -> None:
        self.added += 1
        self.h.add(prompt(length, self.added), max_tokens, seed)

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
