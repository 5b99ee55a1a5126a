"""Shared by all tests: helpers beside this file are importable by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# GPU kernels run in Triton's interpreter; it is chosen when they are imported. The compiler's workers unset it.
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
