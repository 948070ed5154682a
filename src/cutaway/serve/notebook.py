"""`ct.view(model, "text")`: the inspector page as a notebook widget. Its queries run in the notebook's kernel."""

import threading
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from cutaway.errors import InputError
from cutaway.generate.generation_config import CheckpointLike
from cutaway.model import Transformer
from cutaway.serve.errors import APIError
from cutaway.serve.inspect.inspector import build_inspector
from cutaway.serve.inspect.protocol import ERROR, QueryJob, encode_json_frame
from cutaway.serve.inspect.routes import QueryExecutor, parse_query
from cutaway.serve.static_files import load_static_files

if TYPE_CHECKING:
    from anywidget import AnyWidget

SCREENS = ("model", "trace", "edit", "compare", "attention", "generate", "training", "size")


def view(
    model_or_checkpoint: Transformer | CheckpointLike,
    text: str | None = None,
    *,
    screen: str = "trace",
    name: str = "model",
) -> "AnyWidget":
    """Return a widget that inspects a checkpoint or a model, with the same web page as `cutaway open`.

    `text` is the initial input, which is the encoder input of an encoder-decoder. `screen` is the screen shown first.
    `name` is the model name shown on the page.
    """
    if screen not in SCREENS:
        raise InputError(f"screen is '{screen}', which does not exist; use one of {', '.join(SCREENS)}")
    try:
        import anywidget
        import traitlets
    except ImportError:
        message = "ct.view needs the anywidget package; install it with pip install 'cutaway[notebook]'"
        raise InputError(message) from None
    files, executor = load_static_files(), QueryExecutor(build_inspector(model_or_checkpoint, text, name=name))

    class Page(anywidget.AnyWidget):
        _esm = files["page.js"].decode()
        _css = files["page.css"].decode()
        url_fragment = traitlets.Unicode(f"/{screen}?{urlencode({'text': text} if text else {})}").tag(sync=True)

    page = Page()
    bridge = _WidgetBridge(page, executor)
    page.on_msg(lambda _, content, buffers: bridge.on_message(content))
    return page


class _WidgetBridge:
    """Runs the queries of a widget in threads and sends the frames of their results to the widget."""

    def __init__(self, widget: "AnyWidget", executor: QueryExecutor) -> None:
        self.widget, self.executor = widget, executor
        self.jobs: dict[int, QueryJob] = {}
        self._send_lock = threading.Lock()

    def on_message(self, content: object) -> None:
        if not isinstance(content, dict) or not isinstance(query_id := content.get("id"), int):
            return
        if content.get("cancel"):
            if job := self.jobs.pop(query_id, None):
                job.cancelled.set()
            return
        job = self.jobs[query_id] = QueryJob(lambda frame: self.send_frame(query_id, frame))
        try:
            query = parse_query(str(content.get("query")), content.get("params"))
        except APIError as error:
            job.send(encode_json_frame(ERROR, {"message": error.message}))
            self.send_frame(query_id, None)
            return
        future = self.executor.pool.submit(self.executor.execute, query, job)
        future.add_done_callback(lambda _: self.send_frame(query_id, None))

    def send_frame(self, query_id: int, frame: bytes | None) -> None:
        """Send a frame of a query's result. If `frame` is None, send the end of the result.

        The lock is needed because the widget's channel is not thread-safe.
        """
        with self._send_lock:
            self.widget.send({"id": query_id, "end": frame is None}, [] if frame is None else [frame])
