"""Named mutants of the protocol: one wrong line each, a case that shows it, and the verdict.

The name is what `programs`, `model_check` and `faults` look at.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from protocol.programs import Case
from protocol.schedules import ORDERS, forward_backward, one_f_one_b


class Mutant(NamedTuple):
    """A case with a wrong protocol.

    Attributes:
        case: its `mutant` is the name.
        verdict: that the checkers must come to.
        correct: verdict of the same case without the mutant.
        faults: whether faults are needed to see it.
    """

    case: Case
    verdict: str
    correct: str = "ok"
    faults: bool = False


SMALL = Case(ORDERS["forward, backward"])
TWO_STEPS = Case(forward_backward(2, steps=2))
BATCHES = Case(ORDERS["one layer, 2 micro-batches"])
LONG = Case(one_f_one_b(1, micro_batches=4), plan="one way")
GATHERED = dataclasses.replace(SMALL, gathered=True)
RECOMPUTE = Case(ORDERS["per-layer recompute"])
SERIAL = dataclasses.replace(SMALL, queues=1)
DIVERGED = dataclasses.replace(SMALL, diverged=1)
ONE_STEP = Case(forward_backward(1), queues=2)


def _mutant(name: str, case: Case, verdict: str, correct: str = "ok", **options: bool) -> Mutant:
    return Mutant(dataclasses.replace(case, mutant=name), verdict, correct, **options)


MUTANTS = [
    _mutant("no weight credit", SMALL, "race"),
    _mutant("no wait for full", SMALL, "race"),
    _mutant("no gradient credit", LONG, "race"),
    _mutant("home_reduce does not wait for gradients", SMALL, "race"),
    _mutant("retire before the weights are read", SMALL, "race"),
    _mutant("full before the copy", SMALL, "race"),
    _mutant("gradients published before wgrad", SMALL, "race"),
    _mutant("gradient slots retired before they are read", LONG, "race"),
    _mutant("gradient slot by n", LONG, "race"),
    _mutant("backward does not push again", SMALL, "deadlock"),
    _mutant("home_reduce twice", SMALL, "added twice"),
    _mutant("home_reduce left out", SMALL, "wrong value"),
    _mutant("prefetch of an uncertain successor", LONG, "diverged"),
    _mutant("generation not compared", SMALL, "race"),
    _mutant("words carry no hash", DIVERGED, "wrong value", "diverged"),
    _mutant("home_reduce does not wait for wgrad", SMALL, "race"),
    _mutant("wgrad does not wait for home_reduce", BATCHES, "race"),
    _mutant(
        "home_reduce submitted after the next wgrad", dataclasses.replace(BATCHES, lag=1), "race"
    ),
    _mutant("recompute retires its buffer", RECOMPUTE, "race"),
    _mutant("push does not wait for weights_ready", TWO_STEPS, "race"),
    _mutant("use does not wait for its own push", GATHERED, "race"),
    _mutant("no join before the update", SMALL, "race"),
    _mutant("no gradient credit from idle homes", LONG, "deadlock"),
    _mutant("prefetch distance W", dataclasses.replace(SERIAL, distance=2), "deadlock"),
    _mutant("lag G2", dataclasses.replace(SERIAL, lag=2), "deadlock"),
    _mutant("abort is not stored at the peers", ONE_STEP, "hang", faults=True),
    _mutant("credit wait does not see the abort", SMALL, "hang", faults=True),
    _mutant("every rank decides by itself", ONE_STEP, "split update", faults=True),
    _mutant("the abort ends the vote", TWO_STEPS, "split update", faults=True),
]
