"""Terminal output and input of `cutaway learn interview`."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.text import Text

from cutaway.cli.views.question_console import QuestionConsole
from cutaway.cli.views.terminal import borderless_table
from cutaway.learn.interview import InterviewQuestion
from cutaway.learn.interview.progress import InterviewProgress

STATUS_STYLES = {"new": "dim", "partial": "yellow", "complete": "green"}
_MAX_ANSWER_BYTES = 4096
"""Maximum number of bytes of a line. The rest of a longer line is ignored."""


class InterviewConsole(QuestionConsole):
    """Prints questions and model answers, and reads answers of several lines."""

    def print_question(self, question: InterviewQuestion, number: int, total: int) -> None:
        self.print_blank_line()
        self.print_text(f"{number} of {total} · {question.level} · {question.type} · {question.topic}", "dim")
        self.print_text(question.question, "bold")
        self.print_text("Type your answer; an empty line ends it (s: skip, q: quit).", "dim", indent=2)

    def read_lines(self) -> list[str] | None:
        """Read lines up to an empty one. Return None at the end of input."""
        self.prompt = "  > "
        lines: list[str] = []
        while True:
            line = self.read_answer(_MAX_ANSWER_BYTES)
            if line is None:
                return lines or None
            if not line.strip():
                return lines
            lines.append(line)
            if len(lines) == 1 and line.strip().lower() in ("s", "q", "skip", "quit"):
                return lines

    def print_model_answer(self, question: InterviewQuestion) -> None:
        self.print_text("Model answer", "bold", indent=2)
        for paragraph in question.paragraphs:
            self.print_text(paragraph, indent=4)
            self.print_blank_line()
        self.print_text("Key points", "bold", indent=2)
        for point in question.key_points:
            self.print_text(f"[ ] {point}", indent=4, hanging=4)
        self.print_references(question.notebooks, question.docs_page, question.exercise)

    def read_num_points(self, question: InterviewQuestion) -> int | None:
        """Ask how many key points the answer contained. Return None at the end of input or for q."""
        total = len(question.key_points)
        self.prompt = f"  How many of the {total} key points did your answer contain? (0 to {total}, q: quit)> "
        while True:
            text = self.read_answer(_MAX_ANSWER_BYTES)
            if text is None or text.strip().lower() in ("q", "quit"):
                return None
            if text.strip().isdecimal() and int(text) <= total:
                return int(text)
            self.print_note(f"'{text.strip()[:40]}' is not a number from 0 to {total}")

    def print_summary(self, results: Sequence[tuple[InterviewQuestion, int]], progress: InterviewProgress) -> None:
        self.print_note(progress.note)
        if not results:
            self.print_text("No question was answered.", "dim")
            return
        points, total = sum(count for _, count in results), sum(len(question.key_points) for question, _ in results)
        plural = "s" if len(results) > 1 else ""
        self.print_blank_line()
        self.print_text(f"{len(results)} question{plural} answered with {points} of {total} key points.", "bold")
        incomplete = [question.id for question, count in results if count < len(question.key_points)]
        if incomplete:
            self.print_text(f"Next time, these questions are asked first: {', '.join(incomplete)}.")

    def print_question_list(self, questions: Sequence[InterviewQuestion], progress: InterviewProgress) -> None:
        table = borderless_table("llllr", ["question", "level", "type", "topic", "points"])
        for question in questions:
            count, total = progress.num_points(question), len(question.key_points)
            points = Text(f"{total}" if count is None else f"{count}/{total}", STATUS_STYLES[progress.status(question)])
            table.add_row(question.id, question.level, question.type, question.topic, points)
        self.console.print(table)
        levels = _format_counts(question.level for question in questions)
        types = _format_counts(question.type for question in questions)
        self.print_text(f"{len(questions)} questions: {levels}; {types}.", "dim")
        self.print_note(progress.note)


def _format_counts(names: Iterable[str]) -> str:
    """Format how often each name occurs, such as `15 easy, 18 medium`."""
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items())
