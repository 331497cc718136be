"""Training with a re-plan and a reorder before every step equals dense training."""

import io

import pytest
import torch
import torch.distributed as dist
from moe_world import Model, World, balanced, check, reference

import relibra
from relibra import migrate as migrate_module
from relibra_kernels.testing.launch import run_ranks

WORLD = World(
    2, 2, num_experts=16, top_k=2, num_layers=2, micro_batches=2, tokens=48, dy_scale=0.01
)
NUM_STEPS = 5
OPTIMIZERS = {
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-6),
}


def at_step(number):
    """The same weights with other tokens, routing and heat."""
    import dataclasses

    return dataclasses.replace(WORLD, seed=WORLD.seed + 100 * number)


class Trainer:
    """Balanced training and, beside it, dense training on fp64 gradients."""

    def __init__(self, rank, num_ranks, optimizer, **options):
        self.rank = rank
        self.runtime = relibra.Runtime(dist.group.WORLD, WORLD.topology, **options)
        self.model = Model(WORLD, rank, num_ranks)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.runtime.attach(self.model, self.optimizer)
        self.dense = [
            [w.clone().requires_grad_() for w in WORLD.weights(layer)]
            for layer in WORLD.shape.moe_layers
        ]
        self.dense_optimizer = OPTIMIZERS[optimizer]([w for pair in self.dense for w in pair])
        self.moved = self.replicas = 0

    def plan(self, world):
        config = relibra.PlannerConfig(replica_slots=1, proposals=1000)
        loads = self.runtime.gather_loads(relibra.LoadMatrix.from_rows(world.routes(self.rank)))
        return relibra.plan_step(
            {"train": loads}, world.topology, model=world.shape, layout=self.runtime.layout,
            config=config,
        )  # fmt: skip

    def step(self, number):
        world = at_step(number)
        plan = self.plan(world)
        expected = reference(world, self.rank, weights=self.logical_weights())
        self.optimizer.zero_grad()
        with self.runtime.step(plan, {"train": world.routes(self.rank)}) as step:
            for m in range(world.micro_batches):
                x, scores, dy = world.batch(self.rank, m)
                with step.forward(micro_batch=m):
                    y = self.model(x, scores)
                check(y.detach(), expected.y[m], f"step {number} y")
                y.backward(dy)
        self.moved += step.moved_experts
        self.replicas += int((plan.passes["train"].replica_slot_expert_MLGS >= 0).sum())
        for place, moe in enumerate(self.model.layers):
            for name, need in (("w13", expected.dw13[place]), ("w2", expected.dw2[place])):
                grad = self.runtime.gather_experts(getattr(moe, name).grad, moe.layer)
                for expert in range(16):
                    check(grad[expert], need[expert], f"step {number} d{name} expert {expert}")
        self.optimizer.step()
        control = reference(world, self.rank, weights=self.dense)
        for pair, dw13, dw2 in zip(self.dense, control.dw13, control.dw2, strict=True):
            pair[0].grad, pair[1].grad = dw13.float(), dw2.float()
        self.dense_optimizer.step()

    def logical_weights(self):
        return [
            [self.runtime.gather_experts(w, moe.layer) for w in (moe.w13, moe.w2)]
            for moe in self.model.layers
        ]

    def largest_difference(self):
        """Over parameters and moments, expert by expert in logical order."""
        worst = 0.0
        for moe, pair in zip(self.model.layers, self.dense, strict=True):
            for name, dense in zip(("w13", "w2"), pair, strict=True):
                param = getattr(moe, name)
                state = self.optimizer.state[param]
                dense_state = self.dense_optimizer.state[dense]
                pairs = [(param, dense)]
                pairs += [(state[k], dense_state[k]) for k in state if state[k].dim() > 1]
                assert len(pairs) >= 2
                for local, whole in pairs:
                    got = self.runtime.gather_experts(local, moe.layer)
                    worst = max(worst, float((got - whole.detach()).abs().max()))
        return worst


def run_training(rank, num_ranks, optimizer, fault=None):
    if fault is not None:
        fault()
    trainer = Trainer(rank, num_ranks, optimizer)
    for number in range(NUM_STEPS):
        trainer.step(number)
    return trainer.largest_difference(), trainer.moved, trainer.replicas


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_five_steps_equal_dense_training(optimizer):
    for difference, moved, replicas in run_ranks(4, run_training, optimizer):
        assert difference <= 1e-6
        assert moved > 0
        assert replicas > 0


def moments_not_moved():
    """Mutation: only the weights move."""
    original = migrate_module.expert_fields

    def only_weights(moe, optimizer):
        return original(moe, None)

    import relibra.attachment

    relibra.attachment.expert_fields = only_weights


