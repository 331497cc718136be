"""The enqueue log of training steps of three MoE layers on two ranks, with the host's own streams.

Per rank: `compute`; `push` and `reduce` of replica synchronisation; `rows` that sends dispatched
rows into the peer's receive buffer; `gather`, on which the host fills its weights. A host decides
when weights are there and when they go away:

* `PrefetchingFsdp`: gathers the next layer while this one runs, frees a layer after it.
* `PlainFsdp`: gathers in the pre-hook, frees (poisons) after the layer; nothing can be prefetched.
* `LateGather`: one gather of all layers after the optimizer, in pieces that arrive late.

Weights and replica slots have values, so that `happens_before.replay` shows what a race does.
"""

from __future__ import annotations

import collections
import math

from relibra_kernels.testing.recording_streams import Entry, RecordingStreams, Span

LAYERS, RANKS, BUFFERS, GRAD_SLOTS = 3, 2, 2, 2
POISON = math.nan


class PlainFsdp:
    """Weights exist from the pre-hook of a layer to its end."""

    gathers_ahead = False

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def begin_step(self) -> None:
        pass

    def weights_ready(self, layer: int) -> int:
        """Fills the weights of a layer; an event after that."""
        rank = self.rank
        rank.wait_if_new("gather", rank.freed.get(layer, rank.updated))
        rank.fill(layer)
        return rank.streams.record("gather")

    def after_layer(self, layer: int) -> None:
        rank = self.rank
        rank.set("compute", "free", rank.home(layer), POISON)
        rank.freed[layer] = rank.record("compute")


class PrefetchingFsdp(PlainFsdp):
    """The same, but the next layer is gathered while this one runs."""

    gathers_ahead = True


class LateGather(PlainFsdp):
    """All weights are gathered after the optimizer, layer by layer, and stay."""

    gathers_ahead = True

    def begin_step(self) -> None:
        rank = self.rank
        rank.wait_if_new("gather", rank.updated)
        self.ready = []
        for layer in range(LAYERS):
            rank.fill(layer)
            self.ready.append(rank.streams.record("gather"))

    def weights_ready(self, layer: int) -> int:
        return self.ready[layer]

    def after_layer(self, layer: int) -> None:
        pass


