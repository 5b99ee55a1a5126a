"""runtime/cuda/archive.py and the size of the KV pool: what is read, and what is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cuda_fakes import CONFIG, WEIGHTS, archive, binaries, cubin, description, segment
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc.errors import UserError
from llmc.runtime.cuda.archive import Arg, Dim, choice_key, read_archive
from llmc.runtime.cuda.archive_format import VERSION
from llmc.runtime.cuda.memory import CudaConfig, pool_size


def test_what_is_read() -> None:
    found = read_archive(archive(), len(WEIGHTS))
    assert (found.vocab_size, found.page_bytes, found.partials, found.tile_tokens) == (50, 768, 10, (4, 16))
    assert [k.name for k in found.kernels][:3] == ["embed", "linear_small", "linear_tuned"]
    assert bytes(found.kernels[3].code) == cubin("linear_large", b"FAKE linear_large 3 64\0")
    assert found.kernels[3].threads == 256 and found.kernels[0].grid == (Dim("T", 4), Dim("", 2), Dim("", 1))
    linear = found.calls[1]
    assert [v.limit for v in linear.variants] == [16, None] and linear.args[2] == Arg("rows", 16)
    assert found.calls[2].args[1] == Arg("kv", 1, "value")
    assert [choice_key(found.kernels, v) for v in linear.variants] == ["linear 8x8@16", "linear 8x8 large@None"]


def _set(path: str, value: Any) -> Callable[[Any], None]:
    """Puts a value at a path such as "calls/0/args/0"; `DROP` removes what is there."""

    def change(data: Any) -> None:
        *parents, last = [int(p) if p.isdigit() else p for p in path.split("/")]
        for part in parents:
            data = data[part]
        if value is DROP:
            del data[last]
        else:
            data[last] = value

    return change


DROP = object()
DAMAGE: dict[str, Callable[[Any], None]] = {
    "another ABI": _set("abi", VERSION + 1),
    "no vocabulary": _set("vocab_size", DROP),
    "an empty vocabulary": _set("vocab_size", 0),
    "a negative arena": _set("arena/rows", -1),
    "a fractional arena": _set("arena/tokens", 1.5),
    "a boolean size": _set("staging", True),
    "no layers": _set("kv", []),
    "a KV array outside its page": _set("kv/0/value_offset", 512),
    "a KV array at an odd place": _set("kv/0/value_offset", 200),
    "a layer without values": _set("kv/0/value_offset", None),
    "no tile table": _set("tile_tokens", []),
    "four tile tables": _set("tile_tokens", [1, 2, 3, 4]),
    "tiles of no token": _set("tile_tokens", [0]),
    "a weight outside its segment": _set("weights/items/0/source", 200),
    "a weight outside its region": _set("weights/items/0/device", 413),
    "a weight of no bytes": _set("weights/items/0/source_size", 0),
    "a weight larger than the staging area": _set("staging", 63),
    "a kernel outside the segment": _set("kernels/8/offset", 10**6),
    "a kernel at a negative place": _set("kernels/8/offset", -16),
    "a kernel without a name": _set("kernels/0/name", None),
    "a kernel of no name": _set("kernels/0/name", ""),
    "a kernel whose name is no symbol": _set("kernels/0/name", "\ud800"),
    "a kernel of 33 warps": _set("kernels/0/warps", 33),
    "a kernel without warps": _set("kernels/0/warps", 0),
    "a kernel that takes a number": _set("kernels/0/args/1", "i32"),
    "a grid of two dimensions": _set("kernels/0/grid", [1, 1]),
    "a grid over nothing known": _set("kernels/0/grid/0", ["X", 1]),
    "a grid that divides by 0": _set("kernels/0/grid/0", ["T", 0]),
    "a grid over a missing tile table": _set("kernels/0/grid/0", ["tiles2", 1]),
    "a repacking grid over tokens": _set("kernels/8/grid/0", ["T", 1]),
    "a call of no kernel": _set("calls/0/variants/0/kernels", []),
    "a call of an unknown kernel": _set("calls/0/variants/0/kernels", [9]),
    "a call of kernel -1": _set("calls/0/variants/0/kernels", [-1]),
    "a call without variants": _set("calls/0/variants", []),
    "an unlimited variant before another": _set("calls/1/variants/0/max", None),
    "an argument too few": _set("calls/0/args", [["batch", "meta"]]),
    "an unknown argument": _set("calls/0/args/0", ["nothing"]),
    "an unknown batch array": _set("calls/0/args/0", ["batch", "nothing"]),
    "a missing tile table": _set("calls/0/args/0", ["batch", "tiles2"]),
    "an argument without an offset": _set("calls/0/args/2", ["tokens"]),
    "an offset beyond the arena": _set("calls/0/args/2", ["tokens", 96]),
    "a weight at an odd place": _set("calls/1/args/1", ["weight", 8]),
    "a weight beyond its region": _set("calls/1/args/1", ["weight", 512]),
    "a layer that is not there": _set("calls/2/args/0", ["kv", 2, "key"]),
    "scales that are not there": _set("calls/2/args/0", ["kv", 1, "key_scale"]),
    "a step that reads the staging area": _set("calls/0/args/2", ["staging", 0]),
    "a repacking that reads the batch": _set("weights/items/1/calls/0/args/0", ["batch", "meta"]),
    "an unknown condition": _set("calls/0/when", "never"),
    "rows of an unknown kind": _set("calls/0/rows", "S"),
    "calls that are a number": _set("calls", 7),
    "kernels that are numbers": _set("kernels/0", 7),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_archive_is_refused_in_one_line(name: str) -> None:
    data = description()
    binary = binaries(data)
    DAMAGE[name](data)
    with pytest.raises(
        UserError, match=r"^the plan's GPU code is damaged or of another llmc \(.+\); rebuild the plan$"
    ):
        read_archive(segment(data, binary), len(WEIGHTS))


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_damage_is_refused_or_harmless(data: Any) -> None:
    """Any byte, and any value of the description: a UserError or an archive, never another exception."""
    changed = description()
    binary = binaries(changed)
    change = _set(data.draw(st.sampled_from(list(_paths(changed)))), data.draw(st.sampled_from(WRONG)))
    if data.draw(st.booleans()):
        change(changed)
    damaged = bytearray(segment(changed, binary))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] = data.draw(st.integers(0, 255))
    for candidate in (segment(changed, binary), damaged, damaged[:at]):
        try:
            read_archive(memoryview(bytes(candidate)), len(WEIGHTS))
        except UserError as error:
            assert "\n" not in str(error)


WRONG = [None, -1, 0, 10**30, "x", [], {}, 0.5, [None], True]


def _paths(value: Any, prefix: str = "") -> Any:
    """Of every value in the description."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        path = f"{prefix}/{key}" if prefix else str(key)
        yield path
        yield from _paths(inner, path)


