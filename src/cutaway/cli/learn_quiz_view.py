"""How the quiz looks on a terminal."""

import sys
from collections.abc import Sequence
from textwrap import fill, indent

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cutaway.learn.quiz import Choosing, Question, Verdict, headings, questions, shuffled
from cutaway.learn.quiz.judging import LETTERS
from cutaway.learn.quiz.score import Score

SIGNS = {"known": ("✓", "green"), "missed": ("✗", "red"), "new": ("·", "dim")}


class View:
    """Questions and verdicts, one under the other; narrow enough to read."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.width = min(self.console.width, 100)
        self.titles = {each.slug: each.title for each in headings()}

    def say(self, text: str, style: str = "", left: int = 0) -> None:
        space = " " * left
        lines = fill(text, self.width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False)
        self.console.print(Text(lines, style), soft_wrap=True)

    def note(self, text: str) -> None:
        if text:
            self.say(text, "yellow")

    def ask(self, question: Question, number: int, of: int, seed: int) -> None:
        place = f"{number} of {of} · {self.titles[question.heading]} · {question.topic}"
        self.break_line()
        self.say(place, "dim")
        self.say(question.ask, "bold")
        if isinstance(question, Choosing):
            grid = Table.grid(padding=(0, 2, 0, 0))
            for letter, choice in zip(LETTERS, shuffled(question, seed), strict=False):
                grid.add_row(Text(f"  {letter}", "cyan"), Text(choice.text))
            self.console.print(grid, width=self.width)
        self.prompt = f"  {wanted(question)} (Enter: I do not know, q: end)> "

    def read(self, longest: int) -> str | None:
        """A line that was typed or piped in; None at the end of all."""
        self.console.print(Text(self.prompt, "dim"), end="")
        sys.stdout.flush()
        line = b"" if sys.stdin is None else sys.stdin.buffer.readline(longest)
        typed = line.decode("utf-8", "replace").rstrip("\r\n")
        if not line or not sys.stdin.isatty():  # a terminal shows what is typed; a pipe does not
            self.console.print(Text(typed if typed.isprintable() else repr(typed)))
        return typed if line else None

    def break_line(self) -> None:
        self.console.print()

    def tell(self, question: Question, verdict: Verdict, *, answered: bool, proof: bool) -> None:
        if verdict.right:
            self.say(f"✓ Right. {verdict.because}", "green", left=2)
        else:
            if answered:
                self.say(f"✗ Not so. {verdict.why}", "red", left=2)
            self.say(f"→ {verdict.answer}", "bold", left=2)
            if verdict.why != verdict.because:
                self.say(verdict.because, left=4)
        several = "s" if len(question.see) > 1 else ""
        page = "" if question.page is None else f", docs/{question.page}"
        self.say(f"see notebook{several} {' and '.join(map(str, question.see))}{page}", "dim", left=4)
        if proof and question.proof:
            self.console.print(Text(indent(question.program.rstrip(), " " * 4), "cyan"), soft_wrap=True)

    def end(self, right: int, missed: Sequence[str], score: Score) -> None:
        self.note(score.note)
        asked = right + len(missed)
        if not asked:
            self.say("Nothing was answered, so nothing is counted.", "dim")
            return
        every = questions()
        known = sum(score.state(each.id) == "known" for each in every)
        self.break_line()
        self.say(f"{right} of {asked} right; you know {known} of all {len(every)}.", "bold")
        if missed:
            self.say(f"These come again first: {', '.join(missed)}.")

    def show_list(self, asked: Sequence[Question], score: Score) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("", "question", "heading", "topic", "notebooks"):
            table.add_column(column, no_wrap=True)
        for each in asked:
            sign, style = SIGNS[score.state(each.id)]
            see = ", ".join(map(str, each.see))
            table.add_row(Text(sign, style), each.id, each.heading, each.topic, see)
        self.console.print(table)
        states = [score.state(each.id) for each in asked]
        self.say(f"{len(asked)} questions: {states.count('known')} known, {states.count('missed')} missed.", "dim")
        self.note(score.note)


def wanted(question: Question) -> str:
    """What is to be typed."""
    if isinstance(question, Choosing):
        return "all the letters that are right" if question.several else "a letter"
    return f"a number, in {question.unit}" if question.unit else "a number"
