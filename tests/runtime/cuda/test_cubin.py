"""runtime/cuda/cubin.py: files of both ABIs, and what is refused in one line."""

from __future__ import annotations

import struct

import pytest
from cuda_fakes import cubin
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import UserError
from llmc.runtime.cuda.cubin import check_cubin

CODE = b"\x01" * 48


@pytest.mark.parametrize(("code", "gpu"), [(80, 80), (80, 89), (86, 89), (89, 89), (90, 90), (100, 100), (120, 120)])
def test_code_that_the_gpu_runs_is_taken(code: int, gpu: int) -> None:
    check_cubin(memoryview(cubin("k", CODE, code)), "k", gpu)


@pytest.mark.parametrize(("code", "gpu"), [(86, 80), (90, 80), (90, 100), (100, 120), (75, 80), (80, 90)])
def test_code_for_another_gpu_is_refused(code: int, gpu: int) -> None:
    with pytest.raises(UserError, match=f"it is code for sm_{code}, this GPU is sm_{gpu}; rebuild"):
        check_cubin(memoryview(cubin("k", CODE, code)), "k", gpu)


def _patched(layout: str, at: int, value: int) -> bytes:
    code = bytearray(cubin("k", CODE))
    struct.pack_into("<" + layout, code, at, value)
    return bytes(code)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (b"", "it is no ELF file of 64 bits"),
        (b"\x7fELF\x01" + bytes(80), "it is no ELF file of 64 bits"),
        (_patched("H", 18, 62), "it is no cubin"),  # x86-64
        (_patched("H", 16, 1), "it is no cubin"),  # not linked
        (_patched("B", 8, 0), "it is no cubin"),  # another ABI
        (_patched("H", 56, 9), "its program headers do not lie in it"),
        (_patched("Q", 40, 1 << 60), "its section headers do not lie in it"),
        (_patched("H", 60, 60000), "its section headers do not lie in it"),
        (_patched("H", 60, 0), "its section headers do not lie in it"),
        (_patched("H", 62, 3), "its section headers do not lie in it"),
        (cubin("k", CODE)[:-1], "its section headers do not lie in it"),
        (cubin("k", CODE).replace(struct.pack("<QQ", 64, 48), struct.pack("<QQ", 64, 1 << 40)),
         r"it ends at byte \d+, and a section of it at 1099511627840"),
        (cubin("other", CODE), "it has no kernel of that name"),
        (cubin("k", b""), "it has no kernel of that name"),
    ],
)  # fmt: skip
def test_damage_is_refused_in_one_line(code: bytes, words: str) -> None:
    with pytest.raises(UserError, match=f"^the plan's GPU code for the kernel k is damaged: {words}; rebuild"):
        check_cubin(memoryview(code), "k", 90)


@given(st.integers(0, len(cubin("k", CODE)) - 1), st.integers(0, 255), st.booleans())
def test_any_byte_is_refused_or_harmless(at: int, value: int, cut: bool) -> None:
    code = bytearray(cubin("k", CODE))
    code[at] = value
    try:
        check_cubin(memoryview(bytes(code[:at] if cut else code)), "k", 90)
    except UserError as error:
        assert "\n" not in str(error)
