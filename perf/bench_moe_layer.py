"""Forward and backward of a rank's part of a MoE layer, beside what else computes it.

    python perf/bench_moe_layer.py [--smoke] [--full] [--json FILE] [--plot FILE]
    TRITON_INTERPRET=1 python perf/bench_moe_layer.py --backend triton     (gate only)
    python perf/bench_moe_layer.py --host [--ranks 1 2] [--rounds N] [--json FILE]

With --host nothing of this: the time that Python takes for a planned layer of `relibra.BalancedMoE`
and its backward, by part, with no device behind it; see `layer_host`.

Forward: F1 gather + GEMM + SwiGLU, F2 GEMM, F3 weighted sum, F4 sum at the source. Backward: B1,
B3, B4, B5, B2 into fp32 main_grad. One stream, launched by the host; transfers between ranks are
left out. "forward, tables built" also builds every index table from ids, which a plan moves off
the critical path. FLOPs are 6 and 12 * real rows * D * F. The bound adds up, kernel by kernel, the
larger of operations over a dense matmul's rate and bytes over a copy's rate, both measured in the
same run. Everything must agree with an fp32 reference before a time is printed.

Without a GPU: small sizes and CPU bodies; those times say nothing about a GPU.
"""

import sys
from collections.abc import Callable, Sequence

import layer_host
import torch
from kernel_baselines import Pipeline, installed
from kernel_layer import backward, build_tables, forward
from kernel_report import Bench, Candidate, Group
from kernel_shapes import LayerProblem, costs, reference, total

import relibra

# TFLOP/s of forward with its tables, and of backward, on an H200.
MUST = {
    "Qwen3-30B-A3B": (520, 450),
    "Qwen3-235B-A22B": (560, 500),
    "GLM-4.5-Air": (560, 500),
    "DeepSeek-V3": (580, 530),
}

Result = Sequence[torch.Tensor]


def relibra_forward(p: LayerProblem, built: bool) -> Callable[[], Result]:
    return lambda: [forward(p, build_tables(p) if built else p.tables)[0]]


def relibra_backward(p: LayerProblem) -> Callable[[], Result]:
    h = forward(p, p.tables)[1]
    return lambda: backward(p, p.tables, h)


def pipeline_forward(pipeline: Pipeline, built: bool) -> Callable[[], Result]:
    def run() -> Result:
        if built:
            pipeline.build()
        return pipeline.forward()

    return run


def balanced_step(p: LayerProblem) -> Callable[[], Result]:
    """`relibra.BalancedMoE` with a rank's slots as its experts: from ids to gradients."""
    moe = relibra.BalancedMoE.from_dense(p.w13, p.w2, layer=0).to(p.device)
    runtime = relibra.Runtime(combine="reduced", replica_slots=0)
    runtime.attach(moe)
    x, scores = (t.detach().requires_grad_() for t in (p.x, p.scores))

    def run() -> Result:
        y = moe(x, scores, p.ids)
        dx, ds, dw13, dw2 = torch.autograd.grad(y, [x, scores, moe.w13, moe.w2], p.dy)
        return [ds, dw13, dw2]

    run.keep = runtime  # type: ignore[attr-defined]  # the layer holds only a weak reference
    return run


def step(p: LayerProblem) -> Callable[[], Result]:
    """The same on the ops alone."""

    def run() -> Result:
        p.reset()
        tables = build_tables(p)
        _, h = forward(p, tables)
        return backward(p, tables, h)[1:]

    return run


def layer_groups(bench: Bench, problems: list[LayerProblem], others: Sequence[str]) -> list[Group]:
    """Forward with and without tables, backward, and on a CPU the whole step."""
    p, ref = problems[0], reference(problems[0])
    parts = costs(p)
    names = ["torch grouped_mm", *others]
    pipelines = {name: [Pipeline(each, name) for each in problems] for name in names}

    def ahead(built: bool) -> list[Candidate]:
        ours = Candidate("relibra", [relibra_forward(each, built) for each in problems])
        return [ours] + [
            Candidate(name, [pipeline_forward(each, built) for each in copies])
            for name, copies in pipelines.items()
        ]

    def back() -> list[Candidate]:
        ours = Candidate("relibra", [relibra_backward(q) for q in problems], reset=p.reset)
        return [ours] + [
            Candidate(name, [each.backward for each in copies], reset=copies[0].reset)
            for name, copies in pipelines.items()
            if copies[0].has_backward
        ]

    gradients = [ref["dx_sum"], ref["dscores"], ref["dw13"], ref["dw2"]]
    up, down = (total(parts, letter, bench.rates) for letter in "FB")
    must = MUST.get(p.shape.model, (None, None))
    found = [
        Group("forward", [ref["out"]], ahead(False), *up),
        Group("forward, tables built", [ref["out"]], ahead(True), *up, must[0]),
        Group("backward", gradients, back(), *down, must[1]),
    ]
    if not bench.on_gpu and not bench.gate_only:
        both = [
            Candidate("relibra, ops", [step(p)]),
            Candidate("relibra.BalancedMoE", [balanced_step(p)]),
        ]
        costs_of_both = up[0] + down[0], up[1] + down[1]
        found.append(Group("step, tables built", gradients[1:], both, *costs_of_both))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    if "--host" in given:
        layer_host.main(given)
        return
    bench = Bench("moe_layer", __doc__, arguments)
    others = [] if bench.gate_only else installed()
    bench.run(lambda problems: layer_groups(bench, problems, others))


if __name__ == "__main__":
    main()
