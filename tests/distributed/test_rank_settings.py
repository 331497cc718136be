"""Ranks that were given different arguments or models: every rank says which, at once."""

import dataclasses
import re
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_world import Model, World
from shared_memory import leaked_segments

import relibra
from relibra import agreement
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.cuda_options import CudaOptions
from relibra_kernels.transport.provider_choice import ProviderOptions

WORLD = World(1, 4, num_experts=8, top_k=2)
ODD = 2  # the rank that is given something else
SOON_S = 10.0  # no wait for a time-out, which is 20 s
IRREGULAR = relibra.Topology(rank_to_node=[0, 0, 0, 0], rank_to_rail=[7, 1, 2, 3])
SHARED = {"transport": "cpu_shm"}

# what all ranks are given, what rank ODD is given instead, the argument, both values
DIFFERENT = {
    "topology": ({}, {"topology": relibra.Topology(2, 2)}, "topology", "1 nodes x 4 ranks",
        "2 nodes x 2 ranks"),
    "rails": ({}, {"topology": IRREGULAR}, "topology", "1 nodes x 4 ranks",
        "Topology(rank_to_node=[0, 0, 0, 0], rank_to_rail=[7, 1, 2, 3])"),
    "domains": (SHARED, {"topology": relibra.Topology(2, 2)}, "topology", "1 nodes x 4 ranks",
        "2 nodes x 2 ranks"),
    "transport": ({}, SHARED, "transport", "'auto'", "'cpu_shm'"),
    "no-shared-memory": (SHARED, {"transport": "dist"}, "transport", "'cpu_shm'", "'dist'"),
    "gpu-transport": ({}, {"transport": "torch_symm"}, "transport", "'auto'", "'torch_symm'"),
    "dispatch": ({}, {"dispatch": "two_hop"}, "dispatch", "'flat'", "'two_hop'"),
    "peer-dispatch": (SHARED, {"dispatch": "peer"}, "dispatch", "'flat'", "'peer'"),
    "combine": ({}, {"combine": "exact"}, "combine", "'reduced'", "'exact'"),
    "grad-mode": ({}, {"grad_mode": "main_grad"}, "grad_mode", "'returned'", "'main_grad'"),
    "block-rows": ({}, {"block_rows": 32}, "block_rows", "16", "32"),
    "replica-slots": ({}, {"replica_slots": 2}, "replica_slots", "1", "2"),
    "shared-slots": (SHARED, {"replica_slots": 2}, "replica_slots", "1", "2"),
    "no-slots": (SHARED, {"replica_slots": 0}, "replica_slots", "1", "0"),
    "no-time-out": ({}, {"timeout_s": None}, "timeout_s", "20 s", "None"),
    "time-out": (SHARED, {"timeout_s": 21}, "timeout_s", "20 s", "21 s"),
    "multicast": (SHARED, {"transport_options": ProviderOptions(multicast=True)},
        "transport_options.multicast", "False", "True"),
    "all-pes": ({}, {"transport_options": ProviderOptions(all_pes_allocate=True)},
        "transport_options.all_pes_allocate", "False", "True"),
}  # fmt: skip
# what rank ODD is given instead, what is wrong with it
WRONG = {
    "topology-of-others": ({"topology": relibra.Topology(1, 8)}, "topology: need 4 ranks as in"),
    "no-topology": ({"topology": 4}, "topology: need a Topology, got int"),
    "unknown-transport": ({"transport": "nccl"}, "transport: need one of 'auto', 'dist'"),
    "no-transport": ({"transport": ["dist"]}, "transport: need one of 'auto', 'dist'"),
    "local-transport": (
        {"transport": "local"},
        'group: need None with transport="local", got a ProcessGroup',
    ),
    "combine": ({"combine": "sum"}, "combine: need one of"),
    "grad-mode": ({"grad_mode": "bf16"}, "grad_mode: need one of"),
    "kernels": ({"kernels": "cutlass"}, "kernels: need one of"),
    "dispatch": ({"dispatch": "three_hop"}, "dispatch: need one of"),
    "peer-over-nodes": (
        {"topology": relibra.Topology(2, 2), "dispatch": "peer"},
        'dispatch: "peer" needs all ranks on one node',
    ),
    "replica-slots": ({"replica_slots": -1}, "replica_slots: need at least 0, got -1"),
    "block-rows": ({"block_rows": "16"}, "block_rows: need an integer"),
    "time-out": ({"timeout_s": -1}, "timeout_s: need more than 0"),
    "transport-options": ({"transport_options": 3}, "transport_options: need ProviderOptions"),
}


