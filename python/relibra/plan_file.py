"""The plan file, `.npz` without pickle, that anybody can check without this code.

The pass "train" (else the first) has plain names; every other pass has "<pass>/" before them:

* `home_slot_expert` int32 `[L, G, H]`, -1 = filler slot (one layout for all passes)
* `static_slot_expert` int32 `[L, G, X]`, -1 free: copies of all passes, on any node
* `replica_slot_expert` int32 `[M, L, G, S]`, -1 free
* `slot_rows` int64 `[M, L, G, H+X+S]`, rows executed in each slot
* `quota` int32 `[nnz, 5]`, only on request: (micro-batch, layer, source rank, slot id, rows) of the
  experts that have a copy in that (micro-batch, layer); all other rows go home
* `base_home_slot_expert` int32 `[L, G, H]`, layouts that the batch starts from
* `meta`, JSON text: topology, model, strategy, config, report, digests of the loads, hash

Without `quota` the split by source is `relibra.source_split` of counts and `slot_rows`.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from relibra.array_files import ArrayArchive, ArrayFileError, Member, clip, whole_file
from relibra.layout import ExpertLayout
from relibra.pass_plan import PassPlan, check_pass_name
from relibra.plan_check import pass_slot_experts
from relibra.plan_config import PlannerConfig
from relibra.plan_report import PlanReport
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels import native
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relibra.load_matrix import LoadMatrix
    from relibra.plan import StepPlan

FORMAT = "relibra-plan-1"
_MAX_META_BYTES = 1 << 27  # four bytes a character; 2^20 ranks need half of it
# What damaged or hostile meta data raise on their way through JSON and the constructors.
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
_ARRAYS = {
    "home_slot_expert": (np.int32, "LGH"),
    "base_home_slot_expert": (np.int32, "LGH"),
    "static_slot_expert": (np.int32, "LGX"),
    "replica_slot_expert": (np.int32, "MLGS"),
    "slot_rows": (np.int64, "MLGn"),
    "quota": (np.int32, "q5"),
    "meta": (np.str_, ""),
}
_PASS_ARRAYS = ("replica_slot_expert", "slot_rows")


def save_plan(plan: StepPlan, path: str | Path, *, with_quota: bool) -> None:
    """Writes a plan; see `StepPlan.save`."""
    if not plan.is_executable:
        raise PlanError(f"strategy: need one that can be executed to save, got {plan.strategy!r}")
    if with_quota and set(plan.loads) != set(plan.passes):
        raise PlanError("with_quota: need the loads of every pass, got a plan without them")
    home = np.stack([layout.home_slot_expert_GH for layout in plan.layouts])
    base = np.stack([layout.home_slot_expert_GH for layout in plan.base_layouts])
    arrays: dict[str, npt.NDArray[Any]] = {
        "home_slot_expert": home,
        "base_home_slot_expert": base,
        "static_slot_expert": plan.static_slot_expert_LGX,
        "meta": np.array(json.dumps(_meta(plan), sort_keys=True)),
    }
    for name, one in plan.passes.items():
        prefix = _prefix(name, list(plan.passes))
        arrays[f"{prefix}replica_slot_expert"] = one.replica_slot_expert_MLGS
        arrays[f"{prefix}slot_rows"] = one.slot_rows_MLGn
        if with_quota:
            arrays[f"{prefix}quota"] = _quota(plan, name, one)
    # Like np.savez_compressed, but faster, and the same plan gives the same bytes.
    with whole_file(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy")  # a fixed date
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, allow_pickle=False)
            archive.writestr(entry, buffer.getbuffer(), zipfile.ZIP_DEFLATED, compresslevel=1)


def load_plan(cls: type[StepPlan], path: str | Path, loads: Mapping[str, LoadMatrix]) -> StepPlan:
    """Reads a plan of untrusted origin; see `StepPlan.load`."""
    try:
        arrays, meta, topology, shape = _read_arrays(Path(path), with_quota=bool(loads))
        plan = _build(cls, arrays, meta, loads, topology, shape)
        stored_hash = meta["hash"]
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except ArrayFileError as error:
        raise PlanError(f"{path}: need a plan file: {error}") from None
    except _DAMAGE as error:
        raise PlanError(f"{path}: need a plan file, got {type(error).__name__}: {error}") from None
    if plan.hash != stored_hash:
        raise PlanError(f"{path}: need the hash {stored_hash}, got {plan.hash}: the file changed")
    for name, one in plan.passes.items():
        quota = arrays.get(f"{_prefix(name, list(plan.passes))}quota")
        if (
            quota is not None
            and name in loads
            and not np.array_equal(quota, _quota(plan, name, one))
        ):
            raise PlanError(f"{path}: quota of pass {name!r} differs from the documented split")
    return plan


def _meta(plan: StepPlan) -> dict[str, Any]:
    shape = plan.shape
    return {
        "format": FORMAT,
        "topology": {
            "rank_to_node": plan.topology.rank_to_node,
            "rank_to_rail": plan.topology.rank_to_rail,
        },
        "model": {name: getattr(shape, name) for name in shape.__dataclass_fields__},
        "strategy": plan.strategy,
        "config": plan.config.as_dict(),
        "passes": list(plan.passes),
        "rows_sha256": dict(plan.rows_sha256),
        "report": plan.report.as_dict(),
        "hash": plan.hash,
    }


def _prefix(name: str, passes: list[str]) -> str:
    main = "train" if "train" in passes else passes[0]
    return "" if name == main else f"{name}/"


def _quota(plan: StepPlan, name: str, one: PassPlan) -> npt.NDArray[np.int32]:
    quota: npt.NDArray[np.int32] = native.planner().split_copied(
        plan.loads[name].rows_MLGE,
        pass_slot_experts(plan, one),
        one.slot_rows_MLGn,
        plan.topology.rank_to_rail_G,
        plan.config.num_threads,
        plan.topology.rank_to_node_G,
    )
    return quota


def _read_arrays(
    path: Path, with_quota: bool
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any], Topology, ModelShape]:
    """The arrays that the meta data declare, which fit its topology and model by their headers."""
    try:
        archive = ArrayArchive(path)
    except FileNotFoundError:
        raise PlanError("need a plan file, got no such file") from None
    with archive:
        for entry in archive.entries:
            if entry == entry.removesuffix(".npy") or _last(entry)[:-4] not in _ARRAYS:
                raise PlanError(f"need arrays {sorted(_ARRAYS)}, got {entry!r}")
        if "meta" not in archive.members:
            raise PlanError("need the array 'meta', got none")
        _check_member("meta", archive.members["meta"], 0, 0)
        meta = json.loads(str(archive.read(["meta"])["meta"]))
        if meta["format"] != FORMAT:
            raise PlanError(f"meta.format: need {FORMAT!r}, got {meta['format']!r}")
        topology, shape = Topology(**meta["topology"]), ModelShape(**meta["model"])
        passes = meta["passes"]
        if not isinstance(passes, list) or not passes:
            raise PlanError(f"meta.passes: need a list of names, got {clip(passes)}")
        for name in passes:
            check_pass_name("meta.passes", name)
        if len(set(passes)) != len(passes):
            raise PlanError(f"meta.passes: need every name once, got {clip(passes)}")
        prefixes = [_prefix(name, passes) for name in passes]
        needed = {"home_slot_expert", "base_home_slot_expert", "static_slot_expert"}
        needed |= {f"{each}{name}" for each in prefixes for name in _PASS_ARRAYS}
        quotas = {f"{each}quota" for each in prefixes} & set(archive.members)
        found = set(archive.members) - {"meta"}
        for what, names in (("the", needed - found), ("no", found - needed - quotas)):
            if names:
                raise PlanError(f"need {what} arrays {clip(sorted(names))}, as meta.passes says")
        for name in found:
            _check_member(name, archive.members[name], shape.num_layers, topology.num_ranks)
        arrays = archive.read(sorted(needed | (quotas if with_quota else set())))
    return arrays, meta, topology, shape


def _check_member(name: str, member: Member, layers: int, ranks: int) -> None:
    """Dtype, axes and size of an array, from its header."""
    dtype, axes = _ARRAYS[_last(name)]
    if not np.issubdtype(member.dtype, dtype) or len(member.shape) != len(axes):
        raise PlanError(
            f"{name}: need {np.dtype(dtype).name} with {len(axes)} axes, got {member.dtype} "
            f"{list(member.shape)}"
        )
    for axis, need in (("L", layers), ("G", ranks)):
        if axis in axes and member.shape[axes.index(axis)] != need:
            got = list(member.shape)
            raise PlanError(f"{name}: need {need} for {axis} in shape {list(axes)}, got {got}")
    if name == "meta" and member.num_bytes > _MAX_META_BYTES:
        raise PlanError(f"meta: need at most {_MAX_META_BYTES} bytes, got {member.num_bytes}")


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _build(
    cls: type[StepPlan],
    arrays: dict[str, npt.NDArray[Any]],
    meta: dict[str, Any],
    loads: Mapping[str, LoadMatrix],
    topology: Topology,
    shape: ModelShape,
) -> StepPlan:
    names, passes = meta["passes"], {}
    for name in names:
        prefix = _prefix(name, names)
        passes[name] = PassPlan(
            arrays[f"{prefix}replica_slot_expert"], arrays[f"{prefix}slot_rows"]
        )
    report = PlanReport.from_dict(meta["report"])
    check_pass_name("meta.strategy", meta["strategy"])
    digests = {str(name): str(value) for name, value in dict(meta["rows_sha256"]).items()}
    plan = cls(
        topology=topology,
        shape=shape,
        layouts=tuple(ExpertLayout(one) for one in arrays["home_slot_expert"]),
        passes=passes,
        loads=loads,
        base_layouts=tuple(ExpertLayout(one) for one in arrays["base_home_slot_expert"]),
        strategy=meta["strategy"],
        config=PlannerConfig(**meta["config"]),
        planner_ms=report.planner_ms,
        stored_report=report,
        stored_rows_sha256=digests,
        static_slot_expert_LGX=arrays["static_slot_expert"],
    )
    for name in loads:
        if plan.rows_sha256[name] != digests.get(name):
            raise PlanError(f"loads[{name!r}]: need the loads that the plan was made for")
    return plan
