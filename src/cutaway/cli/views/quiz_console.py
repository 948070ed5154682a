"""How the quiz looks on a terminal."""

import sys
from collections.abc import Sequence
from textwrap import fill, indent

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cutaway.learn.quiz import AnswerGrade, ChoiceQuestion, Question, find_questions, load_sections, shuffle_choices
from cutaway.learn.quiz.grading import CHOICE_LETTERS
from cutaway.learn.quiz.progress import QuizProgress

STATE_SYMBOLS = {"known": ("✓", "green"), "missed": ("✗", "red"), "new": ("·", "dim")}


class QuizConsole:
    """Questions and verdicts, one under the other; narrow enough to read."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.width = min(self.console.width, 100)
        self.section_titles = {each.slug: each.title for each in load_sections()}

    def print_text(self, text: str, style: str = "", indent: int = 0) -> None:
        space = " " * indent
        lines = fill(text, self.width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False)
        self.console.print(Text(lines, style), soft_wrap=True)

    def print_note(self, text: str) -> None:
        if text:
            self.print_text(text, "yellow")

    def print_question(self, question: Question, number: int, total: int, seed: int) -> None:
        place = f"{number} of {total} · {self.section_titles[question.section]} · {question.topic}"
        self.print_blank_line()
        self.print_text(place, "dim")
        self.print_text(question.question, "bold")
        if isinstance(question, ChoiceQuestion):
            grid = Table.grid(padding=(0, 2, 0, 0))
            for letter, choice in zip(CHOICE_LETTERS, shuffle_choices(question, seed), strict=False):
                grid.add_row(Text(f"  {letter}", "cyan"), Text(choice.text))
            self.console.print(grid, width=self.width)
        self.prompt = f"  {_answer_hint(question)} (Enter: I do not know, q: end)> "

    def read_answer(self, max_bytes: int) -> str | None:
        """A line that was typed or piped in; None at the end of all."""
        self.console.print(Text(self.prompt, "dim"), end="")
        sys.stdout.flush()
        line = b"" if sys.stdin is None else sys.stdin.buffer.readline(max_bytes)
        typed = line.decode("utf-8", "replace").rstrip("\r\n")
        if not line or not sys.stdin.isatty():  # a terminal shows what is typed; a pipe does not
            self.console.print(Text(typed if typed.isprintable() else repr(typed)))
        return typed if line else None

    def print_blank_line(self) -> None:
        self.console.print()

    def print_verdict(self, question: Question, verdict: AnswerGrade, *, answered: bool, show_code: bool) -> None:
        if verdict.correct:
            self.print_text(f"✓ Right. {verdict.correct_explanation}", "green", indent=2)
        else:
            if answered:
                self.print_text(f"✗ Not so. {verdict.explanation}", "red", indent=2)
            self.print_text(f"→ {verdict.correct_answer}", "bold", indent=2)
            if verdict.explanation != verdict.correct_explanation:
                self.print_text(verdict.correct_explanation, indent=4)
        several = "s" if len(question.notebooks) > 1 else ""
        page = "" if question.docs_page is None else f", docs/{question.docs_page}"
        self.print_text(f"see notebook{several} {' and '.join(map(str, question.notebooks))}{page}", "dim", indent=4)
        if show_code and question.proof:
            self.console.print(Text(indent(question.program.rstrip(), " " * 4), "cyan"), soft_wrap=True)

    def print_summary(self, num_correct: int, missed: Sequence[str], score: QuizProgress) -> None:
        self.print_note(score.note)
        asked = num_correct + len(missed)
        if not asked:
            self.print_text("Nothing was answered, so nothing is counted.", "dim")
            return
        every = find_questions()
        known = sum(score.status(each.id) == "known" for each in every)
        self.print_blank_line()
        self.print_text(f"{num_correct} of {asked} right; you know {known} of all {len(every)}.", "bold")
        if missed:
            self.print_text(f"These come again first: {', '.join(missed)}.")

    def print_question_list(self, quiz_questions: Sequence[Question], score: QuizProgress) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("", "question", "section", "topic", "notebooks"):
            table.add_column(column, no_wrap=True)
        for each in quiz_questions:
            sign, style = STATE_SYMBOLS[score.status(each.id)]
            see = ", ".join(map(str, each.notebooks))
            table.add_row(Text(sign, style), each.id, each.section, each.topic, see)
        self.console.print(table)
        states = [score.status(each.id) for each in quiz_questions]
        self.print_text(
            f"{len(quiz_questions)} questions: {states.count('known')} known, {states.count('missed')} missed.", "dim"
        )
        self.print_note(score.note)


def _answer_hint(question: Question) -> str:
    """What is to be typed."""
    if isinstance(question, ChoiceQuestion):
        return "all the letters that are right" if question.multiple else "a letter"
    return f"a number, in {question.unit}" if question.unit else "a number"
