"""Seconds of a plan on given hardware: one model for the planner's time mode and the simulator.

Nothing is fitted; every constant is a field. With D model dim, F expert dim, BM rows of a tile:

    gemm(g)     = c0 * slots with rows + c1 * sum of ceil(rows / BM) * BM, c1 = 6*D*F / FLOP rate;
                  at least the bytes of the weights used / HBM; the backward takes twice as long
    replica(g)  = (gradients home(g) * 3 + replica slots(g)) * 12*D*F / HBM, backward only
    a2a(g)      = overlap * max(rdma, nvlink) + (1 - overlap) * (rdma + nvlink), each the larger
                  direction of the rank's link, dispatch and combine alike
    push        = t0 + largest of (in, out) over ranks * bytes of an expert / push rate
    forward     = max a2a + max gemm + max a2a + exposed push
    backward    = max a2a + max (2*gemm + replica) + max a2a + exposed (push again, gradients home)
    exposed     = what does not fit in the window: the dense part of the neighbouring layer
    layer       = max dense * (a + 2*b) + a * forward + b * backward

a forwards are run (2 with full recompute in a pass with backward), b backwards. "max" is over the
ranks: dispatch, GEMM and combine wait for the slowest. Pushes of one layer are hidden behind the
dense part of the layer before it, gradients home behind the dense backward of the next one.

Letters: M micro-batches, L MoE layers, G ranks, H home and S replica slots a rank, n = H + S.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from relibra.limits import LARGEST, LONGEST_S
from relibra.presets import Hardware, ModelPreset
from relibra.shape import ModelShape
from relibra.token_copies import DISPATCHES, FloatArray, TokenCopies
from relibra.topology import Topology
from relibra_kernels.checks import check_int
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from relibra.layout import Int32Array

COMBINES = ("reduced", "exact")
RECOMPUTES = ("none", "full")
_GB = 1e9


@dataclass(frozen=True)
class CostModel:
    """Constants and choices behind every simulated second.

    Args:
        hardware: rates.
        shape: of the MoE layers; D and F must be known.
        topology: nodes and rails.
        model: for the dense part; None = no dense part, so no window that hides a push.
        dispatch: `flat` or `two_hop`.
        combine: `reduced` returns one sum for each copy of a token, `exact` its K rows.
        overlap: part of the shorter of RDMA and NVLink that the longer hides, 0..1.
        recompute: `none` or `full`.
        block_rows: BM, rows of a GEMM tile.
        dispatch_bytes: bytes of an element on the way out.
        combine_bytes: bytes of an element on the way back.
        sequence_tokens: tokens of a sequence where sequences are not known.
        window_s: time that hides a push in the forward; None = the dense part of a layer.
        in_flight: micro-batches whose activations are alive together.
        data_parallel: EDP, replicas of an expert's optimizer shards.

    Raises:
        PlanError: a value out of range, or unknown D or F.

    Example:
        >>> from relibra.presets import HARDWARE, MODELS
        >>> model = MODELS["Qwen3-30B-A3B"]
        >>> cost = CostModel(HARDWARE["H100"], model.shape(), Topology(1, 8), model)
        >>> round(cost.row_s * 1e9, 2), round(float(cost.gemm_seconds([4096, 0])) * 1e6, 1)
        (15.73, 65.4)
    """

    hardware: Hardware
    shape: ModelShape
    topology: Topology
    model: ModelPreset | None = None
    dispatch: str = "flat"
    combine: str = "reduced"
    overlap: float = 0.5
    recompute: str = "none"
    block_rows: int = 128
    dispatch_bytes: float = 2.0
    combine_bytes: float = 2.0
    sequence_tokens: int = 4096
    window_s: float | None = None
    in_flight: int = 1
    data_parallel: int = 1

    def __post_init__(self) -> None:
        """Checks every value."""
        for name, value, kind in (
            ("hardware", self.hardware, Hardware),
            ("shape", self.shape, ModelShape),
            ("topology", self.topology, Topology),
        ):
            if not isinstance(value, kind):
                raise PlanError(f"{name}: need {kind.__name__}, got {type(value).__name__}")
        if self.shape.expert_bytes is None:
            raise PlanError("shape: need hidden_size and expert_size for times, got none")
        for name, choices in (
            ("dispatch", DISPATCHES),
            ("combine", COMBINES),
            ("recompute", RECOMPUTES),
        ):
            if getattr(self, name) not in choices:
                raise PlanError(
                    f"{name}: need one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        if not 0 <= self.overlap <= 1:
            raise PlanError(f"overlap: need 0..1, got {self.overlap!r}")
        try:
            for name, most in LARGEST.items():
                check_int(name, getattr(self, name), minimum=1, maximum=most)
        except (TypeError, ValueError) as error:
            raise PlanError(str(error)) from None
        for name in ("dispatch_bytes", "combine_bytes"):
            if not 0 < getattr(self, name) <= 16:
                raise PlanError(f"{name}: need 0 < bytes <= 16, got {getattr(self, name)!r}")
        if self.window_s is not None and not 0 <= self.window_s <= 1e6:
            raise PlanError(f"window_s: need seconds 0..1e+06 or None, got {self.window_s!r}")
        for name, (longest, what) in LONGEST_S.items():
            if getattr(self, name) > longest:
                raise PlanError(
                    f"hardware, shape: need at most {longest:g} s for {what}, got "
                    f"{getattr(self, name):.3g} s"
                )

    def with_values(self, **values: Any) -> CostModel:
        """The same with other choices.

        Args:
            **values: fields by name.
        """
        return replace(self, **values)

    def assumptions(self) -> dict[str, object]:
        """Everything that a simulated time depends on, as plain values."""
        own = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in ("hardware", "shape", "topology", "model")
        }
        return {
            "cost": "time",
            "hardware": self.hardware.as_dict(),
            "model": None if self.model is None else self.model.name,
            "topology": str(self.topology),
            "window": "dense part of a layer" if self.window_s is None else "given",
            **own,
        }

    @cached_property
    def expert_params(self) -> int:
        """3*D*F."""
        assert self.shape.expert_bytes is not None
        return self.shape.expert_bytes // self.shape.item_bytes

    @property
    def hidden_size(self) -> int:
        """D."""
        assert self.shape.hidden_size is not None
        return self.shape.hidden_size

    @cached_property
    def row_s(self) -> float:
        """c1, forward seconds of a row: 6*D*F FLOPs."""
        return 2 * self.expert_params / (self.hardware.gemm_tflop_per_s * 1e12)

    @property
    def slot_s(self) -> float:
        """c0, forward seconds of a slot with rows."""
        return self.hardware.slot_us * 1e-6

    @cached_property
    def expert_read_s(self) -> float:
        """Seconds in which memory delivers the weights of one expert."""
        return self.expert_params * self.shape.item_bytes / (self.hardware.hbm_gb_per_s * _GB)

    @cached_property
    def push_expert_s(self) -> float:
        """Seconds of one expert's weights on a rank's link, without t0."""
        return self.expert_params * self.shape.item_bytes / (self.hardware.push_gb_per_s * _GB)

    @cached_property
    def return_expert_s(self) -> float:
        """Seconds of one expert's fp32 gradient on a rank's link, without t0."""
        return self.expert_params * 4 / (self.hardware.push_gb_per_s * _GB)

    def gemm_seconds(self, slot_rows_n: npt.ArrayLike) -> FloatArray:
        """Forward GEMM seconds of a rank.

        Args:
            slot_rows_n: `[..., n]`, rows of each of its slots.

        Returns:
            float64 `[...]`.
        """
        rows = np.asarray(slot_rows_n)
        slots = (rows > 0).sum(-1)
        padded = (-(-rows // self.block_rows) * self.block_rows).sum(-1)
        compute = self.slot_s * slots + self.row_s * padded
        seconds: FloatArray = np.maximum(compute, self.expert_read_s * slots)
        return seconds

    def replica_seconds(self, returns: npt.ArrayLike, replicas: npt.ArrayLike) -> FloatArray:
        """Backward seconds that replica gradients cost a rank's memory.

        Args:
            returns: `[...]`, replica gradients that come home to the rank.
            replicas: `[...]`, replica slots of the rank in use.
        """
        gradient_s = self.expert_params * 4 / (self.hardware.hbm_gb_per_s * _GB)
        seconds: FloatArray = (3 * np.asarray(returns) + np.asarray(replicas)) * gradient_s
        return seconds

    def push_seconds(
        self, out_G: npt.ArrayLike, in_G: npt.ArrayLike, *, gradients: bool = False
    ) -> FloatArray:
        """Seconds to send the weights of one use to its replicas, or fp32 gradients home.

        Args:
            out_G: `[..., G]`, experts that a rank sends.
            in_G: `[..., G]`, experts that a rank gets.
            gradients: fp32 gradients instead of weights.

        Returns:
            float64 `[...]`, 0 where nothing is sent.
        """
        most = np.maximum(np.asarray(out_G), np.asarray(in_G)).max(-1)
        each = self.return_expert_s if gradients else self.push_expert_s
        return np.where(most > 0, self.hardware.push_latency_us * 1e-6 + most * each, 0.0)

    def all_to_all_seconds(self, copies: TokenCopies, bytes_per_element: float) -> FloatArray:
        """Seconds of each rank's links in one all-to-all, float64 `[..., G]`.

        Args:
            copies: tokens or rows that cross the links.
            bytes_per_element: of the D elements of a copy.
        """
        size = self.hidden_size * bytes_per_element / _GB
        rdma = copies.rdma_G * (size / self.hardware.nic_gb_per_s)
        nvlink = copies.nvlink_G * (size / self.hardware.nvlink_gb_per_s)
        return self.overlap * np.maximum(rdma, nvlink) + (1 - self.overlap) * (rdma + nvlink)

    def dense_seconds(
        self, tokens_G: npt.ArrayLike, pairs_G: npt.ArrayLike | None = None
    ) -> FloatArray:
        """Forward seconds of what is not routed: attention, projections, shared experts, router.

        Args:
            tokens_G: `[..., G]`, tokens of each rank.
            pairs_G: `[..., G]`, pairs of positions that attend to each other
                (`attention_pairs`); None = sequences of `sequence_tokens`.

        Returns:
            float64 `[..., G]`, a layer's; 0 without a model.
        """
        tokens = np.asarray(tokens_G, np.float64)
        if self.model is None:
            return np.zeros_like(tokens)
        if pairs_G is None:
            length = np.minimum(np.maximum(tokens, 1), self.sequence_tokens)
            pairs_G = self.attention_pairs(length) * tokens / length
        return self._dense_from(tokens, np.asarray(pairs_G, np.float64))

    def attention_pairs(self, length: npt.ArrayLike) -> FloatArray:
        """Pairs of positions of causal sequences, mean over windowed and other layers.

        Args:
            length: `[...]`, tokens of each sequence: differences of `cu_seqlens`.
        """
        n = np.asarray(length, np.float64)
        pairs = n * (n + 1) / 2
        if self.model is None or self.model.window is None:
            return pairs
        w = np.minimum(n, self.model.window)
        windowed = w * (w + 1) / 2 + (n - w) * w
        share = self.model.windowed_share
        mixed: FloatArray = share * windowed + (1 - share) * pairs
        return mixed

    def _dense_from(self, tokens: FloatArray, pairs: FloatArray) -> FloatArray:
        assert self.model is not None
        m = self.model
        per_token = m.projection_params + 3 * m.hidden_size * m.shared_size
        per_token += m.hidden_size * m.num_experts
        flops = 2.0 * per_token * tokens + 2.0 * m.score_size * pairs
        return flops / (self.hardware.dense_tflop_per_s * 1e12)

    def instance_seconds(
        self,
        slot_rows_Gn: npt.ArrayLike,
        out_G: npt.ArrayLike,
        in_G: npt.ArrayLike,
        window_s: npt.ArrayLike = 0.0,
        *,
        has_backward: bool = True,
    ) -> FloatArray:
        """Seconds of GEMM and exposed pushes of one use: what replicas can change.

        The planner compares plans by this; all-to-all and dense part are left out.

        Args:
            slot_rows_Gn: `[..., G, n]`.
            out_G: `[..., G]`, replicas of experts whose home is the rank.
            in_G: `[..., G]`, replicas on the rank.
            window_s: `[...]`, forward time that hides a push.
            has_backward: the pass runs a backward.

        Returns:
            float64 `[...]`.
        """
        parts = self.use_parts(slot_rows_Gn, out_G, in_G, window_s)
        forwards, backwards = self.repeats(has_backward)
        seconds: FloatArray = forwards * (parts["gemm"] + parts["push"])
        return seconds + backwards * (parts["gemm_backward"] + parts["push_backward"])

    def repeats(self, has_backward: bool) -> tuple[int, int]:
        """Forwards and backwards of a pass: a, b.

        Args:
            has_backward: the pass runs a backward.
        """
        return (2 if has_backward and self.recompute == "full" else 1), int(has_backward)

    def use_parts(
        self,
        slot_rows_Gn: npt.ArrayLike,
        out_G: npt.ArrayLike,
        in_G: npt.ArrayLike,
        window_s: npt.ArrayLike,
    ) -> dict[str, FloatArray]:
        """Seconds of GEMM and exposed pushes, by part, each float64 `[...]`.

        Args:
            slot_rows_Gn: `[..., G, n]`.
            out_G: `[..., G]`.
            in_G: `[..., G]`.
            window_s: `[...]`, forward window; the backward has twice that.

        Returns:
            `gemm`, `gemm_backward` (replica gradients in memory included), `push`, `push_backward`,
            and `replica`, what the gradients add to `gemm_backward`.
        """
        gemm_G = self.gemm_seconds(slot_rows_Gn)
        extra_G = self.replica_seconds(out_G, in_G)
        push = self.push_seconds(out_G, in_G)
        home = self.push_seconds(in_G, out_G, gradients=True)
        window = np.asarray(window_s, np.float64)
        backward = (2 * gemm_G + extra_G).max(-1)
        return {
            "gemm": gemm_G.max(-1),
            "gemm_backward": backward,
            "replica": backward - 2 * gemm_G.max(-1),
            "push": np.maximum(push - window, 0.0),
            "push_backward": np.maximum(push + home - 2 * window, 0.0),
        }


def push_counts(
    replica_slot_expert_GS: Int32Array, home_rank_E: Int32Array
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Experts that each rank sends to replicas and gets as replicas.

    Args:
        replica_slot_expert_GS: int32 `[M, L, G, S]` or `[G, S]`, -1 free.
        home_rank_E: int32 `[L, E]` or `[E]`, home rank of each expert.

    Returns:
        out and in, int64 `[..., G]`.

    Example:
        >>> out, into = push_counts(np.array([[1], [-1]]), np.array([0, 1]))
        >>> out.tolist(), into.tolist()
        ([0, 1], [1, 0])
    """
    replicas = np.asarray(replica_slot_expert_GS)
    homes = np.asarray(home_rank_E)
    *leading, ranks, _ = replicas.shape
    into = (replicas >= 0).sum(-1)
    flat = np.maximum(replicas, 0).reshape(*leading, -1)
    at_home = np.take_along_axis(np.broadcast_to(homes, (*leading, homes.shape[-1])), flat, -1)
    used = (replicas >= 0).reshape(*leading, -1)
    cells = np.arange(int(np.prod(leading))).reshape(*leading, 1) * ranks + at_home
    out = np.bincount(cells[used], minlength=int(np.prod(leading)) * ranks)
    return out.reshape(*leading, ranks), into
