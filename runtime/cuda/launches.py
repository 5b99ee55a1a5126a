"""The launch list bound to addresses: kernels loaded, arguments resolved, so that a step only evaluates grids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.errors import UserError
from llmc.runtime.cuda.archive import Archive, Arg, Call, Dim, Variant, choice_key
from llmc.runtime.cuda.devices import Arguments, Device

PROGRAMS_PER_MULTIPROCESSOR = 4


@dataclass(frozen=True)
class _Kernel:
    limit: int | None
    function: Any
    threads: int
    shared: int
    grid: tuple[Dim, Dim, Dim]


@dataclass(frozen=True)
class Launch:
    """A call with its arguments; `kernels` by rising limit."""

    rows: str
    when: str
    kernels: tuple[_Kernel, ...]
    args: Arguments


class Launcher:
    """Loads the kernels that an archive's calls need, each once, and runs bound calls."""

    def __init__(self, device: Device, archive: Archive, choices: Mapping[str, int], limits: Mapping[str, int]) -> None:
        """choices: tuned index among a variant's kernels by `choice_key`. limits: the largest T and R of a step.

        Raises UserError for a binary that the driver refuses, or a choice or limit that the archive does not have.
        """
        self._device, self._archive, self._choices = device, archive, choices
        self._programs = PROGRAMS_PER_MULTIPROCESSOR * device.multiprocessors
        self._functions: dict[int, Any] = {}
        self._kernels = {id(call): self._load(call, limits[call.rows]) for call in archive.calls}
        for item in archive.weights:
            self._kernels |= {id(call): self._load(call, 0) for call in item.calls}

    def _load(self, call: Call, most: int) -> tuple[_Kernel, ...]:
        last = call.variants[-1].limit
        if last is not None and last < most:
            what, flag = ("tokens", "batched-tokens") if call.rows == "T" else ("rows", "seqs")
            raise UserError(f"the plan's GPU code runs {last} {what} at a time; lower --max-num-{flag} to that")
        return tuple(self._kernel(variant) for variant in call.variants)

    def _kernel(self, variant: Variant) -> _Kernel:
        key = choice_key(self._archive.kernels, variant)
        choice = self._choices.get(key, 0)
        if not 0 <= choice < len(variant.kernels):
            raise UserError(f"the plan's tuning names kernel {choice} of {key}, there is none; rebuild the plan")
        index = variant.kernels[choice]
        kernel = self._archive.kernels[index]
        if index not in self._functions:
            self._functions[index] = self._device.load(kernel.code, kernel.name, kernel.shared)
        return _Kernel(variant.limit, self._functions[index], kernel.threads, kernel.shared, kernel.grid)

    def bind(self, calls: Sequence[Call], address: Callable[[Arg], int]) -> list[Launch]:
        """Calls of the archive with the arguments' addresses."""
        return [Launch(c.rows, c.when, self._kernels[id(c)], Arguments(map(address, c.args))) for c in calls]

    def run(self, launches: Sequence[Launch], sizes: Mapping[str, int], adjusted: bool) -> None:
        """Launches what a step of these sizes (T, R, S, D, tiles0…) needs, in order. "decode" calls run when a sequence
        has one token, "prefill" calls when one has more, "adjust" calls when a row has penalties, biases or a mask."""
        symbols = {"": 0, **sizes, "programs": self._programs}
        wanted = {
            "always": True, "decode": sizes["D"] > 0, "prefill": sizes["D"] < sizes["S"], "adjust": adjusted,
        }  # fmt: skip
        launch = self._device.launch
        for call in launches:
            if not wanted[call.when]:
                continue
            rows = symbols[call.rows]
            kernel = next(k for k in call.kernels if k.limit is None or rows <= k.limit)
            x, y, z = (-(-symbols[d.symbol] // d.per) if d.symbol else d.per for d in kernel.grid)
            if x and y and z:
                launch(kernel.function, (x, y, z), kernel.threads, kernel.shared, call.args)


NOTHING: Mapping[str, int] = {"T": 0, "R": 0, "S": 0, "D": 0}
"""The sizes with which weights are repacked: their grids depend on none."""
