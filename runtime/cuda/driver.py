"""A GPU through the CUDA driver API (package cuda-bindings), which is imported by `open_device` and not before.

Every call of cuda-bindings releases the GIL. All work goes to one stream.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from llmc.errors import UserError
from llmc.runtime.cuda.cubin import check_cubin
from llmc.runtime.cuda.devices import Arguments, Bytes, DeviceError, DeviceLost, OutOfMemory
from llmc.runtime.cuda.targets import CUDA_TARGETS, cuda_version

log = logging.getLogger(__name__)
_OLDEST_DRIVER = min(target.oldest_driver for target in CUDA_TARGETS)
_STATIC_SHARED = 48 << 10
"""Bytes of shared memory that a block gets without asking."""
_ALL_SHARED = 100
"""The carve-out in percent of the most shared memory that a multiprocessor has."""
_PIECE = 8 << 20
"""Bytes of each of the two pinned buffers through which weights go to the device."""
_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_STICKY = frozenset(
    "CUDA_ERROR_" + name
    for name in (
        "ILLEGAL_ADDRESS", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE", "INVALID_PC", "HARDWARE_STACK_ERROR", "ASSERT", "ECC_UNCORRECTABLE",
        "NVLINK_UNCORRECTABLE", "CONTEXT_IS_DESTROYED", "DEINITIALIZED", "DEVICE_UNAVAILABLE", "NO_DEVICE",
        "INVALID_CONTEXT", "EXTERNAL_DEVICE", "SYSTEM_NOT_READY", "MPS_CLIENT_TERMINATED", "CONTAINED",
        "TENSOR_MEMORY_LEAK", "UNKNOWN",
    )
)  # fmt: skip
"""Errors after which a context answers every call with the same error; only a new process helps."""


def open_device(index: int = 0) -> CudaDevice:
    """The GPU of that number. Raises UserError, in one line, when it cannot be used."""
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UserError(f"the package cuda-bindings is missing ({error}): pip install 'llmc[cuda]'") from error
    # Kernels are loaded with their modules, not at their first launch: that may be within a capture.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    try:
        return CudaDevice(driver, index)
    except RuntimeError as error:
        name = type(error).__name__
        if name == "DynamicLibNotFoundError":
            raise UserError("no NVIDIA driver was found (libcuda.so.1)") from error
        if name == "FunctionNotFoundError":
            raise UserError(f"the NVIDIA driver is too old ({error}); update it") from error
        if isinstance(error, DeviceError):
            what = "no GPU was found" if "CUDA_ERROR_NO_DEVICE" in str(error) else "the GPU cannot be used"
            raise UserError(f"{what}: {error}") from error
        raise


class CudaDevice:
    """Implements `Device` (runtime/cuda/devices.py) with the device's primary context."""

    def __init__(self, driver: Any, index: int) -> None:
        """driver: the module cuda.bindings.driver. Raises DeviceError, and what cuda-bindings raises without a driver;
        UserError for a driver that is too old and for a number that no GPU has."""
        self._driver = driver
        self._launch = driver.cuLaunchKernel
        self._open = False
        self._call(driver.cuInit, 0)
        self.driver_version = int(self._call(driver.cuDriverGetVersion))
        self._version = cuda_version(self.driver_version)
        if self.driver_version < _OLDEST_DRIVER:
            oldest = cuda_version(_OLDEST_DRIVER)
            raise UserError(f"the NVIDIA driver is too old (CUDA {self._version}, not {oldest}); update it")
        count = self._call(driver.cuDeviceGetCount)
        if not 0 <= index < count:
            raise UserError(f"there is no GPU {index} (the driver sees {count})")
        self._device = self._call(driver.cuDeviceGet, index)
        self.name = self._call(driver.cuDeviceGetName, 256, self._device).split(b"\0")[0].decode(errors="replace")
        attribute = driver.CUdevice_attribute
        self.capability = 10 * self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        self.capability += self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.multiprocessors = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self._addresses: set[int] = set()
        self._hosts: list[int] = []
        self._modules: list[Any] = []
        self._graphs: dict[int, Any] = {}
        self._events: list[Any] = []
        self._pieces: list[Bytes] = []
        self._context = self._call(driver.cuDevicePrimaryCtxRetain, self._device)
        self._open = True
        self.activate()
        self._stream = self._call(driver.cuStreamCreate, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def activate(self) -> None:
        self._call(self._driver.cuCtxSetCurrent, self._context)

    def memory_info(self) -> tuple[int, int]:
        free, total = self._call(self._driver.cuMemGetInfo)
        return int(free), int(total)

    def allocate(self, size: int) -> int:
        address = int(self._call(self._driver.cuMemAlloc, size))
        self._addresses.add(address)
        self._call(self._driver.cuMemsetD8Async, address, 0, size, self._stream)
        return address

    def free(self, address: int) -> None:
        self.synchronize()
        self._addresses.remove(address)
        self._call(self._driver.cuMemFree, address)

    def host_buffer(self, size: int) -> Bytes:
        address = int(self._call(self._driver.cuMemHostAlloc, size, 0))
        self._hosts.append(address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def upload(self, address: int, data: memoryview) -> None:
        """Through two pinned buffers in turn: one is filled while the other is on its way."""
        if not self._pieces:
            event = self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._pieces = [self.host_buffer(_PIECE) for _ in range(2)]
            self._events = [self._call(self._driver.cuEventCreate, int(event)) for _ in range(2)]
        source = np.frombuffer(data, np.uint8)
        for number, start in enumerate(range(0, len(source), _PIECE)):
            part = source[start : start + _PIECE]
            piece, event = self._pieces[number % 2], self._events[number % 2]
            self._call(self._driver.cuEventSynchronize, event)
            piece[: len(part)] = part
            self.upload_async(address + start, piece[: len(part)])
            self._call(self._driver.cuEventRecord, event, self._stream)

    def upload_async(self, address: int, data: Bytes) -> None:
        self._call(self._driver.cuMemcpyHtoDAsync, address, data.ctypes.data, data.nbytes, self._stream)

    def download_async(self, data: Bytes, address: int) -> None:
        self._call(self._driver.cuMemcpyDtoHAsync, data.ctypes.data, address, data.nbytes, self._stream)

    def synchronize(self) -> None:
        self._call(self._driver.cuStreamSynchronize, self._stream)

    def load(self, code: memoryview, name: str, shared: int) -> Any:
        check_cubin(code, name, self.capability)
        driver = self._driver
        try:
            module = self._call(driver.cuModuleLoadData, bytes(code))
            self._modules.append(module)
            function = self._call(driver.cuModuleGetFunction, module, name.encode())
            if shared > _STATIC_SHARED:
                attribute = driver.CUfunction_attribute
                dynamic = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call(driver.cuFuncSetAttribute, function, dynamic, shared)
                # L1 and shared memory are one: without this the driver may leave room for fewer blocks than fit.
                carveout = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                self._call(driver.cuFuncSetAttribute, function, carveout, _ALL_SHARED)
        except (OutOfMemory, DeviceLost):
            raise
        except DeviceError as error:
            raise UserError(
                f"the NVIDIA driver (CUDA {self._version}) refuses the plan's kernel {name}: {error}; "
                "update the driver or rebuild the plan"
            ) from error
        return function

    def launch(self, function: Any, grid: tuple[int, int, int], threads: int, shared: int, args: Arguments) -> None:
        self._call(self._launch, function, *grid, threads, 1, 1, shared, self._stream, args.parameters, 0)

    def capture(self, record: Callable[[], None]) -> Any:
        driver = self._driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call(driver.cuStreamBeginCapture, self._stream, mode)
        try:
            record()
        except BaseException:
            code, graph = driver.cuStreamEndCapture(self._stream)  # else the stream would take no other work
            if not code:
                self._call(driver.cuGraphDestroy, graph)
            raise
        graph = self._call(driver.cuStreamEndCapture, self._stream)
        try:
            executable = self._call(driver.cuGraphInstantiate, graph, 0)
        finally:
            driver.cuGraphDestroy(graph)
        self._graphs[int(executable)] = executable
        return executable

    def replay(self, graph: Any) -> None:
        self._call(self._driver.cuGraphLaunch, graph, self._stream)

    def discard(self, graph: Any) -> None:
        del self._graphs[int(graph)]
        self._call(self._driver.cuGraphExecDestroy, graph)

    def close(self) -> None:
        """Errors are logged: what a lost device holds is freed with the process."""
        if not self._open:
            return
        self._open = False
        driver = self._driver
        try:
            self.activate()
            self.synchronize()
            for graph in self._graphs.values():
                self._call(driver.cuGraphExecDestroy, graph)
            for event in self._events:
                self._call(driver.cuEventDestroy, event)
            for module in self._modules:
                self._call(driver.cuModuleUnload, module)
            for address in self._addresses:
                self._call(driver.cuMemFree, address)
            for address in self._hosts:
                self._call(driver.cuMemFreeHost, address)
            self._call(driver.cuStreamDestroy, self._stream)
            self._call(driver.cuDevicePrimaryCtxRelease, self._device)
        except DeviceError as error:
            log.warning("the GPU's memory is freed with the process: %s", error)

    def _attribute(self, attribute: Any) -> int:
        return int(self._call(self._driver.cuDeviceGetAttribute, attribute, self._device))

    def _call(self, function: Any, *args: Any) -> Any:
        """The values that a call results in, without its code. Raises what the code means."""
        try:
            result: tuple[Any, ...] = function(*args)
        except ValueError as error:  # a code that this cuda-bindings does not know: the driver is newer
            raise DeviceError(f"{function.__name__}: {error}") from error
        code = result[0]
        if code:
            raise self._error(code)
        return result[1] if len(result) == 2 else result[1:]

    def _error(self, code: Any) -> DeviceError:
        driver = self._driver
        texts = [call(code)[1] for call in (driver.cuGetErrorName, driver.cuGetErrorString)]
        name, text = (t.decode(errors="replace") if t else f"error {int(code)}" for t in texts)
        kind = OutOfMemory if name == _OUT_OF_MEMORY else DeviceLost if name in _STICKY else DeviceError
        return kind(f"{name} ({text})")
