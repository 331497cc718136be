"""What else computes a MoE layer, in the same process and on the same rows.

Each baseline gets all weights of a rank in one tensor, which spares it the copy from home and
replica storage. What is not installed, or fails, is named in one line; nothing falls back.
"""

import importlib
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from kernel_shapes import LayerProblem

Gemm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # rows, weight number 0 or 1
PACKAGES = {
    "Liger fused_moe": "liger_kernel",
    "TransformerEngine": "transformer_engine",
    "triton_kernels": "triton_kernels",
}


def installed() -> list[str]:
    """Baselines whose package is there; prints a line for each that is absent."""
    found = []
    for name, package in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name}: not installed (package {package}), left out")
        else:
            found.append(name)
    return found


def torch_gemm(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.grouped_mm` on compact rows."""
    return F.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)


def build_index(p: LayerProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Compact rows' places in ids, and offsets: a stable sort, no host sync."""
    flat = p.ids.reshape(-1)
    keys, order = torch.sort(torch.where(flat < 0, p.num_slots, flat), stable=True)
    ends = torch.arange(1, p.num_slots + 1, dtype=keys.dtype, device=keys.device)
    return order[: p.num_real], torch.searchsorted(keys, ends).to(torch.int32)


class Pipeline:
    """Gather, two grouped GEMMs with SwiGLU between, weighted sum; autograd for the backward.

    Args:
        p: the problem.
        kind: "torch grouped_mm", or a name in `PACKAGES`.
    """

    def __init__(self, p: LayerProblem, kind: str = "torch grouped_mm") -> None:
        self.p, self.kind = p, kind
        self.index = p.compact_spot, p.offsets
        self.x, self.scores = (t.detach().requires_grad_() for t in (p.x, p.scores))
        self.weights = [t.detach().requires_grad_() for t in (p.w13, p.w2)]
        self.modules = [_te_linear(p, w) for w in (p.w13, p.w2)] if "Transformer" in kind else []
        self.main_grads = [torch.zeros_like(t, dtype=torch.float32) for t in self.weights]
        self.sums: torch.Tensor | None = None

    @property
    def has_backward(self) -> bool:
        """triton_kernels is made for inference."""
        return self.kind != "triton_kernels"

    def build(self) -> None:
        """The index from ids."""
        self.index = build_index(self.p)

    def _gemm(self, rows: torch.Tensor, number: int, offsets: torch.Tensor) -> torch.Tensor:
        if self.modules:
            return self.modules[number](rows, self.p.slot_rows)
        if self.kind == "triton_kernels":
            return triton_kernels_gemm(self.p, rows, self.weights[number])
        return torch_gemm(rows, self.weights[number], offsets)

    def _sums(self) -> torch.Tensor:
        spot, offsets = self.index
        token = spot // self.p.shape.top_k
        score = self.scores.reshape(-1)[spot, None]
        rows = self.x[token]
        if self.kind == "Liger fused_moe":
            slots = self.p.ids.reshape(-1)[spot, None]
            # Every row as a token of one choice: a rank's tokens have choices elsewhere.
            y = _liger(rows, *self.weights, slots, score.to(rows.dtype))
        else:
            gate, up = self._gemm(rows, 0, offsets).chunk(2, -1)
            y = self._gemm(F.silu(gate) * up, 1, offsets) * score.to(rows.dtype)
        return torch.zeros_like(self.x).index_add(0, token, y)

    def forward(self) -> list[torch.Tensor]:
        """Output of the source's tokens; keeps the graph."""
        grad = self.has_backward
        with torch.set_grad_enabled(grad):
            self.sums = self._sums()
        back = torch.ops.relibra.combine(self.sums.detach(), self.p.returned, None, self.p.backend)
        return [back]

    def backward(self) -> list[torch.Tensor]:
        """Gradients of x and the scores; those of the weights added to fp32 main_grad."""
        assert self.sums is not None
        weights = self.weights
        if self.modules:
            n = self.p.num_slots
            weights = [getattr(m, f"weight{i}") for m in self.modules for i in range(n)]
        wanted = [self.x, self.scores, *weights]
        dx, ds, *grads = torch.autograd.grad(self.sums, wanted, self.p.dy, retain_graph=True)
        back = torch.ops.relibra.combine(dx, self.p.returned, None, self.p.backend)
        targets = self.main_grads
        if self.modules:
            targets = [one for buffer in targets for one in buffer.unbind()]
        torch._foreach_add_(targets, [g.float() for g in grads])
        return [back, ds, *self.main_grads]

    def reset(self) -> None:
        """Zeros in main_grad."""
        for buffer in self.main_grads:
            buffer.zero_()


def _liger(x: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
    found = importlib.import_module("liger_kernel.ops.fused_moe")
    return found.LigerFusedMoEFunction.apply(x, *arguments)  # type: ignore[no-any-return]


def _te_linear(p: LayerProblem, weight: torch.Tensor) -> torch.nn.Module:
    """A GroupedLinear with a parameter a slot."""
    pytorch = importlib.import_module("transformer_engine.pytorch")
    n, width, depth = weight.shape
    module = pytorch.GroupedLinear(
        n, depth, width, bias=False, params_dtype=p.dtype, device=str(p.device)
    )
    with torch.no_grad():
        for slot in range(n):
            getattr(module, f"weight{slot}").copy_(weight[slot])
    return module  # type: ignore[no-any-return]


def triton_kernels_gemm(p: LayerProblem, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`matmul_ogs` on compact rows; its routing data is built once a problem."""
    module = importlib.import_module("triton_kernels.matmul_ogs")
    data = getattr(p, "triton_kernels_routing", None)
    if data is None:
        routing = importlib.import_module("triton_kernels.routing")
        counts = p.put(p.slot_rows_cpu)
        expt = routing.compute_expt_data(counts, p.num_slots, p.num_real)
        data = routing.RoutingData(None, counts, p.num_slots, 1, expt)
        p.triton_kernels_routing = data  # type: ignore[attr-defined]
    found: torch.Tensor = module.matmul_ogs(
        rows, weight.detach().transpose(1, 2), None, routing_data=data
    )
    return found
