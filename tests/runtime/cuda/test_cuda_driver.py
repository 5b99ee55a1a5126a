"""runtime/cuda/driver.py over the recording driver: machines without a GPU, errors, and a device that is lost."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cuda_fakes import run

OPEN = "result = refusal(open_device)"


def test_without_a_driver_there_is_one_line() -> None:
    assert run(OPEN, driver=False).result == ["UserError", "no NVIDIA driver was found (libcuda.so.1)"]


def test_without_cuda_bindings_there_is_one_line() -> None:
    found = run("sys.modules['cuda.bindings'] = None\n" + OPEN, driver=False).result
    assert found[0] == "UserError" and found[1].startswith("the package cuda-bindings is missing (")
    assert found[1].endswith("): pip install 'llmc[cuda]'") and "\n" not in found[1]


def test_a_gpu_that_cannot_be_used_is_one_line() -> None:
    found = run(
        """
result = []
for name, value in (("DEVICES", "0"), ("VERSION", "11080"), ("FAIL", "cuInit:3:100"),
                    ("FAIL", "cuDevicePrimaryCtxRetain:1:2")):
    os.environ["FAKE_CUDA_" + name] = value
    result.append(refusal(open_device))
    del os.environ["FAKE_CUDA_" + name]
"""
    )
    assert found.result == [
        ["UserError", text]
        for text in (
            "there is no GPU 0 (the driver sees 0)",
            "the NVIDIA driver is too old (CUDA 11.8, not 12.0); update it",
            "no GPU was found: CUDA_ERROR_NO_DEVICE (as planned)",
            "the GPU cannot be used: CUDA_ERROR_OUT_OF_MEMORY (as planned)",
        )
    ]


def test_a_driver_that_lacks_a_function_is_too_old() -> None:
    assert run(OPEN, FAKE_CUDA_HIDE="cuStreamCreate").result == [
        "UserError", "the NVIDIA driver is too old (function cuStreamCreate is not found); update it",
    ]  # fmt: skip


def test_what_a_device_says_of_itself_and_uploads_in_pieces() -> None:
    """17 MiB and 5 bytes go through two buffers of 8 MiB; each is filled again only when its copy has left it."""
    found = run(
        """
import ctypes
device = open_device()
result = [device.name, device.capability, device.multiprocessors, device.memory_info()]
data = np.random.default_rng(0).integers(0, 256, (17 << 20) + 5, np.uint8)
address = device.allocate(len(data) + 3)
device.upload(address + 2, memoryview(data.tobytes()))
device.synchronize()
memory = np.frombuffer(ctypes.string_at(address, len(data) + 3), np.uint8)
result.append(bool((memory[2:-1] == data).all()) and memory[[0, 1, -1]].tolist() == [0, 0, 0])
device.close()
"""
    )
    assert found.result == ["Fake GPU", 90, 3, [64 << 20, 64 << 20], True]
    assert [line[2] for line in found.calls("h2d")] == ["8388608", "8388608", str((1 << 20) + 5)]
    assert len(found.calls("host")) == 2


def test_other_threads_run_while_a_step_waits_and_any_thread_may_step() -> None:
    """A context belongs to the thread that made it current; the engine's thread is another than the loader's."""
    found = run(
        """
import threading, time
engine = executor(open_device())
os.environ["FAKE_CUDA_SYNC_MS"] = "300"
outcome = []
worker = threading.Thread(target=lambda: outcome.append(engine.step(decode(2)).tokens.tolist()))
worker.start()
longest, last = 0.0, time.monotonic()
while worker.is_alive():
    time.sleep(0.001)
    now = time.monotonic()
    longest, last = max(longest, now - last), now
result = [outcome, longest]
"""
    )
    outcome, longest = found.result
    assert outcome == [[1, 2]] and longest < 0.25


def test_a_kernel_that_the_driver_refuses_is_one_line() -> None:
    found = run(
        """
data = description()
binary = binaries(data)
from llmc.runtime.cuda.executor import CudaConfig, CudaExecutor
def load(binary):
    arguments = segment(data, binary), memoryview(WEIGHTS), CudaConfig(**CONFIG), open_device(), {}
    return refusal(lambda: CudaExecutor(*arguments))
result = [load(binary.replace(b"FAKE adjust", b"ELF! adjust")),
          load(binary.replace(b"FAKE adjust", b"FAKE advice")), load(binary.replace(b"text.adjust", b"text.advice"))]
