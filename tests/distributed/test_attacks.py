"""Ways in which ranks can drift apart without knowing it: an error on every rank, no wrong step."""

import pytest
import torch
import torch.distributed as dist
from moe_world import Model, World
from torch.utils.checkpoint import checkpoint

import relibra
from relibra import migrate as migrate_module
from relibra_kernels.testing.launch import run_ranks

WORLD = World(1, 2, num_experts=8, top_k=2, micro_batches=2, num_layers=1)


def outcome(rank, fn):
    try:
        fn(rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def set_up(rank, world=WORLD, **options):
    options.setdefault("timeout_s", 60.0)
    runtime = relibra.Runtime(dist.group.WORLD, world.topology, **options)
    model = Model(world, rank, world.num_ranks)
    runtime.attach(model)
    return runtime, model


def run_orders(rank, num_ranks, orders):
    runtime, model = set_up(rank)

    def train(rank):
        with runtime.step(WORLD.random_plan(), {"train": WORLD.routes(rank)}) as step:
            for m in orders[rank]:
                x, scores, _ = WORLD.batch(rank, m)
                with step.forward(micro_batch=m):
                    model(x, scores)

    return outcome(rank, train)


@pytest.mark.parametrize(
    "orders", [((0, 1), (1, 0)), ((0, 1), (0, 0))], ids=["swapped", "one-twice"]
)
def test_ranks_that_run_micro_batches_in_another_order(orders):
    for message in run_ranks(2, run_orders, orders):
        assert message.startswith("PlanError"), message
        assert "same order of passes, micro-batches and layers" in message


def run_interrupt(rank, num_ranks):
    """An interrupt in the middle of a migration: the runtime cannot be used any more."""
    runtime, _ = set_up(rank)
    original = migrate_module.move_fields

    def interrupted(*args):
        original(*args)
        raise KeyboardInterrupt

    import relibra.attachment

    relibra.attachment.move_fields = interrupted
    with pytest.raises(KeyboardInterrupt):
        runtime.set_layout(WORLD.random_plan().layouts)
    with pytest.raises(RuntimeError, match="migration interrupted by KeyboardInterrupt"):
        runtime.step(WORLD.random_plan(), {"train": WORLD.routes(rank)})
    return True


def test_an_interrupted_migration_ends_the_runtime():
    assert all(run_ranks(2, run_interrupt))


def run_default_timeout(rank, num_ranks):
    runtime, _ = set_up(rank, timeout_s=None)
    KEPT.append(runtime)  # a rank stays until all have answered
    if rank == 1:
        return "late"
    return outcome(rank, lambda rank: runtime.gather_loads(WORLD_LOADS))


KEPT = []
WORLD_LOADS = relibra.LoadMatrix.from_rows(WORLD.routes(0))


def test_without_a_number_the_time_out_of_the_group_holds():
    waiting, late = run_ranks(2, run_default_timeout, group_timeout=4.0)
    assert waiting.startswith("ReplicaSyncError"), waiting
    assert late == "late"


def run_ddp(rank, num_ranks):
    runtime, model = set_up(rank)
    before = model.layers[0].home_slot_expert.clone()
    ignored = [name for name, _ in model.named_parameters()]
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ignored
    )
    model.head = torch.nn.Linear(2, 2)
    torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=True)
    assert torch.equal(model.layers[0].home_slot_expert, before)
    runtime.close()
    return True


def test_data_parallelism_does_not_overwrite_the_experts_of_a_rank():
    assert all(run_ranks(2, run_ddp))


class EqualTokens(World):
    """Every micro-batch has the same number of tokens, so that sizes give nothing away."""

    def tokens_of(self, rank, m):
        return self.tokens


def test_two_micro_batches_in_one_backward_with_reentrant_recompute():
    """Micro-batch 0 reaches the loss only by a tensor that the model does not return."""
    world = EqualTokens(num_experts=4, top_k=2, micro_batches=2, num_layers=2, replica_slots=0)
    runtime = relibra.Runtime(replica_slots=0)
    model = Model(world, 0, 1)
    runtime.attach(model)
    hidden = []

    def wrap(moe, x, scores, ids):
        out = checkpoint(moe, x, scores, None, use_reentrant=True)
        hidden.append(out)
        return out

    with runtime.step(world.random_plan(), {"train": world.routes(0)}) as step:
        for m in (0, 1):
            x, scores, _ = world.batch(0, m)
            with step.forward(micro_batch=m):
                y = model(x.requires_grad_(), scores, wrap=wrap)
        loss = hidden[0].sum() + y.sum()
        with pytest.raises(RuntimeError, match="cannot be told"):
            loss.backward()


