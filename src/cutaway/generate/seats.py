"""Who sits in which row of a cache: taking a seat with its pages, moving up from reading to stepping, leaving."""

from cutaway.generate.pages import Pages
from cutaway.generate.plan import Plan
from cutaway.generate.runner import Runner
from cutaway.generate.ticket import Ticket


class Seats:
    """Rows 0 … stepping − 1 take steps; the rows behind them are still reading their prompts."""

    def __init__(self, runner: Runner, plan: Plan, *, share: bool) -> None:
        """`share`: whether texts that begin alike have pages in common, in a cache of pages."""
        self.runner, self.plan = runner, plan
        cache = runner.cache
        self.pages = None if cache.table is None else Pages(cache.page_count, cache.page, share=share)
        self.rows: list[Ticket] = []
        self.stepping = 0

    @property
    def steppers(self) -> list[Ticket]:
        return self.rows[: self.stepping]

    def readers(self) -> list[Ticket]:
        """Those who read, from row `stepping` on; who waits longest is moved to the front."""
        if self.stepping < len(self.rows):
            oldest = min(self.rows[self.stepping :], key=lambda ticket: ticket.number)
            assert oldest.row is not None
            self.swap(oldest.row, self.stepping)
        return self.rows[self.stepping :]

    def take(self, ticket: Ticket) -> bool:
        """Give a row and pages to a request, if there are enough."""
        if len(self.rows) == self.runner.cache.batch:
            return False
        if self.pages is not None:
            taken = self.pages.take([] if ticket.source else ticket.tokens, self.plan.room(ticket))
            if taken is None:
                return False
            ticket.pages, ticket.read = taken
            ticket.shared = ticket.read // self.pages.size
        ticket.row = len(self.rows)
        self.rows.append(ticket)
        return True

    def open(self, ticket: Ticket) -> None:
        """Make a row that was taken ready for its text; a source is read now."""
        assert ticket.row is not None
        self.runner.open(ticket.row, ticket, self.plan.eos)
        self.ready(ticket)

    def ready(self, ticket: Ticket) -> None:
        """Whoever has read all but the last token takes steps from now on."""
        text = ticket.text
        if ticket.read != len(text) - 1 or ticket.row is None:
            return
        if self.pages is not None and ticket.source is None:
            self.pages.keep(ticket.pages, text[: ticket.read])
        self.runner.next[ticket.row] = text[-1]
        self.swap(ticket.row, self.stepping)
        self.stepping += 1

    def read_again(self, ticket: Ticket) -> None:
        """Back to the readers, to read the whole text from its start."""
        assert ticket.row is not None
        self.stepping -= 1
        self.swap(ticket.row, self.stepping)
        ticket.read = 0
        self.runner.cache.open(ticket.row, 0, ticket.pages)

    def swap(self, a: int, b: int) -> None:
        self.runner.swap(a, b)
        first, second = self.rows[a], self.rows[b]
        self.rows[a], self.rows[b] = second, first
        first.row, second.row = b, a

    def leave(self, ticket: Ticket, *, sound: bool = True) -> None:
        """Give the row and its pages to others; what is there is wiped unless it is known to be sound."""
        if ticket.row is None:
            return
        if ticket.row < self.stepping:
            self.stepping -= 1
            self.swap(ticket.row, self.stepping)
        self.swap(ticket.row, len(self.rows) - 1)
        self.rows.pop()
        spoilt: list[int] = []
        if self.pages is not None:
            own = ticket.pages[ticket.shared :]
            if not sound:
                self.pages.disown(own)
            elif ticket.source is None:
                self.pages.keep(ticket.pages, ticket.text[: ticket.read])
            self.pages.give_back(ticket.pages)
            spoilt = [page for page in own if page not in self.pages.users]
        if not sound:
            self.runner.cache.wipe(ticket.row, spoilt)
            self.runner.next[ticket.row] = 0
        self.runner.close(ticket.row)
        ticket.row, ticket.pages = None, []
