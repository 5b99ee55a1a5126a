"""Calls functions of an x86-64 shared object in an emulated CPU: AVX-512 and AVX-VNNI on any x86-64 machine.

    bochs_guest.py MODEL SHIM OBJECT MEMORY SIZE

The other side is cross_guest.py, and what is said between them is what cross_guest.c says too. The CPU is Bochs' (the
package bochscpu-python). It has the memory of this very process at the same addresses, so that the system's loader
serves for the object and its calls of libc work: every gigabyte of addresses that has something mapped is one large
page of the CPU's, and a small page of its physical memory is looked up here when it is first touched. There is no
operating system: what the code wants of one is asked here and answered by the real one. An instruction that the model
lacks, or any other fault, ends the process with a line that says which.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

MODELS = {"ice_lake": (28, 0xE7), "arrow_lake": (31, 0x07)}
"""Bochs' number of a CPU, which the package has under other names, and XCR0: the registers that the system saves."""
_CALL = struct.Struct("<96s8Q8Q8Q")  # cross_guest.py writes it
_GIGABYTE, _PAGE = 1 << 30, 4096
_STACK_BYTES = 8 << 20
_EXITS = 0x10_0000_0000
"""Addresses where this process has nothing. The CPU stops when it comes here: at the first page when the function has
returned, at the second after an exception (8 bytes for each), at the third for a system call."""
_EXIT_GIGABYTE = 500
"""Of physical memory; gigabyte 0 has the page tables, those between are this process'."""
_THREAD_CALLS = {56: "clone", 57: "fork", 58: "vfork", 435: "clone3"}
_ARCH_PRCTL, _ARCH_GET_FS = 158, 0x1003
_WITH_ERROR_CODE = {8, 10, 11, 12, 13, 14, 17, 21}
_EXCEPTIONS = {0: "#DE", 6: "#UD, no instruction of this CPU", 13: "#GP", 14: "#PF", 19: "#XM"}
_SEGMENT_CODE, _SEGMENT_DATA, _SEGMENT_TASK = 0x209B, 0xCF93, 0x8B
_DT_INIT, _DT_FINI, _DT_INIT_ARRAY, _DT_INIT_ARRAYSZ, _DT_FINI_ARRAYSZ, _PT_DYNAMIC = 12, 13, 25, 27, 28, 2

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.malloc.restype = ctypes.c_void_p


class Fault(Exception):
    """The emulated code cannot go on."""


def mapped_gigabytes() -> set[int]:
    """Numbers of the gigabytes of addresses in which this process has anything."""
    found: set[int] = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if end <= 1 << 47:
            found.update(range(begin // _GIGABYTE, (end - 1) // _GIGABYTE + 1))
    return found


def storage_of_an_idle_thread() -> int:
    """The FS base for the emulated code: with our thread's it would share our malloc's arena and locks, and wait for
    itself when a page is looked up while it holds one."""
    base, ready = ctypes.c_uint64(), threading.Event()

    def idle() -> None:
        libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(1000))))  # takes an arena
        libc.syscall(_ARCH_PRCTL, _ARCH_GET_FS, ctypes.byref(base))
        ready.set()
        threading.Event().wait()

    threading.Thread(target=idle, daemon=True).start()
    ready.wait()
    return base.value


