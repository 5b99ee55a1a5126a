"""The GPU backend: from the lowered graph to Triton kernels compiled ahead of time and the list of their launches."""