def outcome(call):
    """How a call ended, and the seconds it took."""
    start = time.perf_counter()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - start
    return "no error", time.perf_counter() - start


def make(rank, common, odd):
    given = {"topology": WORLD.topology, "timeout_s": 20.0, **common}
    return relibra.Runtime(dist.group.WORLD, **(given | odd if rank == ODD else given))


def train(runtime, model, rank, world=WORLD):
    x, scores, dy = world.batch(rank, 0)
    with runtime.step(world.random_plan(), {"train": world.routes(rank)}) as step:
        with step.forward(micro_batch=0):
            y = model(x, scores)
        y.backward(dy)


def run_live(model, rank):
    x, scores, _ = WORLD.batch(rank, 0)
    model(x, scores, torch.from_numpy(WORLD.ids(rank, 0)).long())


def construct_all(rank, num_ranks):
    """All cases over one group, one after the other, and a runtime that works after them."""
    found = {}
    for name, (common, odd, *_) in DIFFERENT.items():
        found["different", name] = outcome(lambda c=common, o=odd: make(rank, c, o))
    for name, (odd, _) in WRONG.items():
        found["wrong", name] = outcome(lambda o=odd: make(rank, {}, o))
    num_groups = len(dist.distributed_c10d._world.pg_map)
    with make(rank, {}, {}) as runtime:
        model = Model(WORLD, rank, num_ranks)
        runtime.attach(model)
        train(runtime, model, rank)
    return found, num_groups


@pytest.fixture(scope="module")
def constructed():
    return run_ranks(4, construct_all, group_timeout=30.0)


@pytest.mark.parametrize("case", DIFFERENT)
def test_an_argument_that_differs_is_named_with_all_values(case, constructed):
    *_, argument, usual, other = DIFFERENT[case]
    values = ", ".join(f"rank {rank}: {other if rank == ODD else usual}" for rank in range(4))
    need = f"PlanError: relibra.Runtime: need the same {argument} on all ranks, got {values}"
    for found, _ in constructed:
        message, seconds = found["different", case]
        assert message == need
        assert seconds < SOON_S


@pytest.mark.parametrize("case", WRONG)
def test_peers_hear_what_one_rank_was_given_wrong(case, constructed):
    _, wrong = WRONG[case]
    for rank, (found, _) in enumerate(constructed):
        message, seconds = found["wrong", case]
        told = rf"PlanError: relibra.Runtime: refused by rank\(s\) \[{ODD}\]; rank {ODD}: "
        start = "" if rank == ODD else told
        assert re.match(rf"{start}(TypeError|ValueError|PlanError): {re.escape(wrong)}", message)
        assert seconds < SOON_S


def test_refused_runtimes_leave_no_group_and_no_memory(constructed):
    assert [num_groups for _, num_groups in constructed] == [1] * 4
    assert leaked_segments() == []


def other_world(**changes):
    return lambda rank, _: (Model(dataclasses.replace(WORLD, **changes), rank, 4), {})


def frozen(_, model):
    return model.requires_grad_(False), {}


def another_activation(rank, _):
    made = relibra.BalancedMoE(
        8, 16, 16, layer=1, num_ranks=4, rank=rank,
        options=relibra.LayerOptions(activation="clamped_swiglu"),
    )  # fmt: skip
    return made, {}


# what rank ODD attaches: (model and options from its rank and the usual model), the message
MODELS = {
    "one-layer-more": (other_world(num_layers=2), "layer numbers", "1", "1-2"),
    "number-of-experts": (other_world(num_experts=16), "number of experts", "8", "16"),
    "hidden-size": (other_world(hidden=32), "sizes and dtypes of the expert weights",
        "w13 (32, 16) float32 cpu, w2 (16, 16) float32 cpu",
        "w13 (32, 32) float32 cpu, w2 (32, 16) float32 cpu"),
    "dtype": (lambda _, model: (model.bfloat16(), {}), "sizes and dtypes of the expert weights",
        "w13 (32, 16) float32 cpu, w2 (16, 16) float32 cpu",
        "w13 (32, 16) bfloat16 cpu, w2 (16, 16) bfloat16 cpu"),
    "options": (another_activation, "options of the layers", "default",
        "activation='clamped_swiglu'"),
    "frozen": (frozen, "trainable expert weights", "w13 w2", "none"),
    "name": (lambda _, model: (model, {"name": "ref"}), "name", "'actor'", "'ref'"),
    "optimizer": (
        lambda _, model: (model, {"optimizer": torch.optim.SGD(model.parameters(), 0.1)}),
        "optimizer", "None", "SGD"),
}  # fmt: skip


