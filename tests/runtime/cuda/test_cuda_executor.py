"""runtime/cuda/executor.py over the recording driver: what it allocates, uploads, launches, captures and replays."""

from __future__ import annotations

import re

import pytest
from cuda_fakes import CONFIG, WEIGHTS, Ran, run

from llmc.runtime.cuda.executor import bucket_of

Line = list[str]
AREAS = {
    512: "weight", 96 * 48: "tokens", 48 * 16: "rows", 6 * 50 * 4: "logits", 6 * 128 * 4: "stats", 128: "out",
    64: "staging", 10 * 4 * 12: "partials", 768 * 32: "kv",
}  # fmt: skip


@pytest.fixture(scope="module")
def ran() -> Ran:
    """Loads, then steps between marks; `result` has each step's tokens and log probabilities."""
    return run(
        """
import ctypes
device = open_device()
engine = executor(device)
weights = engine.memory.area("weight")
memory = ctypes.string_at(weights, 512)
forced = RowSampling(temperature=0.0, bias_tokens=np.int32([7, 9]), bias_values=np.float32([1, 2]))
result = {"weights": [memory[16:116].hex(), memory[256:320].hex(), memory[320:].hex()], "steps": []}
steps = [decode(3), decode(4), batch((0, 20), (5, 6)), decode(4, sampling=forced), decode(5), decode(6, logits=True),
         batch((3, 9), (0, 1), (0, 2), sampling=forced), decode(1, sampling=forced)]
for value in steps:
    mark()
    out = engine.step(value)
    result["steps"].append([out.tokens.tolist(), out.logprobs.tolist(), out.logits is not None and out.logits.shape])
mark()
engine.close()
engine.close()
result["closed"] = refusal(lambda: engine.step(decode(1)))
result["pages"] = engine.num_pages
"""
    )


def _areas(log: list[Line]) -> dict[int, str]:
    """Address -> name of every allocation: by size, and the batch buffer by its copies."""
    found: dict[int, str] = {}
    for _, size, address, *_ in (line for line in log if line[0] == "alloc"):
        name = AREAS.get(int(size), "batch")
        found[int(address)] = "adjusted" if name == "logits" and name in found.values() else name
    return found


def _where(areas: dict[int, str], address: str) -> str:
    """An address as area+offset."""
    base = max(a for a in areas if a <= int(address))
    return f"{areas[base]}+{int(address) - base}"


def _launches(part: list[Line], kind: str) -> dict[str, Line]:
    return {line[1]: line[2:] for line in part if line[0] == kind}


def test_memory_is_zeroed_and_of_the_right_sizes(ran: Ran) -> None:
    load = ran.marks[0]
    sizes = [int(line[1]) for line in load if line[0] == "alloc"]
    batch_bytes = sizes[7]
    assert sizes == [512, 96 * 48, 48 * 16, 1200, 1200, 3072, 128, batch_bytes, 64, 480, 768 * 32]
    assert [line[1:] for line in load if line[0] == "fill"] == [
        [line[2], "0", line[1]] for line in load if line[0] == "alloc"
    ]
    assert ran.result["pages"] == CONFIG["num_pages"]


def test_weights_are_copied_and_repacked_and_the_staging_area_is_freed(ran: Ran) -> None:
    plain, repacked, rest = ran.result["weights"]
    assert bytes.fromhex(plain) == WEIGHTS[:100]
    assert bytes.fromhex(repacked) == bytes(255 - b for b in WEIGHTS[128:192])
    assert not any(bytes.fromhex(rest))
    load = ran.marks[0]
    areas = _areas(load)
    staging = next(line[2] for line in load if line[:2] == ["alloc", "64"])
    order = [line[0] for line in load if line[0] in ("h2d", "launch", "free")]
    assert order == ["h2d", "h2d", "launch", "free"]
    copies = [[_where(areas, line[1]), line[2]] for line in load if line[0] == "h2d"]
    assert copies == [["weight+16", "100"], ["staging+0", "64"]]
    assert ["free", staging] in load
    (repack,) = _launches(load, "launch").items()
    assert repack == ("repack", ["5,3,1", "128,1,1", "0", staging, str(_address(areas, "weight") + 256), "0", "0"])


def _address(areas: dict[int, str], name: str) -> int:
    return next(a for a, n in areas.items() if n == name)


