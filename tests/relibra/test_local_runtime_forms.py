"""All ranks in one process, in every form that a layer can be called in."""

import dataclasses

import numpy as np
import pytest
import torch
from fake_cuda import FakeLibrary, FakeStreams
from local_world import all_routes, joined_batch, make_local
from moe_world import World, check, references
from torch.utils.checkpoint import checkpoint

import relibra
from relibra.local_rank import LocalRank
from relibra_kernels.transport import sync_engine_cuda
from relibra_kernels.transport.cuda_options import CudaOptions
from relibra_kernels.transport.provider_choice import ProviderOptions
from relibra_kernels.transport.sync_engine_cuda import CudaEngine
from relibra_kernels.transport.sync_engine_local import LocalEngine

WORLD = World(
    1, 4, num_experts=8, top_k=2, num_layers=2, tokens=9, replica_slots=2, dtype=torch.float64
)
PLAN = WORLD.random_plan(fill=1.0, reorder=False)


def run(call, world=WORLD, plan=PLAN, prepare=None, model_options=None, **options):
    """Output and all gradients of one step; ``call(step, model, x, scores)``."""
    runtime, model = make_local(world, **options)
    if model_options is not None:
        for moe in model.layers:
            moe.options = model_options
    x, scores, dy = joined_batch(world, 0)
    found = None if prepare is None else prepare(model)
    with runtime, runtime.step(plan, {"train": all_routes(world)}) as step:
        with step.forward(micro_batch=0):
            y = call(step, model, x, scores)
        y.backward(dy)
    grads = (
        [getattr(p, "main_grad", p.grad) for p in model.parameters()] if found is None else found
    )
    return [y.detach(), x.grad, scores.grad, *grads]


def plain(step, model, x, scores):
    return model(x, scores)


