"""SVG badge of a report: `cutaway check | 45 passed`. It loads no fonts or other files."""

from xml.sax.saxutils import escape

from cutaway.check.report.finding import Report

_LABEL = "cutaway check"
_GREEN, _ORANGE, _RED = "#2a7d31", "#a85400", "#c4291c"
"""The contrast of white text on each color is at least 4.5 to 1 (WCAG 2, level AA)."""
_CHAR_WIDTH, _PADDING = 6.6, 6
"""Average width of a character at a font size of 11, and the padding on both sides, in pixels."""


def format_badge(report: Report) -> str:
    """Format a badge: red if a check failed, orange if none failed but one is inconclusive or none ran, else green."""
    text, color = _describe_result(report)
    label_width, text_width = (_measure_text(item) for item in (_LABEL, text))
    left, right = label_width + 2 * _PADDING, text_width + 2 * _PADDING
    title = escape(f"{_LABEL}: {text}")
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-labelledby="title">
  <title id="title">{title}</title>
  <clipPath id="corners"><rect width="{left + right}" height="20" rx="3"/></clipPath>
  <g clip-path="url(#corners)">
    <rect width="{left}" height="20" fill="#444"/>
    <rect x="{left}" width="{right}" height="20" fill="{color}"/>
  </g>
  <g fill="#fff" font-family="Verdana, 'DejaVu Sans', sans-serif" font-size="11" aria-hidden="true">
    <text x="{_PADDING}" y="14" textLength="{label_width}">{escape(_LABEL)}</text>
    <text x="{left + _PADDING}" y="14" textLength="{text_width}">{escape(text)}</text>
  </g>
</svg>
"""


def _describe_result(report: Report) -> tuple[str, str]:
    """The text and the color of the right half."""
    counts = report.counts()
    if report.status == "failed":
        return f"{counts['fail']} failed", _RED
    if report.status == "inconclusive":
        return f"{counts['inconclusive']} inconclusive", _ORANGE
    texts = [f"{counts['pass']} passed"] if counts["pass"] else []
    texts += [f"{counts['warn']} warning{'s' * (counts['warn'] != 1)}"] if counts["warn"] else []
    texts += [f"{counts['accepted']} accepted"] if counts.get("accepted") else []
    return (", ".join(texts), _GREEN) if texts else ("no check ran", _ORANGE)


def _measure_text(text: str) -> int:
    """Approximate width in pixels. `textLength` fits the text to this width in any font."""
    return round(_CHAR_WIDTH * len(text))
