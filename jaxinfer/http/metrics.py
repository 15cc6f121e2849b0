"""`/metrics`: Prometheus metrics of a server, in a registry of their own."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxinfer.engine.engine import EngineStats
from jaxinfer.engine.reads import SOURCES
from jaxinfer.engine.request import RequestMetrics

# A long prompt's first token may take minutes on CPU, a short one's milliseconds on a GPU.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """Counts what the server and its engine do."""

    def __init__(self, stats: Callable[[], EngineStats | None], compilations: Callable[[], int]) -> None:
        """`stats` gives the engine's figures (None before it is ready), `compilations` those made after it was."""
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats, compilations))
        self._ttft = Histogram(
            "jaxinfer_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._tpot = Histogram(
            "jaxinfer_time_per_output_token_seconds",
            "Mean time between the tokens of a request after the first.",
            buckets=_SECONDS_PER_TOKEN,
            registry=self._registry,
        )
        self._e2e = Histogram(
            "jaxinfer_e2e_request_latency_seconds",
            "From the arrival of a request to its end.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def observe(self, metrics: RequestMetrics) -> None:
        """Takes the times of a finished request. May be called from any thread."""
        for histogram, seconds in ((self._ttft, metrics.ttft), (self._tpot, metrics.tpot), (self._e2e, metrics.e2e)):
            if seconds is not None:
                histogram.observe(seconds)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine's own figures whenever Prometheus asks."""

    def __init__(self, stats: Callable[[], EngineStats | None], compilations: Callable[[], int]) -> None:
        self._stats = stats
        self._compilations = compilations

    def describe(self) -> list[Metric]:
        """Nothing: the names need no check against other collectors, and registering must not ask the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment; only `jaxinfer_ready` before the engine is ready."""
        stats = self._stats()
        yield GaugeMetricFamily("jaxinfer_ready", "1 when the engine is loaded and compiled.", int(stats is not None))
        if stats is None:
            return
        yield GaugeMetricFamily("jaxinfer_requests_running", "Sequences that decode.", stats.running)
        yield GaugeMetricFamily("jaxinfer_requests_prefilling", "Sequences whose prompt is computed.", stats.prefilling)
        yield GaugeMetricFamily("jaxinfer_requests_waiting", "Sequences that hold no pages yet.", stats.waiting)
        yield GaugeMetricFamily("jaxinfer_kv_pages", "Pages of the KV cache.", stats.total_pages)
        yield GaugeMetricFamily("jaxinfer_kv_pages_free", "Free pages of the KV cache.", stats.free_pages)
        used = 1 - stats.free_pages / stats.total_pages
        yield GaugeMetricFamily("jaxinfer_kv_page_usage_ratio", "Share of the KV cache's pages in use, 0 to 1.", used)
        yield CounterMetricFamily("jaxinfer_steps", "Steps of the engine.", stats.steps)
        yield CounterMetricFamily("jaxinfer_prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens)
        yield CounterMetricFamily("jaxinfer_generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield CounterMetricFamily(
            "jaxinfer_preemptions", "Sequences that lost their pages to others.", stats.preemptions
        )
        yield CounterMetricFamily("jaxinfer_faults", "Steps that raised, and rows with NaN logits.", stats.faults)
        yield CounterMetricFamily(
            "jaxinfer_compilations_after_ready",
            "Programs compiled while serving; expected to stay 0.",
            self._compilations(),
        )
        finished = CounterMetricFamily(
            "jaxinfer_requests_finished", "Samples that ended, by reason.", labels=["reason"]
        )
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        if stats.reads:
            yield CounterMetricFamily(
                "jaxinfer_attention_queries",
                "Queries of hybrid attention, each once for each layer.",
                stats.reads["queries"],
            )
            keys = CounterMetricFamily(
                "jaxinfer_attention_keys",
                "Keys that those read, on the mean of the groups of heads, by source; blocks count whole.",
                labels=["source"],
            )
            for source in SOURCES:
                keys.add_metric([source], stats.reads.get(source, 0))
            yield keys
            yield CounterMetricFamily(
                "jaxinfer_attention_sampled_queries",
                "Queries compared with dense attention: the last of a step's part of a prompt, once for each layer.",
                stats.reads.get("sampled", 0),
            )
            yield CounterMetricFamily(
                "jaxinfer_attention_captured_mass",
                "Shares of dense attention's softmax mass that those read, added up.",
                stats.reads.get("captured", 0),
            )
        done = GaugeMetricFamily("jaxinfer_prefill_done_tokens", "Prompt tokens computed so far.", labels=["request"])
        total = GaugeMetricFamily("jaxinfer_prefill_total_tokens", "Prompt tokens of the request.", labels=["request"])
        for request_id, (computed, length) in stats.prefill_progress.items():
            done.add_metric([request_id], computed)
            total.add_metric([request_id], length)
        yield done
        yield total