class Rank:
    """What one rank submits; rank 0 and rank 1 each have a replica of the other's hot expert."""

    def __init__(self, log: list[Entry], me: int, values: dict[Span, float], host: type,
                 replicated: tuple[int, ...]) -> None:  # fmt: skip
        self.streams, self.me, self.peer = RecordingStreams(log, me), me, 1 - me
        self.values, self.replicated = values, replicated
        self.read: list[tuple[str, float, float]] = []  # use, value that was read, right value
        self.freed: dict[int, int] = {}
        self.updated: int | None = None
        self.order: dict[int, tuple[str, int]] = {}  # event -> stream, number of its record
        self.seen: dict[tuple[str, str], int] = {}  # streams -> last record waited for
        self.n, self.q, self.step = -1, -1, 0
        self.pushed: dict[int, int] = {}  # n -> event
        self.gathered: dict[int, int] = {}  # n -> event
        self.reduced: dict[int, int] = {}  # layer -> event
        self.sent: int | None = None
        self.host = host(self)

    def home(self, layer: int) -> Span:
        return Span(("home", self.me, layer))

    def right(self, layer: int) -> float:
        return 100.0 * self.step + layer

    def set(self, stream: str, name: str, span: Span, value: float) -> None:
        self.streams.submit(
            stream, name, writes=[span], action=lambda: self.values.update({span: value})
        )

    def fill(self, layer: int) -> None:
        """The host's all-gather of a layer from its shards."""
        span, value = self.home(layer), self.right(layer)
        self.streams.submit(
            "gather", f"gather of layer {layer}", reads=[Span(("shard", self.me))], writes=[span],
            action=lambda: self.values.update({span: value}),
        )  # fmt: skip

    def record(self, stream: str) -> int:
        event = self.streams.record(stream)
        self.order[event] = (stream, len(self.order))
        return event

    def wait_if_new(self, stream: str, event: int | None) -> None:
        """Waits, unless the stream has waited for a later event of the same stream."""
        if event is None:
            return
        source, number = self.order.get(event, ("", math.inf))
        if number <= self.seen.get((stream, source), -1):
            return
        if source:
            self.seen[stream, source] = int(number)
        self.streams.wait(stream, event)

    # -- one use ---------------------------------------------------------------------------

    def gather(self, n: int, layer: int) -> None:
        self.gathered[n] = self.host.weights_ready(layer)

    def push(self, n: int, layer: int) -> None:
        if layer not in self.replicated:
            return
        streams, source = self.streams, self.home(layer)
        target = Span(("weights", self.peer, n % BUFFERS))
        streams.wait("push", self.gathered[n])
        streams.wait_word("push", ("retired", self.peer, self.me), n - BUFFERS + 1)

        def copy() -> None:
            self.values[target] = self.values[source]

        streams.submit("push", f"push {n}", reads=[source], writes=[target], action=copy)
        streams.publish("push", ("full", self.peer, n % BUFFERS), n + 1)
        self.pushed[n] = self.record("push")

    def dispatch(self, n: int) -> None:
        """Sends rows into the peer's receive buffer."""
        streams, rows = self.streams, Span(("send rows", self.me))
        streams.submit("compute", f"gate {n}", writes=[rows])
        streams.wait("rows", self.record("compute"))
        streams.wait_word("rows", ("row credit", self.peer), n)
        receive = Span(("receive rows", self.peer))
        streams.submit("rows", f"dispatch {n}", reads=[rows], writes=[receive])
        streams.publish("rows", ("rows", self.peer), n + 1)
        self.sent = self.record("rows")

    def experts(self, n: int, layer: int, name: str) -> None:
        """Grouped GEMMs that read weights of both kinds and the received rows."""
        streams, slot = self.streams, Span(("weights", self.me, n % BUFFERS))
        streams.wait("compute", self.gathered[n])
        streams.wait_word("compute", ("rows", self.me), n + 1)
        weights, right = [self.home(layer)], self.right(layer)
        if layer in self.replicated:
            streams.wait_word("compute", ("full", self.me, n % BUFFERS), n + 1)
            weights.append(slot)

        def read() -> None:
            self.read.extend((f"{name} {n}", self.values[span], right) for span in weights)

        rows = Span(("receive rows", self.me))
        streams.submit("compute", f"{name} {n}", reads=[*weights, rows], action=read)
        streams.publish("compute", ("retired", self.me, self.peer), n + 1)

    def wgrad(self, n: int, layer: int) -> None:
        streams, q = self.streams, self.q
        slot = ("grads", self.me, q % GRAD_SLOTS)
        writes = [Span(("main_grad", self.me, layer))]
        self.wait_if_new("compute", self.reduced.get(layer))
        if layer in self.replicated:
            streams.wait_word("compute", ("grad_retired", self.peer), q - GRAD_SLOTS + 1)
            writes.append(Span(slot))
        rows = [Span(("receive rows", self.me))]
        streams.submit("compute", f"wgrad {q}", reads=rows, writes=writes)
        if layer in self.replicated:
            self.wgrad_done = self.record("compute")
            streams.publish("compute", ("grad_ready", self.peer, q % GRAD_SLOTS), q + 1)

    def home_reduce(self, layer: int) -> None:
        streams, q = self.streams, self.q
        if layer in self.replicated:
            streams.wait("reduce", self.wgrad_done)
            streams.wait_word("reduce", ("grad_ready", self.me, q % GRAD_SLOTS), q + 1)
            grads = [Span(("grads", self.peer, q % GRAD_SLOTS))]
            sums = [Span(("main_grad", self.me, layer))]
            streams.submit("reduce", f"home_reduce {q}", reads=grads, writes=sums)
        streams.publish("reduce", ("grad_retired", self.me), q + 1)
        if layer in self.replicated:
            self.reduced[layer] = self.record("reduce")

    # -- steps -----------------------------------------------------------------------------

    def use(self, layer: int, following: int | None, kind: str) -> None:
        """One execution of a layer; `following` is the layer that certainly comes next."""
        self.n += 1
        n = self.n
        if n not in self.gathered:
            self.gather(n, layer)
        if n not in self.pushed:
            self.push(n, layer)
        if following is not None and self.host.gathers_ahead:
            self.gather(n + 1, following)
            self.push(n + 1, following)
        self.dispatch(n)
        self.experts(n, layer, kind)
        if kind == "backward":
            self.q += 1
            self.wgrad(n, layer)
        self.streams.publish("compute", ("row credit", self.me), n + 1)
        self.wait_if_new("compute", self.pushed.get(n))
        self.wait_if_new("compute", self.sent)
        self.streams.submit("compute", f"free {n}", writes=[Span(("send rows", self.me))])
        self.host.after_layer(layer)

    def training_step(self, micro_batches: int) -> None:
        self.host.begin_step()
        for index in range(micro_batches):
            for layer in range(LAYERS):
                self.use(layer, layer + 1 if layer + 1 < LAYERS else None, "forward")
            for layer in reversed(range(LAYERS)):
                self.use(layer, layer - 1 if layer else None, "backward")
                self.home_reduce(layer)
                if index == micro_batches - 1:  # before the layer's backward returns
                    self.wait_if_new("compute", self.reduced.get(layer))
                    grads = [Span(("main_grad", self.me, layer))]
                    self.streams.submit("compute", f"data-parallel reduction {layer}", reads=grads)
        grads = [Span(("main_grad", self.me, layer)) for layer in range(LAYERS)]
        self.streams.submit("compute", "optimizer", reads=grads,
                            writes=[Span(("shard", self.me)), *grads])  # fmt: skip
        self.step += 1
        self.updated = self.record("compute")
        self.freed.clear()


def training_log(
    host: type, *, micro_batches: tuple[int, ...] = (2, 1), replicated: tuple[int, ...] = (0, 1, 2)
) -> tuple[list[Entry], list[Rank]]:
    """What two ranks submit.

    Args:
        host: that owns the weights.
        micro_batches: of each optimizer step.
        replicated: layers with replicas.

    Returns:
        The log, and the ranks: after a replay their `read` says what each use has read.
    """
    log: list[Entry] = []
    values: dict[Span, float] = collections.defaultdict(lambda: POISON)
    ranks = [Rank(log, me, values, host, replicated) for me in range(RANKS)]
    for count in micro_batches:
        for rank in ranks:
            rank.training_step(count)
    return log, ranks