def attach_all(rank, num_ranks, transport):
    """All cases on one runtime, which works after them."""
    found = {}
    runtime = make(rank, {"transport": transport, "replica_slots": 1}, {})
    for name, (change, *_) in MODELS.items():
        model, options = Model(WORLD, rank, num_ranks), {}
        if rank == ODD:
            model, options = change(rank, model)
        found[name] = outcome(lambda m=model, o=options: runtime.attach(m, **o))
        assert not runtime.attachments
        assert not any(getattr(part, "is_attached", False) for part in model.modules())
        assert not model._forward_hooks
    nothing = torch.nn.Linear(2, 2) if rank == ODD else Model(WORLD, rank, num_ranks)
    found["no layers"] = outcome(lambda: runtime.attach(nothing))
    model = Model(WORLD, rank, num_ranks)
    runtime.attach(model)
    train(runtime, model, rank)
    if rank == ODD:
        model.layers[0].w13.requires_grad_(False)
    found["frozen later", "step"] = outcome(lambda: train(runtime, model, rank))
    found["frozen later", "live"] = outcome(lambda: run_live(model, rank))
    if rank == ODD:
        found["diverged"] = outcome(lambda: runtime.attach(Model(WORLD, rank, 4), name="ref"))
    else:
        found["diverged"] = outcome(lambda: train(runtime, model, rank))
    model.requires_grad_(True)
    train(runtime, model, rank)
    runtime.close()
    return found


@pytest.fixture(scope="module", params=["dist", "cpu_shm"])
def attached(request):
    return run_ranks(4, attach_all, request.param, group_timeout=30.0)


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_differs_is_refused_on_every_rank(case, attached):
    _, fact, usual, other = MODELS[case]
    values = ", ".join(f"rank {rank}: {other if rank == ODD else usual}" for rank in range(4))
    for found in attached:
        message, seconds = found[case]
        assert message == f"PlanError: attach: need the same {fact} on all ranks, got {values}"
        assert seconds < SOON_S


def test_peers_hear_that_one_rank_has_no_moe_layers(attached):
    for rank, found in enumerate(attached):
        told = "" if rank == ODD else f"PlanError: attach: refused by rank(s) [{ODD}]; rank {ODD}: "
        message, seconds = found["no layers"]
        assert message == f"{told}ValueError: model: need at least one BalancedMoE layer, got none"
        assert seconds < SOON_S


@pytest.mark.parametrize("use", ["step", "live"])
def test_weights_that_one_rank_froze_later_are_named_at_their_next_use(attached, use):
    values = ", ".join(f"rank {rank}: {'w2' if rank == ODD else 'w13 w2'}" for rank in range(4))
    for found in attached:
        message, seconds = found["frozen later", use]
        assert f"need the same trainable expert weights on all ranks, got {values}" in message
        assert seconds < SOON_S


def test_a_rank_that_attaches_while_the_others_train_is_named(attached):
    there = "optimizer step 0 of model 'actor'"
    values = ", ".join(f"rank {rank}: {'attach' if rank == ODD else there}" for rank in range(4))
    for found in attached:
        message, seconds = found["diverged"]
        assert f"need the same operation on all ranks, got {values}" in message
        assert seconds < SOON_S


def without_memory(rank, num_ranks):
    """One rank has no memory for its replica slots."""

    def refused(*_):
        raise MemoryError("no memory for 8 EB")

    with make(rank, {}, {}) as runtime:
        if rank == ODD:
            runtime.buffers.weights = refused
        model = Model(WORLD, rank, num_ranks)
        return outcome(lambda: runtime.attach(model))


def test_peers_hear_that_one_rank_has_no_memory_for_replicas():
    for rank, (message, seconds) in enumerate(run_ranks(4, without_memory)):
        told = "" if rank == ODD else f"PlanError: attach: refused by rank(s) [{ODD}]; rank {ODD}: "
        assert message == f"{told}MemoryError: no memory for 8 EB"
        assert seconds < SOON_S


