"""What runs kernels here runs them in Triton's interpreter."""

from interpreter import device_sums, quick_device_functions

__all__ = ["device_sums", "quick_device_functions"]
