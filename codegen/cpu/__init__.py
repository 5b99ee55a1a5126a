"""The CPU backend: one C++ unit per model, compiled by the pinned zig toolchain."""