@pytest.mark.parametrize(
    "optimizer", ["adam", pytest.param("sgd-momentum", marks=pytest.mark.slow)]
)
def test_mutation_moments_not_moved_is_caught(optimizer):
    results = run_ranks(4, run_training, optimizer, moments_not_moved)
    assert max(difference for difference, _, _ in results) > 1e-5


def replica_gradient_added_twice():
    """Mutation: every replica gradient comes home twice."""
    from relibra_kernels.transport.replica import DistReplica

    original = DistReplica.reduce

    def twice(self, *args, **kwargs):
        original(self, *args, **kwargs)
        original(self, *args, **kwargs)

    DistReplica.reduce = twice


def test_mutation_replica_gradient_added_twice_is_caught():
    with pytest.raises(RuntimeError, match="calc_diff"):
        run_ranks(4, run_training, "adam", replica_gradient_added_twice)


def save_at_ep4(rank, num_ranks):
    trainer = Trainer(rank, num_ranks, "adam")
    trainer.step(0), trainer.step(1)
    assert trainer.moved > 0
    state = trainer.runtime.logical_state_dict()
    exported = [dict(trainer.runtime.export_experts(layer)) for layer in WORLD.shape.moe_layers]
    for place, layer in enumerate(exported):
        for name in ("w13", "w2"):
            whole = torch.stack([layer[expert][name] for expert in range(16)])
            assert torch.equal(whole, state[f"layers.{place}.{name}"])
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def logits(rank, num_ranks, saved):
    group = dist.group.WORLD if num_ranks > 1 else None
    runtime = relibra.Runtime(group, relibra.Topology(1, num_ranks), combine="exact")
    model = Model(WORLD, rank, num_ranks)
    runtime.attach(model)
    state = torch.load(io.BytesIO(saved), weights_only=True)
    rng_layouts = WORLD.rng(9)
    from relibra.testing.plans import random_layout

    runtime.set_layout([random_layout(rng_layouts, 16, num_ranks) for _ in range(2)])
    runtime.load_logical_state_dict(None, state)
    x, scores, _ = WORLD.batch(0, 0)
    ids = torch.from_numpy(WORLD.ids(0, 0)).long()
    return model(x, scores, ids).detach()


def test_saved_at_ep4_loads_at_ep1_ep2_and_ep4():
    saved = run_ranks(4, save_at_ep4)[0]
    expected = logits(0, 1, saved)
    for num_ranks in (2, 4):
        for got in run_ranks(num_ranks, logits, saved):
            assert torch.equal(got, expected)


def refuse_wrong_state(rank, num_ranks):
    trainer = Trainer(rank, num_ranks, "adam")
    before = trainer.model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    trainer.step(0)
    with pytest.raises(ValueError, match="home_slot_expert: the saved weights hold experts"):
        trainer.model.load_state_dict(before)
    trainer.runtime.set_layout([relibra.ExpertLayout.identity(16, 4)] * 2)
    trainer.model.load_state_dict(before)
    state = trainer.runtime.logical_state_dict()
    state["layers.0.w13"] = state["layers.0.w13"][:8]
    with pytest.raises(ValueError, match="need a tensor \\[16, 32, 16\\], got \\[8, 32, 16\\]"):
        trainer.runtime.load_logical_state_dict(None, state)
    return True


def test_state_saved_by_position_under_another_layout_is_refused():
    assert all(run_ranks(4, refuse_wrong_state))


