"""The benchmark of the server: what it says of its figures. tests/e2e runs it."""

from __future__ import annotations

from typing import Any

import serving

FOUND: dict[str, Any] = {
    "date": "2026-01-02", "threads": 2, "decode": 128, "file_bytes": 140 << 20, "kv_bytes": 256 << 20,
    "machine": {"cpu": "A CPU", "cores": 2, "features": ["avx2"], "memory_gib": 23.4, "kernel": "6.1"},
    "first_token_s": [0.8, 0.9, 1.1], "tokens_per_s": {"server": [95.0, 190.0, 100.0], "engine": [100.0, 200.0, 80.0]},
    "host_share": [0.02, 0.031, 0.05], "memory": {"peak_bytes": 500 << 20, "anonymous_bytes": 300 << 20},
}  # fmt: skip


def test_a_section_compares_server_and_engine_round_by_round() -> None:
    text = serving.section(FOUND, "tiny")
    for part in (
        "## Serving tiny\n", "2026-01-02. A CPU, 2 threads",
        "0.90 s after the start of the process (0.80-1.10, 3 starts",
        "16 streams of 128 tokens: 100 tokens/s, the engine alone 100; in the same round 95% (95%-125%, 3 rounds)",
        "3.1% of the server's CPU time",
        "500 MiB: the file's 140, a KV pool of 256, and +104; 300 are not of the file",
    ):  # fmt: skip
        assert part in text, part
    assert "CPU time" not in serving.section({k: v for k, v in FOUND.items() if k != "host_share"}, "tiny")
