"""What each rank submits to its queues: the protocol of replica synchronisation, and its mutants.

    push(n)        push queue      weights ready; credit; copy; full := word
    use(n)         compute queue   full; read weights; retired := n + 1; local completion of push(n)
    backward use   compute queue   home_reduce of the layer before; gradient credit; wgrad; ready
    home_reduce(q) reduce queue    wgrad of this rank; ready words; add in order; grad_retired

Waits on words are between ranks; waits on events are inside a rank and, as in CUDA, do nothing
if the event was not recorded before the wait was submitted.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from protocol.schedules import Entry, Event, Use, number, plan

GENERATION = 1  # words of generation 0 are left over from a run before
STALE = 0
QUEUES = {  # hardware queues that push, compute and reduce share
    1: (0, 0, 0),
    2: (0, 1, 0),
    3: (0, 1, 2),
}
PUSH, COMPUTE, REDUCE = range(3)


class Op(NamedTuple):
    """One operation of a queue.

    Attributes:
        kind: wait, set or access.
        word: that is waited for or set: (name, ...).
        number: that the word must have reached, or gets.
        tag: hash that the word must have at exactly that number, or gets; None for credits.
        reads: (resource, value that must be there; None for any).
        adds: (accumulator, item that must not be in it).
        writes: (resource, value).
    """

    kind: str
    word: tuple[Any, ...]
    number: int = 0
    tag: Any = None
    reads: tuple[tuple[Any, Any], ...] = ()
    adds: tuple[tuple[Any, Any], ...] = ()
    writes: tuple[tuple[Any, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration to check.

    Attributes:
        order: of the uses, on every rank.
        plan: name of a plan in `schedules`.
        queues: hardware queues a rank.
        distance: of the prefetch; W - 1 is the protocol's.
        lag: backward uses between wgrad(q) and the submission of home_reduce(q).
        mutant: one wrong line in the protocol; "" for none.
        diverged: rank whose order is another one from its second use on.
        gathered: the host gathers a layer's weights before it and frees them after it, as FSDP2
            does; then no use can be pushed before its own entry.
        without_wait: index of one wait among those of all ranks that is left out; -1 for none.
    """

    order: list[Event]
    plan: str = "ring"
    ranks: int = 2
    queues: int = 3
    buffers: int = 2
    grad_slots: int = 2
    distance: int = 1
    lag: int = 0
    mutant: str = ""
    diverged: int = -1
    gathered: bool = False
    without_wait: int = -1


