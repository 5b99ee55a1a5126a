"""The size of a page of the KV pool, which the compiler lays out and the runtime hands out.

The kernels have it as a constant of their own (kPageSize in kernels/cpu/abi.h, PAGE_SIZE in
kernels/triton/attention.py); tests hold them to this one.
"""

from __future__ import annotations

PAGE_SIZE = 16
"""Positions of one sequence in a page."""
