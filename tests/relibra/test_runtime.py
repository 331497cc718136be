"""The runtime's own rules: made again, plans that fit it, one owner of a layer, logical state."""

import copy
import types

import pytest
import torch
import torch.distributed as dist
from late_rank import Told
from moe_world import Model, World, check, reference

import relibra
from relibra import agreement
from relibra.domain_sync import DomainSync
from relibra.testing.plans import random_layout
from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.watchdog import AbortGate

WORLD = World(1, 1, num_experts=8, top_k=2, num_layers=2, micro_batches=2)
PAIR = World(1, 2, num_experts=8, top_k=2)


def attached(world=WORLD, rank=0, group=None, **options):
    runtime = relibra.Runtime(group, world.topology, **options)
    model = Model(world, rank, world.num_ranks)
    runtime.attach(model)
    return runtime, model


def train_once(runtime, model, plan, world=WORLD, rank=0):
    with runtime.step(plan, {"train": world.routes(rank)}) as step:
        for m in range(world.micro_batches):
            x, scores, dy = world.batch(rank, m)
            with step.forward(micro_batch=m):
                y = model(x.requires_grad_(), scores)
            y.backward(dy)


def make_three_times(rank, num_ranks):
    """Ranks may also differ in how many groups they have."""
    kept = dist.new_group([0], use_local_synchronization=True) if rank == 0 else None
    for _ in range(3):
        with relibra.Runtime(dist.group.WORLD, PAIR.topology, timeout_s=60.0) as runtime:
            runtime.gather_loads(relibra.LoadMatrix.from_rows(PAIR.routes(rank)))
            runtime.close()
    return kept is None or rank == 0


def test_a_runtime_with_its_own_time_out_can_be_made_again():
    assert all(run_ranks(2, make_three_times))


def fail_then_make_again(rank, num_ranks, told):
    runtime = relibra.Runtime(dist.group.WORLD, PAIR.topology, timeout_s=3.0)
    own = relibra.LoadMatrix.from_rows(PAIR.routes(rank))
    if rank == 1:
        told.wait_for(1)
    with pytest.raises(relibra.ReplicaSyncError):
        runtime.gather_loads(own)
    told.say()
    with pytest.raises(RuntimeError, match="the runtime failed before .*make a new one"):
        runtime.gather_loads(own)
    runtime.close()
    again = relibra.Runtime(dist.group.WORLD, PAIR.topology, timeout_s=60.0)
    return again.gather_loads(own).is_gathered


def test_after_a_failed_agreement_a_new_runtime_works():
    assert all(run_ranks(2, fail_then_make_again, Told()))


def test_a_plan_may_use_fewer_replica_slots_than_the_runtime_has():
    runtime, model = attached(replica_slots=2)
    train_once(runtime, model, WORLD.random_plan(replica_slots=1))
    expected = reference(WORLD, 0)
    for moe, dw13, dw2 in zip(model.layers, expected.dw13, expected.dw2, strict=True):
        check(runtime.gather_experts(moe.w13.grad, moe.layer), dw13, "dw13")
        check(runtime.gather_experts(moe.w2.grad, moe.layer), dw2, "dw2")
    runtime, model = attached(replica_slots=0)
    with pytest.raises(relibra.PlanError, match="uses 1 replica slots a rank, the runtime has 0"):
        train_once(runtime, model, WORLD.random_plan(replica_slots=1))


def test_a_plan_without_its_loads_is_refused(tmp_path):
    runtime, model = attached()
    WORLD.random_plan().save(tmp_path / "plan.npz")
    plan = relibra.StepPlan.load(tmp_path / "plan.npz")
    with pytest.raises(relibra.PlanError, match="plan: need the loads of pass 'train'"):
        train_once(runtime, model, plan)


def test_an_optimizer_step_that_the_plan_does_not_have_is_refused():
    runtime, _ = attached()
    step = runtime.step(WORLD.random_plan(), {"train": WORLD.routes(0)}, optimizer_step=7)
    with pytest.raises(relibra.PlanError, match=r"optimizer_step: need one of \[0\], got 7"), step:
        pass