def test_only_large_shared_memory_is_asked_for(ran: Ran) -> None:
    assert ran.calls("attribute") == [  # the most dynamic shared memory, and all of L1 as shared memory
        ["attribute", "linear_large", "8", "50000"], ["attribute", "linear_large", "9", "100"],
    ]  # fmt: skip
    assert [line[1] for line in ran.calls("load")] == [
        "embed", "linear_small", "linear_large", "decode", "prefill", "adjust", "sample", "repack",
    ]  # fmt: skip


def test_a_mixed_step_is_launched_in_order(ran: Ran) -> None:
    part, areas = ran.marks[3], _areas(ran.marks[0])
    assert [line[0] for line in part] == ["h2d", *["launch"] * 5, "d2h", "synchronize"]
    found = _launches(part, "launch")
    assert list(found) == ["embed", "linear_large", "decode", "prefill", "sample"]
    shapes = {name: words[:3] for name, words in found.items()}
    assert shapes == {  # T 21, R 2, S 2, D 1, one sequence of 20 tokens; 4 * 3 programs
        "embed": ["6,2,1", "128,1,1", "0"], "linear_large": ["1,3,1", "256,1,1", "50000"],
        "decode": ["12,1,1", "128,1,1", "0"], "prefill": ["5,1,1", "128,1,1", "0"],
        "sample": ["2,1,1", "32,1,1", "0"],
    }  # fmt: skip
    assert all(words[-2:] == ["0", "0"] for words in found.values())
    args = {name: [_where(areas, a) for a in words[3:-2]] for name, words in found.items()}
    assert args["embed"] == ["batch+0", "batch+64", "tokens+0"]
    assert args["linear_large"] == [f"tokens+{32 * 48}", "weight+256", f"rows+{16 * 16}"]
    kv = [0, 512 * 32 + 128 * 32, 448 * 32]
    assert args["decode"][:4] == [*(f"kv+{n}" for n in kv), "partials+0"]
    assert args["prefill"][4:] == [f"kv+{384 * 32}", f"kv+{512 * 32}"]
    assert args["sample"][3:] == ["out+0", "out+64"]


def test_the_upload_is_one_copy_of_what_is_used(ran: Ran) -> None:
    areas = _areas(ran.marks[0])
    copies = [[line for line in part if line[0] == "h2d"] for part in ran.marks[1:9]]
    assert all(len(lines) == 1 and _where(areas, lines[0][1]) == "batch+0" for lines in copies)
    sizes = [int(lines[0][2]) for lines in copies]
    assert sizes[1] - sizes[0] == 4  # one more sequence of one page
    assert sizes[2] - sizes[1] == 0  # two sequences of two pages
    assert sizes[3] - sizes[1] == 4 * 4 * 4  # four rows with two biases and their values


def test_decode_steps_are_captured_once_per_bucket(ran: Ran) -> None:
    first, second, mixed, adjusted, larger, again = ran.marks[1:7]
    captured = ["h2d", "begin_capture", *["record"] * 4, "end_capture", "instantiate", "destroy_graph", "replay"]
    done = ["d2h", "synchronize"]
    assert [line[0] for line in first] == captured + done
    assert [line[0] for line in second] == ["h2d", "replay", *done]  # 3 and 4 sequences share a bucket
    assert "replay" not in [line[0] for line in mixed]
    assert [line[0] for line in adjusted] == captured[:2] + ["record"] * 5 + captured[6:] + done
    assert [line[0] for line in larger] == captured + done
    assert [line[0] for line in again] == ["h2d", "replay", "d2h", "host", *done]  # the logits, too
    assert {n: w[0] for n, w in _launches(first, "record").items()} == {
        "embed": "1,2,1", "linear_small": "1,3,1", "decode": "12,1,1", "sample": "4,1,1",
    }  # fmt: skip
    assert _launches(larger, "record")["sample"][0] == "6,1,1"  # the bucket of 8, but at most 6 rows
    assert _launches(adjusted, "record")["adjust"][0] == "4,1,1"


def test_graphs_are_captured_before_the_first_step() -> None:
    """Of every bucket, with and without penalties: no decode step captures one, and a graph that cannot be had is told
    at the start, with everything freed."""
    script = """
engine = executor(open_device())
engine.capture_graphs()
for value in (*(decode(n) for n in range(1, 7)), decode(3, sampling=RowSampling(repetition_penalty=2.0))):
    mark()
    engine.step(value)
"""
    found = run(script)
    start, *steps = found.marks
    assert [line[1] for line in start if line[0] == "instantiate"] == ["4", "5"] * 4  # of 1, 2, 4 and 6 sequences
    shapes = [line[2] for line in start if line[:2] == ["record", "sample"]]
    assert shapes == [f"{n},1,1" for n in (1, 1, 2, 2, 4, 4, 6, 6)]
    assert [line[0] for part in steps for line in part] == ["h2d", "replay", "d2h", "synchronize"] * 7
    failed = run(
        "engine = executor(open_device())\nresult = refusal(engine.capture_graphs)",
        FAKE_CUDA_FAIL="cuGraphInstantiateWithFlags:3:2",
    )
    assert failed.result[0] == "UserError"
    assert failed.result[1].startswith("the GPU or its driver is out of memory: CUDA_ERROR_OUT_OF_MEMORY")
    assert len(failed.calls("discard")) == 2 and failed.calls("release")
    assert len(failed.calls("free")) == len(failed.calls("alloc"))


