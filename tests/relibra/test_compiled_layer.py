"""The layer under ``torch.compile(fullgraph=True)``: equal to eager, and one graph for all uses."""

import gc
import threading

import pytest
import torch
import torch._dynamo.testing
from moe_world import Model, World
from torch.utils.checkpoint import checkpoint

import relibra
from relibra.testing.plans import make_plan

WORLD = World(num_layers=2, micro_batches=4, hidden=8, expert=8)


class Run:
    """A model under a runtime whose layers run eagerly or compiled; counts the compiled frames."""

    def __init__(self, compiled, *, wrap=None, world=WORLD, backend="aot_eager", **options):
        torch._dynamo.reset()
        self.world, self.runtime = world, relibra.Runtime(None, world.topology, **options)
        self.model = Model(world, 0, 1)
        self.runtime.attach(self.model)
        self.counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

        def layers(x, scores):
            for place, moe in enumerate(self.model.layers):
                x = x + (wrap or _call)(moe, x, scores[place])
            return x

        self.layers = layers
        if compiled:
            self.layers = torch.compile(layers, fullgraph=True, backend=self.counter)

    def step(self):
        plan = self.world.random_plan()
        return self.runtime.step(plan, {"train": self.world.routes(0)})

    def forward(self, step, m, pass_="train", needs=(True, True)):
        x, scores, dy = self.world.batch(0, m)
        x.requires_grad_(needs[0]), scores.requires_grad_(needs[1])
        with step.forward(micro_batch=m, pass_=pass_):
            return x, scores, dy, self.layers(x, scores)

    def kept(self):
        gc.collect()
        return sum(len(moe._opaque.kept) for moe in self.model.layers)

    def weight_grads(self):
        return [p.grad for p in self.model.parameters()]


def _call(moe, *arguments):
    return moe(*arguments)


def _checkpointed(moe, *arguments):
    return checkpoint(moe, *arguments, use_reentrant=False)


def in_pipeline_order(run):
    """All forwards before the first backward; backwards neither first-in nor last-in first."""
    out = []
    with run.step() as step:
        uses = [run.forward(step, m) for m in range(run.world.micro_batches)]
        held = run.kept()
        for x, scores, dy, y in uses[1::2] + uses[::2]:
            y.backward(dy)
            out += [y.detach(), x.grad, scores.grad]
        del uses, y
    return out + run.weight_grads(), held


def equal(one, two):
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("combine", ["reduced", "exact"])
def test_micro_batches_in_flight_equal_eager_bit_for_bit(combine):
    expected, _ = in_pipeline_order(Run(False, combine=combine))
    run = Run(True, combine=combine)
    got, held = in_pipeline_order(run)
    equal(got, expected)
    assert held == WORLD.micro_batches * WORLD.num_layers
    assert run.kept() == 0
    assert run.counter.frame_count == 2  # the token counts differ: once fixed, once dynamic


@pytest.mark.slow
def test_inductor_equals_eager_bit_for_bit():
    expected, _ = in_pipeline_order(Run(False))
    run = Run(True, backend="inductor")
    equal(in_pipeline_order(run)[0], expected)
    assert run.counter.frame_count == 2


def test_backward_on_another_thread():
    results = []
    for run in (Run(False), Run(True)):
        with run.step() as step:
            x, scores, dy, y = run.forward(step, 1)
            thread = threading.Thread(target=y.backward, args=(dy,))
            thread.start(), thread.join()
        results.append([y.detach(), x.grad, scores.grad, *run.weight_grads()])
    equal(*results)


def test_comm_05_layers_compiled_one_by_one_share_one_graph():
    """A layer number in the graph would be a guard: a new compile for each, an error at the 9th."""
    world, results = World(num_layers=12, hidden=8, expert=8), []
    for compiled in (False, True):
        run = Run(False, world=world)
        for moe in run.model.layers:
            with torch.no_grad():
                moe.w2.mul_(0.01)  # SwiGLU is quadratic: a deep stack would overflow
            if compiled:
                moe.compile(fullgraph=True, backend=run.counter)
        results.append(in_pipeline_order(run)[0])
        assert run.counter.frame_count == compiled
    equal(*results)