def test_ids_that_are_no_integers_are_refused_in_a_step():
    runtime, model = attached()
    x, scores, _ = WORLD.batch(0, 0)
    with (
        runtime.step(WORLD.random_plan(), {"train": WORLD.routes(0)}) as step,
        step.forward(micro_batch=0),
        pytest.raises(TypeError, match="expert_ids: need an integer dtype for optimizer step 0"),
    ):
        model.layers[0](x, scores[0], model.layers[0].replayed_ids() + 0.5)


@pytest.mark.parametrize("combine", ["reduced", "exact"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_of_any_dtype(dtype, combine):
    for weights in (torch.float64, torch.float32):
        moe = relibra.BalancedMoE(4, 8, 8, layer=0, dtype=weights)
        relibra.Runtime(combine=combine, replica_slots=0).attach(moe)
        x = torch.randn(5, 8, dtype=weights)
        ids = torch.arange(10).reshape(5, 2) % 4
        scores = torch.tensor([0.25, 0.75]).expand(5, 2).to(dtype).requires_grad_()
        y = moe(x, scores, ids)
        y.sum().backward()
        assert y.dtype == weights
        assert scores.grad.dtype == dtype
        assert torch.equal(y, moe(x, scores.detach().to(weights), ids))


def test_a_layer_has_one_runtime_at_a_time():
    runtime, model = attached()
    for other in (runtime, relibra.Runtime()):
        with pytest.raises(ValueError, match=r"'layers.0' is attached already; need runtime.det"):
            other.attach(model, name="second")
    assert len(model._forward_hooks) == 1
    runtime.detach("actor")
    assert len(model._forward_hooks) == 0
    other.attach(model, name="second")
    other.close()
    assert len(model._forward_hooks) == 0
    with pytest.raises(RuntimeError, match="the runtime is closed"):
        other.logical_state_dict()


def test_experts_do_not_move_inside_a_step():
    runtime, _ = attached()
    identity = [relibra.ExpertLayout.identity(8, 1)] * 2
    with runtime.step(WORLD.random_plan(), {"train": WORLD.routes(0)}):
        before = runtime.layout
        with pytest.raises(RuntimeError, match="'actor' is in a training step"):
            runtime.set_layout(identity)
        assert runtime.layout == before
    runtime.set_layout(identity)
    with pytest.raises(relibra.PlanError, match="layouts: need 2, one a MoE layer, got 1"):
        runtime.set_layout(identity[:1])


def test_a_backward_after_the_experts_moved_is_refused():
    runtime, model = attached()
    x, scores, dy = WORLD.batch(0, 0)
    y = model(x.requires_grad_(), scores, torch.from_numpy(WORLD.ids(0, 0)).long())
    runtime.set_layout([random_layout(WORLD.rng(7), 8, 1) for _ in range(2)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def set_other_layouts(rank, num_ranks):
    runtime, _ = attached(PAIR, rank, dist.group.WORLD, timeout_s=60.0)
    layout = [[0, 1, 2, 3], [4, 5, 6, 7]] if rank else [[1, 0, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(relibra.PlanError, match="migration: need the same layouts"):
        runtime.set_layout([relibra.ExpertLayout(layout)])
    with pytest.raises(relibra.PlanError, match="got 8 on 1 x 8" if rank else "refused by rank"):
        runtime.set_layout([relibra.ExpertLayout.identity(8, 1 if rank else 2)])
    only_here = runtime.export_experts(1)
    return rank == 1 or [expert for expert, _ in only_here] == list(range(8))


def test_layouts_are_agreed_and_an_export_that_one_rank_reads_does_not_wait():
    assert all(run_ranks(2, set_other_layouts))


def test_logical_state_is_of_attached_layers_only():
    """A copy may have been made under another layout."""
    runtime, model = attached()
    twin = copy.deepcopy(model)
    train_once(runtime, model, WORLD.random_plan())
    state = runtime.logical_state_dict()
    for call in (
        lambda: runtime.logical_state_dict(twin),
        lambda: runtime.load_logical_state_dict(twin, state),
    ):
        with pytest.raises(ValueError, match="module: need a part of the attached model 'actor'"):
            call()
    part = runtime.logical_state_dict(model.layers[1])
    assert torch.equal(part["w13"], state["layers.1.w13"])
    for place, layer in enumerate(WORLD.shape.moe_layers):
        assert torch.equal(state[f"layers.{place}.w13"], WORLD.weights(layer)[0])


def test_a_layer_with_two_names_is_in_expert_order_under_both():
    moe = relibra.BalancedMoE.from_dense(*WORLD.weights(1), layer=1)
    runtime, model = relibra.Runtime(), torch.nn.ModuleDict({"a": moe, "b": moe})
    runtime.attach(model)
    runtime.set_layout([relibra.ExpertLayout([[7, 6, 5, 4, 3, 2, 1, 0]])])
    state = runtime.logical_state_dict()
    assert torch.equal(state["a.w2"], WORLD.weights(1)[1])
    assert torch.equal(state["b.w2"], WORLD.weights(1)[1])


def test_an_optimizer_without_the_expert_weights_is_refused():
    moe = relibra.BalancedMoE(4, 16, 8, layer=0)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="optimizer: need all trainable .* w13 of layer 0"):
        relibra.Runtime().attach(moe, other)


def test_what_is_no_plan_is_refused():
    moe = relibra.BalancedMoE(4, 16, 8, layer=0)
    runtime = relibra.Runtime()
    runtime.attach(moe)
    with pytest.raises(TypeError, match="plan: need a StepPlan, got dict"), runtime.step({}, {}):
        pass


@pytest.mark.parametrize("memory", ["cpu", "cuda:1"])
def test_weights_on_another_device_than_the_memory_are_refused(memory):
    def nothing(*_):
        pytest.fail("no memory is made")

    name = {"cpu": "cpu_shm", "cuda:1": "nvshmem"}[memory]
    heap = types.SimpleNamespace(name=name, device=torch.device(memory), alloc=nothing)
    sync = DomainSync(lambda: heap, nothing, (0, 1), 0, 1, timeout_s=1.0)
    weights = {"w13": torch.empty(1, 4, 2, device="meta")}
    need = f'transport: "{name}" needs expert weights on {memory}, got w13 on meta; use'
    with pytest.raises(ValueError, match=need):
        sync.prepare(weights)


def test_an_interrupt_while_peers_are_asked_does_not_hide_the_failure(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    runtime = relibra.Runtime()
    monkeypatch.setattr(runtime.departures, "told", interrupted)
    with pytest.raises(KeyboardInterrupt), runtime.noting_failure():
        raise ReplicaSyncError("lost")
    assert str(runtime.failure) == "lost"


def test_a_rank_s_own_fault_is_not_lost_when_the_ranks_do_not_meet(monkeypatch):
    def nobody(*_):
        raise ReplicaSyncError("nobody came")

    monkeypatch.setattr(agreement, "wait_for_all", nobody)
    with pytest.raises(ReplicaSyncError, match="^home reduce of layer 3$"):
        agreement.agree(object(), {}, what="end", fault=ReplicaSyncError("home reduce of layer 3"))
    with pytest.raises(ReplicaSyncError, match="^nobody came; this rank: KeyError: 'w13'$"):
        agreement.agree(object(), {}, what="end", fault=KeyError("w13"))
    with pytest.raises(ReplicaSyncError, match="^nobody came$"):
        agreement.agree(object(), {}, what="end")


def test_collectives_of_a_step_that_is_good_on_no_rank_may_be_ended():
    runtime = relibra.Runtime()
    runtime.domain_sync = types.SimpleNamespace(on_abort=AbortGate(None))
    for fault in (None, ReplicaSyncError("lost")):
        with runtime.voting(fault):
            assert runtime.domain_sync.on_abort._lock.locked() == (fault is None)
