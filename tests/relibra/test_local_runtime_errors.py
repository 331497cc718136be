"""All ranks in one process: wrong input, ranks that stop, and what a runtime can do afterwards."""

import gc
import threading

import pytest
import torch
from local_world import all_routes, joined_batch, make_local, run_local_step
from moe_world import Model, Result, World, check, references

import relibra
from relibra import local_layer
from relibra.domain_sync import DomainSync
from relibra_kernels.transport.sync_items import Use as SyncUse

WORLD = World(
    1, 4, num_experts=8, top_k=2, num_layers=2, tokens=9, replica_slots=2, dtype=torch.float64
)
PLAN = WORLD.random_plan(fill=1.0, reorder=False)


def check_step(runtime, model):
    """A step that equals the dense reference."""
    for param in model.parameters():
        param.grad = None
    results = run_local_step(WORLD, runtime, model, PLAN)
    need = references(WORLD)
    for rank, result in enumerate(results):
        check(result.y[0], need[rank].y[0], f"rank {rank} y")
        check(result.dx[0], need[rank].dx[0], f"rank {rank} dx")
    for moe, dw13 in zip(model.layers, need[0].dw13, strict=True):
        check(runtime.gather_experts(moe.w13.grad, moe.layer), dw13, "dw13")


def local(topology=WORLD.topology, **options):
    return relibra.Runtime(topology=topology, transport="local", **options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"topology": None}, TypeError, 'need a Topology with transport="local", got NoneType'),
        ({"group": object()}, ValueError, 'group: need None with transport="local"'),
        ({"dispatch": "two_hop"}, ValueError, "dispatch: need \"flat\" .*got 'two_hop'"),
        ({"replica_slots": -1}, ValueError, "replica_slots"),
        ({"combine": "fast"}, ValueError, "combine"),
    ],
)
def test_arguments_of_the_runtime(options, error, text):
    with pytest.raises(error, match=text):
        local(**options)


def test_models_that_do_not_fit():
    runtime = local()
    with pytest.raises(ValueError, match="that the 4 ranks .* share evenly, got 6"):
        runtime.attach(torch.nn.Sequential(relibra.BalancedMoE(6, 8, 8, layer=0)))
    with pytest.raises(ValueError, match="is shard 0 of 4, this is rank 0 of 1"):
        runtime.attach(Model(WORLD, 0, 4))
    model = Model(WORLD, 0, 1)
    runtime.attach(model)
    with pytest.raises(ValueError, match="need one on cpu as the others, got meta"):
        runtime.attach(
            torch.nn.Sequential(relibra.BalancedMoE(8, 8, 8, layer=0, device="meta")), name="b"
        )
    with pytest.raises(ValueError, match="weights_release: need None"):
        runtime.set_layer_hooks(1, weights_release=print)
    with pytest.raises(ValueError, match=r"layer: need one of \[1, 2\], got 7"):
        runtime.set_layer_hooks(7)
    runtime.detach("actor")
    runtime.attach(model)
    runtime.close()


def test_routes_and_loads_that_are_not_by_rank():
    runtime, model = make_local(WORLD)
    routes = all_routes(WORLD)
    for wrong, error, text in (
        (routes, TypeError, "routes: need pass -> by rank -> DispatchRows, got list"),
        ({"train": routes[0]}, relibra.PlanError, "need 4 entries, one a rank, got 1"),
        ({"train": "abcd"}, TypeError, "need a list by rank, got str"),
    ):
        with pytest.raises(error, match=text):
            runtime.step(PLAN, wrong)
    with pytest.raises(relibra.PlanError, match="rank 0 in the|the plan was made for"):
        runtime.step(PLAN, {"train": routes[::-1]}).__enter__()
    other = World(1, 2, num_experts=8, num_layers=2, replica_slots=2).random_plan()
    with pytest.raises(relibra.PlanError, match="need topology 1 nodes x 4 ranks, got 1 nodes x 2"):
        runtime.step(other, {"train": routes}).__enter__()
    loads = [relibra.LoadMatrix.from_rows(one) for one in routes]
    for few, got in ((loads[:3], "3"), (loads[0], "one")):
        with pytest.raises(relibra.PlanError, match=f"need a list of 4, one a rank, got {got}"):
            runtime.gather_loads(few)
    check_step(runtime, model)
    runtime.close()


