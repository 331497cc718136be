"""The checked input of a planning call, in the form that the strategies use.

Letters: M micro-batches of a pass, C columns (micro-batches of all different passes), L MoE layers,
E experts, G ranks, H home slots a rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from relibra.cost_model import CostModel
from relibra.layout import ExpertLayout, Int32Array, Int64Array
from relibra.limits import MAX_EP_RANKS
from relibra.load_matrix import LoadMatrix
from relibra.plan_config import DEFAULT_PASS_WEIGHT, PlannerConfig
from relibra.presets import find_hardware
from relibra.shape import ModelShape
from relibra.token_sample import TokenSample, as_token_sample
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Problem:
    """Input of every strategy.

    Args:
        loads: gathered loads by pass, never empty.
        topology: of the G ranks.
        shape: of the model.
        base_layouts: one a layer, that the batch starts from.
        has_base: False when no layout was given and `base_layouts` is the identity.
        config: settings.
        previous: loads of the batch before, by pass; only baselines that plan on history use them.
        cost_model: what time mode compares plans by; None in rows mode.
        groups: where several EP groups are planned together, for each pass the name in the
            configuration and the factor of its weight.
        token_sample: tokens that show which experts are chosen together.
    """

    loads: Mapping[str, LoadMatrix]
    topology: Topology
    shape: ModelShape
    base_layouts: tuple[ExpertLayout, ...]
    has_base: bool
    config: PlannerConfig
    previous: Mapping[str, LoadMatrix] = field(default_factory=dict)
    cost_model: CostModel | None = None
    groups: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    token_sample: TokenSample | None = None

    @property
    def home_slots(self) -> int:
        """H."""
        return self.base_layouts[0].slots_per_rank

    @cached_property
    def identity(self) -> ExpertLayout:
        """Experts in order over the ranks."""
        return ExpertLayout.identity(self.shape.num_experts, self.topology.num_ranks)

    @cached_property
    def same_as(self) -> Mapping[str, str]:
        """For each pass the first pass with equal totals: planned once."""
        same: dict[str, str] = {}
        for name, loads in self.loads.items():
            same[name] = name
            for other in set(same.values()) - {name}:
                if np.array_equal(loads.totals_MLE, self.loads[other].totals_MLE):
                    same[name] = other
        return same

    @cached_property
    def distinct_passes(self) -> tuple[str, ...]:
        """Passes that are planned, in order."""
        return tuple(name for name in self.loads if self.same_as[name] == name)

    @cached_property
    def weight_C(self) -> Int64Array:
        """int64 `[C]`, weight of each column, without the common factor `weight_unit`."""
        weight = self._distinct_weights
        return self._by_column([weight[name] // self.weight_unit for name in self.distinct_passes])

    @cached_property
    def weight_unit(self) -> int:
        """Forward-only passes that a weight of 1 in `weight_C` stands for."""
        return math.gcd(*self._distinct_weights.values())

    @cached_property
    def _distinct_weights(self) -> dict[str, int]:
        weight = dict.fromkeys(self.distinct_passes, 0)
        for name in self.loads:
            known_as, scale = self.groups.get(name, (name, 1))
            weight[self.same_as[name]] += self.config.weight_of(known_as) * scale
        return weight

    @cached_property
    def passes_2C(self) -> Int64Array:
        """int64 `[2, C]`, passes without and with backward that a column stands for.

        A pass whose weight is that of a forward and a backward or more has a backward.
        """
        count = {name: [0, 0] for name in self.distinct_passes}
        for name in self.loads:
            known_as, scale = self.groups.get(name, (name, 1))
            has_backward = self.config.weight_of(known_as) >= DEFAULT_PASS_WEIGHT["train"]
            count[self.same_as[name]][has_backward] += scale
        values = [count[name] for name in self.distinct_passes]
        return np.stack([self._by_column([pair[i] for pair in values]) for i in (0, 1)])

    def _by_column(self, values: list[int]) -> Int64Array:
        counts = [self.loads[name].num_micro_batches for name in self.distinct_passes]
        return np.repeat(np.asarray(values, np.int64), counts)

    @cached_property
    def row_multiple(self) -> int:
        """Rows of a replica are a multiple of it."""
        if self.config.row_multiple is not None:
            return self.config.row_multiple
        return 1 if self.cost_model is None else self.cost_model.block_rows

    @cached_property
    def max_pushes(self) -> int | None:
        """Most replicas that a rank sends in one use."""
        limit, size = self.config.max_push_bytes, self.shape.expert_bytes
        return None if limit is None or size is None else limit // size

    @cached_property
    def window_CL(self) -> npt.NDArray[np.float64]:
        """float64 `[C, L]`, forward seconds that hide a push; time mode only."""
        assert self.cost_model is not None
        if self.cost_model.window_s is not None:
            return np.full(self.totals_CLE.shape[:2], self.cost_model.window_s)
        sent_CLG = np.concatenate(
            [self.loads[name].rows_MLGE.sum(3, dtype=np.int64) for name in self.distinct_passes]
        )
        seconds: npt.NDArray[np.float64] = self.cost_model.dense_seconds(
            sent_CLG / self.shape.top_k
        ).max(2)
        return seconds

    @cached_property
    def totals_CLE(self) -> Int64Array:
        """int64 `[C, L, E]`, rows of each expert in each column, not weighted."""
        return np.concatenate([self.loads[name].totals_MLE for name in self.distinct_passes])

    @cached_property
    def static_slots(self) -> int:
        """X, static slots a rank: none on one node, where replicas do as well."""
        if self.topology.num_nodes == 1:
            return 0
        return -(-self.config.static_copies // min(self.topology.node_sizes))

    @cached_property
    def num_refreshes(self) -> int:
        """Times that static copies get their weights: once an optimizer step of each pass."""
        return sum(len(np.unique(loads.optimizer_step_M)) for loads in self.loads.values())

    @cached_property
    def node_rows_CLNE(self) -> Int64Array:
        """int64 `[C, L, N, E]`, rows of each source node in each column, not weighted."""
        node_G = self.topology.rank_to_node_G
        order = np.argsort(node_G, kind="stable")
        first_N = np.flatnonzero(np.diff(node_G[order], prepend=-1))
        parts = [
            np.add.reduceat(self.loads[name].rows_MLGE[:, :, order], first_N, 2, np.int64)
            for name in self.distinct_passes
        ]
        return np.concatenate(parts)

    @cached_property
    def sample_ids_LTK(self) -> Int32Array:
        """int32 `[L, T, K]`, expert ids of the sampled tokens, -1 = none."""
        assert self.token_sample is not None
        return np.ascontiguousarray(self.token_sample.ids_TLK.transpose(1, 0, 2))

    @cached_property
    def sample_node_T(self) -> Int32Array:
        """int32 `[T]`, node that each sampled token comes from, -1 = unknown."""
        assert self.token_sample is not None
        rank_T = self.token_sample.source_rank_T
        node: Int32Array = np.where(rank_T < 0, -1, self.topology.rank_to_node_G[rank_T])
        return node.astype(np.int32)

    @property
    def has_sample_sources(self) -> bool:
        """Whether the ranks of sampled tokens are known."""
        return bool((self.sample_node_T >= 0).any())

    @cached_property
    def base_LGH(self) -> Int32Array:
        """int32 `[L, G, H]` of the base layouts."""
        return np.stack([layout.home_slot_expert_GH for layout in self.base_layouts])

    def with_config(self, config: PlannerConfig) -> Problem:
        """The same input, which passes are the same included, with other settings."""
        changed = replace(self, config=config)
        vars(changed)["same_as"] = self.same_as  # fills in the cached property
        return changed

    def only_layers(self, first: int, last: int) -> Problem:
        """The same input for some layers; which passes are the same is still decided on all."""
        part = replace(
            self,
            loads={name: loads.only_layers(first, last) for name, loads in self.loads.items()},
            shape=replace(self.shape, moe_layers=self.shape.moe_layers[first:last]),
            base_layouts=self.base_layouts[first:last],
            previous={name: old.only_layers(first, last) for name, old in self.previous.items()},
            token_sample=self.token_sample and self.token_sample.only_layers(first, last),
        )
        vars(part)["same_as"] = self.same_as  # fills in the cached property
        return part

    def weigh(self, largest_CL: Int64Array) -> Int64Array:
        """Weighted sum over columns, int64 `[L]`."""
        total: Int64Array = (largest_CL * self.weight_C[:, None]).sum(0)
        return total

    def slot_rows(
        self, home_LGH: Int32Array, layers: npt.NDArray[np.int64] | None = None
    ) -> Int64Array:
        """Rows of every home slot of some layers without replicas, int64 `[C, L, G, H]`."""
        totals_CLE = self.totals_CLE if layers is None else self.totals_CLE[:, layers]
        experts = np.maximum(home_LGH, 0).reshape(1, len(home_LGH), -1).astype(np.int64)
        rows = np.take_along_axis(totals_CLE, experts, 2).reshape(-1, *home_LGH.shape)
        held: Int64Array = np.where(home_LGH >= 0, rows, 0)
        return held

    def rank_rows(self, home_LGH: Int32Array) -> Int64Array:
        """Rows of every rank without replicas, int64 `[C, L, G]`."""
        rows: Int64Array = self.slot_rows(home_LGH).sum(3)
        return rows

    def least_largest(self, home_LGH: Int32Array, replica_slots: int) -> Int64Array:
        """Bound on the fullest rank for a layout, int64 `[C, L]`.

        Exact without replicas, else the fullest node, flat inside; with static copies nodes are
        equal at best.
        """
        if replica_slots and self.static_slots:
            even: Int64Array = -(-self.totals_CLE.sum(2) // self.topology.num_ranks)
            return even
        rows = self.rank_rows(home_LGH)
        if replica_slots == 0:
            largest: Int64Array = rows.max(2)
            return largest
        node_G = self.topology.rank_to_node_G
        by_node = np.argsort(node_G, kind="stable")
        first_N = np.flatnonzero(np.diff(node_G[by_node], prepend=-1))
        node_rows = np.add.reduceat(rows[:, :, by_node], first_N, axis=2)
        per_rank = -(-node_rows // np.asarray(self.topology.node_sizes))
        bound: Int64Array = per_rank.max(2)
        return bound


def make_problem(
    loads: Mapping[str, LoadMatrix],
    topology: Topology,
    model: ModelShape,
    layout: Sequence[ExpertLayout] | None,
    config: PlannerConfig | None,
    previous: Mapping[str, LoadMatrix] | None = None,
    cost_model: CostModel | None = None,
    token_sample: TokenSample | npt.ArrayLike | None = None,
) -> Problem:
    """Checks the arguments of `plan_step`.

    Raises:
        PlanError, TypeError: see `plan_step`.
    """
    config = PlannerConfig() if config is None else config
    for name, value, kind in (
        ("loads", loads, Mapping),
        ("topology", topology, Topology),
        ("model", model, ModelShape),
        ("config", config, PlannerConfig),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name}: need {kind.__name__}, got {type(value).__name__}")
    if not loads:
        raise PlanError("loads: need at least one pass, got none")
    previous = {} if previous is None else dict(previous)
    for where, matrices in (("loads", loads), ("previous", previous)):
        for name, matrix in matrices.items():
            if not isinstance(name, str):
                raise TypeError(f"{where}: need pass names of type str, got {name!r}")
            _check_loads(f"{where}[{name!r}]", matrix, topology, model)
    ranks, experts = topology.num_ranks, model.num_experts
    if ranks > MAX_EP_RANKS:
        raise PlanError(f"topology: need at most {MAX_EP_RANKS} ranks to plan, got {ranks}")
    if experts % ranks and not config.allow_filler:
        raise PlanError(
            f"num_experts: need a multiple of {ranks} ranks with allow_filler=False, got {experts}"
        )
    if layout is None:
        base = (ExpertLayout.identity(experts, ranks),) * model.num_layers
    else:
        base = _check_layout(layout, experts, ranks, model.num_layers)
    if config.max_push_bytes is not None and model.expert_bytes is None:
        raise PlanError("max_push_bytes: need hidden_size and expert_size in the model, got none")
    if token_sample is not None:
        token_sample = as_token_sample(token_sample)
        token_sample.check(model.num_layers, experts, ranks)
        if config.expert_groups:
            raise PlanError(
                f"token_sample: need none with expert_groups={config.expert_groups}, which says "
                "what stays together"
            )
    return Problem(
        dict(loads),
        topology,
        model,
        base,
        layout is not None,
        config,
        previous,
        _check_cost_model(cost_model, topology, model, config),
        token_sample=token_sample,
    )


def _check_cost_model(
    cost_model: CostModel | None, topology: Topology, model: ModelShape, config: PlannerConfig
) -> CostModel | None:
    if config.cost == "rows":
        if cost_model is not None:
            raise PlanError("cost_model: need None with cost='rows', got a model")
        return None
    recompute = "full" if config.full_recompute else "none"
    if cost_model is None:
        return CostModel(find_hardware(config.hardware), model, topology, recompute=recompute)
    if not isinstance(cost_model, CostModel):
        raise TypeError(f"cost_model: need CostModel, got {type(cost_model).__name__}")
    sizes = [(one.hidden_size, one.expert_size, one.dtype) for one in (model, cost_model.shape)]
    if sizes[0] != sizes[1]:
        raise PlanError(f"cost_model.shape: need (D, F, dtype) = {sizes[0]}, got {sizes[1]}")
    if cost_model.topology != topology:
        raise PlanError(f"cost_model.topology: need {topology}, got {cost_model.topology}")
    if cost_model.recompute != recompute:
        raise PlanError(
            f"cost_model.recompute: need {recompute!r} as config.full_recompute says, got "
            f"{cost_model.recompute!r}"
        )
    return cost_model


def _check_loads(name: str, matrix: object, topology: Topology, model: ModelShape) -> None:
    if not isinstance(matrix, LoadMatrix):
        raise TypeError(f"{name}: need a LoadMatrix, got {type(matrix).__name__}")
    if not matrix.is_gathered:
        source = "one rank" if matrix.source_rank is None else f"rank {matrix.source_rank}"
        raise PlanError(
            f"{name}: need a gathered LoadMatrix, got the rows of {source} only; gather them "
            "first (runtime.gather_loads, or LoadMatrix.stack)"
        )
    if matrix.num_ranks != topology.num_ranks:
        sizes = topology.node_sizes
        even = len(set(sizes)) == 1
        text = f"{len(sizes)} x {sizes[0]}" if even else f"nodes of {list(sizes)}"
        raise PlanError(
            f"{name}: need {topology.num_ranks} source ranks for the topology ({text}), got "
            f"{matrix.num_ranks}"
        )
    for what, got, need in (
        ("experts", matrix.num_experts, model.num_experts),
        ("MoE layers", matrix.num_layers, model.num_layers),
    ):
        if got != need:
            raise PlanError(f"{name}: need {need} {what} as in the model, got {got}")


def _check_layout(
    layout: Sequence[ExpertLayout], experts: int, ranks: int, layers: int
) -> tuple[ExpertLayout, ...]:
    if isinstance(layout, ExpertLayout):
        raise TypeError("layout: need one ExpertLayout a layer in a sequence, got a single one")
    base = tuple(layout)
    if len(base) != layers:
        raise PlanError(f"layout: need one a layer, {layers}, got {len(base)}")
    for index, one in enumerate(base):
        if not isinstance(one, ExpertLayout):
            raise TypeError(f"layout[{index}]: need an ExpertLayout, got {type(one).__name__}")
        need = (experts, ranks, -(-experts // ranks))
        got = (one.num_experts, one.num_ranks, one.slots_per_rank)
        if got != need:
            raise PlanError(
                f"layout[{index}]: need (experts, ranks, home slots) = {need}, got {got}"
            )
    return base
