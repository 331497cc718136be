"""Compiles what a layer will launch, so that no training step compiles anything.

Every op of a layer runs once on two tokens of zeros with the sizes, dtypes and options of the
layer: the same code decides what is compiled as in a step. What a plan decides (tokens, rows,
tiles, splits, where tables start) is never specialised, so two tokens stand for all uses.

Letters: T tokens, K choices, U received, R rows, D model dim, F expert dim, H home slots.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch

from relibra_kernels.checks import check_choice, check_int
from relibra_kernels.ops.backend import use_triton
from relibra_kernels.ops.expert_arguments import SCORE_AT, Activation
from relibra_kernels.ops.gemm_launch import default_block_rows
from relibra_kernels.tables import m_tiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOKENS = 2
_relibra = torch.ops.relibra


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What decides which kernels a layer launches; defaults are those of `relibra.LayerOptions`.

    Attributes:
        hidden_size: D.
        expert_size: F.
        top_k: K.
        num_home: H.
        num_static: X.
        num_replica: S; 0 for a layer without replica slots.
        num_ranks: G.
        return_widths: terms of the sums of what comes back; None is min(K, G), a flat dispatch.
        dtype: of activations and weights.
        activation: number of the activation, see `relibra_kernels.reference.activation`.
        alpha, limit: of the clamped SwiGLU.
        interleaved, transposed: storage of the weights.
        bias: whether the experts have biases.
        score_at: ``"output"`` or ``"activation"``.
        separate_experts: one tensor a home expert instead of one ``[H, ...]``.
    """

    hidden_size: int
    expert_size: int
    top_k: int
    num_home: int = 1
    num_static: int = 0
    num_replica: int = 1
    num_ranks: int = 1
    return_widths: Sequence[int] | None = None
    dtype: torch.dtype = torch.bfloat16
    activation: int = 0
    alpha: float = 1.702
    limit: float = 7.0
    interleaved: bool = False
    transposed: bool = False
    bias: bool = False
    score_at: str = "output"
    separate_experts: bool = False

    def __post_init__(self) -> None:
        """Checks the numbers; the ops check the rest."""
        for name in ("hidden_size", "expert_size", "top_k", "num_home", "num_ranks"):
            check_int(name, getattr(self, name), minimum=1)
        for name in ("num_static", "num_replica"):
            check_int(name, getattr(self, name), minimum=0)
        check_choice("score_at", self.score_at, SCORE_AT)

    @property
    def chosen(self) -> Activation:
        """The activation with its parameters."""
        return Activation(self.activation, self.alpha, self.limit)

    @property
    def halves(self) -> int:
        """2 with a gate, else 1."""
        return self.chosen.halves

    @property
    def widths(self) -> Sequence[int]:
        """Terms of the sums at the source."""
        return self.return_widths or (min(self.top_k, self.num_ranks),)


@dataclasses.dataclass(frozen=True)
class WarmupReport:
    """What a warm-up did.

    Attributes:
        num_ops: ops that ran.
        seconds: wall time, compilation included.
        note: one sentence for logs.
    """

    num_ops: int
    seconds: float
    note: str


