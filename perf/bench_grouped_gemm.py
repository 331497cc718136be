"""The GEMM kernels of a MoE layer, each alone, beside grouped and dense GEMMs on the same rows.

    python perf/bench_grouped_gemm.py [--smoke] [--full] [--json FILE] [--plot FILE]
    TRITON_INTERPRET=1 python perf/bench_grouped_gemm.py --backend triton     (gate only)

Kernels: F1 gather + GEMM + SwiGLU, F2 and B3 plain grouped GEMMs, B1 gather + GEMM + gradient of
SwiGLU, B2 both weight gradients into fp32. Each runs as a rank has its weights, with all of them in
the home tensor ("all home"), and with every second tile read from the replica tensor. Everything
must agree with an fp32 reference before a time is printed. The bound is the larger of operations
over a dense matmul's rate and bytes over a copy's rate, both measured in the same run.

Without a GPU: small sizes and CPU bodies; those times say nothing about a GPU.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from kernel_baselines import installed, torch_gemm, triton_kernels_gemm
from kernel_layer import down_backward, expert_up, ops, wgrad
from kernel_report import Bench, Candidate, Group
from kernel_shapes import LayerProblem, costs, reference

KINDS = {"relibra": "", "relibra, all home": "all home", "relibra, half replica": "half"}

Result = Sequence[torch.Tensor]
Make = Callable[["Inputs"], Callable[[], Result]]


class Inputs:
    """One buffer: a problem and the inputs of its kernels, with and without padding."""

    def __init__(self, p: LayerProblem, ref: dict[str, torch.Tensor]) -> None:
        self.p = p
        self.rows = {name: ref[name].to(p.dtype) for name in ("h", "a", "dh", "scored")}
        self.padded = {name: p.padded(rows) for name, rows in self.rows.items()}
        self.tables = {
            kind: dataclasses.replace(p.tables, tiles=p.tiles(kind)) for kind in KINDS.values()
        }
        t = p.tables
        self.score = ops.row_scores(p.scores, t.row_to_choice, t.token_choice_to_row, p.backend)
        self.compact_score = p.scores.reshape(-1)[p.compact_spot, None]
        self.grad13, self.grad2 = torch.zeros_like(p.grad13), torch.zeros_like(p.grad2)

    def up(self, kind: str) -> Result:
        return expert_up(self.p, self.tables[kind], kind)

    def gemm(self, kind: str) -> Result:
        p = self.p
        rows, tiles = self.padded["a"], self.tables[kind].tiles
        return [ops.grouped_gemm(rows, *p.weights(kind)[1], tiles, p.block_rows, False, p.backend)]

    def dgrad(self, kind: str) -> Result:
        p = self.p
        rows, tiles = self.padded["dh"], self.tables[kind].tiles
        weights = p.weights(kind)[0]
        return [ops.grouped_gemm_dgrad(rows, *weights, tiles, p.block_rows, False, p.backend)]

    def down_backward(self, kind: str) -> Result:
        return down_backward(self.p, self.tables[kind], self.padded["h"], self.score, kind)

    def wgrad(self) -> Result:
        p = self.p
        wgrad(p, p.tables, self.padded["dh"], self.padded["scored"])
        return [p.grad13, p.grad2]

    def torch_up(self) -> Result:
        p = self.p
        h = torch_gemm(p.x[p.compact_token], p.w13, p.offsets)
        gate, up = h.chunk(2, 1)
        return [h, F.silu(gate) * up]

    def torch_down_backward(self) -> Result:
        p = self.p
        g = F.grouped_mm(p.dy[p.compact_token], p.w2, offs=p.offsets).float()
        gate, up = self.rows["h"].float().chunk(2, 1)
        sigmoid = gate.sigmoid()
        a, da = gate * sigmoid * up, g * self.compact_score
        d_gate = da * up * sigmoid * (1 + gate * (1 - sigmoid))
        dh = torch.cat([d_gate, da * gate * sigmoid], 1).to(p.dtype)
        return [dh, (a * self.compact_score).to(p.dtype), (g * a).sum(1)]

    def torch_wgrad(self) -> Result:
        p, token = self.p, self.p.compact_token
        dh, scored = self.rows["dh"], self.rows["scored"]
        self.grad13 += F.grouped_mm(dh.T, p.x[token], offs=p.offsets)
        self.grad2 += F.grouped_mm(p.dy[token].T, scored, offs=p.offsets)
        return [self.grad13, self.grad2]

    def reset(self) -> None:
        self.p.reset()
        self.grad13.zero_()
        self.grad2.zero_()

    def dense(self, depth: int, width: int) -> Callable[[], Result]:
        """As many operations against one weight."""
        p = self.p
        rows = torch.randn(p.num_real, depth, device=p.device).to(p.dtype)
        weight = torch.randn(depth, width, device=p.device).to(p.dtype)
        return lambda: [rows @ weight]


def gemm_groups(bench: Bench, problems: list[LayerProblem], others: Sequence[str]) -> list[Group]:
    """The five kernels."""
    p, ref = problems[0], reference(problems[0])
    buffers = [Inputs(each, ref) for each in problems]
    rates, d, f = bench.rates, p.shape.hidden, p.shape.expert

    def candidate(name: str, make: Make, padded: bool = False, is_bound: bool = False) -> Candidate:
        runs = [make(each) for each in buffers]
        return Candidate(name, runs, padded, buffers[0].reset, is_bound)

    def ours(method: str) -> list[Candidate]:
        def make(kind: str) -> Make:
            return lambda b: lambda: getattr(b, method)(kind)

        return [candidate(name, make(kind), padded=True) for name, kind in KINDS.items()]

    def dense(depth: int, width: int) -> Candidate:
        return candidate("dense matmul", lambda b: b.dense(depth, width), is_bound=True)

    def torchs(method: str) -> Candidate:
        return candidate("torch grouped_mm", lambda b: getattr(b, method))

    def plain(rows: str, weight: Callable[[LayerProblem], torch.Tensor]) -> list[Candidate]:
        def torch_run(b: Inputs) -> Callable[[], Result]:
            return lambda: [torch_gemm(b.rows[rows], weight(b.p), b.p.offsets)]

        def triton_run(b: Inputs) -> Callable[[], Result]:
            return lambda: [triton_kernels_gemm(b.p, b.rows[rows], weight(b.p))]

        found = [candidate("torch grouped_mm", torch_run)]
        if "triton_kernels" in others:
            found.append(candidate("triton_kernels", triton_run))
        return found

    wgrad_run = candidate("relibra", lambda b: b.wgrad)
    wanted = {
        "F1 expert_up": (["h", "a"], [*ours("up"), torchs("torch_up"), dense(d, 2 * f)]),
        "F2 grouped_gemm": (["y"], [*ours("gemm"), *plain("a", lambda q: q.w2), dense(f, d)]),
        "B1 expert_down_backward": (
            ["dh", "scored", "dscore"],
            [*ours("down_backward"), torchs("torch_down_backward"), dense(d, f)],
        ),
        "B3 grouped_gemm_dgrad": (
            ["dx"],
            [*ours("dgrad"), *plain("dh", lambda q: q.w13.transpose(1, 2)), dense(2 * f, d)],
        ),
        "B2 expert_wgrad": (["dw13", "dw2"], [wgrad_run, torchs("torch_wgrad")]),
    }
    parts = costs(p)
    return [
        Group(
            name,
            [ref[key] for key in keys],
            candidates,
            parts[name].flops,
            parts[name].bound_us(*rates),
        )
        for name, (keys, candidates) in wanted.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    bench = Bench("grouped_gemm", __doc__, arguments)
    others = [] if bench.gate_only else installed()
    bench.run(lambda problems: gemm_groups(bench, problems, others))


if __name__ == "__main__":
    main()