@pytest.mark.parametrize("inside", [True, False])
def test_recompute_keeps_nothing_between_forward_and_backward(inside):
    def recomputed(compiled):
        run = Run(compiled and inside, wrap=_checkpointed)
        if compiled and not inside:
            for moe in run.model.layers:
                moe.compile(fullgraph=True, backend=run.counter)
        out = []
        with run.step() as step:
            for m in range(WORLD.micro_batches):
                x, scores, dy = WORLD.batch(0, m)
                x.requires_grad_(), scores.requires_grad_()
                with step.forward(micro_batch=m):
                    y = run.layers(x, scores)
                    assert run.kept() == 0
                    y.backward(dy)
                out += [y.detach(), x.grad, scores.grad]
        assert run.kept() == 0
        return out + run.weight_grads()

    equal(recomputed(True), recomputed(False))


def test_recompute_in_a_whole_compiled_model_asks_for_the_micro_batch():
    run = Run(True, wrap=_checkpointed)
    with run.step() as step:
        _, _, dy, y = run.forward(step, 0)
        with pytest.raises(RuntimeError, match="recomputed in a backward whose micro-batch cannot"):
            y.backward(dy)


class Outer(torch.nn.Module):
    """An eager module around a compiled one: attached, it marks the outputs of each use."""

    def __init__(self, inner, **options):
        super().__init__()
        self.inner, self.run = inner, torch.compile(inner, **options) if options else inner

    def forward(self, *arguments):
        return self.run(*arguments, wrap=_checkpointed)


def test_a_whole_compiled_model_recomputes_the_right_use_below_an_attached_eager_module():
    results = []
    for options in ({}, {"fullgraph": True, "backend": "aot_eager"}):
        torch._dynamo.reset()
        runtime, model = relibra.Runtime(None, WORLD.topology), Outer(Model(WORLD, 0, 1), **options)
        runtime.attach(model)
        out, plan = [], WORLD.random_plan()
        with runtime.step(plan, {"train": WORLD.routes(0)}) as step:
            for m in range(WORLD.micro_batches):
                x, scores, dy = WORLD.batch(0, m)
                x.requires_grad_(), scores.requires_grad_()
                with step.forward(micro_batch=m):
                    y = model(x, scores, torch.from_numpy(WORLD.ids(0, m)))
                out.append((x, scores, dy, y))
            for _, _, dy, y in reversed(out):
                y.backward(dy)
        results.append([t for x, scores, _, y in out for t in (y.detach(), x.grad, scores.grad)])
        results[-1] += [param.grad for param in model.parameters()]
    equal(*results)


def test_the_attached_model_itself_compiled():
    expected, _ = in_pipeline_order(Run(False))
    run = Run(False)
    compiled = torch.compile(run.model, fullgraph=True, backend=run.counter)
    use = iter(range(WORLD.micro_batches))
    run.layers = lambda x, scores: compiled(x, scores, torch.from_numpy(WORLD.ids(0, next(use))))
    equal(in_pipeline_order(run)[0], expected)
    assert run.counter.frame_count == 2


def test_without_gradients_nothing_is_kept():
    results = []
    for run in (Run(False), Run(True)):
        with run.step() as step:
            with torch.no_grad():
                y = run.forward(step, 0)[3]
            assert run.kept() == 0
            assert not step._tables
        results.append([y])
    equal(*results)


def test_two_passes_use_the_same_graph():
    plan = make_plan(
        WORLD.rng(5),
        {"train": WORLD.loads(), "again": WORLD.loads()},
        WORLD.topology,
        WORLD.shape,
        replica_slots=1,
    )
    results = []
    for run in (Run(False), Run(True)):
        routes = {"train": WORLD.routes(0), "again": WORLD.routes(0)}
        out = []
        with run.runtime.step(plan, routes) as step:
            for pass_ in ("train", "again"):
                x, scores, dy, y = run.forward(step, 0, pass_)
                y.backward(dy)
                out += [y.detach(), x.grad, scores.grad]
        results.append(out + run.weight_grads())
        assert run.counter.frame_count <= 1
    equal(*results)


