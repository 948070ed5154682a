"""Terminal output of `cutaway learn quiz`."""

from collections.abc import Sequence
from textwrap import indent

from rich.table import Table
from rich.text import Text

from cutaway.cli.views.question_console import QuestionConsole
from cutaway.cli.views.terminal import borderless_table
from cutaway.learn.claims import claims_of_question
from cutaway.learn.quiz import AnswerGrade, ChoiceQuestion, Question, find_questions, load_sections, shuffle_choices
from cutaway.learn.quiz.grading import CHOICE_LETTERS
from cutaway.learn.quiz.progress import QuizProgress

STATE_SYMBOLS = {"known": ("✓", "green"), "missed": ("✗", "red"), "new": ("·", "dim")}


class QuizConsole(QuestionConsole):
    """Prints questions and verdicts, and reads answers."""

    def __init__(self) -> None:
        super().__init__()
        self.section_titles = {section.slug: section.title for section in load_sections()}

    def print_question(self, question: Question, number: int, total: int, seed: int) -> None:
        header = f"{number} of {total} · {self.section_titles[question.section]} · {question.topic} · {question.level}"
        self.print_blank_line()
        self.print_text(header, "dim")
        self.print_text(question.question, "bold")
        if isinstance(question, ChoiceQuestion):
            grid = Table.grid(padding=(0, 2, 0, 0))
            for letter, choice in zip(CHOICE_LETTERS, shuffle_choices(question, seed), strict=False):
                grid.add_row(Text(f"  {letter}", "cyan"), Text(choice.text))
            self.console.print(grid, width=self.width)
        self.prompt = f"  {_answer_hint(question)} (Enter: skip, q: quit)> "

    def print_verdict(self, question: Question, verdict: AnswerGrade, *, answered: bool, show_code: bool) -> None:
        if verdict.correct:
            self.print_text(f"✓ Correct. {verdict.correct_explanation}", "green", indent=2)
        else:
            if answered:
                self.print_text(f"✗ Incorrect. {verdict.explanation}", "red", indent=2)
            self.print_text(f"→ {verdict.correct_answer}", "bold", indent=2)
            if verdict.explanation != verdict.correct_explanation:
                self.print_text(verdict.correct_explanation, indent=4)
        for row in claims_of_question(question.id):
            figure = f" {row.figure}." if row.figure else ""
            self.print_text(f"{row.id}: {row.statement} {row.verdict.capitalize()}.{figure}", "dim", indent=4)
        self.print_references(question.notebooks, question.docs_page)
        if show_code and question.proof:
            self.console.print(Text(indent(question.program.rstrip(), " " * 4), "cyan"), soft_wrap=True)

    def print_summary(self, num_correct: int, missed: Sequence[str], score: QuizProgress) -> None:
        self.print_note(score.note)
        num_answered = num_correct + len(missed)
        if not num_answered:
            self.print_text("No question was answered.", "dim")
            return
        all_questions = find_questions()
        num_known = sum(score.status(question.id) == "known" for question in all_questions)
        self.print_blank_line()
        known = f"{num_known} of all {len(all_questions)} questions known"
        self.print_text(f"{num_correct} of {num_answered} correct; {known}.", "bold")
        if missed:
            self.print_text(f"Next time, these questions are asked first: {', '.join(missed)}.")

    def print_question_list(self, quiz_questions: Sequence[Question], score: QuizProgress) -> None:
        table = borderless_table("lllll", ["", "question", "topic", "level", "notebooks"])
        section = ""
        for question in quiz_questions:
            if question.section != section:
                section = question.section
                table.add_row("", Text(self.section_titles[section], "bold"))
            symbol, style = STATE_SYMBOLS[score.status(question.id)]
            notebooks = ", ".join(map(str, question.notebooks))
            table.add_row(Text(symbol, style), question.id, question.topic, question.level, notebooks)
        self.console.print(table)
        states = [score.status(question.id) for question in quiz_questions]
        counts = f"{states.count('known')} known, {states.count('missed')} missed"
        self.print_text(f"{len(quiz_questions)} questions: {counts}.", "dim")
        self.print_note(score.note)


def _answer_hint(question: Question) -> str:
    """Return which kind of answer a question expects, such as "a letter"."""
    if isinstance(question, ChoiceQuestion):
        return "all correct letters" if question.multiple else "a letter"
    return f"a number, in {question.unit}" if question.unit else "a number"
