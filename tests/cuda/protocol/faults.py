"""Faults at any point of a run: a rank times out, or is killed; every survivor must end.

After an error a rank stores its abort at all peers; from then on waits end, copies, sums and
publications do nothing, and the rank votes "error" before the optimizer. A time-out may come to
the peers at once or only when nothing else can run; a killed rank says nothing, so the first
survivor that cannot go on times out and aborts. Words only grow and an abort only lets waits
through, so these two extremes stand for all delays.

The vote alone decides about the optimizer. A rank that has voted "no error" and then sees an
abort stays in the vote: the abort may come from a peer that has its result and is in the next
step. Only a vote that cannot come, that of a killed rank, is given up.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from protocol.programs import GENERATION

if TYPE_CHECKING:
    from protocol.model_check import Machine, State
    from protocol.programs import Op

ERROR = "error"


@dataclasses.dataclass
class Broken:
    """A run after a fault.

    Attributes:
        state: counters and words; data does not matter any more.
        knows: ranks that know of an error.
        refused: ranks whose last vote forbade the optimizer.
        dead: ranks that do nothing more.
        updated: (rank, step) whose optimizer ran.
        votes_lost: whether missing votes are given up.
    """

    state: State
    knows: set[int]
    refused: set[int]
    dead: set[int]
    updated: set[tuple[int, int]]
    votes_lost: bool = False


def is_over(machine: Machine, run: Broken, rank: int, op: Op) -> bool:
    """Whether a wait ends, with its word, or by an error."""
    passed = machine.passes(op, run.state.words, strict=False)
    knows, mutant = rank in run.knows, machine.case.mutant
    if op.word[0] == "event":
        return passed
    if op.word[0] == "vote":
        left = run.votes_lost or (knows and mutant == "the abort ends the vote")
        if left or run.state.words[machine.words[op.word]][2] == ERROR:
            run.refused.add(rank)
        return passed or left
    if op.word[0] == "retired" and mutant == "credit wait does not see the abort":
        return passed
    return passed or knows


def run_one(machine: Machine, run: Broken, queue: int, op: Op) -> bool:
    """Runs one operation of a queue if it can run."""
    rank, kind = machine.rank_of[queue], op.word[0]
    knows = rank in run.knows
    alone = machine.case.mutant == "every rank decides by itself"
    if op.kind == "wait" and not is_over(machine, run, rank, op):
        return False
    if op.kind == "set" and (not knows or kind in ("event", "vote")):
        tag = ERROR if knows and kind == "vote" else op.tag
        run.state.words[machine.words[op.word]] = (GENERATION, op.number, tag)
    if kind == "update" and not (knows if alone else rank in run.refused):
        run.updated.add((rank, op.word[1]))
    run.state.pcs[queue] += 1
    return True


def run_out(machine: Machine, run: Broken) -> dict[int, Op]:
    """Runs everything as far as it goes.

    Returns:
        The ranks that are blocked, dead ones aside, each with one operation; waits for words
        before those for votes.
    """
    moved = True
    while moved:
        moved = False
        for queue, rank in enumerate(machine.rank_of):
            while rank not in run.dead and (op := machine.next_op(run.state, queue)):
                if not run_one(machine, run, queue, op):
                    break
                moved = True
    blocked: dict[int, Op] = {}
    for queue, rank in enumerate(machine.rank_of):
        op = machine.next_op(run.state, queue)
        if op and rank not in run.dead and op.word[0] != "event":
            blocked[rank] = op
    return blocked


def inject(machine: Machine, state: State, fault: str, rank: int) -> None:
    """One fault in one state.

    Raises:
        Violation: a survivor hangs, or some survivors ran the optimizer and others did not.
    """
    from protocol.model_check import State, Violation

    everyone = set(range(machine.case.ranks))
    done = {ran for ran in executed(machine, state) if ran[1] == "update"}
    run = Broken(State(state.pcs[:], state.words[:], []), set(), set(), set(),
                 {(who, step) for who, _, step in done})  # fmt: skip
    mirrored = machine.case.mutant != "abort is not stored at the peers"
    where = f"{fault} on rank {rank} at {state.pcs}"
    (run.dead if fault == "killed" else run.knows).add(rank)
    if fault == "time-out, seen at once" and mirrored:
        run.knows |= everyone
    if blocked := run_out(machine, run):
        run.knows |= everyone if mirrored else {min(blocked)}
        blocked = run_out(machine, run)
        words = {who: op.word for who, op in blocked.items() if op.word[0] != "vote"}
        run.votes_lost = True
        if words or run_out(machine, run):
            raise Violation("hang", f"{where}: {words} never end")
    survivors = everyone - run.dead
    for step in {step for _, step in run.updated}:
        ran = {one for one in survivors if (one, step) in run.updated}
        if ran and ran != survivors:
            raise Violation("split update", f"{where}: only ranks {sorted(ran)} ran step {step}")


def executed(machine: Machine, state: State) -> list[tuple[int, str, int]]:
    """(rank, "vote" or "update", step) behind a state."""
    return [
        (machine.rank_of[queue], op.word[0], op.word[-1])
        for queue, program in enumerate(machine.programs)
        for op in program[: state.pcs[queue]]
        if op.word[0] == "update" or (op.word[0] == "vote" and op.kind == "set")
    ]


def inject_all(machine: Machine, state: State) -> None:
    """Every fault of every rank in one state; a rank between vote and optimizer has no waits."""
    done = executed(machine, state)
    for rank in range(machine.case.ranks):
        inject(machine, state, "killed", rank)
        votes = sum(who == rank and what == "vote" for who, what, _ in done)
        updates = sum(who == rank and what == "update" for who, what, _ in done)
        if votes == updates:
            inject(machine, state, "time-out, seen at once", rank)
            inject(machine, state, "time-out, seen late", rank)
