"""Orders of uses that a domain makes, and plans of replicas: the inputs of the model checker.

A use is one execution of a layer's experts. Uses are numbered by n in the order in which the
domain makes them; the backward of a recomputation just made keeps its buffer and so its n.
Backward uses have a second number q of their own.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Entry(NamedTuple):
    """One replica: the hot expert of `home` in slot `slot` of rank `replica`."""

    home: int
    replica: int
    slot: int


class Event(NamedTuple):
    """One line of an order: kind is forward, recompute, backward or update."""

    kind: str
    micro_batch: int = 0
    layer: int = 0


@dataclasses.dataclass(frozen=True)
class Use:
    """A numbered use; an optimizer update has n = -1.

    Attributes:
        kind: forward, recompute, backward or update.
        step: optimizer step, the version of the weights.
        n: number of the use, weight buffer n mod W.
        q: number of the backward use, gradient slot q mod G2; -1 for others.
        reuses: whether it is the backward of the recomputation just before it.
        certain: whether the host knows here which use comes next.
    """

    kind: str
    step: int
    micro_batch: int
    layer: int
    n: int
    q: int
    reuses: bool
    certain: bool

    @property
    def key(self) -> tuple[int, str, int, int]:
        """What the words are hashed from; the buffer of a recomputation serves two uses."""
        push = "backward" if self.kind == "backward" else "forward"
        return (self.step, push, self.micro_batch, self.layer)


def follows(one: Event, other: Event) -> bool:
    """Whether `other` is certain after `one`: the next layer of the same pass."""
    step = {"forward": 1, "backward": -1}.get(one.kind, 0)
    return step != 0 and other == one._replace(layer=one.layer + step)


def number(order: list[Event]) -> list[Use]:
    """Numbers the uses of an order.

    >>> [(use.kind, use.n, use.q) for use in number(recompute(2))][2:6]
    [('recompute', 2, -1), ('backward', 2, 0), ('recompute', 3, -1), ('backward', 3, 1)]
    """
    uses: list[Use] = []
    step, n, q = 0, -1, -1
    for index, event in enumerate(order):
        if event.kind == "update":
            uses.append(Use("update", step, 0, 0, -1, -1, reuses=False, certain=False))
            step += 1
            continue
        recomputed = event._replace(kind="recompute")
        reuses = event.kind == "backward" and index > 0 and order[index - 1] == recomputed
        certain = index + 1 < len(order) and follows(event, order[index + 1])
        n += not reuses
        q += event.kind == "backward"
        own_q = q if event.kind == "backward" else -1
        uses.append(Use(event.kind, step, *event[1:], n, own_q, reuses, certain))
    return uses


def forward(layers: int, micro_batch: int = 0) -> list[Event]:
    return [Event("forward", micro_batch, layer) for layer in range(layers)]


def backward(layers: int, micro_batch: int = 0) -> list[Event]:
    return [Event("backward", micro_batch, layer) for layer in reversed(range(layers))]


def forward_backward(layers: int, micro_batches: int = 1, steps: int = 1) -> list[Event]:
    """Gradient accumulation: every micro-batch forward and backward, then the update."""
    order = [
        event
        for micro_batch in range(micro_batches)
        for event in forward(layers, micro_batch) + backward(layers, micro_batch)
    ]
    return (order + [Event("update")]) * steps


def recompute(layers: int, *, whole: bool = False, steps: int = 1) -> list[Event]:
    """Activation recomputation, layer by layer or of the whole model before its backward."""
    order = forward(layers)
    if whole:
        order += [event._replace(kind="recompute") for event in forward(layers)]
        order += backward(layers)
    else:
        for event in backward(layers):
            order += [event._replace(kind="recompute"), event]
    return (order + [Event("update")]) * steps


def one_f_one_b(layers: int, micro_batches: int = 2, warmup: int = 1) -> list[Event]:
    """The order of a pipeline stage: `warmup` forwards, then forward and backward in turn."""
    order: list[Event] = []
    for index in range(micro_batches + warmup):
        if index < micro_batches:
            order += forward(layers, index)
        if index >= warmup:
            order += backward(layers, index - warmup)
    return order + [Event("update")]


ORDERS = {
    "one layer": forward_backward(1, steps=2),
    "one layer, 2 micro-batches": forward_backward(1, micro_batches=2),
    "forward, backward": forward_backward(3),
    "forward, backward, 2 steps": forward_backward(2, steps=2),
    "2 micro-batches": forward_backward(2, micro_batches=2),
    "per-layer recompute": recompute(3),
    "whole recompute": recompute(2, whole=True),
    "1F1B": one_f_one_b(2),
    "1F1B, one layer, 4 micro-batches": one_f_one_b(1, micro_batches=4),
}


def plan(name: str, ranks: int, use: Use) -> list[Entry]:
    """Replicas of a micro-batch in a layer, the same in all of its passes.

    >>> plan("ring", 2, number(forward(1))[0])
    [Entry(home=1, replica=0, slot=0), Entry(home=0, replica=1, slot=0)]
    """
    last = ranks - 1
    plans = {
        "empty": [],
        "one way": [Entry(0, 1, 0)],
        "ring": [Entry(home, (home + 1) % ranks, 0) for home in range(ranks)],
        "chain": [Entry(home, home + 1, 0) for home in range(last)],
        "back": [Entry(last, 0, 1), Entry(last, 0, 0)],
        "one home": [Entry(0, 1, 0), Entry(0, 1, 1)] + [Entry(0, r, 0) for r in range(2, ranks)],
    }
    if name == "mixed":  # others at every use: chains that turn, empty uses, all slots of one home
        turn = ("chain", "one way", "empty", "back", "one home", "ring")
        name = turn[(use.step + 2 * use.micro_batch + use.layer) % len(turn)]
    return sorted(plans[name], key=lambda entry: entry[1:])


PLANS = ("empty", "one way", "ring", "one home", "mixed")
