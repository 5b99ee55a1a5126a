"""Serving on NVIDIA GPUs: loads the kernels of `llmc build --target cuda:…` through the driver API alone."""