def warmup(
    spec: LayerSpec,
    *,
    device: torch.device | str | None = None,
    backend: str = "auto",
    block_rows: int | None = None,
) -> WarmupReport:
    """Compiles every kernel variant that a layer of these sizes and options launches.

    Args:
        spec: of the layer.
        device: where it will run; None is the current CUDA device, else the CPU.
        backend: as the layer will have it, see `relibra_kernels.ops`.
        block_rows: rows of a tile of its tables; None takes what the device's kernels need.

    Returns:
        What was done; where no kernel is compiled (the references, Triton's interpreter), nothing.

    Raises:
        TypeError, ValueError: sizes, a dtype or an architecture that no kernel has.

    Example:
        >>> warmup(LayerSpec(64, 64, top_k=2), device="cpu").note
        'nothing to compile: on cpu the ops run as references or in the interpreter'
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.empty(0, device=device).device
    if not use_triton(backend, torch.empty(0, device=place)) or _interprets():
        note = f"nothing to compile: on {place} the ops run as references or in the interpreter"
        return WarmupReport(0, 0.0, note)
    start = time.perf_counter()
    block = default_block_rows(place, backend) if block_rows is None else block_rows
    layer = _Layer(spec, place, backend, block)
    with torch.no_grad():
        num_ops = sum(1 for _ in layer.run())
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    seconds = time.perf_counter() - start
    return WarmupReport(num_ops, seconds, f"{num_ops} ops ran on {place} in {seconds:.1f} s")


def _interprets() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


class _Layer:
    """Two tokens, all of whose choices are computed by home slot 0."""

    def __init__(
        self, spec: LayerSpec, device: torch.device, backend: str, block_rows: int
    ) -> None:
        self.spec, self.device, self.backend, self.block = spec, device, backend, block_rows
        count = TOKENS * spec.top_k
        # One slot has other strides than several. Slots by address need their true number, which
        # such kernels take as an argument.
        self.num_home = spec.num_home if spec.separate_experts else min(spec.num_home, 2)
        self.num_static = spec.num_static if spec.separate_experts else min(spec.num_static, 2)
        self.num_replica = min(spec.num_replica, 2)
        copies = self.num_static + self.num_replica
        self.slot_rows = torch.tensor([count] + [0] * (self.num_home - 1 + copies))
        self.slot_rows = self.slot_rows.to(torch.int32)
        tiles = m_tiles(self.slot_rows, self.num_home, block_rows, self.num_static)
        self.tiles = tiles.to(device)
        self.num_rows = len(tiles) * block_rows
        self.scores = torch.zeros(TOKENS, spec.top_k, device=device)
        self.options = spec.chosen.keywords()

    def run(self) -> Iterator[str]:
        """Runs every op of a layer, and says which."""
        yield from self._tables()
        yield from self._forward()
        yield from self._backward()
        yield from self._weight_grads()
        yield from self._returns()

    def _tables(self) -> Iterator[str]:
        spec, count = self.spec, TOKENS * self.spec.top_k
        ids = self._int(torch.zeros(TOKENS, spec.top_k))
        lists = [self._int(torch.tensor(x)) for x in ([0, 1], [0], [count], [0])]
        sizes = len(self.slot_rows), spec.num_ranks
        _relibra.route_to_slots(ids, *lists[:3], self.backend)
        yield "route_to_slots"
        _relibra.count_sends(ids, *lists[:3], *sizes, self.backend)
        yield "count_sends"
        self.rows = _relibra.build_route(ids, *lists, *sizes, TOKENS, self.backend)[2]
        yield "build_route"
        self.row_to_token, self.row_to_choice = _relibra.build_rows(
            self.rows, self.num_rows, self.backend
        )
        yield "build_rows"

    def _forward(self) -> Iterator[str]:
        spec = self.spec
        self.x = self._zeros(TOKENS, spec.hidden_size)
        self.score = self._scores(self.scores, self.row_to_choice, self.rows)
        yield "row_scores"
        self.w13 = self._weights(spec.halves * spec.expert_size, spec.hidden_size)
        self.w2 = self._weights(spec.hidden_size, spec.expert_size)
        tiles = (self.tiles, self.block, False)
        self.h, a = _relibra.expert_up(
            self.x,
            self.row_to_token,
            *self.w13,
            *tiles,
            **self.options,
            **self._biases("b13", spec.halves * spec.expert_size),
            interleaved=spec.interleaved,
            transposed=spec.transposed,
            score_R=self.score if spec.score_at == "activation" else None,
            backend=self.backend,
        )
        yield "expert_up"
        y = _relibra.expert_down(
            a,
            *self.w2,
            *tiles,
            **self._biases("b2", spec.hidden_size),
            transposed=spec.transposed,
            backend=self.backend,
        )
        yield "expert_down"
        for scores in (self.scores, None):
            _relibra.combine(y, self.rows, scores, self.backend)
            yield "combine"

    def _backward(self) -> Iterator[str]:
        spec, tiles = self.spec, (self.tiles, self.block, False)
        self.dh, self.scored, dscore = _relibra.expert_down_backward(
            self.x,
            self.row_to_token,
            *self.w2,
            self.h,
            self.score,
            *tiles,
            **self.options,
            **self._biases("b2", spec.hidden_size),
            transposed=spec.transposed,
            score_at=spec.score_at,
            backend=self.backend,
        )
        yield "expert_down_backward"
        _relibra.expert_up_backward(
            self.dh,
            *self.w13,
            *tiles,
            gated=spec.halves == 2,
            interleaved=spec.interleaved,
            transposed=spec.transposed,
            backend=self.backend,
        )
        yield "expert_up_backward"
        self._scores(dscore, self.rows, self.row_to_choice)
        yield "row_scores"

    def _weight_grads(self) -> Iterator[str]:
        spec = self.spec
        fields = {"13": self.w13, "2": self.w2}
        for wanted in (("13", "2"), ("13",), ("2",)):  # frozen weights have no gradient
            found: dict[str, Any] = {}
            for name, (home, static, replica) in fields.items():
                use = name in wanted
                grads = [torch.zeros_like(x, dtype=torch.float32) for x in home[:1]] if use else []
                whole = not spec.separate_experts
                found[f"home_grad{name}"] = grads[0] if use and whole else None
                found[f"home_grads{name}"] = grads * len(home) if use and not whole else None
                found[f"static_grad{name}"] = self._wide(static if use else None)
                found[f"replica_grad{name}"] = self._wide(replica if use else None)
            _relibra.expert_wgrad(
                self.x,
                self.x,
                self.dh,
                self.scored,
                self.row_to_token,
                self.slot_rows,
                self.block,
                **found,
                accumulate_home=True,
                interleaved=spec.interleaved,
                transposed=spec.transposed,
                backend=self.backend,
            )
            yield "expert_wgrad"
            if spec.bias:
                self._bias_grads(wanted)
                yield "expert_bias_grad"

    def _bias_grads(self, wanted: Sequence[str]) -> None:
        spec, found = self.spec, {}
        widths = {"13": spec.halves * spec.expert_size, "2": spec.hidden_size}
        for name, width in widths.items():
            for family, bias in self._biases(f"b{name}", width).items():
                key = f"{family.split('_')[0]}_grad{name}"
                found[key] = self._wide(bias if name in wanted else None)
        _relibra.expert_bias_grad(
            self.x,
            self.dh,
            self.row_to_token,
            self.score if spec.score_at == "output" else None,
            self.slot_rows,
            self.block,
            **found,
            accumulate_home=True,
            gated=spec.halves == 2,
            interleaved=spec.interleaved,
            backend=self.backend,
        )

    def _returns(self) -> Iterator[str]:
        """Sums of what comes back, of tokens and of their fp32 score gradients."""
        for width in self.spec.widths:
            index = self._int(torch.full((TOKENS, width), -1))
            for rows in (self.x, self.scores):
                _relibra.combine(rows, index, None, self.backend)
                yield "combine"

    def _scores(self, *arguments: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _relibra.row_scores(*arguments, self.backend)
        return found

    def _weights(self, rows: int, columns: int) -> tuple[list[torch.Tensor], Any, Any]:
        """Home, static and replica weights as stored; separate experts share one tensor."""
        shape = (columns, rows) if self.spec.transposed else (rows, columns)
        separate = self.spec.separate_experts
        whole = [self._zeros(1 if separate else self.num_home, *shape)]
        home = [whole[0][0]] * self.num_home if separate else whole
        return home, *self._copies(*shape)

    def _copies(self, *shape: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Static slots, if any, and replica slots."""
        static = self._zeros(self.num_static, *shape) if self.num_static else None
        return static, self._zeros(self.num_replica, *shape)

    def _biases(self, name: str, width: int) -> dict[str, torch.Tensor | None]:
        if not self.spec.bias:
            return {}
        families = (self._zeros(self.num_home, width), *self._copies(width))
        names = (f"home_{name}", f"static_{name}", f"replica_{name}")
        return dict(zip(names, families, strict=True))

    def _wide(self, weight: torch.Tensor | None) -> torch.Tensor | None:
        return None if weight is None else torch.zeros_like(weight, dtype=torch.float32)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.spec.dtype, device=self.device)

    def _int(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device, torch.int32)