def test_tokens_and_ids_that_do_not_fit_the_routes():
    runtime, model = make_local(WORLD)
    x, scores, _ = joined_batch(WORLD, 0)
    ids = torch.cat([torch.from_numpy(WORLD.ids(rank, 0)) for rank in range(4)]).long()
    wrong = ids.clone()
    wrong[-1, 0] = wrong[-1, 0].flip(0)
    with runtime.step(PLAN, {"train": all_routes(WORLD)}) as step:
        with step.forward(micro_batch=0):
            text = f"x: need {len(x)} tokens, as routed for .* on all 4 ranks, got {len(x) - 1}"
            with pytest.raises(ValueError, match=text):
                model(x[:-1], scores[:, :-1])
            with pytest.raises(ValueError, match=f"need the replayed ids .* at token {len(x) - 1}"):
                model(x, scores, wrong)
            with pytest.raises(ValueError, match="scores_TK: need"):
                model(x, scores[:, :-1])
            with pytest.raises(ValueError, match="micro_batch: need one of"):
                step.forward(micro_batch=5).__enter__()
            slots = step.route(ids[:, 0], 1)
        assert slots.shape == (len(x), 2)
        raise_nothing(runtime)
    check_step(runtime, model)
    with pytest.raises(RuntimeError, match="its training step is not active"):
        step.forward(micro_batch=0).__enter__()
    runtime.close()


def raise_nothing(runtime):
    """Refused calls so far were refused on all ranks alike."""
    runtime.require_open()
    for rank in runtime.ranks:
        rank.require_open()


def test_a_step_that_is_left_by_an_error_is_followed_by_another():
    runtime, model = make_local(WORLD)

    def leave(after):
        with runtime.step(PLAN, {"train": all_routes(WORLD)}) as step:
            x, scores, dy = joined_batch(WORLD, 0)
            with step.forward(micro_batch=0):
                y = model(x, scores)
            if after == "backward":
                y.backward(dy)
            raise KeyError(after)

    for after in ("forward", "backward"):
        with pytest.raises(KeyError, match=after):
            leave(after)
        check_step(runtime, model)
    runtime.close()


def test_a_missing_main_grad_is_told_before_anything_moves():
    runtime, model = make_local(WORLD, grad_mode="main_grad")
    kept = model.layers[0].w2.main_grad
    del model.layers[0].w2.main_grad
    with pytest.raises(ValueError, match="main_grad: .*needs a tensor"):
        run_local_step(WORLD, runtime, model, PLAN)
    model.layers[0].w2.main_grad = kept
    for param in model.parameters():
        param.main_grad.zero_()
    run_local_step(WORLD, runtime, model, PLAN)
    need = references(WORLD)[0]
    check(runtime.gather_experts(kept, 1), need.dw2[0], "dw2")
    runtime.close()


def check_broken(runtime, model, error, text):
    """The step fails as it should, and so does all that follows; a new runtime trains."""
    with pytest.raises(error, match=text):
        run_local_step(WORLD, runtime, model, PLAN)
    with pytest.raises(RuntimeError, match="the runtime failed before"):
        runtime.step(PLAN, {"train": all_routes(WORLD)})
    runtime.close()


def run_again(model):
    runtime = local(replica_slots=2)
    runtime.attach(model)
    check_step(runtime, model)
    runtime.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_rank_that_fails_inside_a_layer(when, monkeypatch):
    """Before its part of the layer its peers wait for it; after that nobody does."""
    original = local_layer.run_backward

    def failing(dy, kept, call, *rest):
        is_lost = call.handle.movers.runtime.rank == 2 and "layer 1" in call.handle.what
        found = None if is_lost and when == "before" else original(dy, kept, call, *rest)
        if is_lost:
            raise ArithmeticError("rank 2 has had enough")
        return found

    runtime, model = make_local(WORLD)
    with monkeypatch.context() as patch:
        patch.setattr(local_layer, "run_backward", failing)
        check_broken(runtime, model, ArithmeticError, "rank 2 has had enough")
    run_again(model)