def test_outputs_come_back(ran: Ran) -> None:
    """`sample` of the fake: token + 1 and -token / 2."""
    last = [[0, 1, 2], [0, 1, 2, 3], [19, 20], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [5, 6, 8], [0]]
    for (tokens, logprobs, logits), wanted in zip(ran.result["steps"], last, strict=True):
        assert tokens == [t + 1 for t in wanted] and logprobs == [-t / 2 for t in wanted]
        assert logits == ([6, 50] if len(wanted) == 6 else False)
    areas = _areas(ran.marks[0])
    downloads = [[_where(areas, line[1]), line[2]] for line in ran.calls("d2h")]
    assert downloads == [["out+0", "128"]] * 6 + [["logits+0", str(6 * 50 * 4)]] + [["out+0", "128"]] * 2


def test_close_frees_everything(ran: Ran) -> None:
    end = ran.marks[9]
    allocated = [line[-1] for line in ran.calls("alloc")]
    assert sorted(line[1] for line in ran.calls("free")) == sorted(allocated)
    assert sorted(line[1] for line in end if line[0] == "free_host") == sorted(line[2] for line in ran.calls("host"))
    assert len(ran.calls("discard")) == len(ran.calls("instantiate")) == 4
    assert end[-1] == ["release"] and ran.result["closed"] == ["RuntimeError", "the executor is closed"]


def test_a_larger_tail_moves_the_batch_and_drops_the_graphs() -> None:
    """Six rows whose biases fill more than the first buffer; afterwards everything still arrives."""
    found = run(
        """
engine = executor(open_device())
many = np.arange(20000, dtype=np.int32) % 50
huge = RowSampling(temperature=0.0, bias_tokens=many, bias_values=many.astype(np.float32))
result = []
for value in (decode(6), decode(6, sampling=huge), decode(6), batch((0, 9), (0, 2), sampling=huge)):
    mark()
    result.append(engine.step(value).tokens.tolist())
"""
    )
    assert found.result == [[1, 2, 3, 4, 5, 6]] * 3 + [[9, 11]]
    _, first, grown, again, last = found.marks
    old, new = (next(line for line in part if line[0] == "h2d")[1] for part in (first, grown))
    names = [line[0] for line in grown]
    assert names[:6] == ["discard", "alloc", "fill", "host", "synchronize", "free"] and ["free", old] in grown
    assert grown[1][2] == new != old and "begin_capture" in names
    assert all(line[5] == new for part in (grown, again) for line in part if line[:2] == ["record", "embed"])
    assert [line[0] for line in again].count("begin_capture") == 1  # its old graph had the old addresses
    assert _launches(last, "launch")["embed"][3] == new


def test_calls_that_a_step_does_not_need_are_left_out() -> None:
    """Prompts alone, as many tokens as a variant takes; single tokens of which one is sampled; nothing sampled."""
    found = run(
        """
from dataclasses import replace
data = description()
data["kernels"][5]["grid"] = [1, 1, 1]  # one that does not vanish without tiles
engine = executor(open_device(), data)
some = replace(decode(3), rows=np.int32([1]), sampling=(GREEDY,))
none = replace(batch((0, 17)), rows=np.int32([]), sampling=())
result = []
for value in (batch((0, 9), (0, 7)), some, none):
    mark()
    result.append(engine.step(value).tokens.tolist())
"""
    )
    assert found.result == [[9, 16], [2], []]
    launched = [[line[1] for line in part if line[0] == "launch"] for part in found.marks[1:]]
    assert launched == [
        ["embed", "linear_small", "prefill", "sample"],
        ["embed", "linear_small", "decode", "sample"],
        ["embed", "linear_large", "prefill"],
    ]


@pytest.mark.parametrize("tokens", [*range(1, 70), 96, 97, 250, 256])
def test_buckets_cover_and_do_not_exceed(tokens: int) -> None:
    buckets = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    assert bucket_of(tokens, 256) == next(b for b in buckets if b >= tokens)
    assert bucket_of(tokens, tokens) == tokens


