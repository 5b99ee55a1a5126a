"""How many blocks of a kernel a multiprocessor holds at a time: more of them hide each other's waiting for memory.

The rules are those of NVIDIA's occupancy calculator, which are the same from capability 8.0 to 12.0.
"""

from __future__ import annotations

from llmc.runtime.cuda.targets import CudaTarget

_WARP = 32
_REGISTERS, _PARTITIONS = 16384, 4
"""Registers of each partition of a multiprocessor; a warp lives in one."""
_REGISTER_UNIT, _SHARED_UNIT = 256, 128
"""Registers of a warp and bytes of a block's shared memory are handed out in multiples of these."""
_SYSTEM_SHARED = 1024
"""Bytes of every block's shared memory that the system takes. A block may use all but these of a multiprocessor's."""


def resident_blocks(target: CudaTarget, warps: int, registers: int, shared: int) -> int:
    """Blocks of a kernel on one multiprocessor. warps: of a block. registers: per thread. shared: bytes of a block.

    0 for a kernel that no block of the target has room for.
    """
    by_threads = target.resident_threads // (_WARP * warps)
    per_warp = _rounded(max(registers, 1) * _WARP, _REGISTER_UNIT)
    by_registers = _REGISTERS // per_warp * _PARTITIONS // warps
    by_shared = (target.shared_limit + _SYSTEM_SHARED) // (_rounded(shared, _SHARED_UNIT) + _SYSTEM_SHARED)
    return min(target.resident_blocks, by_threads, by_registers, by_shared)


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit
