"""`ct.view(model, "text")`: the page in a notebook, answered by its kernel."""

import threading
from typing import Any
from urllib.parse import urlencode

from cutaway.errors import InputError
from cutaway.serve.built import files
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.opening import looked_into
from cutaway.serve.inspect.routes import Desk, read_question
from cutaway.serve.inspect.wire import ERROR, told
from cutaway.serve.refusal import Refused

SCREENS = ("follow", "break", "attention", "generate", "gradients", "size")


def view(thing: Any, text: str | None = None, *, screen: str = "follow", name: str = "model") -> Any:
    """A widget that looks into a checkpoint or a model: the same page as `cutaway open`, and the same numbers.

    `text` is what it reads first (the source, for an encoder-decoder); `screen` is where it begins.
    """
    if screen not in SCREENS:
        raise InputError(f"there is no screen '{screen}'; there is {', '.join(SCREENS)}")
    try:
        import anywidget
        import traitlets
    except ImportError:
        raise InputError("a widget needs anywidget; install it: pip install 'cutaway[notebook]'") from None
    built, desk = files(), Desk(looked_into(thing, text, name=name))

    class Page(anywidget.AnyWidget):
        _esm = built["page.js"].decode()
        _css = built["page.css"].decode()
        place = traitlets.Unicode(f"/{screen}?{urlencode({'text': text} if text else {})}").tag(sync=True)

    page = Page()
    kernel = Kernel(page, desk)
    page.on_msg(lambda _, content, buffers: kernel.hear(content))
    return page


class Kernel:
    """Answers a widget's questions, each in a thread of its own until it is done or nobody waits."""

    def __init__(self, widget: Any, desk: Desk) -> None:
        self.widget, self.desk = widget, desk
        self.jobs: dict[int, Job] = {}
        self.one_at_a_time = threading.Lock()

    def hear(self, content: Any) -> None:
        number = content.get("id") if isinstance(content, dict) else None
        if not isinstance(number, int):
            return
        if content.get("stop"):
            if job := self.jobs.pop(number, None):
                job.stop.set()
            return
        job = self.jobs[number] = Job(lambda frame: self.tell(number, frame))
        try:
            question = read_question(str(content.get("question")), content.get("given"))
        except Refused as refused:
            job.tell(told(ERROR, {"message": refused.message}))
            self.tell(number, None)
            return
        done = self.desk.pool.submit(self.desk.work, question, job)
        done.add_done_callback(lambda _: self.tell(number, None))

    def tell(self, number: int, frame: bytes | None) -> None:
        """One message after another: a widget's channel is not made for several threads."""
        with self.one_at_a_time:
            self.widget.send({"id": number, "end": frame is None}, [] if frame is None else [frame])
