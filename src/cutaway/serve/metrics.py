"""What a server has done, in the text that Prometheus reads. Counted on the event loop, by nobody else."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Bounds for whole requests and first tokens."""
STEPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
"""Bounds for the time a token takes."""


class Histogram:
    """How many values there were up to each bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str) -> Iterator[str]:
        below = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {below}"


class Metrics:
    """Counters and histograms of one server; gauges are asked for when somebody looks."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.tokens_in = self.tokens_out = self.cancelled = 0
        self.took = Histogram(SECONDS)
        self.first = Histogram(SECONDS)
        self.step = Histogram(STEPS)
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        """By name: what it is, and how to ask for it."""

    def answered(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] += 1
        self.took.add(seconds)

    def text(self) -> str:
        return "\n".join([*self.lines(), ""])

    def lines(self) -> Iterator[str]:
        yield from heading("requests_total", "counter", "Requests, by route and status.")
        for (route, status), count in sorted(self.requests.items()):
            yield f'cutaway_requests_total{{route="{route}",status="{status}"}} {count}'
        for name, what, count in (
            ("prompt_tokens_total", "Tokens of prompts.", self.tokens_in),
            ("generated_tokens_total", "Tokens of answers.", self.tokens_out),
            ("cancelled_total", "Answers that nobody waited for to the end.", self.cancelled),
        ):
            yield from heading(name, "counter", what)
            yield f"cutaway_{name} {count}"
        for name, (what, ask) in self.gauges.items():
            yield from heading(name, "gauge", what)
            yield f"cutaway_{name} {ask():g}"
        for name, what, histogram in (
            ("request_seconds", "From a request's arrival to the end of its answer.", self.took),
            ("first_token_seconds", "From a request to the first token of its answer.", self.first),
            ("token_seconds", "Between the tokens of an answer.", self.step),
        ):
            yield from heading(name, "histogram", what)
            yield from histogram.lines(f"cutaway_{name}")


def heading(name: str, kind: str, what: str) -> Iterator[str]:
    yield f"# HELP cutaway_{name} {what}"
    yield f"# TYPE cutaway_{name} {kind}"