"""
    )
    start = "the NVIDIA driver (CUDA 12.4) refuses the plan's kernel adjust: CUDA_ERROR_"
    end = "update the driver or rebuild the plan"
    assert found.result == [
        ["UserError", f"{start}INVALID_IMAGE (as planned); {end}"],
        ["UserError", f"{start}NOT_FOUND (as planned); {end}"],
        ["UserError", "the plan's GPU code for the kernel adjust is damaged: it has no kernel of that name; "
         "rebuild the plan"],
    ]  # fmt: skip
    assert len(found.calls("release")) == 3
    assert len(found.calls("free")) == len(found.calls("alloc"))


@pytest.mark.parametrize("failing", ["cuLaunchKernel:{}:1", "cuGraphInstantiate:1:2", "cuStreamEndCapture:1:1"])
def test_an_error_that_the_context_survives_fails_one_step(failing: str) -> None:
    """The third launch of a capture, counted after the one that repacks a weight; a graph that cannot be made."""
    failing = failing.format(4).replace("cuGraphInstantiate", "cuGraphInstantiateWithFlags")
    found = run(
        """
engine = executor(open_device())
result = [refusal(lambda: engine.step(decode(3)))]
for value in (decode(3), batch((0, 9))):
    result.append(engine.step(value).tokens.tolist())
engine.close()
""",
        FAKE_CUDA_FAIL=failing,
    )
    kind = {"1": "DeviceError", "2": "OutOfMemory"}[failing[-1]]
    name = {"1": "CUDA_ERROR_INVALID_VALUE", "2": "CUDA_ERROR_OUT_OF_MEMORY"}[failing[-1]]
    assert found.result == [[kind, f"{name} (as planned)"], [1, 2, 3], [9]]
    assert found.calls("release")


@pytest.mark.parametrize("failing", ["cuStreamSynchronize:3:700", "cuMemcpyHtoDAsync:3:700", "cuGraphLaunch:1:777"])
def test_a_lost_device_fails_every_later_step_at_once(failing: str) -> None:
    """Also with a code that nobody knows, after which the driver takes no other call."""
    found = run(
        """
engine = executor(open_device())
result = []
for value in (decode(3), decode(3), batch((0, 9))):
    mark()
    result.append(refusal(lambda: engine.step(value)))
engine.close()
""",
        FAKE_CUDA_FAIL=failing,
    )
    known = "CUDA_ERROR_ILLEGAL_ADDRESS (as planned)"
    unknown = "cuStreamSynchronize: 777 is not a valid CUresult"
    assert found.result == [["DeviceLost", unknown if failing.endswith("777") else known]] * 3
    assert found.marks[2] == []
    assert "the GPU's memory is freed with the process" in found.stderr


def test_an_engine_survives_a_lost_device_and_says_so() -> None:
    """The step's request ends with an error, later ones are refused, the thread goes on and closes as ever."""
    found = run(
        """
from llmc.runtime.config import EngineConfig
from llmc.runtime.engine import Engine
from llmc.runtime.request import Request, SamplingParams
engine = Engine(executor(open_device()), EngineConfig(max_model_len=100, max_num_seqs=4, max_num_batched_tokens=40,
                max_queue=4, eos_token_ids=frozenset()), None)
engine.start()
def ask(name):
    outputs = list(engine.generate_blocking(Request(name, (1, 2, 3), SamplingParams(max_tokens=4, temperature=0.0))))
    return outputs[-1].finish_reason, outputs[-1].error, sum(len(o.token_ids) for o in outputs)
result = [ask("first"), engine.is_alive, ask("second"), engine.is_alive, refusal(lambda: ask("third"))]
result.append(engine._thread.is_alive())
engine.close()
result.append(engine._thread.is_alive())
""",
        FAKE_CUDA_FAIL="cuGraphLaunch:5:700",
    )
    first, alive, second, still, third, thread, closed = found.result
    assert first == ["length", None, 4] and alive
    assert second == ["error", "internal error: a step of the model failed", 2] and not still
    assert third == ["EngineUnavailable", "the device is lost; restart the server"]
    assert thread and not closed
    assert "a step failed; its requests end with an error: second" in found.stderr
    assert "DeviceLost: CUDA_ERROR_ILLEGAL_ADDRESS" in found.stderr


def test_importing_the_executor_loads_no_compiler_and_no_driver() -> None:
    script = "import llmc.runtime.cuda.executor, llmc.runtime.cuda.driver, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "llmc.runtime.cuda.executor" in loaded and "numpy" in loaded
    assert not loaded & {"torch", "triton", "cuda", "cuda.bindings", "cuda.core", "llmc.kernels", "llmc.codegen"}
