"""Forward and backward of one MoE layer on the CPU, all experts in this process.

Side by side in one run: a loop over experts, a pipeline on torch's grouped GEMM, and
`relibra.BalancedMoE` in both combine modes, tables built in every call. Before any time is printed
the outputs and gradients of all of them must agree.

    python perf/bench_moe_layer.py [--smoke] [--json FILE]
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from harness import measure, write_lines

import relibra
from relibra_kernels.reference.moe import dense_moe
from relibra_kernels.testing.compare import calc_diff

# tokens, experts, choices, model dim, expert dim
CASES = {
    "small": (512, 32, 4, 256, 256),
    "fine-grained": (1024, 128, 8, 256, 96),
    "wide": (512, 8, 2, 512, 1024),
}
SMOKE = {"smoke": (64, 8, 2, 32, 32)}


def grouped_pipeline(x, ids, scores, w13, w2):
    """Sort by expert, two grouped GEMMs, weighted sum: what a torch user writes today."""
    num_choices = ids.shape[1]
    order = torch.argsort(ids.reshape(-1), stable=True)
    offsets = torch.bincount(ids.reshape(-1), minlength=w13.shape[0]).cumsum(0).to(torch.int32)
    rows = x[order // num_choices]
    h = F.grouped_mm(rows, w13.transpose(1, 2), offs=offsets)
    gate, up = h.chunk(2, -1)
    y = F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offsets)
    y = y * scores.reshape(-1)[order, None]
    return torch.zeros_like(x).index_add(0, order // num_choices, y)


def make_case(tokens, experts, choices, hidden, expert):
    """Inputs of order one, popularity of experts log-normal."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    heat = normal(experts)
    ids = (heat - torch.empty(tokens, experts).exponential_(generator=generator).log()).topk(
        choices
    )
    return {
        "x": normal(tokens, hidden).requires_grad_(),
        "ids": ids.indices,
        "scores": torch.rand(tokens, choices, generator=generator).requires_grad_(),
        "w13": normal(experts, 2 * expert, hidden).mul_(hidden**-0.5).requires_grad_(),
        "w2": normal(experts, hidden, expert).mul_(expert**-0.5).requires_grad_(),
        "dy": normal(tokens, hidden),
    }


def candidates(case):
    """Name -> function that returns the output and all gradients."""
    leaves = [case[name] for name in ("x", "scores", "w13", "w2")]
    x, scores, w13, w2 = leaves

    def grads(y, wanted):
        return [y.detach(), *torch.autograd.grad(y, wanted, case["dy"])]

    def balanced(combine):
        moe = relibra.BalancedMoE.from_dense(w13.detach(), w2.detach(), layer=0)
        runtime = relibra.Runtime(combine=combine, replica_slots=0)
        runtime.attach(moe)

        def run():
            return grads(moe(x, scores, case["ids"]), [x, scores, moe.w13, moe.w2])

        run.keep = runtime  # the layer holds only a weak reference
        return run

    return {
        "expert loop": lambda: grads(dense_moe(x, case["ids"], scores, w13, w2), leaves),
        "torch grouped_mm": lambda: grads(
            grouped_pipeline(x, case["ids"], scores, w13, w2), leaves
        ),
        "relibra reduced": balanced("reduced"),
        "relibra exact": balanced("exact"),
    }


def check(functions):
    """The correctness gate: every candidate equals the expert loop."""
    expected = functions["expert loop"]()
    for name, run in functions.items():
        for place, (got, need) in enumerate(zip(run(), expected, strict=True)):
            diff = calc_diff(got, need)
            if not diff < 1e-11:
                sys.exit(f"error: {name}: tensor {place} differs, calc_diff {diff:.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one tiny case, two rounds")
    parser.add_argument("--json", metavar="FILE", help="append one JSON line a result")
    args = parser.parse_args()
    rows = []
    for case_name, sizes in (SMOKE if args.smoke else CASES).items():
        functions = candidates(make_case(*sizes))
        check(functions)
        times = measure(functions, rounds=2 if args.smoke else 15)
        base = times["torch grouped_mm"]["median_us"]
        print(f"{case_name}: T, E, K, D, F = {sizes}; fp32, forward + backward, measured on CPU")
        for name, value in times.items():
            ratio = value["median_us"] / base
            print(
                f"  {name:18} {value['median_us'] / 1e3:8.2f} ms "
                f"(p10 {value['p10_us'] / 1e3:.2f}, p90 {value['p90_us'] / 1e3:.2f}), "
                f"{ratio:.2f} x torch grouped_mm"
            )
            rows.append({"bench": "moe_layer", "case": case_name, "name": name, **value})
    write_lines(args.json, rows)


if __name__ == "__main__":
    main()