# ---- the pool


def _pool(free: int, total: int, **changes: Any) -> Any:
    config = CudaConfig(**{**CONFIG, "num_pages": None, **changes})
    return pool_size(read_archive(archive(), len(WEIGHTS)), config, free, total)


def test_the_pool_takes_what_is_left_of_the_share() -> None:
    """768 bytes a page, 10 words for each 4 pages and for each of 6 rows."""
    size = _pool(40_000, 100_000, memory_utilization=0.9)
    left = 90_000 - 60_000 - 6 * 40
    assert size.pages == left * 4 // (4 * 768 + 40) and size.items == min(6 * 2, size.pages // 4 + 6)
    assert size.pages * 768 + size.items * 40 <= 30_000


def test_the_pool_is_never_larger_than_all_sequences_need() -> None:
    assert _pool(10**9, 10**9).pages == 6 * 7


def test_work_items_are_bounded_by_pages_where_sequences_are_long() -> None:
    size = _pool(0, 0, num_pages=100, max_model_len=100_000)
    assert size.pages == 100 and size.items == 25 + 6


@pytest.mark.parametrize("free", [0, 30_000, 65_000])
def test_a_pool_without_room_for_one_sequence_says_what_to_do(free: int) -> None:
    with pytest.raises(UserError) as caught:
        _pool(free, 100_000, memory_utilization=0.4)
    assert "one sequence of 100 tokens takes 5 KiB" in str(caught.value) and "\n" not in str(caught.value)
    assert "raise --gpu-memory-utilization or lower --max-model-len" in str(caught.value)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(UserError, match=r"--gpu-memory-utilization .*: must be above 0 and at most 1"):
        _pool(10**6, 10**6, memory_utilization=share)