class Tables:
    """The CPU's page tables over this process' memory. bochs: the package."""

    def __init__(self, bochs: Any) -> None:
        self.insert = bochs.memory.page_insert
        self.memory = mmap.mmap(-1, 1 << 20)
        self.here = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.end = _PAGE  # of physical memory: page 0 stays free
        self.root = self._new_table()
        self.gigabytes: dict[int, int] = {}
        """Physical gigabyte -> the process' gigabyte."""
        self._map(_EXITS // _GIGABYTE, _EXIT_GIGABYTE)

    def refresh(self) -> None:
        """After this process may have mapped more."""
        for gigabyte in sorted(mapped_gigabytes() - set(self.gigabytes.values())):
            physical = len(self.gigabytes) + 1
            if physical >= _EXIT_GIGABYTE or gigabyte == _EXITS // _GIGABYTE:
                raise Fault(f"no room for addresses from {gigabyte * _GIGABYTE:#x}")
            self.gigabytes[physical] = gigabyte
            self._map(gigabyte, physical)

    def look_up(self, physical: int) -> bool:
        """Gives a page of physical memory its place in this process; False where there is none."""
        gigabyte = self.gigabytes.get(physical // _GIGABYTE)
        if gigabyte is None:
            return False
        self.insert(physical & -_PAGE, gigabyte * _GIGABYTE + (physical % _GIGABYTE & -_PAGE))
        return True

    def _new_table(self) -> int:
        physical, self.end = self.end, self.end + _PAGE
        self.insert(physical, self.here + physical)
        return physical

    def _map(self, gigabyte: int, physical: int) -> None:
        at, present, large = self.root + gigabyte // 512 * 8, 7, 0x80
        (table,) = struct.unpack_from("<Q", self.memory, at)
        if not table:
            table = self._new_table() | present
            struct.pack_into("<Q", self.memory, at, table)
        entry = physical * _GIGABYTE | large | present
        struct.pack_into("<Q", self.memory, (table & -_PAGE) + gigabyte % 512 * 8, entry)


class Cpu:
    """One emulated CPU; a process can have no second one. bochs: the package."""

    def __init__(self, bochs: Any, model: str) -> None:
        number, xcr0 = MODELS[model]
        _choose_model(bochs, number)
        self.session = bochs.Session()
        self.session.missing_page_handler = self._missing_page
        self.tables = Tables(bochs)
        self.stack = mmap.mmap(-1, _STACK_BYTES)
        self.stack_end = ctypes.addressof(ctypes.c_char.from_buffer(self.stack)) + _STACK_BYTES
        self._set_up(bochs, xcr0)

    def call(self, address: int, words: tuple[int, ...] = (), floats: tuple[int, ...] = (),
             stack: tuple[int, ...] = ()) -> int:  # fmt: skip
        """What rax is after the function. words: integer registers; floats: low 64 bits of vector registers."""
        state = self.session.cpu.state
        top = self.stack_end - _PAGE - (8 * len(stack) + 15) // 16 * 16
        struct.pack_into(f"<{len(stack) + 1}Q", self.stack, _STACK_BYTES - (self.stack_end - top) - 8, _EXITS, *stack)
        state.rsp, state.rip, state.rax = top - 8, address, len(floats)
        for name, word in zip(("rdi", "rsi", "rdx", "rcx", "r8", "r9"), words, strict=False):
            setattr(state, name, word)
        vectors = list(state.zmm)
        for i, word in enumerate(floats):
            lanes = list(vectors[i].q)
            lanes[0] = word
            vectors[i].q = lanes
        state.zmm = vectors
        while state.rip != _EXITS:
            self.tables.refresh()
            self.session.cpu.state = state
            self.session.run([])
            state = self.session.cpu.state
            if _EXITS + 2 * _PAGE <= state.rip < _EXITS + 3 * _PAGE:
                _call_system(state)
            elif state.rip != _EXITS:
                raise Fault(self._reason(state))
        result: int = state.rax
        return result

    def _missing_page(self, physical: int) -> None:
        if not self.tables.look_up(physical):
            self.session.stop()

    def _reason(self, state: Any) -> str:
        vector = (state.rip - _EXITS - _PAGE) // 8
        if not 0 <= vector < 256:
            return f"the CPU stopped at {state.rip:#x}"
        at = ctypes.c_uint64.from_address(state.rsp + (8 if vector in _WITH_ERROR_CODE else 0)).value
        name = _EXCEPTIONS.get(vector, f"exception {vector}")
        known = vector != 14 and at // _GIGABYTE in mapped_gigabytes()
        code = f" ({ctypes.string_at(at, 12).hex()})" if known else ""
        return f"{name}, at {at:#x}{code}, cr2 {state.cr2:#x}"

    def _set_up(self, bochs: Any, xcr0: int) -> None:
        """64-bit mode in ring 0, with vector registers, where every exception and system call leads to its exit."""
        self.descriptors = mmap.mmap(-1, 2 * _PAGE)  # segments, then the gates of exceptions
        here = ctypes.addressof(ctypes.c_char.from_buffer(self.descriptors))
        struct.pack_into("<3Q", self.descriptors, 0, 0, 0x00209B0000000000, 0x00CF93000000FFFF)
        for vector in range(256):
            to = _EXITS + _PAGE + 8 * vector
            gate = struct.pack("<HHHHQ", to & 0xFFFF, 8, 0x8E00, to >> 16 & 0xFFFF, to >> 32)
            self.descriptors[_PAGE + 16 * vector : _PAGE + 16 * vector + 16] = gate

        def segment(selector: int, attributes: int) -> Any:
            made = bochs.Segment()
            made.present, made.selector, made.base, made.limit, made.attr = True, selector, 0, 0xFFFFFFFF, attributes
            return made

        def table(base: int, limit: int) -> Any:
            made = bochs.GlobalSegment()
            made.base, made.limit = base, limit
            return made

        s = bochs.State()
        s.cr0 = 0x80010033  # paging, protection, the FPU
        s.cr3 = self.tables.root
        s.cr4 = 1 << 5 | 1 << 9 | 1 << 10 | 1 << 18  # PAE, SSE and its exceptions, XSAVE
        s.efer = 1 << 0 | 1 << 8 | 1 << 10  # system calls, long mode
        s.xcr0, s.rflags = xcr0, 2
        s.mxcsr, s.mxcsr_mask, s.fpcw, s.fptw = 0x1F80, 0xFFFF, 0x37F, 0xFFFF
        s.cs, s.tr = segment(8, _SEGMENT_CODE), segment(0, _SEGMENT_TASK)
        s.ds = s.es = s.ss = s.gs = segment(16, _SEGMENT_DATA)
        fs = segment(16, _SEGMENT_DATA)
        fs.base = storage_of_an_idle_thread()
        s.fs = fs
        s.lstar, s.star, s.sfmask = _EXITS + 2 * _PAGE, 8 << 32, 0
        s.gdtr, s.idtr = table(here, 23), table(here + _PAGE, _PAGE - 1)
        self.session.cpu.state = s


def _choose_model(bochs: Any, number: int) -> None:
    """Before the first session. The package has no function for it; Bochs' own are in its shared object."""
    library = ctypes.CDLL(bochs._bochscpu.__file__)
    library.sim_get_param_enum.restype = ctypes.c_void_p
    parameter = ctypes.c_void_p(library.sim_get_param_enum(b"cpu.model"))
    library._ZN15bx_param_enum_c3setEl(parameter, ctypes.c_long(number))


def _call_system(state: Any) -> None:
    """Makes the system call that the CPU stopped at, in this process, and lets it go on behind it."""
    if state.rax in _THREAD_CALLS:
        raise Fault(f"{_THREAD_CALLS[state.rax]}: a thread or process would run outside the emulated CPU")
    names = ("rax", "rdi", "rsi", "rdx", "r10", "r8", "r9")
    result = libc.syscall(*(ctypes.c_long(getattr(state, name)) for name in names))
    state.rax = (result if result != -1 else -ctypes.get_errno()) & (1 << 64) - 1
    state.rip, state.rflags = state.rcx, state.r11


def load(cpu: Cpu, path: str) -> ctypes.CDLL:
    """The shared object. Its constructors are code for the other CPU: the system's loader must not run them."""
    data = bytearray(Path(path).read_bytes())
    table = size = 0
    (headers,), (entry, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
    for at in range(headers, headers + entry * count, entry):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", data, at)
        for tag_at in range(offset, offset + length, 16) if kind == _PT_DYNAMIC else ():
            tag, value = struct.unpack_from("<QQ", data, tag_at)
            assert tag not in (_DT_INIT, _DT_FINI), "constructors in a form that compilers no longer use"
            table = value if tag == _DT_INIT_ARRAY else table
            size = value if tag == _DT_INIT_ARRAYSZ else size
            if tag in (_DT_INIT_ARRAYSZ, _DT_FINI_ARRAYSZ):
                struct.pack_into("<Q", data, tag_at + 8, 0)
    with tempfile.NamedTemporaryFile(prefix="llmc-guest-", suffix=".so") as file:
        file.write(data)
        file.flush()
        library = ctypes.CDLL(file.name)
    base = ctypes.c_uint64.from_address(library._handle).value  # the first member of glibc's link_map
    for at in range(base + table, base + table + size, 8):
        cpu.call(ctypes.c_uint64.from_address(at).value)
    return library


def main(model: str, shim: str, path: str, shared: str, size: str) -> None:
    ctypes.CDLL(shim, ctypes.RTLD_GLOBAL)  # before the import, which needs it
    import bochscpu
    import bochscpu.cpu
    import bochscpu.memory

    cpu = Cpu(bochscpu, model)
    library = load(cpu, path)
    with open(shared, "r+b") as file:
        memory = mmap.mmap(file.fileno(), int(size))
    answer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    while True:
        sys.stdout.buffer.write(answer.to_bytes(8, "little"))
        sys.stdout.buffer.flush()
        data = sys.stdin.buffer.read(_CALL.size)
        if len(data) < _CALL.size:
            return
        name, *registers = _CALL.unpack(data)
        function = ctypes.cast(getattr(library, name.rstrip(b"\0").decode()), ctypes.c_void_p).value
        assert function is not None
        answer = cpu.call(function, tuple(registers[:6]), tuple(registers[8:16]), tuple(registers[16:]))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Fault as fault:
        print(fault, file=sys.stderr, flush=True)
        os._exit(6)
    os._exit(0)  # the package's teardown and the idle thread are not waited for
