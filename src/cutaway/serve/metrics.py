"""Prometheus metrics of one server, rendered by prometheus_client."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Histogram buckets of request duration and time to first token, in seconds."""
TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
"""Histogram buckets of the time per output token, in seconds."""
disable_created_metrics()  # type: ignore[no-untyped-call]  # no `_created` gauge beside each counter and histogram


class ServerMetrics:
    """Counters, histograms and gauges of one server. Each server has its own registry, so a process can run several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = self._counter("http_requests", "HTTP requests by route and status.", "route", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "Number of prompt tokens processed.")
        self.generation_tokens = self._counter("generation_tokens", "Number of tokens generated.")
        self.aborted_requests = self._counter("aborted_requests", "Completions aborted before they finished.")
        self.http_request_duration = self._histogram(
            "http_request_duration_seconds",
            "Time from the arrival of a request to the end of its response, in seconds.",
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time from a request to its first token, in seconds."
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of a completion, one observation per completion, in seconds.",
            TOKEN_LATENCY_BUCKETS,
        )

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        return Counter(f"cutaway_{name}", description, labels, registry=self.registry)

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
        return Histogram(f"cutaway_{name}", description, buckets=buckets, registry=self.registry)

    def add_gauge(self, name: str, description: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is `read()` at the time when /metrics is scraped."""
        Gauge(f"cutaway_{name}", description, registry=self.registry).set_function(read)

    def add_counter(self, name: str, description: str, read: Callable[[], float]) -> None:
        """Add a counter whose value is `read()` at the time when /metrics is scraped."""
        self.registry.register(_ReadCounter(f"cutaway_{name}", description, read))

    def record_response(self, route: str, status: int, seconds: float) -> None:
        self.http_requests.labels(route, status).inc()
        self.http_request_duration.observe(seconds)

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class _ReadCounter(Collector):
    """Counter that is kept elsewhere and read when /metrics is scraped."""

    def __init__(self, name: str, description: str, read: Callable[[], float]) -> None:
        self.name, self.description, self.read = name, description, read

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self.name, self.description, value=self.read())