class Rank:
    """Submits everything that one rank does, in the order of its program."""

    def __init__(self, case: Case, me: int) -> None:
        self.case, self.me, self.uses = case, me, number(case.order)
        if me == case.diverged:  # it takes another layer than its peers for the same n
            self.uses[1:2] = [dataclasses.replace(self.uses[1], layer=self.uses[1].layer + 1)]
        self.queues: list[list[Op]] = [[] for _ in range(max(QUEUES[case.queues]) + 1)]
        self.events: set[Any] = set()
        self.pushed: set[int] = set()
        self.waiting: list[Use] = []  # whose home_reduce is not submitted yet
        self.reduced: dict[int, int] = {}  # layer -> last q
        self.held: int | None = None  # n of a recomputation that its backward may reuse
        self.sums: dict[int, list[Any]] = {}  # layer -> what main_grad must have added up

    def is_mutant(self, *names: str) -> bool:
        return self.case.mutant in names

    def submit(self, queue: int, op: Op) -> None:
        self.queues[QUEUES[self.case.queues][queue]].append(op)

    def set(self, queue: int, *word: Any, to: int, tag: Any = None) -> None:
        self.submit(queue, Op("set", word, to, tag))

    def wait(self, queue: int, *word: Any, at_least: int, tag: Any = None) -> None:
        if at_least > 0:
            tag = None if self.is_mutant("words carry no hash") else tag
            self.submit(queue, Op("wait", word, at_least, tag))

    def record_event(self, queue: int, *name: Any) -> None:
        self.events.add(name)
        self.set(queue, "event", self.me, *name, to=1)

    def wait_event(self, queue: int, *name: Any) -> None:
        if name in self.events:
            self.wait(queue, "event", self.me, *name, at_least=1)

    def program(self) -> list[list[Op]]:
        """All queues of this rank."""
        for index, use in enumerate(self.uses):
            if use.kind == "update":
                self.update(use)
                continue
            if self.held is not None and not use.reuses:
                self.retire(self.held)
            if self.case.gathered and not use.reuses:
                self.change_weights(use, "gather", use.step)
            if use.n not in self.pushed and not use.reuses:
                self.push(use)
            self.prefetch(index)
            self.use(use)
            if self.case.gathered and self.held is None:
                self.change_weights(use, "free", "freed")
            while len(self.waiting) > self.case.lag:
                self.home_reduce(self.waiting.pop(0))
        return self.queues

    def change_weights(self, use: Use, name: str, value: Any) -> None:
        """The host fills or frees the weights of a layer on its own stream, the compute queue."""
        write = (("home", self.me, use.layer), value)
        self.submit(COMPUTE, Op("access", (name, use.n), writes=(write,)))
        self.record_event(COMPUTE, "weights_ready", use.n, name)

    def prefetch(self, index: int) -> None:
        """Pushes the next uses as far as they are certain."""
        if self.case.gathered:
            return
        guess = self.is_mutant("prefetch of an uncertain successor")
        for ahead in range(index, min(index + self.case.distance, len(self.uses) - 1)):
            use, following = self.uses[ahead], self.uses[ahead + 1]
            if following.kind == "update" or following.reuses:
                return
            if not use.certain:
                if not guess or use.kind == "recompute":
                    return  # guessed: the next micro-batch goes forward
                following = dataclasses.replace(
                    following, kind="forward", micro_batch=use.micro_batch + 1, layer=0
                )
            if following.n not in self.pushed:
                self.push(following)

    def entries(self, use: Use) -> list[Entry]:
        return plan(self.case.plan, self.case.ranks, use)

    def push(self, use: Use) -> None:
        self.pushed.add(use.n)
        if use.kind == "backward" and self.is_mutant("backward does not push again"):
            return
        if not self.is_mutant("push does not wait for weights_ready"):
            self.wait_event(PUSH, "weights_ready", use.step)
            self.wait_event(PUSH, "weights_ready", use.n, "gather")
        buffer = use.n % self.case.buffers
        for home, replica, slot in self.entries(use):
            if home != self.me:
                continue
            if not self.is_mutant("no weight credit"):
                credit = use.n - self.case.buffers + 1
                self.wait(PUSH, "retired", replica, at_least=credit)
            full = Op("set", ("full", replica, buffer, slot), use.n + 1, (use.key, home))
            if self.is_mutant("full before the copy"):
                self.submit(PUSH, full)
            source = (("home", self.me, use.layer), use.step)
            target = (("weights", replica, buffer, slot), (use.n, home, use.layer, use.step))
            self.submit(PUSH, Op("access", ("push", use.n), reads=(source,), writes=(target,)))
            if not self.is_mutant("full before the copy"):
                self.submit(PUSH, full)
        self.record_event(PUSH, "pushed", use.n)

    def use(self, use: Use) -> None:
        n, buffer = use.n, use.n % self.case.buffers
        mine = [entry for entry in self.entries(use) if entry.replica == self.me]
        if self.is_mutant("retire before the weights are read"):
            self.retire(n)
        reads = [(("home", self.me, use.layer), use.step)]
        for home, _, slot in mine:
            if not use.reuses and not self.is_mutant("no wait for full"):
                self.wait(COMPUTE, "full", self.me, buffer, slot, at_least=n + 1,
                          tag=(use.key, home))  # fmt: skip
            reads.append((("weights", self.me, buffer, slot), (n, home, use.layer, use.step)))
        self.submit(COMPUTE, Op("access", (use.kind, n), reads=tuple(reads)))
        if use.kind == "recompute" and not self.is_mutant("recompute retires its buffer"):
            self.held = n
        else:
            self.retire(n)
        if use.kind == "backward":
            self.wgrad(use, mine)
        if not self.is_mutant("use does not wait for its own push"):
            self.wait_event(COMPUTE, "pushed", n)

    def retire(self, n: int) -> None:
        self.held = None
        self.set(COMPUTE, "retired", self.me, to=n + 1)

    def wgrad(self, use: Use, mine: list[Entry]) -> None:
        layer, q = use.layer, use.q
        slots = self.case.grad_slots
        for other in [one for one in self.waiting if one.layer == layer]:
            if not self.is_mutant("home_reduce submitted after the next wgrad"):
                self.waiting.remove(other)
                self.home_reduce(other)
        if not self.is_mutant("wgrad does not wait for home_reduce"):
            self.wait_event(COMPUTE, "reduced", layer, self.reduced.get(layer))
        for rank in range(self.case.ranks):
            if not self.is_mutant("no gradient credit"):
                self.wait(COMPUTE, "grad_retired", rank, at_least=q - slots + 1)
        buffer = (use.n if self.is_mutant("gradient slot by n") else q) % slots
        writes = [(("grads", self.me, buffer, slot), (q, home)) for home, _, slot in mine]
        write = Op("access", ("wgrad", q), adds=((("main_grad", self.me, layer), ("local", q)),),
                   writes=tuple(writes))  # fmt: skip
        self.sums.setdefault(layer, []).append(("local", q))
        early = self.is_mutant("gradients published before wgrad")
        if not early:
            self.submit(COMPUTE, write)
        for home, _, slot in mine:
            tag = (use.key, home)
            self.set(COMPUTE, "grad_ready", home, buffer, self.me, slot, to=q + 1, tag=tag)
        if early:
            self.submit(COMPUTE, write)
        self.record_event(COMPUTE, "wgrad", q)
        self.waiting.append(use)

    def home_reduce(self, use: Use) -> None:
        layer, q = use.layer, use.q
        buffer = (use.n if self.is_mutant("gradient slot by n") else q) % self.case.grad_slots
        mine = [entry for entry in self.entries(use) if entry.home == self.me]
        if not self.is_mutant("home_reduce does not wait for wgrad"):
            self.wait_event(REDUCE, "wgrad", q)
        if self.is_mutant("gradient slots retired before they are read"):
            self.set(REDUCE, "grad_retired", self.me, to=q + 1)
        reads = []
        for home, replica, slot in mine:
            if not self.is_mutant("home_reduce does not wait for gradients"):
                self.wait(REDUCE, "grad_ready", self.me, buffer, replica, slot, at_least=q + 1,
                          tag=(use.key, home))  # fmt: skip
            reads.append((("grads", replica, buffer, slot), (q, home)))
        items = [(q, replica, slot) for _, replica, slot in mine]
        sums = ("main_grad", self.me, layer)
        add = Op("access", ("home_reduce", q), reads=tuple(reads),
                 adds=tuple((sums, item) for item in items))  # fmt: skip
        if not self.is_mutant("home_reduce left out"):
            for _ in range(2 if self.is_mutant("home_reduce twice") else 1):
                self.submit(REDUCE, add)
        self.sums.setdefault(layer, []).extend(items)
        if mine or not self.is_mutant("no gradient credit from idle homes"):
            self.set(REDUCE, "grad_retired", self.me, to=q + 1)
        self.reduced[layer] = q
        self.record_event(REDUCE, "reduced", layer, q)

    def update(self, use: Use) -> None:
        """Joins, asks all ranks whether there was an error, and changes the weights."""
        while self.waiting:
            self.home_reduce(self.waiting.pop(0))
        if not self.is_mutant("no join before the update"):
            for layer, q in self.reduced.items():
                self.wait_event(COMPUTE, "reduced", layer, q)
        self.set(COMPUTE, "vote", self.me, use.step, to=1)
        if not self.is_mutant("every rank decides by itself"):
            for rank in range(self.case.ranks):
                self.wait(COMPUTE, "vote", rank, use.step, at_least=1)
        layers = sorted({one.layer for one in self.uses if one.kind != "update"})
        grads = [(("main_grad", self.me, k), tuple(self.sums.get(k, ()))) for k in layers]
        writes = [(("main_grad", self.me, layer), ()) for layer in layers]
        writes += [(("home", self.me, layer), use.step + 1) for layer in layers]
        self.submit(COMPUTE, Op("access", ("update", use.step), reads=tuple(grads),
                                writes=tuple(writes)))  # fmt: skip
        self.sums.clear()
        self.record_event(COMPUTE, "weights_ready", use.step + 1)
