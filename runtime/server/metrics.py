"""/metrics: the engine's figures for Prometheus, named as vLLM names its own, with the prefix `llmc:`.

Gauges and counters are read from the engine when they are asked for; only the histograms are kept here.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmc.runtime.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_NEXT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, text, gauge in (
            ("num_requests_running", "Sequences in the running batch.", stats.num_running),
            ("num_requests_waiting", "Sequences that wait for a place.", stats.num_waiting),
            ("kv_cache_usage", "Used fraction of the KV pages, 0 to 1.", stats.kv_cache_usage),
        ):
            family = GaugeMetricFamily(f"llmc:{name}", text, labels=["model_name"])
            family.add_metric([self._model], gauge)
            yield family
        for name, text, count in (
            ("prompt_tokens", "Prompt tokens of requests that got a first token.", stats.prompt_tokens),
            ("generation_tokens", "Sampled tokens.", stats.generation_tokens),
            ("num_preemptions", "Sequences put back to be computed again.", stats.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
        ):
            total = CounterMetricFamily(f"llmc:{name}", text, labels=["model_name"])
            total.add_metric([self._model], count)
            yield total
        ended = CounterMetricFamily(
            "llmc:request_success",
            "Sequences that ended, by reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in stats.finished.items():
            ended.add_metric([self._model, reason], count)
        yield ended


class Metrics:
    """Observes one engine. Its registry is its own, so several servers can live in one process."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"llmc:{name}", text, ["model_name"], registry=self._registry, buckets=buckets)
            return family.labels(model)

        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST)
        self._next = histogram("time_per_output_token_seconds", "From one token to the next.", _NEXT)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._next.observe(seconds)

    def finished(self, seconds: float) -> None:
        self._whole.observe(seconds)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
