"""Studies: experiments over seeds whose results are stored with the package, each with the command that repeats it."""

import difflib
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from cutaway.errors import InputError
from cutaway.evaluate.confidence_interval import mean_confidence_interval

RESULTS_DIR = Path(__file__).parent / "results"
MEASURES_FILE = Path(__file__).with_name("measures.toml")
ProgressFn = Callable[[int, int, str], None]
"""Called with the number of completed measurements, the total number, and a description of the next one."""


@dataclass(frozen=True)
class Estimate:
    """Mean of a measured quantity over seeds, and its 95 % confidence interval.

    The mean is geometric if the quantity is a ratio.
    """

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        if self.low == self.high:  # a count, or an estimate without variation
            return format_count(self.mean) if float(self.mean).is_integer() else format_figure(self.mean)
        if self.low < 0:  # a difference: digits below 0.001 are noise
            mean, low, high = (f"{value:.3f}".replace("-", "−") for value in (self.mean, self.low, self.high))
        else:
            values = (self.mean, self.low, self.high)
            mean, low, high = map(format_figure, values)
            if low == high:  # a narrow interval
                mean, low, high = (format_figure(value, extra_digits=1) for value in values)
        return f"{mean} ({low} to {high})"


def estimate(values: Sequence[float], *, ratio: bool = False) -> Estimate:
    """Estimate the mean over seeds with Student's t. For a ratio, on a log scale."""
    if ratio:
        logs = estimate([math.log(value) for value in values])
        return Estimate(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.count)
    interval = mean_confidence_interval(values)
    half_width = interval.half_width or 0.0
    return Estimate(fmean(values), interval.mean - half_width, interval.mean + half_width, interval.count)


def exact(value: float, count: int = 1) -> Estimate:
    """A number without variation, such as a count."""
    return Estimate(value, value, value, count)


def estimate_difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """Estimate the mean difference between values of equal seeds."""
    return estimate([value - other for value, other in zip(values, others, strict=True)])


def estimate_share(flags: Sequence[float]) -> Estimate:
    """Estimate the share of ones among zeros and ones, with Wilson's score interval."""
    count, share, z = len(flags), fmean(flags), 1.959964
    center = (share + z * z / (2 * count)) / (1 + z * z / count)
    half_width = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return Estimate(share, max(0.0, center - half_width), min(1.0, center + half_width), count)


def format_count(value: float) -> str:
    return f"{value:,.0f}".replace("-", "−") if abs(value) < 1e6 else f"{value:.1e}"


def format_figure(value: float, extra_digits: int = 0) -> str:
    """Format a number with two significant digits below 10, and with three above; more with `extra_digits`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{1 + extra_digits}e}"
    digits = (2 if abs(value) < 10 else 3) + extra_digits
    rounded = float(f"{value:.{digits}g}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


@dataclass(frozen=True)
class StudyResults:
    """Stored results of a study."""

    name: str
    command: str
    settings: Mapping[str, object]
    environment: str
    seconds: float
    estimates: Mapping[str, Estimate]

    def get(self, key: str) -> Estimate:
        """Return the estimate with this key, such as `first_to_last/post/decoder/gelu/xavier/24`."""
        if key not in self.estimates:
            raise InputError(
                f"study '{self.name}' has no result '{key}'; list them with `cutaway learn study {self.name}`"
            )
        return self.estimates[key]


PartResults = Mapping[str, Estimate | Sequence[float]]
"""Results of a part of a study: estimates, or values by seed, which the study's `summarize` compares."""
PartFn = Callable[[], PartResults]


@dataclass(frozen=True)
class Study:
    """A study that consists of independent parts.

    `module` has `list_parts(device)`, functions by name, and `describe_settings(device)`. It may have
    `summarize(results)`, which makes the estimates of the results by part; without it, the parts return estimates. It
    may have `TIMED_PARTS`, the names of parts that measure time and never run beside others.
    """

    name: str
    title: str
    module: str

    @property
    def results_file(self) -> Path:
        return RESULTS_DIR / f"{self.name}.json"

    @property
    def command(self) -> str:
        return f"cutaway learn study {self.name} --run"


_MODULES = "cutaway.learn.studies"
STUDIES = {
    study.name: study
    for study in (
        Study("norm-placement", "Gradients and training by norm placement and depth", f"{_MODULES}.norm_placement"),
        Study("layer-speed", "Time of norms, heads, attention and recurrence", f"{_MODULES}.layer_speed"),
        Study("positions", "Loss of position methods within and beyond the training length", f"{_MODULES}.positions"),
        Study("components", "Loss of a decoder by component at equal training tokens", f"{_MODULES}.components"),
        Study("forms", "Decoder, prefix decoder and encoder-decoder at equal parameters", f"{_MODULES}.forms"),
        Study("representation", "Superposition, probes, heads, facts and answers", f"{_MODULES}.representation"),
        Study(
            "training-inference", "Exposure bias, KL penalty, decoding time and bugs", f"{_MODULES}.training_inference"
        ),
        Study("recurrent", "Gradients, recall and speed of an RNN, an LSTM and a Transformer", f"{_MODULES}.recurrent"),
        Study("residual-depth", "Paths, deletion and loss landscape of residual stacks", f"{_MODULES}.residual_depth"),
        Study("mechanisms", "Mechanisms of the pretrained models, by intervention", f"{_MODULES}.mechanisms"),
        Study("saturation", "Saturated softmax, dead ReLU units and unscaled attention", f"{_MODULES}.saturation"),
    )
}


def get_study(name: str) -> Study:
    """Return the study with this name, in upper or lower case."""
    name = name.lower()
    if name not in STUDIES:
        near = difflib.get_close_matches(name, STUDIES, 1)
        suggestion = f"did you mean '{near[0]}'? The" if near else "the"
        raise InputError(f"there is no study '{name}'; {suggestion} studies are {', '.join(STUDIES)}")
    return STUDIES[name]


@dataclass(frozen=True)
class Measure:
    """A group of results of a study: those whose key is `name`, or starts with it and a slash."""

    name: str
    key: str
    """What the other parts of the key are, such as METHOD/TASK/LENGTH."""
    about: str

    def includes(self, key: str) -> bool:
        return key == self.name or key.startswith(f"{self.name}/")


def load_measures(study: str) -> list[Measure]:
    """Measures of a study, in order."""
    tables = tomllib.loads(MEASURES_FILE.read_text(encoding="utf-8"))
    return [Measure(name, **fields) for name, fields in tables[study].items()]


@cache
def load_results(name: str) -> StudyResults:
    """Load the stored results of a study."""
    study = get_study(name)
    if not study.results_file.exists():
        raise InputError(f"study '{name}' has no stored results; measure them with `{study.command}`")
    return read_results(study.results_file)


def read_results(path: Path) -> StudyResults:
    data = json.loads(path.read_text(encoding="utf-8"))
    data["estimates"] = {key: Estimate(*values) for key, values in data["estimates"].items()}
    return StudyResults(**data)


def write_results(results: StudyResults, path: Path) -> None:
    """Write results as JSON, one estimate per line: mean, low, high, count."""
    head = {name: getattr(results, name) for name in ("name", "command", "settings", "environment")}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    lines.append(f' "seconds": {results.seconds:.0f},')
    rows = [
        f"  {json.dumps(key)}: {json.dumps([_round(e.mean), _round(e.low), _round(e.high), e.count])}"
        for key, e in results.estimates.items()
    ]
    text = "\n".join(["{", *lines, ' "estimates": {', ",\n".join(rows), " }", "}", ""])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _round(value: float) -> float:
    return float(f"{value:.6g}")