def test_all_ranks_that_fail_at_one_place_leave_the_runtime_as_it_was(monkeypatch):
    runtime, model = make_local(WORLD)
    with monkeypatch.context() as patch:
        patch.setattr(local_layer, "run_forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_local_step(WORLD, runtime, model, PLAN)
    check_step(runtime, model)
    runtime.close()


def test_gradients_that_never_come_are_an_error_at_once(monkeypatch):
    """Without the publication of rank 1 the homes of its replicas could wait for ever."""
    original = DomainSync.reduce

    def reduce(self, *args, **options):
        if self.rank == 1:
            monkeypatch.setattr(self._current.sync, "publish_grads", lambda use: None)
        return original(self, *args, **options)

    runtime, model = make_local(WORLD, timeout_s=1000.0)
    with monkeypatch.context() as patch:
        patch.setattr(DomainSync, "reduce", reduce)
        text = r"all virtual ranks wait and none can go on: rank \d waits for GRADS of "
        check_broken(runtime, model, relibra.ReplicaSyncError, text)
    run_again(model)


def test_a_rank_with_another_plan_is_found_by_its_words(monkeypatch):
    original = SyncUse.hash_of

    def hash_of(self, copy):
        return original(self, copy) ^ (self.plan_hash == "other")

    runtime, model = make_local(WORLD)
    submit = DomainSync._submit

    def other(self, *args, **options):
        made = submit(self, *args, **options)
        if self.rank == 3:
            made.plan_hash = "other"
        return made

    with monkeypatch.context() as patch:
        patch.setattr(SyncUse, "hash_of", hash_of)
        patch.setattr(DomainSync, "_submit", other)
        text = "rank 3: use of replica weights .*layer 1.*met another plan, layer, use or expert"
        check_broken(runtime, model, relibra.ReplicaSyncError, text)
    run_again(model)


def test_sleep_and_close_leave_no_thread_and_no_memory():
    before = set(threading.enumerate())
    runtime, model = make_local(WORLD)
    counts = []
    for cycle in range(100):
        runtime.suspend()
        if cycle == 0:
            with pytest.raises(RuntimeError, match="the runtime is suspended"):
                runtime.step(PLAN, {"train": all_routes(WORLD)})
            with pytest.raises(ValueError, match="group: need None"):
                runtime.resume(object())
        runtime.resume(None)
        if cycle % 33 == 0:
            check_step(runtime, model)
            made = set(threading.enumerate()) - before
            counts.append((len(made), len(runtime._world.lockstep.background)))
    assert len(set(counts)) == 1
    assert runtime.ranks[0]._generation == 101
    runtime.close()
    runtime.close()
    with pytest.raises(RuntimeError, match="the runtime is closed"):
        runtime.step(PLAN, {"train": all_routes(WORLD)})
    gc.collect()
    assert set(threading.enumerate()) <= before
    assert runtime._world.lockstep.background == []


def test_two_models_and_hooks():
    runtime, model = make_local(WORLD)
    other = Model(WORLD, 0, 1)
    runtime.attach(other, name="critic")
    asked = []
    runtime.set_layer_hooks(2, weights_ready=lambda: asked.append(2))
    check_step(runtime, model)
    assert len(asked) == 4  # once a rank in the forward; nobody can tell, so nothing goes ahead
    results = [Result([], [], [], [], [])]
    with runtime.step(PLAN, {"train": all_routes(WORLD)}, model="critic") as step:
        x, scores, _ = joined_batch(WORLD, 0)
        with step.forward(micro_batch=0), torch.no_grad():
            results[0].y.append(other(x, scores))
    check(results[0].y[0], torch.cat([one.y[0] for one in references(WORLD)]), "critic")
    runtime.close()
