"""A pass recorded as sizes: what is multiplied, what is kept for the way back, what is alive at once."""

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

from cutaway.size.walk.setting import Setting
from cutaway.size.walk.storage import (
    EnoughError,
    Frame,
    Key,
    Meter,
    Node,
    Product,
    Shape,
    Storage,
    Tensor,
    Weight,
    receive,
)
from cutaway.size.walk.tally import Again, Tally

if TYPE_CHECKING:
    from cutaway.size.walk.shares import Group, Shares


class Tape:
    """Runs the walk: allocates, records, and goes back."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.meter, self.tally = Meter(), Tally()
        self.nodes: list[Node] = []
        self.frame: Frame | None = None
        self.block: Again | None = None
        self.keep_costly = False
        self.casts: dict[Key, Storage] = {}
        """Weights that autocast has narrowed; it keeps them until the forward pass is over."""
        self.weights: dict[Key, Weight] = {}
        self.gradients: dict[Key, Storage] = {}
        self.shares: Shares | None = None
        self.part = ""
        self.steps = 0
        """Operations so far: at least as many kernels are launched."""

    # ------------------------------------------------------------------------------------ tensors

    def new(self, shape: Shape, dtype: int, part: str | None = None) -> Tensor:
        """Memory that needs no gradient: masks, angles, tokens."""
        return Tensor(shape, dtype, Storage(self.meter, prod(shape) * dtype, part or self.part), None)

    def op(
        self,
        shape: Shape,
        dtype: int,
        inputs: Sequence[Tensor] = (),
        *,
        saves: Sequence[Tensor | Storage] = (),
        saves_result: bool = False,
        passes: bool = False,
        weights: Sequence[Weight] = (),
        products: Sequence[Product] = (),
        back: Sequence[Product] = (),
        costly: bool = False,
        beside: int = 0,
    ) -> Tensor:
        """One operation: what it gives, keeps for the way back, and multiplies; `beside` are bytes that it gives and
        keeps for itself alone (a norm's statistics, a softmax's log-sum)."""
        self.steps += 1
        size = prod(shape) * dtype
        needs = self.setting.grad and (bool(weights) or any(x.node is not None for x in inputs))
        node = Node(size, inputs, passes=passes) if needs else None
        for weight in weights:
            self.weights[weight.key] = weight
        if node is not None:
            node.weights, node.back = list(weights), list(back)
            for each in saves:
                self.save(node, each if isinstance(each, Storage) else each.storage)
        frame = self.frame
        if costly and frame is not None and frame.filled >= 0 and self.keep_costly:
            out = frame.kept.pop(0)
            extra = frame.kept.pop(0) if beside else None
        else:
            second = frame is not None and frame.filled >= 0
            for product in products:
                self.tally.add("recompute" if second else "forward", *product)
            if self.block is not None and not second:
                self.block.products += [(product, costly) for product in products]
            out = Storage(self.meter, size, self.part)
            extra = Storage(self.meter, beside, self.part) if beside else None
            if costly and frame is not None and self.keep_costly:
                frame.kept += [out] if extra is None else [out, extra]
        if node is not None:
            if extra is not None:
                self.save(node, extra)
            if saves_result:
                self.save(node, out)
            if frame is None or frame.filled < 0:
                self.nodes.append(node)
        return Tensor(shape, dtype, out, node)

    def cut(self, x: Tensor, *shape: int) -> Tensor:
        """A piece of x: the same memory, but a gradient of its own."""
        node = None
        if x.node is not None:
            node = Node(prod(shape) * x.dtype, [x])
            if self.frame is None or self.frame.filled < 0:
                self.nodes.append(node)
        return Tensor(shape, x.dtype, x.storage, node)

    def given(self, x: Tensor) -> Tensor:
        """What all read that share a matrix: what each finds for its gradient is added up."""
        if self.setting.tensor == 1:
            return x
        x = self.cut(x, *x.shape)
        if x.node is not None:
            x.node.sends = x.bytes
        return x

    def summed(self, x: Tensor) -> Tensor:
        """What those that share a matrix come to together."""
        if self.setting.tensor == 1:
            return x
        self.tally.send("all-reduce", x.bytes)
        return self.op(x.shape, x.dtype, [x], passes=True)

    def save(self, node: Node, storage: Storage) -> None:
        """Keep for the way back; in a checkpointed block only a slot, which a second run fills."""
        frame = self.frame
        if self.block is not None:
            self.block.needed = len(self.block.products)
        if frame is None:
            node.saved.append(storage)
        elif frame.filled < 0:
            node.frame = frame
            frame.slots.append((node, len(node.saved)))
            node.saved.append(None)
        else:
            first, index = frame.slots[frame.filled]
            first.saved[index] = storage
            frame.filled += 1
            if frame.filled == len(frame.slots):
                raise EnoughError

    def cast(self, x: Tensor, dtype: int) -> Tensor:
        return x if x.dtype == dtype else self.op(x.shape, dtype, [x])

    # ------------------------------------------------------------------------------------ products with weights

    def linear(self, x: Tensor, d_out: int, key: Key, *, bias: bool, part: str, least: int | None = None) -> Tensor:
        """x·Wᵀ + b; `least` are its FLOPs where another way needs fewer."""
        d_in = x.shape[-1]
        weight = Weight(key, (d_out, d_in), multiplied=True)
        weights = [weight, Weight((*key, "bias"), (d_out,), multiplied=True)] if bias else [weight]
        saves: list[Tensor | Storage] = []
        dtype = self.setting.compute if self.setting.autocast else x.dtype
        x = self.cast(x, dtype)
        saves.append(x)
        if self.setting.autocast:
            copies = [self.narrowed(each) for each in weights]
            saves.append(copies[0])
        flops = 2 * x.elements * d_out
        return self.op(
            (*x.shape[:-1], d_out),
            dtype,
            [x],
            saves=saves,
            weights=weights,
            products=[(part, flops, flops if least is None else least)],
            back=[(part, 2 * flops, 2 * flops)],
            costly=True,
        )

    def narrowed(self, weight: Weight) -> Storage:
        """Autocast's copy of a weight, made once a forward pass; of a part of a matrix, each time."""
        if weight.key in self.casts:
            return self.casts[weight.key]
        made = Storage(self.meter, weight.elements * self.setting.compute, "weights in bf16")
        if self.setting.tensor == 1:
            self.casts[weight.key] = made
        return made

    # ------------------------------------------------------------------------------------ blocks run twice

    def run(self, block: Callable[[Tensor], Tensor], x: Tensor, group: "Group") -> Tensor:
        """block(x), keeping as little as the recompute mode says."""
        if not self.setting.grad:
            return block(x)
        self.block = Again()
        shares = None if self.shares is None or not self.shares.has(group) else self.shares
        if shares is not None:
            shares.enter(group)
            self.on_way_back(lambda: shares.leave_back(group))
        out = self.run_once(block, x)
        if shares is not None:
            shares.leave(group)
            self.on_way_back(lambda: shares.enter_back(group))
        self.tally.would_repeat(self.block)
        self.block = None
        return out

    def on_way_back(self, action: Callable[[], None]) -> None:
        """Do this when the way back comes by here."""
        node = Node(0, [])
        node.action = action
        self.nodes.append(node)

    def run_once(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.setting.recompute == "none":
            return block(x)
        self.keep_costly = self.setting.recompute == "selective"
        holder = Node(x.bytes, [x], passes=True)
        holder.saved.append(x.storage)
        self.nodes.append(holder)
        inside = Tensor(x.shape, x.dtype, x.storage, holder)
        self.frame = Frame(lambda: block(inside))
        out = block(inside)
        self.frame = None
        return out

    def refill(self, frame: Frame) -> None:
        """Run a checkpointed block again, up to the last value that the way back asks for."""
        frame.filled, self.frame = 0, frame
        self.keep_costly = self.setting.recompute == "selective"
        try:
            frame.again()
        except EnoughError:
            frame.slots.clear()  # nodes and frame would keep each other alive
        finally:
            self.frame = None
            self.casts.clear()

    # ------------------------------------------------------------------------------------ the way back

    def backward(self, out: Tensor, grad: Storage | None = None) -> None:
        """From `out` to every weight, freeing what each step kept as soon as it is done."""
        assert out.node is not None
        out.node.grad = grad or Storage(self.meter, out.node.size, "gradients on the way")
        del out, grad
        while self.nodes:
            node = self.nodes.pop()
            if node.action is not None:
                node.action()
                continue
            if node.grad is None:
                node.saved.clear()
                continue
            if node.frame is not None and node.frame.filled < 0:
                self.refill(node.frame)
            for part, full, seen in node.back:
                self.tally.add("backward", part, full, seen)
            self.give(node)

    def give(self, node: Node) -> None:
        self.steps += 1 + len(node.weights)
        grad = node.grad
        node.grad = None
        if node.sends:
            self.tally.send("all-reduce", node.sends)
        for weight in node.weights:
            self.accumulate(weight)
        for source, size in node.inputs:
            if node.passes:
                assert grad is not None
                grad.shared = True
                receive(source, grad)
            else:
                receive(source, Storage(self.meter, size, "gradients on the way"))
        node.saved.clear()

    def accumulate(self, weight: Weight) -> None:
        """A weight's gradient; a tensor that is used twice gets a second one, and their sum takes a third place."""
        setting, way = self.setting, "gradients on the way"
        wide = Storage(self.meter, weight.elements * max(4, setting.weights), way) if weight.summed else None
        narrow = Storage(self.meter, weight.elements * setting.compute, way) if weight.multiplied else None
        fresh = wide if setting.weights >= 4 and wide is not None else narrow
        if fresh is None or (fresh is narrow and setting.compute != setting.weights):
            fresh = Storage(self.meter, weight.elements * setting.weights, way)
        held = self.gradients if self.shares is None else self.shares.unsent
        if weight.key in held and not setting.autocast:
            fresh = Storage(self.meter, weight.elements * setting.weights, way)
        if self.shares is None:
            self.gradients[weight.key] = fresh.for_part("gradients")
        else:
            self.shares.take(weight.key, fresh)
