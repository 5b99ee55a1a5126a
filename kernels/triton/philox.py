"""The counter-based generator Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2,
3", SC11), as kernels/cpu/philox.h has it: the same seed and position give the same bits on every device."""

import triton
import triton.language as tl
from triton.language.random import philox_impl

_TWO_M32 = tl.constexpr(2.0**-32)
_TWO_M53 = tl.constexpr(2.0**-53)


@triton.jit
def philox_uniform(seed_low, seed_high, index):
    """Uniform in [0, 1) with 53 bits, float64, from three 32-bit words: words 0 (high) and 1 of the block at counter
    (index, 0, 0, 0) under the key (seed_low, seed_high)."""
    counter = index.to(tl.uint32, bitcast=True)
    key_low, key_high = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    zero = counter ^ counter
    high, low, _, _ = philox_impl(counter, zero, zero, zero, key_low, key_high, 10)
    return high.to(tl.float64) * _TWO_M32 + (low >> 11).to(tl.float64) * _TWO_M53