def test_a_tuned_choice_picks_the_other_kernel() -> None:
    found = run(
        """
choices = {"linear 8x8@16": 1, "linear 8x8 large@None": 0, "something else@4": 3}
engine = executor(open_device(), choices=choices)
engine.step(decode(6))
result = refusal(lambda: executor(open_device(), choices={"linear 8x8@16": 2}))
"""
    )
    assert _launches(found.log, "record")["linear_tuned"][:3] == ["1,3,1", "128,1,1", "60000"]
    assert found.calls("attribute")[0] == ["attribute", "linear_tuned", "8", "60000"]
    assert [line[1] for line in found.calls("load")].count("linear_small") == 0
    assert found.result == [
        "UserError", "the plan's tuning names kernel 2 of linear 8x8@16, there is none; rebuild the plan",
    ]  # fmt: skip


def test_tuning_times_a_kernel_over_the_weights_of_every_layer() -> None:
    """Two layers at 16 rows, 5 launches at least: three rounds over both, for each alternative alike."""
    found = run(
        """
from copy import deepcopy
from llmc.runtime.cuda import tune
tune.ROUNDS, tune.LAUNCHES = 2, 5
data = description()
second = deepcopy(data["calls"][1])
second["args"][1] = ["weight", 16]
data["calls"].insert(2, second)
engine = executor(open_device(), data)
weight = engine.memory.area("weight")
alternatives = tune.alternatives(engine)
result = [weight, {key: [a.calls, a.rows, a.count] for key, a in alternatives.items()},
          {key: len(times) for key, times in tune.time_alternatives(engine, alternatives).items()}]
"""
    )
    weight, alternatives, seconds = found.result
    assert alternatives == {"linear 8x8@16": [[1, 2], 16, 2]} and seconds == {"linear 8x8@16": 2}
    records = [(line[1], int(line[6]) - weight) for line in found.log if line[0] == "record"]
    assert records == [(name, at) for name in ("linear_small", "linear_tuned") for at in (256, 16) * 3]
    assert found.calls("replay") == [["replay", "6"]] * 6  # once to warm up, then two rounds


def test_batches_that_are_refused_reach_nothing() -> None:
    found = run(
        """
from dataclasses import replace
engine = executor(open_device(), max_num_seqs=2, max_num_rows=2)
mark()
few = replace(batch((0, 1), (0, 1), (0, 1)), rows=np.int32([0]), sampling=(GREEDY,))
good = decode(2)
result = [refusal(lambda: engine.step(b)) for b in (
    few, decode(3), replace(good, tokens=good.tokens + np.int32(49)), batch((0, 41)),
    batch((255, 256), (255, 256), columns=16), replace(good, block_tables=good.block_tables + np.int32(40)))]
"""
    )
    assert [kind for kind, _ in found.result] == ["ValueError"] * 6
    texts = [text for _, text in found.result]
    assert texts[0] == "a batch of 3 sequences does not fit the engine"
    assert texts[1] == "a batch of 3 tokens and 3 rows does not fit the engine"
    assert texts[4] == "a batch of 2 sequences and 8 blocks does not fit the engine"
    assert found.marks[1] == []


def test_a_sequence_may_have_several_rows() -> None:
    """Nine rows of two sequences, where steps of six sequences fit: the buffers of rows are those of rows. Steps of
    single tokens with a row each are graphs, of at most six."""
    found = run(
        """
from dataclasses import replace
engine = executor(open_device(), max_num_rows=9)
two = batch((4, 9), (0, 6))
result = [engine.step(replace(two, rows=np.int32(rows), sampling=(GREEDY,) * len(rows))).tokens.tolist()
          for rows in ([2, 3, 4, 5, 6, 7, 8, 9, 10], [0, 4])]
result.append(refusal(lambda: engine.step(replace(two, rows=np.arange(10, dtype=np.int32), sampling=(GREEDY,) * 10))))
engine.capture_graphs()
"""
    )
    assert found.result[:2] == [[3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 5]]
    assert found.result[2] == ["ValueError", "a batch of 11 tokens and 10 rows does not fit the engine"]
    assert _launches(found.log, "launch")["sample"][0] == "2,1,1"
    grids = [line[2] for line in found.log if line[:2] == ["launch", "sample"]]
    assert grids == ["9,1,1", "2,1,1"]
    sizes = [int(line[1]) for line in found.calls("alloc")]
    assert sizes[3:7] == [9 * 50 * 4, 9 * 50 * 4, 9 * 128 * 4, 128]
    assert len(found.calls("instantiate")) == 8


