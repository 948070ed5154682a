"""What a server has done, in the text that Prometheus reads. Counted on the event loop, by nobody else."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Bounds for whole requests and first tokens."""
TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
"""Bounds for the time a token takes."""


class Histogram:
    """How many values there were up to each bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def format_lines(self, name: str) -> Iterator[str]:
        below = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {below}"


class ServerMetrics:
    """Counters and histograms of one server; gauges are asked for when somebody looks."""

    def __init__(self) -> None:
        self.http_requests: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = self.generation_tokens = self.aborted_requests = 0
        self.http_request_duration = Histogram(LATENCY_BUCKETS)
        self.time_to_first_token = Histogram(LATENCY_BUCKETS)
        self.inter_token_latency = Histogram(TOKEN_LATENCY_BUCKETS)
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        """By name: what it is, and how to ask for it."""

    def record_response(self, route: str, status: int, seconds: float) -> None:
        self.http_requests[route, status] += 1
        self.http_request_duration.observe(seconds)

    def render(self) -> str:
        return "\n".join([*self._format_lines(), ""])

    def _format_lines(self) -> Iterator[str]:
        yield from _format_metric_header("http_requests_total", "counter", "Requests, by route and status.")
        for (route, status), count in sorted(self.http_requests.items()):
            yield f'cutaway_http_requests_total{{route="{route}",status="{status}"}} {count}'
        for name, what, count in (
            ("prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            ("generation_tokens_total", "Tokens of answers.", self.generation_tokens),
            ("aborted_requests_total", "Answers that nobody waited for to the end.", self.aborted_requests),
        ):
            yield from _format_metric_header(name, "counter", what)
            yield f"cutaway_{name} {count}"
        for name, (what, ask) in self.gauges.items():
            yield from _format_metric_header(name, "gauge", what)
            yield f"cutaway_{name} {ask():g}"
        for name, what, histogram in (
            (
                "http_request_duration_seconds",
                "From a request's arrival to the end of its answer.",
                self.http_request_duration,
            ),
            (
                "time_to_first_token_seconds",
                "From a request to the first token of its answer.",
                self.time_to_first_token,
            ),
            ("inter_token_latency_seconds", "Between the tokens of an answer.", self.inter_token_latency),
        ):
            yield from _format_metric_header(name, "histogram", what)
            yield from histogram.format_lines(f"cutaway_{name}")


def _format_metric_header(name: str, kind: str, description: str) -> Iterator[str]:
    yield f"# HELP cutaway_{name} {description}"
    yield f"# TYPE cutaway_{name} {kind}"
