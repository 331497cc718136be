"""Static copies in one step: faults, frozen experts, live rows, and gradients that come late."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from moe_world import Result, balanced, collect_weight_grads, compare, reference
from static_world import WORLD, Trainer, X
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import relibra
from relibra.live_routes import live_source
from relibra_kernels.testing.compare import assert_close_gemm, assert_equal_bits
from relibra_kernels.testing.launch import run_ranks

SHORT = dataclasses.replace(WORLD, micro_batches=2)  # one optimizer step
pytestmark = pytest.mark.xdist_group("static_copy_cases")  # one launch for all tests


def short_plan(**options):
    return SHORT.random_plan(static_slots=X, **options)


def run_micro_batch(trainer, step, m, ids=None):
    """Outputs and gradients of one micro-batch of `SHORT`."""
    x, scores, dy = SHORT.batch(trainer.rank, m)
    x.requires_grad_(), scores.requires_grad_()
    with step.forward(micro_batch=m):
        y = trainer.model(x, scores, ids)
    y.backward(dy)
    return y.detach(), x.grad, scores.grad


def enter(trainer, plan=None, **options):
    routes = {"train": SHORT.routes(trainer.rank)}
    return trainer.runtime.step(plan or short_plan(), routes, **options)


def message_of(run):
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Short:
    """Cases of one step; each method runs on all ranks and gives what the test looks at."""

    @staticmethod
    def left_by_an_exception(rank):
        trainer, result = Trainer(rank), Result([], [], [], [], [])

        def leave():
            with enter(trainer) as step:
                run_micro_batch(trainer, step, 0)
                raise KeyError("host")

        assert message_of(leave) == "KeyError: 'host'"
        trainer.optimizer.zero_grad()
        with enter(trainer) as step:
            parts = [run_micro_batch(trainer, step, m) for m in range(2)]
        result.y, result.dx, result.dscores = (list(part) for part in zip(*parts, strict=True))
        collect_weight_grads(SHORT, trainer.runtime, trainer.model, result)
        compare(result, reference(SHORT, rank), "after an exception")

    @staticmethod
    def no_grad_at_the_end(rank):
        """The host took what autograd returned; the static part comes in a new `param.grad`."""
        trainer = Trainer(rank)
        params = [(moe, p) for moe in trainer.model.layers for p in (moe.w13, moe.w2)]
        with enter(trainer) as step:
            for m in range(2):
                run_micro_batch(trainer, step, m)
            taken = [param.grad for _, param in params]
            trainer.optimizer.zero_grad()
        is_copied = [param.grad is not None for _, param in params]
        for (_, param), first in zip(params, taken, strict=True):
            param.grad = first if param.grad is None else param.grad + first
        expected = reference(SHORT, rank)
        for place, (moe, param) in enumerate(params):
            need = (expected.dw13, expected.dw2)[place % 2][place // 2]
            assert_close_gemm("grad", trainer.runtime.gather_experts(param.grad, moe.layer), need)
        held = [
            np.isin(short_plan().static_slot_expert_LGX[layer], home.home_slot_expert_GH[rank])
            for layer, home in enumerate(trainer.runtime.layout)
        ]
        assert is_copied == [bool(one.any()) for one in held for _ in range(2)]

    @staticmethod
    def frozen(rank):
        trainer, expected = Trainer(rank), reference(SHORT, rank)
        trainer.model.layers[0].w13.requires_grad_(False)
        with enter(trainer) as step:
            for m in range(2):
                run_micro_batch(trainer, step, m)
        first, second = trainer.model.layers
        assert first.w13.grad is None
        for moe, name, need in (
            (first, "w2", expected.dw2[0]),
            (second, "w13", expected.dw13[1]),
            (second, "w2", expected.dw2[1]),
        ):
            grad = moe.get_parameter(name).grad
            assert_close_gemm(name, trainer.runtime.gather_experts(grad, moe.layer), need)

    @staticmethod
    def repeated(rank):
        """Sums have one order: the same bits again."""
        found = []
        for _ in range(2):
            trainer = Trainer(rank)
            with enter(trainer) as step:
                for m in range(2):
                    run_micro_batch(trainer, step, m)
            found.append([param.grad for param in trainer.model.parameters()])
        for a, b in zip(*found, strict=True):
            assert_equal_bits("grad", a, b)

    @staticmethod
    def forward_only(rank):
        x, scores, _ = SHORT.batch(rank, 0)
        found = []
        for plan in (short_plan(), SHORT.random_plan(fill=0.0)):
            trainer = Trainer(rank, combine="exact")
            with torch.no_grad(), enter(trainer, plan) as step, step.forward(micro_batch=0):
                found.append(trainer.model(x, scores))
            assert all(param.grad is None for param in trainer.model.parameters())
        assert_equal_bits("y", *found)

    @staticmethod
    def bf16(rank):
        world = dataclasses.replace(SHORT, dtype=torch.bfloat16, num_layers=1, micro_batches=1)
        got = balanced(world, rank, world.random_plan(static_slots=X))
        for name in ("y", "dx", "dw13", "dw2"):
            expected = getattr(reference(world, rank), name)
            for a, b in zip(getattr(got, name), expected, strict=True):
                assert a.dtype == torch.bfloat16
                assert_close_gemm(name, a, b)

    @staticmethod
    def opaque(rank):
        results = []
        for opaque in (False, True):
            trainer = Trainer(rank, combine="exact")
            layer = trainer.model.layers[0]
            x, scores, dy = SHORT.batch(rank, 0)
            x.requires_grad_()
            with enter(trainer) as step:
                with step.forward(micro_batch=0):
                    y = (layer._traced if opaque else layer)(x, scores[0], None)
                y.backward(dy)
            results.append((y.detach(), x.grad, layer.w13.grad, layer.w2.grad))
        for a, b in zip(*results, strict=True):
            assert_equal_bits("opaque", a, b)

    @staticmethod
    def slots_for_other_dispatchers(rank):
        trainer = Trainer(rank)
        ids = torch.from_numpy(SHORT.ids(rank, 0))[:, 1].contiguous()
        with torch.no_grad(), enter(trainer) as step, step.forward(micro_batch=0):
            slots = step.route(ids, 2)
        view = short_plan().replica_plan("train", 0, 1)
        assert np.array_equal(view.slot_expert_Gn.reshape(-1)[slots.numpy()], ids.numpy())
        place = slots.numpy() % view.slot_expert_Gn.shape[1] - view.layout.slots_per_rank
        return int(((place >= 0) & (place < X)).sum())

    @staticmethod
    def rows_of_the_live_router(rank):
        """Each mode equals the reference; static copies take rows only as the plan said."""
        rows = []
        for m in range(2):
            ids = SHORT.ids(rank, m)
            kind = np.zeros(len(ids), np.uint8)
            kind[:: 2 + rank] = relibra.DispatchRows.KIND_UNKNOWN
            rows.append(relibra.DispatchRows(ids, kind, num_experts=SHORT.num_experts))
        static_rows = []
        for mode in ("fraction", "online", "home"):
            trainer, result = Trainer(rank, dispatch="two_hop"), Result([], [], [], [], [])
            loads = trainer.runtime.gather_loads(relibra.LoadMatrix.from_rows(rows))
            plan = SHORT.random_plan(loads, static_slots=X)
            ids = [torch.from_numpy(SHORT.ids(rank, m)).long() for m in range(2)]
            with trainer.runtime.step(plan, {"train": rows}, unknown_rows=mode) as step:
                parts = [run_micro_batch(trainer, step, m, ids[m]) for m in range(2)]
            result.y, result.dx, result.dscores = (list(part) for part in zip(*parts, strict=True))
            collect_weight_grads(SHORT, trainer.runtime, trainer.model, result)
            compare(result, reference(SHORT, rank), mode)
            counts = SHORT.loads().rows_MLGE[0, 0]
            view = plan.replica_plan("train", 0, 0)
            source = live_source(trainer.runtime, mode, counts, plan.layouts[0], view)
            assert source.num_static == (X if mode == "fraction" else 0)
            home = view.layout.slots_per_rank
            static_rows.append(int(source.slot_rows_n[home : home + source.num_static].sum()))
        return static_rows

    @staticmethod
    def faults(rank):
        found = {}
        trainer = Trainer(rank)
        mine = SHORT.random_plan(static_slots=1) if rank == 3 else short_plan()
        found["other X"] = message_of(enter(trainer, mine).__enter__)
        other = dataclasses.replace(SHORT, seed=7) if rank == 3 else SHORT
        plan = other.random_plan(SHORT.loads(), static_slots=X)
        found["other plan"] = message_of(enter(trainer, plan).__enter__)

        def foreign():
            moe, (x, scores, _) = trainer.model.layers[0], SHORT.batch(rank, 0)
            with enter(trainer) as step, step.forward(micro_batch=0):
                relibra.balanced_moe(
                    x, scores[0], moe.w13 * 1, moe.w2, handle=step.handle(moe.layer)
                )

        found["other weights"] = message_of(foreign)
        into_main = Trainer(rank, grad_mode="main_grad")

        def no_main_grad():
            with enter(into_main) as step:
                run_micro_batch(into_main, step, 0)
                if rank == 0:
                    del into_main.model.layers[1].w2.main_grad

        found["no main_grad"] = message_of(no_main_grad)
        mesh = init_device_mesh("cpu", (4,))
        moe = trainer.model.layers[1]
        sharded = distribute_tensor(moe.w2.detach(), mesh, [Shard(1)])
        moe.w2 = torch.nn.Parameter(sharded)
        found["sharded"] = message_of(enter(trainer).__enter__)
        return found


SHORT_CASES = [name for name in vars(Short) if not name.startswith("_")]


def run_short(rank, num_ranks):
    torch.set_num_threads(1)
    found = {}
    for name in SHORT_CASES:
        try:
            result = getattr(Short, name)(rank)
            found[name] = True if result is None else result
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    return found


@pytest.fixture(scope="module")
def short():
    return run_ranks(4, run_short)


@pytest.mark.parametrize(
    "case",
    [
        "left_by_an_exception",
        "no_grad_at_the_end",
        "frozen",
        "repeated",
        "forward_only",
        "bf16",
        "opaque",
    ],
)
def test_results_are_those_without_copies(short, case):
    assert all(one[case] for one in short)


def test_hosts_with_their_own_dispatcher_reach_static_slots(short):
    assert sum(one["slots_for_other_dispatchers"] for one in short) > 0


def test_rows_of_the_live_router_go_to_static_copies_only_as_planned(short):
    fraction, online, home = np.sum([one["rows_of_the_live_router"] for one in short], 0)
    assert fraction > 0
    assert online == home == 0


@pytest.mark.parametrize(
    ("fault", "on_rank_0", "elsewhere"),
    [
        ("other X", *["PlanError.*need the same static slots a rank on all ranks.*rank 3: 1"] * 2),
        ("other plan", *["PlanError.*need the same plan hash on all ranks"] * 2),
        ("other weights", *["ValueError: w13: need the parameter of the attached layer 1"] * 2),
        (
            "no main_grad",
            "ValueError: main_grad: .*got None",
            r"PlanError.*refused by rank\(s\) \[0",
        ),
        ("sharded", *[r"PlanError.*got a sharded w2 \(FSDP\) in layer 2; plan with static"] * 2),
    ],
)
def test_faults_are_named_on_every_rank(short, fault, on_rank_0, elsewhere):
    for rank, one in enumerate(short):
        assert re.search(elsewhere if rank else on_rank_0, one["faults"][fault])
