"""An explicit-state model checker of the protocol that `programs` writes down.

`explore` visits every interleaving of the accesses of all queues. `prove` visits one state per
operation and is for larger cases. Both find the same, since words have one writer at a time and
only grow: an operation that can run stays able to run until it does. Hence

* a wait or a set may run at once without hiding any interleaving of the accesses (both do that);
* either every run ends or every run deadlocks in the same state;
* two conflicting accesses can overlap exactly if, when the first of them is about to run, all
  *other* queues can get as far as the second. `prove` looks there: it holds the queue back, runs
  the others as far as they go, and returns. If nothing ever overlaps, every run computes the same.

`test_protocol_model.py` compares the verdicts of the two on small cases and on every mutant.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

from protocol.programs import GENERATION, STALE, Case, Op, Rank


class Violation(Exception):
    """A property does not hold.

    Attributes:
        verdict: race, wrong value, added twice, diverged, overrun, deadlock, hang or split update.
    """

    def __init__(self, verdict: str, what: str) -> None:
        super().__init__(f"{verdict}: {what}")
        self.verdict = verdict


@dataclasses.dataclass
class State:
    """Program counters of all queues, words as (generation, number, tag), and data."""

    pcs: list[int]
    words: list[tuple[int, int, Any]]
    data: list[Any]

    def copy(self) -> State:
        return State(self.pcs[:], self.words[:], self.data[:])

    def frozen(self) -> tuple[Any, ...]:
        return (*self.pcs, *self.words, *self.data)


class Machine:
    """All queues of all ranks; words and resources are numbered.

    Args:
        case: to run.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.any_generation = case.mutant == "generation not compared"
        ranks = [Rank(case, me).program() for me in range(case.ranks)]
        self.programs = [queue for queues in ranks for queue in queues]
        self.waits = [(q, op) for q in self.programs for op in q if op.kind == "wait"]
        if case.without_wait >= 0:
            program, left_out = self.waits[case.without_wait]
            program[:] = [op for op in program if op is not left_out]
        self.rank_of = [me for me, queues in enumerate(ranks) for _ in queues]
        self.words: dict[Any, int] = {}
        self.data: dict[Any, int] = {}
        stale: list[tuple[int, int, Any]] = []
        for program in self.programs:
            for op in program:
                if op.kind != "access" and op.word not in self.words:
                    self.words[op.word] = len(stale)
                    stale.append((STALE, 0, None))
                if op.kind == "set" and stale[self.words[op.word]][1] == 0:
                    stale[self.words[op.word]] = (STALE, op.number, op.tag)  # of the run before
                for resource, _ in (*op.reads, *op.adds, *op.writes):
                    self.data.setdefault(resource, len(self.data))
        self.numbered = [
            [(op, self.words.get(op.word, -1)) for op in program] for program in self.programs
        ]
        first = {"home": 0, "main_grad": ()}
        self.touched = {
            id(op): (
                frozenset(resource for resource, _ in op.reads),
                frozenset(resource for resource, _ in (*op.adds, *op.writes)),
            )
            for program in self.programs
            for op in program
        }
        self.start = State([0] * len(self.programs), stale, [first.get(r[0]) for r in self.data])

    def next_op(self, state: State, queue: int) -> Op | None:
        pc, program = state.pcs[queue], self.programs[queue]
        return program[pc] if pc < len(program) else None

    def passes(self, op: Op, words: list[tuple[int, int, Any]], *, strict: bool = True) -> bool:
        """Whether a wait is over; its word is of this generation and, if strict, the right one."""
        generation, number, tag = words[self.words[op.word]]
        if generation != GENERATION and not self.any_generation:
            return False
        if number < op.number:
            return False
        if not strict or op.tag is None:
            return True
        if number > op.number:
            raise Violation("overrun", f"{op.word} is {number} while {op.number} is in use")
        if tag != op.tag:
            raise Violation("diverged", f"{op.word}: expected {op.tag}, observed {tag}")
        return True

    def can_run(self, state: State, op: Op) -> bool:
        return op.kind != "wait" or self.passes(op, state.words)

    def run(self, state: State, queue: int, op: Op) -> None:
        """Runs the next operation of a queue."""
        state.pcs[queue] += 1
        if op.kind == "set":
            state.words[self.words[op.word]] = (GENERATION, op.number, op.tag)
        for resource, expected in op.reads:
            value = state.data[self.data[resource]]
            if expected is not None and value != expected:
                raise Violation("wrong value", f"{op.word} read {value}, not {expected}")
        for resource, item in op.adds:
            total = state.data[self.data[resource]]
            if item in total:
                raise Violation("added twice", f"{op.word} adds {item} to {resource}")
            state.data[self.data[resource]] = (*total, item)
        for resource, value in op.writes:
            state.data[self.data[resource]] = value

    def conflict(self, one: Op, other: Op) -> bool:
        """Whether both touch a resource and one of them changes it."""
        (reads, changes), (other_reads, other_changes) = (
            self.touched[id(one)],
            self.touched[id(other)],
        )
        return bool(changes & (other_reads | other_changes) or reads & other_changes)

    def run_words(self, state: State) -> None:
        """Runs waits and sets until every queue is at an access, blocked or at its end."""
        moved = True
        while moved:
            moved = False
            for queue in range(len(self.programs)):
                while (op := self.next_op(state, queue)) and op.kind != "access":
                    if not self.can_run(state, op):
                        break
                    self.run(state, queue, op)
                    moved = True

    def check_stuck(self, state: State) -> None:
        """Nothing can run any more: every queue must be at its end."""
        blocked = {
            f"rank {self.rank_of[queue]} waits for {op.word} >= {op.number}"
            for queue in range(len(self.programs))
            if (op := self.next_op(state, queue))
        }
        if blocked:
            raise Violation("deadlock", "; ".join(sorted(blocked)))


