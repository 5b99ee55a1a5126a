"""GPU kernels in Triton: the dialect's ops over the same ragged batch and paged KV as the CPU's.

They are compiled ahead of time by `codegen/triton`, and run in Triton's interpreter in the tests. docs/gpu.md describes
the layouts, the orders of reduction and what they promise.
"""