def assert_equal(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def expected():
    """What the module gives, which `test_local_runtime` compares with the dense reference."""
    found = run(plain)
    check(found[0], torch.cat([one.y[0] for one in references(WORLD)]), "y")
    return found


def in_stages(step, model, x, scores):
    for place, moe in enumerate(model.layers):
        x = x + moe.start(x, scores[place]).compute().wait()
    return x


def functional(dispatched, wait):
    def call(step, model, x, scores):
        for place, moe in enumerate(model.layers):
            handle, mine = step.handle(moe.layer), scores[place]
            sent = relibra.dispatch(x, mine, handle=handle) if dispatched else None
            y = relibra.balanced_moe(
                x, mine, moe.w13, moe.w2, handle=handle, dispatched=sent, wait=wait
            )
            x = x + (y if wait else y.wait())
        return x

    return call


@pytest.mark.parametrize(
    "call", [in_stages, functional(True, True), functional(False, False)], ids=["start", "a", "b"]
)
def test_stages(call, expected):
    assert_equal(run(call), expected)


@pytest.mark.parametrize("save", ["copy", "redispatch"])
@pytest.mark.parametrize("recompute_h", [False, True])
def test_what_is_kept_for_the_backward(save, recompute_h, expected):
    options = relibra.LayerOptions(save=save, recompute_h=recompute_h)
    assert_equal(run(plain, model_options=options), expected)


def test_a_stage_that_is_left_over_is_named():
    def call(step, model, x, scores):
        relibra.dispatch(x, scores[0], handle=step.handle(1))
        return model(x, scores)

    with pytest.raises(RuntimeError, match="layer 1: tokens were dispatched, no balanced_moe took"):
        run(call)


@pytest.mark.parametrize("grad_mode", ["returned", "main_grad"])
def test_one_parameter_an_expert(grad_mode, expected):
    """Fused gradient accumulation marks every parameter, and gets a dummy for it."""
    made = []

    def prepare(model):
        for moe in model.layers:
            fields = [[p.detach().clone().requires_grad_() for p in w] for w in (moe.w13, moe.w2)]
            made.append(tuple(tuple(field) for field in fields))
        if grad_mode == "main_grad":
            for param in (p for layer in made for field in layer for p in field):
                param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(param), False

    def call(step, model, x, scores):
        for place, (moe, fields) in enumerate(zip(model.layers, made, strict=True)):
            handle = step.handle(moe.layer)
            x = x + relibra.balanced_moe(x, scores[place], *fields, handle=handle)
        return x

    found = run(call, prepare=prepare, grad_mode=grad_mode)
    assert_equal(found[:3], expected[:3])
    whole = [torch.stack([getattr(p, "main_grad", p.grad) for p in f]) for one in made for f in one]
    assert_equal(whole, expected[3:])
    if grad_mode == "main_grad":
        assert all(p.grad_added_to_main_grad for one in made for f in one for p in f)


def test_frozen_experts_of_two_ranks(expected):
    frozen = (0, 5)
    runtime, model = make_local(WORLD)
    first, second = model.layers
    w13 = tuple(second.w13.unbind())
    w2 = tuple(
        part.detach().clone().requires_grad_(n not in frozen) for n, part in enumerate(second.w2)
    )
    x, scores, dy = joined_batch(WORLD, 0)
    with runtime.step(PLAN, {"train": all_routes(WORLD)}) as step:
        with step.forward(micro_batch=0):
            h = x + first(x, scores[0])
            y = h + relibra.balanced_moe(h, scores[1], w13, w2, handle=step.handle(second.layer))
        y.backward(dy)
    need = expected[6]
    for expert, part in enumerate(w2):
        assert part.grad is None if expert in frozen else torch.equal(part.grad, need[expert])
    runtime.close()


def test_a_layer_that_is_recomputed_finds_its_micro_batch_by_the_layer_above(expected):
    """The model itself is not called, so that none of its outputs can tell."""

    def call(step, model, x, scores):
        first, second = model.layers
        x = x + checkpoint(first, x, scores[0], use_reentrant=False)
        return x + second(x, scores[1])

    assert_equal(run(call), expected)


def test_frozen_weights_and_inputs():
    def prepare(model):
        model.layers[0].w2.requires_grad_(False)

    def call(step, model, x, scores):
        return model(x, scores.detach() + 0)

    runtime, model = make_local(WORLD)
    prepare(model)
    x, scores, dy = joined_batch(WORLD, 0)
    with runtime.step(PLAN, {"train": all_routes(WORLD)}) as step:
        with step.forward(micro_batch=0):
            y = call(step, model, x.detach(), scores)
        y.backward(dy)
    assert scores.grad is None
    assert model.layers[0].w2.grad is None
    check(model.layers[0].w13.grad, references(WORLD)[0].dw13[0], "dw13")
    runtime.close()


def test_inference_gives_the_tables_back(expected):
    runtime, model = make_local(WORLD)
    x, scores, _ = joined_batch(WORLD, 0)
    with runtime.step(PLAN, {"train": all_routes(WORLD)}) as step:
        for modes in (torch.no_grad(), torch.inference_mode()):
            with modes, step.forward(micro_batch=0):
                assert torch.equal(model(x, scores), expected[0])
            assert [rank.table_memory.num_in_flight for rank in runtime.ranks] == [0] * 4
    runtime.close()


@pytest.mark.slow
@pytest.mark.parametrize("save", ["copy", "redispatch"])
def test_in_a_compiled_graph(save, expected):
    torch._dynamo.reset()

    def call(step, model, x, scores):
        def layers(x, scores):
            for place, moe in enumerate(model.layers):
                x = x + moe(x, scores[place])
            return x

        return torch.compile(layers, fullgraph=True, backend="aot_eager")(x, scores)

    assert_equal(run(call, model_options=relibra.LayerOptions(save=save)), expected)


def test_over_the_engine_of_gpus(expected, monkeypatch):
    """Its streams are threads here that lag behind; the compute stream is the caller."""
    streams = []

    def engine(self, arena, layout, domain):
        streams.append(FakeStreams(lag_s=0.002))
        made = {"library": FakeLibrary(), "streams": streams[-1]}
        inner = CudaEngine(arena, layout, timeout_s=20.0, **made)
        return LocalEngine(inner, self._world.lockstep, arena.words, domain)

    monkeypatch.setattr(LocalRank, "_engine", engine)
    assert_equal(run(plain), expected)
    assert len(streams) == 4
    for one in streams:
        one.close()
        assert not one.errors


def test_transport_options_reach_the_engine_of_gpus(expected, monkeypatch):
    cuda, given, streams = CudaOptions(push="sm", waits="kernel"), [], []

    def engine(arena, layout, **options):
        given.append(options.get("options"))
        streams.append(FakeStreams())
        fakes = {"library": FakeLibrary(), "streams": streams[-1]}
        return CudaEngine(arena, layout, **options, **fakes)

    def on_a_gpu(self, arena, layout, domain):
        with monkeypatch.context() as patch:
            patch.setattr(self._world, "device", torch.device("cuda"))
            return make_engine(self, arena, layout, domain)

    make_engine = LocalRank._engine
    monkeypatch.setattr(sync_engine_cuda, "CudaEngine", engine)
    monkeypatch.setattr(LocalRank, "_engine", on_a_gpu)
    found = run(plain, timeout_s=20.0, transport_options=ProviderOptions(cuda=cuda))
    assert_equal(found, expected)
    assert given == [cuda] * 4
    for one in streams:
        one.close()


class HalfKnown(World):
    """A third of rank 1's rows follow the live router."""

    def routes(self, rank):
        ids = self.ids(rank, 0)
        kind = np.zeros(len(ids), np.uint8)
        if rank == 1:
            kind[::3] = relibra.DispatchRows.KIND_UNKNOWN
        return [relibra.DispatchRows(ids, kind, num_experts=self.num_experts)]


@pytest.mark.parametrize("mode", ["fraction", "online", "home"])
def test_rows_that_follow_the_live_router(mode, expected):
    world = HalfKnown(**dataclasses.asdict(WORLD))
    config = relibra.PlannerConfig(replica_slots=2, proposals=100)
    plan = relibra.plan_step(
        {"train": world.loads()}, world.topology, model=world.shape, config=config
    )
    runtime, model = make_local(world)
    x, scores, dy = joined_batch(world, 0)
    ids = torch.cat([torch.from_numpy(world.ids(rank, 0)) for rank in range(4)]).long()
    routes = {"train": all_routes(world)}
    with runtime.step(plan, routes, unknown_rows=mode, live_passes={"ref": "home"}) as step:
        with step.forward(micro_batch=0, pass_="ref"), torch.no_grad():
            check(model(x, scores, ids), expected[0], "a pass without routes")
        with step.forward(micro_batch=0):
            y = model(x, scores, ids)
        y.backward(dy)
    check(y.detach(), expected[0], "y")
    check(x.grad, expected[1], "dx")
    for param, need in zip(model.layers, references(world)[0].dw13, strict=True):
        check(runtime.gather_experts(param.w13.grad, param.layer), need, "dw13")
    runtime.close()


def test_what_the_host_says_runs_next_is_pushed_ahead():
    runtime, model = make_local(WORLD)
    x, scores, dy = joined_batch(WORLD, 0)
    with runtime.step(PLAN, {"train": all_routes(WORLD)}) as step:
        with step.forward(micro_batch=0):
            step.next(micro_batch=0, direction="backward")
            y = model(x, scores)
        y.backward(dy)
        with pytest.raises(ValueError, match="direction: need one of"):
            step.next(micro_batch=0, direction="sideways")
    ahead = step.report()["layer_2/replica_uses_pushed_ahead"]
    assert ahead == 2 * 4  # its forward and, as said, its backward, on every rank
    runtime.close()
