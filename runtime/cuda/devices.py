"""What the CUDA executor asks of a device. Addresses are integers: those of a GPU, or in tests those of host memory.

All work of a device runs in the order in which it was asked for (one stream).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmc.runtime.batch import ExecutorLost

Bytes = npt.NDArray[np.uint8]
_HIDDEN = 2
"""Pointers that every kernel of Triton takes after its own arguments (global scratch, profile scratch); both null."""


class DeviceError(RuntimeError):
    """The device refused a call; it is usable for others. The message has the driver's name and text of the code."""


class OutOfMemory(DeviceError):
    """The device, or the system for pinned memory, has no room."""


class DeviceLost(DeviceError, ExecutorLost):
    """The context is broken (an illegal address, a device that fell off the bus): every later call fails, too."""


class Arguments(tuple[int, ...]):
    """The pointer arguments of one kernel call, with the array that the driver reads them from.

    `parameters` is the address of that array (void**): one pointer to each argument and to the hidden ones. It is
    built once, so that a launch is one call. Lives as long as this object; the driver copies the values at the launch.
    """

    parameters: int
    _values: ctypes.Array[ctypes.c_uint64]
    _pointers: ctypes.Array[ctypes.c_void_p]

    def __new__(cls, addresses: Iterable[int]) -> Arguments:
        self = super().__new__(cls, addresses)
        count = len(self) + _HIDDEN
        self._values = (ctypes.c_uint64 * count)(*self)
        start = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * count)(*(start + 8 * i for i in range(count)))
        self.parameters = ctypes.addressof(self._pointers)
        return self


class Device(Protocol):
    """One GPU. Methods raise DeviceError, OutOfMemory or DeviceLost. `activate` comes first in every thread."""

    capability: int
    """90 for compute capability 9.0."""
    multiprocessors: int

    def activate(self) -> None:
        """Makes the device usable from the calling thread."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """Bytes that are free now, and in all."""
        ...

    def allocate(self, size: int) -> int:
        """Zeroed device memory, aligned to 256 bytes. size > 0, in bytes."""
        ...

    def free(self, address: int) -> None:
        """Frees what `allocate` returned, after all work that was asked for."""
        ...

    def host_buffer(self, size: int) -> Bytes:
        """Host memory [size] for asynchronous copies. It is the device's: not to be touched after `close`."""
        ...

    def upload(self, address: int, data: memoryview) -> None:
        """Copies any host memory of any size to the device; `data` may change when it returns."""
        ...

    def upload_async(self, address: int, data: Bytes) -> None:
        """Copies a part of a host buffer to the device; it must not change before `synchronize`."""
        ...

    def download_async(self, data: Bytes, address: int) -> None:
        """Copies from the device into a part of a host buffer; there after `synchronize`."""
        ...

    def synchronize(self) -> None:
        """Waits for all work, without the GIL. Raises what went wrong in it."""
        ...

    def load(self, code: memoryview, name: str, shared: int) -> Any:
        """The kernel `name` of a binary, for launches with `shared` bytes of dynamic shared memory.

        Raises UserError for a binary that the driver refuses.
        """
        ...

    def launch(self, function: Any, grid: tuple[int, int, int], threads: int, shared: int, args: Arguments) -> None:
        """Runs a kernel. threads: of a block. No dimension of the grid is 0."""
        ...

    def capture(self, record: Callable[[], None]) -> Any:
        """The launches that `record` makes, as a graph; they do not run. Nothing else may be asked for in it."""
        ...

    def replay(self, graph: Any) -> None:
        """Runs a captured graph."""
        ...

    def discard(self, graph: Any) -> None:
        """Frees a captured graph."""
        ...

    def close(self) -> None:
        """Frees everything that this device handed out; safe to call twice. Never raises."""
        ...
