"""`ct.view(model, "text")`: the page in a notebook, answered by its kernel."""

import threading
from typing import Any
from urllib.parse import urlencode

from cutaway.errors import InputError
from cutaway.serve.errors import APIError
from cutaway.serve.inspect.inspector import build_inspector
from cutaway.serve.inspect.protocol import ERROR, QueryJob, encode_json_frame
from cutaway.serve.inspect.routes import QueryExecutor, parse_query
from cutaway.serve.static_files import load_static_files

SCREENS = ("trace", "edit", "attention", "generate", "gradients", "size")


def view(model_or_checkpoint: Any, text: str | None = None, *, screen: str = "trace", name: str = "model") -> Any:
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
    built, desk = load_static_files(), QueryExecutor(build_inspector(model_or_checkpoint, text, name=name))

    class Page(anywidget.AnyWidget):
        _esm = built["page.js"].decode()
        _css = built["page.css"].decode()
        url_fragment = traitlets.Unicode(f"/{screen}?{urlencode({'text': text} if text else {})}").tag(sync=True)

    page = Page()
    kernel = WidgetBridge(page, desk)
    page.on_msg(lambda _, content, buffers: kernel.on_message(content))
    return page


class WidgetBridge:
    """Answers a widget's questions, each in a thread of its own until it is done or nobody waits."""

    def __init__(self, widget: Any, executor: QueryExecutor) -> None:
        self.widget, self.executor = widget, executor
        self.jobs: dict[int, QueryJob] = {}
        self._send_lock = threading.Lock()

    def on_message(self, content: Any) -> None:
        number = content.get("id") if isinstance(content, dict) else None
        if not isinstance(number, int):
            return
        if content.get("cancel"):
            if job := self.jobs.pop(number, None):
                job.cancelled.set()
            return
        job = self.jobs[number] = QueryJob(lambda frame: self.send_frame(number, frame))
        try:
            question = parse_query(str(content.get("query")), content.get("params"))
        except APIError as refused:
            job.send(encode_json_frame(ERROR, {"message": refused.message}))
            self.send_frame(number, None)
            return
        done = self.executor.pool.submit(self.executor.execute, question, job)
        done.add_done_callback(lambda _: self.send_frame(number, None))

    def send_frame(self, query_id: int, frame: bytes | None) -> None:
        """One message after another: a widget's channel is not made for several threads."""
        with self._send_lock:
            self.widget.send({"id": query_id, "end": frame is None}, [] if frame is None else [frame])