def run_plan_01(rank, num_ranks):
    """plan-01 (sglang#25882): re-plan and migrate before every step."""
    import dataclasses

    base = World(2, 2, num_experts=16, top_k=2, tokens=250, hidden=64, expert=64, seed=1)
    runtime = relibra.Runtime(dist.group.WORLD, base.topology, combine="exact")
    plain = relibra.Runtime(dist.group.WORLD, base.topology, combine="exact")
    models = [Model(base, rank, num_ranks) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    runtime.attach(models[0], optimizers[0])
    plain.attach(models[1], optimizers[1])
    for number in range(5):
        world = dataclasses.replace(base, seed=1 + 10 * number)
        loads = {"train": world.loads()}
        plain.load_logical_state_dict(None, runtime.logical_state_dict())
        outputs = []
        for place, (owner, strategy) in enumerate(((runtime, "relibra"), (plain, "none"))):
            plan = relibra.plan_step(
                loads, world.topology, model=world.shape, layout=owner.layout, strategy=strategy,
                config=relibra.PlannerConfig(proposals=1000),
            )  # fmt: skip
            x, scores, dy = world.batch(rank, 0)
            optimizers[place].zero_grad()
            with owner.step(plan, {"train": world.routes(rank)}) as step:
                with step.forward(micro_batch=0):
                    y = models[place](x, scores)
                y.backward(dy)
            optimizers[place].step()
            outputs.append(y.detach())
            if place == 0 and number:
                assert step.moved_experts > 0
        assert torch.equal(*outputs)
        for name in ("w13", "w2"):
            a, b = (
                owner.gather_experts(getattr(model.layers[0], name), 1)
                for owner, model in zip((runtime, plain), models, strict=True)
            )
            assert float((a - b).abs().max()) < 1e-6
    return True


def test_plan_01_outputs_after_rebalances():
    assert all(run_ranks(4, run_plan_01))


def run_kernel_15(rank, num_ranks):
    """kernel-15 (grouped_gemm#1): tables are built anew each step; weights follow the loop."""
    trainer = Trainer(rank, num_ranks, "sgd-momentum")
    for number in range(3):
        trainer.step(number)
        assert trainer.largest_difference() < 1e-6
    return True


def test_kernel_15_three_steps_equal_the_loop():
    assert all(run_ranks(4, run_kernel_15))


def run_kernel_01(rank, num_ranks):
    """kernel-01 (MSLK#158): gradients of experts without rows after a busy use of the memory."""
    import dataclasses

    busy = World(1, 2, num_experts=256, top_k=1, tokens=2048, hidden=8, expert=8, skew=0.0)
    balanced(busy, rank, busy.random_plan())
    odd_world = _OddExperts(**dataclasses.asdict(dataclasses.replace(busy, tokens=64)))
    for options in ({}, {"grad_mode": "main_grad"}):
        result = balanced(odd_world, rank, odd_world.random_plan(), **options)
        for grad in (result.dw13[0], result.dw2[0]):
            assert torch.isfinite(grad).all()
            assert (grad[::2] == 0).all()
            assert (grad[1::2] != 0).any()
    return True


class _OddExperts(World):
    """A world whose even experts never get a row."""

    def ids(self, rank, m):
        return (super().ids(rank, m) // 2) * 2 + 1


def test_kernel_01_experts_without_rows():
    assert all(run_ranks(2, run_kernel_01))


def run_plan_04(rank, num_ranks):
    """plan-04 (sglang#5524): rank r sends 100(r+1) rows to each of experts 4r..4r+3."""
    import numpy as np

    ids = np.repeat(4 * rank + np.arange(4), 100 * (rank + 1)).astype(np.int32)[:, None, None]
    own = relibra.LoadMatrix.from_rows([relibra.DispatchRows(ids, num_experts=16)])
    topology, shape = relibra.Topology(2, 2), relibra.ModelShape(16, 1, (0,))
    with pytest.raises(relibra.PlanError, match="gather"):
        relibra.plan_step({"train": own}, topology, model=shape)
    runtime = relibra.Runtime(dist.group.WORLD, topology)
    loads = runtime.gather_loads(own)
    assert loads.rows_MLGE.shape == (1, 1, 4, 16)
    none = relibra.plan_step({"train": loads}, topology, model=shape, strategy="none")
    assert none.report.imbalance_mean == pytest.approx(1.6)
    assert none.passes["train"].slot_rows_MLGn[0, 0].sum(1).tolist() == [400, 800, 1200, 1600]
    plan = relibra.plan_step({"train": loads}, topology, model=shape)
    return plan.hash, loads.rows_MLGE.tobytes()


def test_plan_04_all_ranks_plan_on_the_same_counts():
    assert len(set(run_ranks(4, run_plan_04))) == 1


def run_plan_10(rank, num_ranks, sleeper, place):
    """plan-10 (vllm#32860): one rank comes late to one stage; the others wait for it."""
    import time

    def stage(name):
        if rank == sleeper and name == place:
            time.sleep(2.0)

    recorded = []
    originals = {name: getattr(dist, name) for name in ("all_gather", "all_to_all_single")}
    for name, original in originals.items():

        def call(*args, _name=name, _original=original, **kwargs):
            recorded.append(_name)
            return _original(*args, **kwargs)

        setattr(dist, name, call)
    trainer = Trainer(rank, num_ranks, "adam")
    world = at_step(0)
    stage("gather")
    trainer.runtime.gather_loads(relibra.LoadMatrix.from_rows(world.routes(rank)))
    stage("plan")
    plan = trainer.plan(world)
    stage("migrate")
    with trainer.runtime.step(plan, {"train": world.routes(rank)}) as step:
        for m in range(2):
            x, scores, dy = world.batch(rank, m)
            stage("push")
            with step.forward(micro_batch=m):
                y = trainer.model(x, scores)
            stage("reduce")
            y.backward(dy)
    stage("close")
    trainer.runtime.close()
    return recorded


@pytest.mark.parametrize(
    ("sleeper", "place"),
    [(0, "gather"), (1, "plan"), (2, "migrate"), (3, "push"), (0, "reduce"), (1, "close")],
)
def test_plan_10_same_order_of_collectives_with_a_late_rank(sleeper, place):
    results = run_ranks(4, run_plan_10, sleeper, place)
    assert all(result == results[0] for result in results)
    assert len(results[0]) > 20
