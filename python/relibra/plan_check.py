"""The rules of a plan, and the digests by which ranks compare plans.

Letters as in `relibra.plan`. A plan that keeps these rules executes correctly, whatever made it;
balance is not a rule.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from relibra.pass_plan import check_pass_name
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from relibra.load_matrix import LoadMatrix
    from relibra.plan import PassPlan, StepPlan

_AXES = ("micro-batch", "layer", "rank", "slot")


def check_plan(plan: StepPlan) -> None:
    """Checks sizes, homes, replicas and conservation of rows.

    Rules: every layer has a layout of E experts over G ranks; a static copy sits on any rank; a
    replica sits in a node that has the home or a static copy of its expert; no expert is twice on a
    rank; rows lie only in slots that hold an expert; the slots of an expert execute exactly its
    rows.

    Args:
        plan: a `StepPlan`.

    Raises:
        PlanError: the first rule that is broken, with its place.
    """
    _check_sizes(plan)
    _check_static(plan)
    for name, one in plan.passes.items():
        totals_MLE = plan.loads[name].totals_MLE if name in plan.loads else None
        if not plan.is_executable:
            _check_report_only(name, one, totals_MLE)
            continue
        _check_replicas(plan, name, one)
        slot_expert_MLGn = pass_slot_experts(plan, one)
        _check_slot_rows(name, one, slot_expert_MLGn, totals_MLE)


def pass_slot_experts(plan: StepPlan, one: PassPlan) -> npt.NDArray[np.int32]:
    """Expert of every slot in every use, int32 `[M, L, G, n]`, -1 = none."""
    home_LGH = np.stack([layout.home_slot_expert_GH for layout in plan.layouts])
    static_LGX, replicas = plan.static_slot_expert_LGX, one.replica_slot_expert_MLGS
    first_static = home_LGH.shape[2]
    first_replica = first_static + static_LGX.shape[2]
    experts = np.empty((*replicas.shape[:3], first_replica + replicas.shape[3]), np.int32)
    experts[..., :first_static] = home_LGH
    experts[..., first_static:first_replica] = static_LGX
    experts[..., first_replica:] = replicas
    return experts


def rows_digest(loads: LoadMatrix) -> str:
    """sha256 of what a load matrix says about execution: rows, optimizer steps, unknown rows."""
    digest = hashlib.sha256(repr(loads.rows_MLGE.shape).encode())
    for array in (loads.rows_MLGE, loads.optimizer_step_M, loads.num_unknown_ML):
        _feed(digest, array, "<i4")
    return digest.hexdigest()


def plan_hash(plan: StepPlan) -> str:
    """sha256 hex of all that decides execution, in a form that no machine changes."""
    head = {
        "format": 1,
        "rank_to_node": plan.topology.rank_to_node,
        "rank_to_rail": plan.topology.rank_to_rail,
        "moe_layers": plan.shape.moe_layers,
        "num_experts": plan.shape.num_experts,
        "top_k": plan.shape.top_k,
        "is_executable": plan.is_executable,
        "rows": dict(sorted(plan.rows_sha256.items())),
        "shapes": {name: one.slot_rows_MLGn.shape for name, one in sorted(plan.passes.items())},
    }
    static_LGX = plan.static_slot_expert_LGX
    if static_LGX.shape[2] > 0:
        head["static_shape"] = static_LGX.shape
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for layouts in (plan.base_layouts, plan.layouts):
        for layout in layouts:
            _feed(digest, layout.home_slot_expert_GH, "<i4")
    _feed(digest, static_LGX, "<i4")
    for _, one in sorted(plan.passes.items()):
        _feed(digest, one.replica_slot_expert_MLGS, "<i4")
        _feed(digest, one.slot_rows_MLGn, "<i8")
    return digest.hexdigest()


def _feed(digest: hashlib._Hash, array: npt.NDArray[np.signedinteger], dtype: str) -> None:
    digest.update(np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8).data)


def _check_sizes(plan: StepPlan) -> None:
    ranks, experts, layers = plan.topology.num_ranks, plan.shape.num_experts, plan.shape.num_layers
    if layers == 0:
        raise PlanError("shape.moe_layers: need at least one MoE layer, got none")
    for name, layouts in (("layouts", plan.layouts), ("base_layouts", plan.base_layouts)):
        if len(layouts) != layers:
            raise PlanError(f"{name}: need one a layer, {layers}, got {len(layouts)}")
        for index, layout in enumerate(layouts):
            got = (layout.num_experts, layout.num_ranks, layout.slots_per_rank)
            need = (experts, ranks, plan.layouts[0].slots_per_rank)
            if got != need:
                raise PlanError(
                    f"{name}[{index}]: need (experts, ranks, home slots) = {need}, got {got}"
                )
    if not plan.passes:
        raise PlanError("passes: need at least one, got none")
    for name in (*plan.passes, *plan.loads):
        check_pass_name("passes" if name in plan.passes else "loads", name)
    home_slots = plan.layouts[0].slots_per_rank
    static_slots = plan.static_slot_expert_LGX.shape[2]
    if plan.static_slot_expert_LGX.shape[:2] != (layers, ranks):
        raise PlanError(
            f"static_slot_expert_LGX: need [L, G] = {[layers, ranks]}, got "
            f"{list(plan.static_slot_expert_LGX.shape[:2])}"
        )
    replica_slots = next(iter(plan.passes.values())).replica_slots
    slots = home_slots + static_slots + replica_slots
    with_static = f"{static_slots} static and " if static_slots else ""
    for name, one in plan.passes.items():
        need_shape = (one.num_micro_batches, layers, ranks, slots)
        got_shape = one.slot_rows_MLGn.shape
        if got_shape != need_shape or one.replica_slots != replica_slots:
            raise PlanError(
                f"passes[{name!r}].slot_rows_MLGn: need shape {list(need_shape)} with "
                f"{with_static}{replica_slots} replica slots, got {list(got_shape)} with "
                f"{one.replica_slots}"
            )
    unknown = sorted(set(plan.loads) - set(plan.passes))
    if unknown:
        raise PlanError(f"loads: need only passes {sorted(plan.passes)}, got also {unknown}")
    for name, loads in plan.loads.items():
        need_shape = (plan.passes[name].num_micro_batches, layers, ranks, experts)
        if loads.rows_MLGE.shape != need_shape or not loads.is_gathered:
            raise PlanError(
                f"loads[{name!r}]: need a gathered matrix [M, L, G, E] = {list(need_shape)}, got "
                f"{list(loads.rows_MLGE.shape)} with is_gathered={loads.is_gathered}"
            )


def _check_report_only(name: str, one: PassPlan, totals_MLE: npt.NDArray[np.int64] | None) -> None:
    where = f"passes[{name!r}]"
    if (one.replica_slot_expert_MLGS >= 0).any() or one.slot_rows_MLGn[..., 1:].any():
        raise PlanError(f"{where}: need rank rows in slot 0 only for a plan that is for reports")
    if totals_MLE is None:
        return
    missing = np.argwhere(one.slot_rows_MLGn.sum((2, 3)) < totals_MLE.sum(2))
    if missing.size:
        raise PlanError(f"{where}.slot_rows_MLGn: rows are missing in {_place(missing[0])}")


def _check_static(plan: StepPlan) -> None:
    where, static = "static_slot_expert_LGX", plan.static_slot_expert_LGX
    places = np.argwhere(static >= 0)
    if places.size == 0:
        return
    experts = static[tuple(places.T)]
    _check_experts(plan, experts, places, where)
    home_rank_LE = np.stack([layout.home_rank_E for layout in plan.layouts])
    at_home = home_rank_LE[places[:, 0], experts] == places[:, 1]
    _refuse(at_home, places, experts, where, "a static copy at its home rank")
    ordered = np.sort(static, axis=2)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any():
        at = np.argwhere(twice)[0]
        raise PlanError(
            f"{where}: expert {ordered[tuple(at)]} twice on one rank at {_place(at[:2], 1)}"
        )


def _check_experts(
    plan: StepPlan, experts: npt.NDArray[np.int32], places: npt.NDArray[np.int64], where: str
) -> None:
    if experts.max() >= plan.shape.num_experts:
        wrong = places[np.argmax(experts)]
        raise PlanError(
            f"{where}: need experts 0..{plan.shape.num_experts - 1} or -1, got {experts.max()} at "
            f"{_place(wrong, 4 - places.shape[1])}"
        )


def _check_replicas(plan: StepPlan, name: str, one: PassPlan) -> None:
    where = f"passes[{name!r}].replica_slot_expert_MLGS"
    replicas = one.replica_slot_expert_MLGS
    places = np.argwhere(replicas >= 0)
    if places.size == 0:
        return
    experts = replicas[tuple(places.T)]
    _check_experts(plan, experts, places, where)
    home_rank_LE = np.stack([layout.home_rank_E for layout in plan.layouts])
    home = home_rank_LE[places[:, 1], experts]
    node = plan.topology.rank_to_node_G
    _refuse(home == places[:, 2], places, experts, where, "a replica at its home rank")
    away = node[home] != node[places[:, 2]]
    static_LGX = plan.static_slot_expert_LGX
    if static_LGX.shape[2] > 0:
        _, layer, rank, _ = places.T
        here = (static_LGX[layer, rank] == experts[:, None]).any(1)
        _refuse(here, places, experts, where, "a replica beside a static copy")
        layer_S, rank_S, slot_S = np.nonzero(static_LGX >= 0)
        has_LNE = np.zeros((len(static_LGX), int(node.max()) + 1, plan.shape.num_experts), np.bool_)
        has_LNE[layer_S, node[rank_S], static_LGX[layer_S, rank_S, slot_S]] = True
        away &= ~has_LNE[layer, node[rank], experts]
    _refuse(away, places, experts, where, "a replica in another node")
    ordered = np.sort(replicas, axis=3)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any():
        at = np.argwhere(twice)[0]
        expert = ordered[tuple(at)]
        raise PlanError(f"{where}: expert {expert} twice on one rank at {_place(at[:3])}")


def _refuse(
    broken: npt.NDArray[np.bool_],
    places: npt.NDArray[np.int64],
    experts: npt.NDArray[np.int32],
    where: str,
    rule: str,
) -> None:
    if broken.any():
        first = int(np.argmax(broken))
        at = _place(places[first], 4 - places.shape[1])
        raise PlanError(f"{where}: {rule}: expert {experts[first]} at {at}")


def _check_slot_rows(
    name: str,
    one: PassPlan,
    slot_expert_MLGn: npt.NDArray[np.int32],
    totals_MLE: npt.NDArray[np.int64] | None,
) -> None:
    where = f"passes[{name!r}].slot_rows_MLGn"
    rows = one.slot_rows_MLGn
    stray = (slot_expert_MLGn < 0) & (rows > 0)
    if stray.any():
        at = np.argwhere(stray)[0]
        raise PlanError(f"{where}: {rows[tuple(at)]} rows in an empty slot at {_place(at)}")
    if totals_MLE is None or rows.size == 0:
        return
    num_uses, num_experts = rows.shape[0] * rows.shape[1], totals_MLE.shape[2]
    if int(rows.max()) * rows.shape[2] * rows.shape[3] >= 1 << 53:
        raise PlanError(f"{where}: need counts below 2^53, got {rows.max()}")
    use = np.arange(num_uses).repeat(rows.shape[2] * rows.shape[3])
    held = slot_expert_MLGn.reshape(-1) >= 0
    cells = (use * num_experts + slot_expert_MLGn.reshape(-1))[held]
    # Sums below 2^53 are exact in bincount's double precision.
    executed = np.bincount(cells, rows.reshape(-1)[held], minlength=num_uses * num_experts)
    differs = executed.reshape(totals_MLE.shape) != totals_MLE
    if differs.any():
        at = np.argwhere(differs)[0]
        got = int(executed.reshape(totals_MLE.shape)[tuple(at)])
        raise PlanError(
            f"{where}: need the {totals_MLE[tuple(at)]} rows of expert {at[2]} at "
            f"{_place(at[:2])}, got {got}"
        )


def _place(indices: npt.NDArray[np.int64], first_axis: int = 0) -> str:
    """Text of a place whose first index is that of axis `first_axis`."""
    axes = _AXES[first_axis:]
    return ", ".join(f"{axis} {int(i)}" for axis, i in zip(axes, indices, strict=False))
