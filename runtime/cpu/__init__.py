"""The CPU: its targets, the executor over a shared object of machine code, its phases, threads on memory nodes."""
