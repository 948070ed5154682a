"""Prometheus metrics of one server, rendered by prometheus_client.

A quantity that vLLM has too has vLLM's name, with the prefix `cutaway_`, and its label `model_name`.
"""

from collections.abc import Callable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Histogram buckets of request duration and time to first token, in seconds."""
TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
"""Histogram buckets of the time per output token, in seconds."""
LENGTH_BUCKETS = tuple(float(2**i) for i in range(18))
"""Histogram buckets of numbers of tokens."""
disable_created_metrics()  # type: ignore[no-untyped-call]  # no `_created` gauge beside each counter and histogram


class ServerMetrics:
    """Metrics of one server and its models. Each server has its own registry, so a process can run several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._read_counters: dict[str, _ReadCounter] = {}
        ProcessCollector(registry=self.registry)  # memory, CPU time and open files of the process
        self.http_requests = self.counter("http_requests", "HTTP requests by route and status.", "route", "status")
        self.http_request_duration = self.histogram(
            "http_request_duration_seconds",
            "Time from the arrival of a request to the end of its response, in seconds.",
            LATENCY_BUCKETS,
        )

    def counter(self, name: str, description: str, *labels: str) -> Counter:
        """Return the counter of this name, which is created on first use. The same holds for the other types."""
        if name not in self._counters:
            self._counters[name] = Counter(f"cutaway_{name}", description, labels, registry=self.registry)
        return self._counters[name]

    def gauge(self, name: str, description: str, *labels: str) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(f"cutaway_{name}", description, labels, registry=self.registry)
        return self._gauges[name]

    def histogram(self, name: str, description: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        if name not in self._histograms:
            metric = Histogram(f"cutaway_{name}", description, labels, buckets=buckets, registry=self.registry)
            self._histograms[name] = metric
        return self._histograms[name]

    def read_counter(self, name: str, description: str) -> "_ReadCounter":
        if name not in self._read_counters:
            self._read_counters[name] = _ReadCounter(f"cutaway_{name}", description)
            self.registry.register(self._read_counters[name])
        return self._read_counters[name]

    def record_response(self, route: str, status: int, seconds: float) -> None:
        self.http_requests.labels(route, status).inc()
        self.http_request_duration.observe(seconds)

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class _ReadCounter(Collector):
    """Counter of each model whose value is read when /metrics is scraped."""

    def __init__(self, name: str, description: str) -> None:
        self.name, self.description = name, description
        self.read_by_model: dict[str, Callable[[], float]] = {}

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self.name, self.description, labels=["model_name"])
        for model_name, read in self.read_by_model.items():
            family.add_metric([model_name], read())
        yield family


class ModelMetrics:
    """Metrics of one model of a server: the same metrics for each model, with the label `model_name`."""

    def __init__(self, server: ServerMetrics, model_name: str) -> None:
        self.server, self.model_name = server, model_name
        self.prompt_tokens = self._counter("prompt_tokens", "Number of prompt tokens processed.")
        self.generation_tokens = self._counter("generation_tokens", "Number of tokens generated.")
        self.aborted_requests = self._counter("aborted_requests", "Completions aborted before they finished.")
        self._finished_requests = server.counter(
            "request_success", "Finished completions by finish reason.", "model_name", "finished_reason"
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time from a request to its first token, in seconds."
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of a completion, one observation per completion, in seconds.",
            TOKEN_LATENCY_BUCKETS,
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "Time from a request to the last token of a completion, in seconds."
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Number of prompt tokens of a completion.", LENGTH_BUCKETS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Number of generated tokens of a completion.", LENGTH_BUCKETS
        )

    def _counter(self, name: str, description: str) -> Counter:
        return self.server.counter(name, description, "model_name").labels(self.model_name)

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
        return self.server.histogram(name, description, buckets, "model_name").labels(self.model_name)

    def add_gauge(self, name: str, description: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is `read()` at the time when /metrics is scraped."""
        self.server.gauge(name, description, "model_name").labels(self.model_name).set_function(read)

    def add_counter(self, name: str, description: str, read: Callable[[], float]) -> None:
        """Add a counter that is kept elsewhere: `read()` is its value when /metrics is scraped."""
        self.server.read_counter(name, description).read_by_model[self.model_name] = read

    def record_finished(self, finish_reason: str) -> None:
        self._finished_requests.labels(self.model_name, finish_reason).inc()