def test_scratch_of_attention_grows_where_sequences_share_pages() -> None:
    """Six sequences of two blocks each in a pool of eight pages: scratch for 8 items, then for all 12 there can be. The
    next step finds it there; where there is no memory for it one step fails."""
    script = """
from dataclasses import replace
engine = executor(open_device(), num_pages=8)
alone = decode(6, columns=1)
shared = batch(*[(70 + i, 71 + i) for i in range(6)])
shared = replace(shared, block_tables=shared.block_tables % 8)
result = []
for step in (alone, shared, shared, alone):
    mark()
    result.append(refusal(lambda: engine.step(step)))
engine.close()
"""
    found = run(script)
    assert found.result == [None] * 4
    first, grown, again, last = found.marks[1:5]
    assert [line[1] for line in grown if line[0] == "alloc"] == [str(12 * 40)]
    old = next(line[2] for line in found.marks[0] if line[:2] == ["alloc", str(8 * 40)])
    new = next(line[2] for line in grown if line[0] == "alloc")
    assert ["free", old] in grown and [line[0] for line in grown].count("discard") == 1
    assert _launches(first, "record")["decode"][6] == old and _launches(grown, "record")["decode"][6] == new
    replayed = ["h2d", "replay", "d2h", "synchronize"]
    assert [line[0] for line in again] == replayed and [line[0] for line in last][:4] == replayed
    failed = run(script, FAKE_CUDA_FAIL="cuMemAlloc:12:2")
    assert failed.result == [None, ["OutOfMemory", "CUDA_ERROR_OUT_OF_MEMORY (as planned)"], None, None]
    assert len(failed.calls("free")) == len(failed.calls("alloc"))


def test_memory_that_does_not_fit_is_one_line_that_says_what_to_do() -> None:
    found = run(
        """
def attempt(total, **config):
    os.environ["FAKE_CUDA_TOTAL"] = str(total)
    return refusal(lambda: executor(open_device(), **config))
result = {
    "weights": attempt(511), "activations": attempt(512 + 4607), "sampler": attempt(9000),
    "pool": attempt(290_000, num_pages=None), "given": attempt(290_000, num_pages=200),
    "share": attempt(400_000, num_pages=None, memory_utilization=0.5), "rows": attempt(9000, max_num_rows=40),
}
os.environ["FAKE_CUDA_TOTAL"] = "290000"
engine = executor(open_device(), num_pages=None, memory_utilization=0.98)
result["pages"] = engine.num_pages
"""
    )
    messages = {name: value[1] for name, value in found.result.items() if name != "pages"}
    assert {found.result[name][0] for name in messages} == {"UserError"}
    assert not any("\n" in text for text in messages.values())
    wanted = {
        "weights": r"no 0 KiB for the weights: 0 KiB of 0 KiB are free; free GPU .* smaller weights \(--int8, --int4\)",
        "activations": r"no 4 KiB for activations: 4 KiB of 5 KiB are free; lower --max-num-batched-tokens",
        "sampler": r"no 3 KiB for the sampler: .*; lower --max-num-seqs",
        "rows": r"no 8 KiB for logits: .*; lower --max-num-seqs",
        "share": r".* takes 5 KiB; raise --gpu-memory-utilization or lower --max-model-len",
        "pool": r".* left for the KV pool \(of 283 KiB, at --gpu-memory-utilization 0.9\), one sequence of 100 .*",
        "given": r"no 150 KiB for the KV pool: .*; lower --kv-cache-memory",
    }
    for name, pattern in wanted.items():
        assert re.fullmatch("GPU memory: " + pattern, messages[name]), messages[name]
    fixed = 512 + 4608 + 768 + 2 * 1200 + 3072 + 128 + _batch_bytes(found)
    left = int(290_000 * 0.98) - fixed - 6 * 40
    assert found.result["pages"] == left * 4 // (4 * 768 + 40)


def _batch_bytes(found: Ran) -> int:
    return max(int(line[1]) for line in found.calls("alloc") if line[2] != "fails")


def test_code_for_fewer_tokens_names_the_flag() -> None:
    found = run(
        """
data = description()
data["calls"][1]["variants"].pop()
result = [refusal(lambda: executor(open_device(), data, max_num_tokens=n)) for n in (17, 16)]
"""
    )
    assert found.result == [
        ["UserError", "the plan's GPU code runs 16 tokens at a time; lower --max-num-batched-tokens to that"], None,
    ]  # fmt: skip