def explore(case: Case, limit: int = 200_000) -> int:
    """Visits every interleaving of the accesses.

    Returns:
        Number of states.

    Raises:
        Violation: of a property.
        RuntimeError: more states than `limit`.
    """
    machine = Machine(case)
    start = machine.start.copy()
    machine.run_words(start)
    seen, todo = {start.frozen()}, deque([start])
    while todo:
        state = todo.popleft()
        ready = [(q, op) for q in range(len(machine.programs)) if (op := machine.next_op(state, q))
                 and op.kind == "access"]  # fmt: skip
        for index, (_, one) in enumerate(ready):
            for _, other in ready[index + 1 :]:
                if machine.conflict(one, other):
                    raise Violation("race", f"{one.word} and {other.word}")
        if not ready:
            machine.check_stuck(state)
        for queue, op in ready:
            following = state.copy()
            machine.run(following, queue, op)
            machine.run_words(following)
            name = following.frozen()
            if name not in seen:
                seen.add(name)
                todo.append(following)
        if len(seen) > limit:
            raise RuntimeError(f"more than {limit} states")
    return len(seen)


def look_ahead(machine: Machine, state: State, held: int, about_to: Op) -> None:
    """Runs all other queues as far as they go; nothing on the way may conflict."""
    pcs, words, any_generation = state.pcs[:], state.words[:], machine.any_generation
    others = [(q, ops) for q, ops in enumerate(machine.numbered) if q != held]
    moved = True
    while moved:
        moved = False
        for queue, program in others:
            first = pc = pcs[queue]
            while pc < len(program):
                op, word = program[pc]
                if op.kind == "wait":
                    generation, number, _ = words[word]
                    if number < op.number or not (generation == GENERATION or any_generation):
                        break
                elif op.kind == "set":
                    words[word] = (GENERATION, op.number, op.tag)
                elif machine.conflict(about_to, op):
                    raise Violation("race", f"{about_to.word} and {op.word}")
                pc += 1
            if pc > first:
                pcs[queue], moved = pc, True


def prove(case: Case, *, faults: bool = False) -> int:
    """Follows one interleaving and looks ahead at each access.

    Args:
        case: to check.
        faults: also injects every fault of every rank in every state on the way.

    Returns:
        Number of states.

    Raises:
        Violation: of a property.
    """
    from protocol.faults import inject_all

    machine, moved = Machine(case), True
    state = machine.start.copy()
    while moved:
        moved = False
        for queue in range(len(machine.programs)):
            while (op := machine.next_op(state, queue)) and machine.can_run(state, op):
                if op.kind == "access":
                    look_ahead(machine, state, queue, op)
                if faults:
                    inject_all(machine, state)
                machine.run(state, queue, op)
                moved = True
    machine.check_stuck(state)
    return sum(state.pcs) + 1


def verdict(check: Any, case: Case, **options: Any) -> str:
    """What a checker says: "ok" or the verdict of its violation."""
    try:
        check(case, **options)
    except Violation as violation:
        return violation.verdict
    return "ok"