def own_choices(rank, num_ranks):
    """What ranks may choose for themselves."""
    options = ProviderOptions(nvshmem_is_free=True, cuda=CudaOptions(push="sm"))
    odd = {"kernels": "reference", "transport_options": options, "timeout_s": np.float32(20)}
    with make(rank, SHARED, odd) as runtime:
        model = Model(WORLD, rank, num_ranks)
        runtime.attach(model)
        train(runtime, model, rank)
    return True


def test_kernels_and_the_options_of_a_gpu_are_each_rank_s_own():
    assert all(run_ranks(4, own_choices))


def two_expert_groups(rank, num_ranks):
    """Two stages of a pipeline: each has its own settings, and one its own trouble."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage, place = divmod(rank, 2)
    world = World(1, 2, num_experts=8, top_k=2, num_layers=1 + stage)
    slots = 1 + stage * place
    call = outcome(
        lambda: relibra.Runtime(pairs[stage], world.topology, replica_slots=slots, timeout_s=20.0)
    )
    combine = ("exact", "reduced")[stage]
    with relibra.Runtime(pairs[stage], world.topology, combine=combine) as runtime:
        model = Model(world, place, 2)
        runtime.attach(model)
        train(runtime, model, place, world)
    return call[0]


def test_only_ranks_of_one_expert_parallel_group_must_agree():
    need = "relibra.Runtime: need the same replica_slots on all ranks, got rank 0: 1, rank 1: 2"
    assert run_ranks(4, two_expert_groups) == ["no error"] * 2 + [f"PlanError: {need}"] * 2


def different_ends(rank, num_ranks):
    text = 5000 * "é" + str(rank)
    return outcome(lambda: agreement.agree(dist.group.WORLD, {"text": text}, what="a step"))[0]


def test_texts_that_differ_only_at_their_end_are_different():
    for message in run_ranks(2, different_ends):
        match = re.fullmatch(
            r"PlanError: a step: need the same text on all ranks, got "
            r"rank 0: é+\.\.\. \(CRC-32 (\w{8})\), rank 1: é+\.\.\. \(CRC-32 (\w{8})\)",
            message,
        )
        assert match
        assert match[1] != match[2]


def test_of_many_ranks_the_odd_ones_are_listed_first():
    values = [[4 if rank in (37, 40) else 3] for rank in range(64)]
    need = "got rank(s) 37, 40: 4, rank(s) 0, 1, 2, 3, 4, 5, 6, 7 and 54 more: 3"
    with pytest.raises(relibra.PlanError, match=re.escape(need)):
        agreement.check_agreement("a step", [None] * 64, ["slots"], values)


class Wordless(str):
    """A name, or a transport, that cannot even be shown."""

    __slots__ = ()

    def __repr__(self):
        raise LookupError("no words")

    __str__ = __repr__


HUGE = 10**5000  # more digits than Python prints
ABSURD = {
    "time-out-beyond-floats": ({"timeout_s": HUGE}, "OverflowError: int too large"),
    "time-out-without-words": ({"timeout_s": Wordless("1")}, "LookupError: no words"),
    "transport-without-words": ({"transport": [Wordless("dist")]}, "LookupError: no words"),
}


def construct_absurd(rank, num_ranks):
    found = {name: outcome(lambda o=odd: make(rank, {}, o)) for name, (odd, _) in ABSURD.items()}
    found["slots"] = outcome(lambda: make(rank, {}, {"replica_slots": HUGE}))
    with make(rank, {}, {}) as runtime:
        name = Wordless("actor") if rank == ODD else "actor"
        model = Model(WORLD, rank, num_ranks)
        found["name"] = outcome(lambda: runtime.attach(model, name=name))
        runtime.attach(model)
        train(runtime, model, rank)
    return found


def test_values_that_cannot_be_sent_or_shown_keep_nobody_waiting():
    need = {**{name: text for name, (_, text) in ABSURD.items()}, "name": "LookupError: no words"}
    for rank, found in enumerate(run_ranks(4, construct_absurd)):
        assert all(seconds < SOON_S for _, seconds in found.values())
        slots = found.pop("slots")[0]
        assert (
            "need the same replica_slots on all ranks, got rank 0: 1, rank 1: 1, rank 2: 0x"
            in slots
        )
        for name, (message, _) in found.items():
            told = "" if rank == ODD else f"refused by rank(s) [{ODD}]; rank {ODD}: "
            assert f"{told}{need[name]}" in message
