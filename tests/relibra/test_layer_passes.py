"""The order of the stages of a layer: what every rank calls, and what overlaps."""

import dataclasses

import torch
from moe_world import World
from option_worlds import CASES, OneLayer

from relibra import LayerOptions
from relibra.layer_passes import LayerCall, run_backward, run_forward
from relibra.local_use import LocalMovers, local_handle

WORLD = World(num_experts=4, top_k=2, hidden=8, expert=6, tokens=9)


class Recorder(LocalMovers):
    """Moves nothing and notes every call."""

    def __init__(self):
        self.calls = []

    def start_exchange(self, x, send_splits, recv_splits, what, channel=""):
        name = what.split(": ")[-1]
        self.calls.append(f"start {name}")
        return Noted(super().start_exchange(x, send_splits, recv_splits, what), name, self.calls)

    def push(self, weights, tables, what):
        self.calls.append("push " + " ".join(weights))
        return super().push(weights, tables, what)

    def replica_grads(self, weights):
        self.calls.append("weight gradients")
        return super().replica_grads(weights)

    def reduce(self, replica_grads, home_grads, tables, what):
        self.calls.append(f"reduce {len(home_grads)}")
        super().reduce(replica_grads, home_grads, tables, what)

    def enter_experts(self, handle, detail):
        pass

    def enter_backward(self, handle, detail):
        self.calls.append("enter")

    def leave_backward(self, handle):
        self.calls.append("leave")


@dataclasses.dataclass
class Noted:
    rows: object
    name: str
    calls: list

    def wait(self):
        self.calls.append(f"wait {self.name}")
        return self.rows.wait()


def backward_calls(options, needs=(True,) * 6, split=False):
    moe = OneLayer(WORLD, 0, dataclasses.replace(CASES["swiglu-bias"], options=options)).moe
    weights = moe.expert_weights
    if split:
        weights = dataclasses.replace(weights, w13=tuple(weights.w13.unbind()))
    x, scores, dy = WORLD.batch(0, 0)
    ids = torch.from_numpy(WORLD.ids(0, 0))[:, 0].long()
    movers = Recorder()
    handle = dataclasses.replace(local_handle(ids, torch.arange(4), 4), movers=movers)
    call = LayerCall(handle, options, weights)
    with torch.no_grad():
        _, kept = run_forward(x, scores[0], call)
        movers.calls.clear()
        grads = run_backward(dy, kept, call, call.weights.flatten(), needs)
    assert [grad is not None for grad in grads] == list(needs)
    return movers.calls


def test_gradients_of_x_and_scores_travel_while_those_of_the_weights_are_computed():
    calls = backward_calls(LayerOptions())
    sent = ["start score gradients", "start input gradients", "weight gradients", "reduce 4"]
    arrived = ["wait score gradients", "wait input gradients", "leave"]
    assert calls[:4] == ["enter", "start output gradients", "wait output gradients", calls[3]]
    assert calls[3] == "push w13 w2 b13 b2"
    assert calls[4:] == sent + arrived


def test_redispatch_sends_the_tokens_again_and_nothing_else():
    more = set(backward_calls(LayerOptions(save="redispatch"))) - set(
        backward_calls(LayerOptions())
    )
    assert more == {"start tokens again", "wait tokens again"}


def test_frozen_experts_compute_and_reduce_nothing():
    calls = backward_calls(LayerOptions(), (True, True, False, False, False, False))
    assert not {"weight gradients", "reduce 4"} & set(calls)
    calls = backward_calls(LayerOptions(), (False, False, False, True, False, True))
    assert "reduce 2" in calls
    assert not {"start input gradients", "start score gradients"} & set(calls)


def test_a_frozen_expert_among_others_gets_no_gradient():
    needs = (True, True, *(True, False, True, True), False, False, False)
    assert "reduce 1" in backward_calls(LayerOptions(), needs, split=True)
