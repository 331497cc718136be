"""The plan file, `.npz` without pickle, that anybody can check without this code.

The pass "train" (else the first) has plain names; every other pass has "<pass>/" before them:

* `home_slot_expert` int32 `[L, G, H]`, -1 = filler slot (one layout for all passes)
* `static_slot_expert` int32 `[L, G, X]`, here always X = 0
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
import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from relibra.layout import ExpertLayout
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
    from relibra.plan import PassPlan, StepPlan

FORMAT = "relibra-plan-1"
MAX_ARRAY_BYTES = 1 << 33  # a header that asks for more is refused before anything is allocated
# What damaged or hostile bytes raise on their way through zipfile, zlib, NumPy and JSON.
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
    "home_slot_expert": (np.int32, 3),
    "base_home_slot_expert": (np.int32, 3),
    "static_slot_expert": (np.int32, 3),
    "replica_slot_expert": (np.int32, 4),
    "slot_rows": (np.int64, 4),
    "quota": (np.int32, 2),
    "meta": (np.str_, 0),
}


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
        "static_slot_expert": np.zeros((*home.shape[:2], 0), np.int32),
        "meta": np.array(json.dumps(_meta(plan), sort_keys=True)),
    }
    for name, one in plan.passes.items():
        prefix = _prefix(name, list(plan.passes))
        arrays[f"{prefix}replica_slot_expert"] = one.replica_slot_expert_MLGS
        arrays[f"{prefix}slot_rows"] = one.slot_rows_MLGn
        if with_quota:
            arrays[f"{prefix}quota"] = _quota(plan, name, one)
    # Like np.savez_compressed, but faster, and the same plan gives the same bytes.
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy")  # a fixed date
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, allow_pickle=False)
            archive.writestr(entry, buffer.getbuffer(), zipfile.ZIP_DEFLATED, compresslevel=1)


def load_plan(cls: type[StepPlan], path: str | Path, loads: Mapping[str, LoadMatrix]) -> StepPlan:
    """Reads a plan of untrusted origin; see `StepPlan.load`."""
    try:
        arrays = _read_arrays(Path(path))
        meta = json.loads(str(arrays["meta"]))
        plan = _build(cls, arrays, meta, loads)
        stored_hash = meta["hash"]
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
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
    )
    return quota


def _read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All arrays of the file, with dtype, axes and size checked from their headers first."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.namelist()
            if len(set(entries)) != len(entries):
                raise PlanError(f"need every array once, got {sorted(entries)}")
            for entry in entries:
                _check_header(archive, entry)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise PlanError("need a plan file, got no such file") from None


def _check_header(archive: zipfile.ZipFile, entry: str) -> None:
    name = entry.removesuffix(".npy")
    if entry == name or name.rpartition("/")[2] not in _ARRAYS:
        raise PlanError(f"need arrays {sorted(_ARRAYS)}, got {entry!r}")
    dtype, ndim = _ARRAYS[name.rpartition("/")[2]]
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read is None:
            raise PlanError(f"{name}: need .npy version 1.0 or 2.0, got {version}")
        shape, _, found = read(file)
    if not np.issubdtype(found, dtype) or len(shape) != ndim:
        raise PlanError(
            f"{name}: need {np.dtype(dtype).name} with {ndim} axes, got {found} {list(shape)}"
        )
    size = math.prod(shape) * max(found.itemsize, 1)
    if size > MAX_ARRAY_BYTES:
        raise PlanError(f"{name}: need at most {MAX_ARRAY_BYTES} bytes, got {size}")


def _build(
    cls: type[StepPlan],
    arrays: dict[str, npt.NDArray[Any]],
    meta: dict[str, Any],
    loads: Mapping[str, LoadMatrix],
) -> StepPlan:
    from relibra.plan import PassPlan  # the class is built from this module's functions

    if meta["format"] != FORMAT:
        raise PlanError(f"meta.format: need {FORMAT!r}, got {meta['format']!r}")
    names = [str(name) for name in meta["passes"]]
    passes = {}
    for name in names:
        prefix = _prefix(name, names)
        passes[name] = PassPlan(
            arrays[f"{prefix}replica_slot_expert"], arrays[f"{prefix}slot_rows"]
        )
    digests = {str(name): str(value) for name, value in dict(meta["rows_sha256"]).items()}
    plan = cls(
        topology=Topology(**meta["topology"]),
        shape=ModelShape(**meta["model"]),
        layouts=tuple(ExpertLayout(one) for one in arrays["home_slot_expert"]),
        passes=passes,
        loads=loads,
        base_layouts=tuple(ExpertLayout(one) for one in arrays["base_home_slot_expert"]),
        strategy=str(meta["strategy"]),
        config=PlannerConfig(**meta["config"]),
        planner_ms=float(meta["report"]["planner_ms"]),
        stored_report=PlanReport.from_dict(meta["report"]),
        stored_rows_sha256=digests,
    )
    if arrays["static_slot_expert"].shape[2] != 0:
        raise PlanError(
            f"static_slot_expert: need no static slots, got {arrays['static_slot_expert'].shape[2]}"
        )
    for name in loads:
        if plan.rows_sha256[name] != digests.get(name):
            raise PlanError(f"loads[{name!r}]: need the loads that the plan was made for")
    return plan