@pytest.mark.parametrize("needs", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("fused", [True, False])
def test_main_grad(fused, needs):
    results = []
    for run in (Run(False, grad_mode="main_grad"), Run(True, grad_mode="main_grad")):
        for param in run.model.parameters():
            param.main_grad = torch.full_like(param, 0.5)
            if fused:
                param.grad_added_to_main_grad = False
        with run.step() as step:
            x, scores, dy, y = run.forward(step, 0, needs=needs)
            y.backward(dy)
        results.append([y.detach(), x.grad, scores.grad])
        results[-1] += [p.main_grad for p in run.model.parameters()]
        for grad in run.weight_grads():
            assert grad is None or not grad.any()
        if fused:
            assert all(p.grad_added_to_main_grad for p in run.model.parameters())
            assert all(grad is not None for grad in run.weight_grads())
        elif any(needs):
            assert run.weight_grads()[-1] is None  # of the last layer: x of it needs a gradient
    equal(*results)


def test_main_grad_of_recomputed_layers():
    results = []
    for compiled in (False, True):
        run = Run(compiled, wrap=_checkpointed, grad_mode="main_grad")
        for param in run.model.parameters():
            param.main_grad = torch.zeros_like(param)
        x, scores, dy = WORLD.batch(0, 0)
        with run.step() as step, step.forward(micro_batch=0):
            run.layers(x.requires_grad_(), scores).backward(dy)
        results.append([x.grad, *(param.main_grad for param in run.model.parameters())])
    equal(*results)


def test_frozen_experts_and_frozen_tokens():
    for frozen in ("weights", "w13", "x"):
        results = []
        for run in (Run(False), Run(True)):
            for name, param in run.model.named_parameters():
                param.requires_grad_(frozen == "x" or not ("w13" in name or frozen == "weights"))
            with run.step() as step:
                x, scores, dy, y = run.forward(step, 0, needs=(frozen != "x", True))
                y.backward(dy)
            results.append([y.detach(), x.grad, scores.grad, *run.weight_grads()])
        equal(*results)


def test_a_graph_that_is_dropped_lets_go_of_what_it_kept():
    run = Run(True)
    step = run.step().__enter__()
    y = run.forward(step, 0)[3]
    assert run.kept() == WORLD.num_layers
    step.__exit__(ZeroDivisionError, ZeroDivisionError(), None)  # as `with` does after an error
    del y
    assert run.kept() == 0


def test_backward_after_the_step_is_refused_as_in_eager():
    run = Run(True)
    with run.step() as step:
        _, _, dy, y = run.forward(step, 0)
    with pytest.raises(RuntimeError, match="layer 2: its training step is not active"):
        y.backward(dy)


def test_a_retained_graph_runs_twice():
    results = []
    for run in (Run(False), Run(True)):
        with run.step() as step:
            x, scores, dy, y = run.forward(step, 0)
            y.backward(dy, retain_graph=True)
            y.backward(dy)
        results.append([x.grad, scores.grad, *run.weight_grads()])
    equal(*results)


def test_wrong_ids_are_found_when_the_graph_runs():
    run = Run(False)
    moe = torch.compile(run.model.layers[0], fullgraph=True, backend=run.counter)
    x, scores, _ = WORLD.batch(0, 0)
    ids = torch.from_numpy(WORLD.ids(0, 0))[:, 0]
    with run.step() as step, step.forward(micro_batch=0):
        with pytest.raises(ValueError, match="need the replayed ids of optimizer step 0, train"):
            moe(x, scores[0], (ids + 1) % 8)
        with pytest.raises(ValueError, match=r"x: need 24 tokens, as routed for .*, got 23"):
            moe(x[1:], scores[0, 1:])
        moe(x, scores[0], ids)
        run.model.layers[1](x, scores[1])


def test_the_graph_has_no_other_inputs_than_the_layer_and_its_arguments():
    shapes = []

    def backend(graph, inputs):
        shapes.extend((t.dtype, tuple(t.shape)) for t in inputs if isinstance(t, torch.Tensor))
        return graph

    run = Run(False, grad_mode="main_grad")
    for param in run.model.parameters():
        param.main_grad = torch.zeros_like(param)
    moe, (x, scores, _) = run.model.layers[0], WORLD.batch(0, 0)
    compiled = torch.compile(moe, fullgraph=True, backend=backend)
    with run.step() as step, step.forward(micro_batch=0):
        compiled(x, scores[0]), run.model.layers[1](x, scores[1])
    given = [x, scores[0], moe.w13, moe.w2, moe._layer_id]
    assert sorted(map(str, shapes)) == sorted(str((t.dtype, tuple(t.shape))) for t in given)


def test_a_graph_of_another_grad_mode_is_refused():
    run = Run(False, grad_mode="main_grad")
    moe = run.model.layers[0]
    moe._grads_to_main = False
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    x, scores, _ = WORLD.batch(0, 0)
    y = compiled(x, scores[0], torch.from_numpy(WORLD.ids(0, 0))[:, 0])
    with pytest.raises(RuntimeError, match="live use of layer 1: compiled for weight gradients to"):
        y.sum().backward()