def test_routes_of_other_layers_or_types_are_refused():
    world = World(num_experts=4, top_k=2)
    runtime = relibra.Runtime()
    runtime.attach(Model(world, 0, 1))
    plan, rows = world.random_plan(), world.routes(0)[0]
    other = relibra.DispatchRows(rows.ids, num_experts=4, moe_layers=(7,))
    for routes, error, message in (
        ({"train": [other]}, relibra.PlanError, "need rows of MoE layers \\[1\\], got \\[7\\]"),
        (3, TypeError, "routes: need pass -> DispatchRows, got int"),
        ({1: [rows]}, TypeError, "routes: need a name"),
        ({"train": rows}, TypeError, "a sequence of DispatchRows"),
        ({"train": [rows.ids]}, TypeError, "routes\\['train'\\]\\[0\\]: need DispatchRows"),
    ):
        step = runtime.step(plan, routes)
        with pytest.raises(error, match=message), step:
            pass


def test_moments_inside_containers_are_refused():
    moe = relibra.BalancedMoE(4, 8, 8, layer=3)
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    optimizer.state[moe.w13]["history"] = [{"first": torch.zeros(4, 3)}]
    with pytest.raises(ValueError, match="state 'history' of layer 3 w13: need tensors directly"):
        migrate_module.expert_fields(moe, optimizer)


class Wants:
    """What rank 0 wants otherwise than the others, in one step of one layer."""

    @staticmethod
    def frozen_weight(moe, x):
        moe.w13.requires_grad_(False)

    @staticmethod
    def all_frozen(moe, x):
        moe.requires_grad_(False)

    @staticmethod
    def no_input_gradient(moe, x):
        x.requires_grad_(False)

    @staticmethod
    def options(moe, x):
        moe.options = relibra.LayerOptions(save="redispatch")

    @staticmethod
    def bias(moe, x):
        moe.b2 = torch.nn.Parameter(torch.zeros(moe.w13.shape[0], x.shape[1]))


def run_wants(rank, num_ranks):
    messages = {}
    for name in ("frozen_weight", "all_frozen", "no_input_gradient", "options", "bias"):
        runtime, model = set_up(rank)
        x, scores, dy = WORLD.batch(rank, 0)
        x.requires_grad_()
        step = runtime.step(WORLD.random_plan(), {"train": WORLD.routes(rank)})

        def train(rank, name=name, step=step, model=model, batch=(x, scores, dy)):
            x, scores, dy = batch
            with step, step.forward(micro_batch=0):
                if rank == 0:  # after the ranks agreed on what there is
                    getattr(Wants, name)(model.layers[0], x)
                model(x, scores).backward(dy)

        messages[name] = outcome(rank, train)
        runtime.close()
    return messages


def test_ranks_that_want_other_gradients_or_have_other_options_in_the_middle_of_a_step():
    for messages in run_ranks(2, run_wants):
        for name, message in messages.items():
            assert message.startswith("PlanError"), f"{name}: {message}"
            assert "same options, biases and wanted gradients" in message, name


def run_wrong_ids(rank, num_ranks):
    """Rank 0 has ids that are none, outside a step and in a live pass of one."""
    world = WORLD
    good = torch.from_numpy(world.ids(rank, 0)).long()
    messages = {}
    for name, bad in (
        ("above", good.clone().fill_(world.num_experts)),
        ("wraps", good + 2**32),  # a good id in 32 bits
        ("float", good.float()),
    ):
        runtime, model = set_up(rank)
        x, scores, _ = world.batch(rank, 0)
        ids = good if rank else bad

        def live(rank, model=model, batch=(x, scores, ids)):
            model(*batch)

        def in_step(rank, model=model, runtime=runtime, batch=(x, scores, ids)):
            step = runtime.step(
                world.random_plan(), {"train": world.routes(rank)}, live_passes={"ref": "online"}
            )
            with step, step.forward(micro_batch=0, pass_="ref"):
                model(*batch)

        messages |= {name: outcome(rank, live), f"{name} in a step": outcome(rank, in_step)}
        runtime.close()
    return messages


def test_wrong_live_ids_of_one_rank_are_told_to_all():
    at_fault, other = run_ranks(2, run_wrong_ids)
    for name, message in at_fault.items():
        assert message.startswith("TypeError" if "float" in name else "ValueError"), message
        assert "expert_ids: need" in message, name
    for name, message in other.items():
        assert message.startswith("PlanError"), f"{name}: {message}"
        assert "expert_ids: refused by rank(s) [0]" in message, name
