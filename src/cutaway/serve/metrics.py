"""Server metrics in the Prometheus text format. Updated on the event loop only, so no locks are needed."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Bucket bounds in seconds of request duration and time to first token."""
TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
"""Bucket bounds in seconds of inter-token latency."""


class Histogram:
    """Prometheus histogram: counts per bucket, and the sum of the values."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def format_lines(self, name: str) -> Iterator[str]:
        cumulative = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            cumulative += count
            yield f'{name}_bucket{{le="{bound}"}} {cumulative}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {cumulative}"


class ServerMetrics:
    """Counters, histograms and gauges of one server. Gauges are evaluated when /metrics is scraped."""

    def __init__(self) -> None:
        self.http_requests: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = self.generation_tokens = self.aborted_requests = 0
        self.http_request_duration = Histogram(LATENCY_BUCKETS)
        self.time_to_first_token = Histogram(LATENCY_BUCKETS)
        self.inter_token_latency = Histogram(TOKEN_LATENCY_BUCKETS)
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        """Description and function by gauge name."""

    def record_response(self, route: str, status: int, seconds: float) -> None:
        self.http_requests[route, status] += 1
        self.http_request_duration.observe(seconds)

    def render(self) -> str:
        return "\n".join([*self._format_lines(), ""])

    def _format_lines(self) -> Iterator[str]:
        yield from _format_metric_header("http_requests_total", "counter", "HTTP requests by route and status code.")
        for (route, status), count in sorted(self.http_requests.items()):
            yield f'cutaway_http_requests_total{{route="{route}",status="{status}"}} {count}'
        for name, description, count in (
            ("prompt_tokens_total", "Number of prompt tokens processed.", self.prompt_tokens),
            ("generation_tokens_total", "Number of tokens generated.", self.generation_tokens),
            ("aborted_requests_total", "Completions aborted before they finished.", self.aborted_requests),
        ):
            yield from _format_metric_header(name, "counter", description)
            yield f"cutaway_{name} {count}"
        for name, (description, read_gauge) in self.gauges.items():
            yield from _format_metric_header(name, "gauge", description)
            yield f"cutaway_{name} {read_gauge():g}"
        for name, description, histogram in (
            (
                "http_request_duration_seconds",
                "Time from the arrival of a request to the end of its response, in seconds.",
                self.http_request_duration,
            ),
            (
                "time_to_first_token_seconds",
                "Time from a request to its first token, in seconds.",
                self.time_to_first_token,
            ),
            (
                "inter_token_latency_seconds",
                "Time between consecutive tokens of a completion, in seconds.",
                self.inter_token_latency,
            ),
        ):
            yield from _format_metric_header(name, "histogram", description)
            yield from histogram.format_lines(f"cutaway_{name}")


def _format_metric_header(name: str, kind: str, description: str) -> Iterator[str]:
    yield f"# HELP cutaway_{name} {description}"
    yield f"# TYPE cutaway_{name} {kind}"
