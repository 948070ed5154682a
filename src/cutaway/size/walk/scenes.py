"""What layers share on sizes: angles, masks and biases, made once for all that can use them."""

from typing import Any

from cutaway.config.attention import Latent, MultiHead
from cutaway.config.positions import Alibi, RelativeBias, Rope
from cutaway.config.stack import CrossBlock, Stack
from cutaway.size.walk.attention import Angles, Scene
from cutaway.size.walk.kernels import View, kernel_for
from cutaway.size.walk.storage import Key, Tensor, Weight
from cutaway.size.walk.tape import Tape


def visible_pairs(queries: int, keys: int, window: int | None, *, causal: bool) -> int:
    """(query, key) pairs that see each other, when the queries are the last of the keys.

    A query at position p sees p + 1 keys, or all; with a window, those less than `window` away.
    """
    first = keys - queries
    reach = keys if window is None else window
    back = sum_between(first + 1, keys) - sum_between(first + 1 - reach, keys - reach)  # itself and before
    ahead = 0 if causal else sum_between(0, queries - 1) - sum_between(1 - reach, queries - reach)  # after it
    return back + ahead


def sum_between(low: int, high: int) -> int:
    """Σ of max(n, 0) for n from low to high."""
    low = max(low, 1)
    return (low + high) * (high - low + 1) // 2 if high >= low else 0


class Scenes:
    """Angles and masks, made once for all the layers of a stack that can share them."""

    def __init__(
        self,
        tape: Tape,
        tower: Stack,
        d_model: int,
        *,
        causal: bool,
        length: int,
        past: int,
        cached: bool,
        source_read: bool,
    ) -> None:
        self.tape, self.d_model, self.causal = tape, d_model, causal
        self.length, self.past, self.cached, self.source_read = length, past, cached, source_read
        self.rows = tape.setting.rows or 1
        self.angles: dict[Any, Angles] = {}
        self.views: dict[Any, View] = {}
        self.tables: dict[Any, int] = {}
        self.blocks = tower.blocks
        tape.part = "positions and masks"
        for each in self.blocks:
            self.angles_of(each.attention)
        for index in range(tower.layers):
            self.view_of(index)

    def of(self, index: int, memory: Tensor | None) -> Scene:
        each = self.blocks[index]
        scene = Scene(self.view_of(index), self.angles_of(each.attention), self.cached, memory)
        scene.memory_known = self.source_read
        if isinstance(each, CrossBlock) and memory is not None:
            scene.memory_view = self.memory_view(each, memory)
        return scene

    def angles_of(self, attention: MultiHead | Latent) -> Angles | None:
        position = attention.position
        if not isinstance(position, Rope):
            return None
        width = attention.d_rope if isinstance(attention, Latent) else attention.head_width(self.d_model)
        pairs = (position.width or width) // 2
        kind = position, attention.heads, width
        if kind not in self.angles:
            shape, dtype = (self.rows, self.length, 1, pairs), max(4, self.tape.setting.stream)
            self.angles[kind] = Angles(self.tape.new(shape, dtype), self.tape.new(shape, dtype))
        return self.angles[kind]

    def view_of(self, index: int) -> View:
        tape, attention = self.tape, self.blocks[index].attention
        keys, window = self.past + self.length, attention.window
        position = attention.position
        biased = position if isinstance(position, Alibi | RelativeBias) else None
        own = index if isinstance(position, RelativeBias) and not position.shared else None
        softcap, sink = getattr(attention, "softcap", None), getattr(attention, "sink", False)
        kernel = kernel_for(tape.setting.kernel, softcap=softcap is not None, sink=sink)
        kind = None if biased is None else (position, attention.heads, own), window, kernel
        if kind in self.views:
            return self.views[kind]
        pairs = visible_pairs(self.length, keys, window, causal=self.causal)
        view = View(kernel, self.length, keys, pairs)
        self.views[kind] = view
        narrow = window is not None and window < keys
        plain = self.past == 0 and not narrow and biased is None and not tape.setting.rows
        if kernel == "sdpa" and plain:
            return view
        view.blind = tape.new((self.rows, 1, self.length, 1), 1)
        if kernel == "flex":
            return view
        view.mask = tape.new((self.rows, 1, self.length, keys), 1)
        if biased is not None:
            table = self.tables.setdefault((biased, attention.heads, own), index)  # by the first layer that uses it
            bias = self.bias(biased, attention.heads, keys, (self.tower_name, table))
            if kernel == "sdpa":
                view.mask = tape.op(bias.shape, bias.dtype, [bias], saves=[tape.new(view.mask.shape, 1)])
            else:
                view.bias = bias
        return view

    @property
    def tower_name(self) -> str:
        return "decoder" if self.causal else "encoder"

    def bias(self, position: Alibi | RelativeBias, heads: int, keys: int, key: Key) -> Tensor:
        tape, shape = self.tape, (self.rows, heads, self.length, keys)
        if isinstance(position, Alibi):
            return tape.new(shape, tape.setting.stream)
        buckets = tape.new((self.rows, self.length, keys), 8)
        table = Weight((*key, "bias table"), (position.buckets, heads))
        return tape.op(shape, tape.setting.stream, saves=[buckets], weights=[table])

    def memory_view(self, each: CrossBlock, memory: Tensor) -> View:
        cross = each.cross
        kernel = kernel_for(self.tape.setting.kernel, softcap=cross.softcap is not None, sink=False)
        keys = memory.shape[1]
        kind = "memory", kernel
        if kind not in self.views:
            view = self.views[kind] = View(kernel, self.length, keys, self.length * keys)
            if kernel != "sdpa":
                view.blind = self.tape.new((1, 1, self.length, 1), 1)
            if kernel == "explicit":
                view.mask = self.tape.new((1, 1, self.length, keys), 1)
        return self.views[kind]
