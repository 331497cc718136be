"""Plan files: round trip, the independent checker, and damage of every kind."""

import importlib.util
import io
import json
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from relibra.load_matrix import LoadMatrix
from relibra.plan import StepPlan
from relibra.planner import PlannerConfig, plan_step
from relibra.shape import ModelShape
from relibra.source_split import split_rows_reference
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

TOPOLOGY = Topology(2, 4)
SHAPE = ModelShape(24, 2, (1, 2), hidden_size=8, expert_size=16)


def skewed(seed: int, micro_batches: int = 3) -> LoadMatrix:
    rng = np.random.default_rng(seed)
    mean = 40 * np.exp(rng.normal(size=(1, 2, 1, 24)))
    return LoadMatrix(
        rng.poisson(np.broadcast_to(mean, (micro_batches, 2, 8, 24))).astype(np.int32)
    )


@pytest.fixture(scope="module")
def loads() -> dict[str, LoadMatrix]:
    return {"logprob": skewed(1), "train": skewed(0, micro_batches=2)}


@pytest.fixture(scope="module")
def plan(loads: dict[str, LoadMatrix]) -> StepPlan:
    config = PlannerConfig(replica_slots=2, proposals=5000, pass_weight={"train": 4})
    return plan_step(loads, TOPOLOGY, model=SHAPE, config=config)


@pytest.fixture(scope="module")
def check_plan(shared_dir: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", shared_dir / "tools" / "check_plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("with_quota", [False, True])
def test_round_trip(
    plan: StepPlan, loads: dict[str, LoadMatrix], tmp_path: Path, with_quota: bool
) -> None:
    path = tmp_path / "plan.npz"
    plan.save(path, with_quota=with_quota)
    for again in (StepPlan.load(path, loads), StepPlan.load(path)):
        assert again.hash == plan.hash
        assert again.layouts == plan.layouts
        assert again.base_layouts == plan.base_layouts
        assert again.topology == plan.topology
        assert again.shape == plan.shape
        assert again.config == plan.config
        assert again.report == plan.report
        assert list(again.passes) == ["logprob", "train"]
        for name, one in plan.passes.items():
            got = again.passes[name]
            assert np.array_equal(got.slot_rows_MLGn, one.slot_rows_MLGn)
            assert np.array_equal(got.replica_slot_expert_MLGS, one.replica_slot_expert_MLGS)
    quota = StepPlan.load(path, loads).source_quota("train", 1, 1)
    assert np.array_equal(quota, plan.source_quota("train", 1, 1))
    with pytest.raises(
        PlanError, match=r"loads: need those of pass 'train'.*StepPlan.load\(path, lo"
    ):
        StepPlan.load(path).source_quota("train", 1, 1)


def test_the_same_plan_gives_the_same_bytes(plan: StepPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "a.npz", with_quota=True)
    plan.save(tmp_path / "b.npz", with_quota=True)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_names_shapes_and_dtypes_are_those_of_the_format(plan: StepPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.npz", with_quota=True)
    with np.load(tmp_path / "plan.npz") as file:
        found = {name: (file[name].dtype, file[name].shape) for name in file.files}
        meta = json.loads(str(file["meta"]))
    assert found.pop("meta")[0].kind == "U"
    num_quota = {name: found[name][1][0] for name in ("quota", "logprob/quota")}
    assert min(num_quota.values()) > 0
    assert found == {
        "home_slot_expert": (np.int32, (2, 8, 3)),
        "base_home_slot_expert": (np.int32, (2, 8, 3)),
        "static_slot_expert": (np.int32, (2, 8, 0)),
        "replica_slot_expert": (np.int32, (2, 2, 8, 2)),
        "slot_rows": (np.int64, (2, 2, 8, 5)),
        "quota": (np.int32, (num_quota["quota"], 5)),
        "logprob/replica_slot_expert": (np.int32, (3, 2, 8, 2)),
        "logprob/slot_rows": (np.int64, (3, 2, 8, 5)),
        "logprob/quota": (np.int32, (num_quota["logprob/quota"], 5)),
    }
    assert set(meta) >= {"topology", "strategy", "config", "report", "hash"}
    assert meta["hash"] == plan.hash


def test_quota_is_the_documented_split_of_experts_with_copies(
    plan: StepPlan, loads: dict[str, LoadMatrix], tmp_path: Path
) -> None:
    plan.save(tmp_path / "plan.npz", with_quota=True)
    with np.load(tmp_path / "plan.npz") as file:
        quota = file["quota"]
    expected = []
    for m, layer in np.ndindex(2, 2):
        view = plan.replica_plan("train", m, layer)
        split = split_rows_reference(
            loads["train"].rows_MLGE[m, layer],
            view.slot_expert_Gn,
            view.slot_rows_Gn,
            TOPOLOGY.rank_to_rail_G,
        )
        copied = np.isin(
            view.slot_expert_Gn, view.replica_slot_expert_GS[view.replica_slot_expert_GS >= 0]
        )
        for source, slot in np.argwhere((split > 0) & copied.reshape(-1)):
            expected.append([m, layer, source, slot, split[source, slot]])
    assert quota.tolist() == expected


@pytest.mark.parametrize("with_quota", [False, True])
def test_the_independent_checker_agrees(
    plan: StepPlan,
    loads: dict[str, LoadMatrix],
    check_plan: ModuleType,
    tmp_path: Path,
    with_quota: bool,
) -> None:
    only = plan_step({"train": loads["train"]}, TOPOLOGY, model=SHAPE)
    for one in (only, plan):
        one.save(tmp_path / "plan.npz", with_quota=with_quota)
        found = check_plan.rescore(tmp_path / "plan.npz", loads["train"].rows_MLGE, 2, 4)
        assert found["meta"]["hash"] == one.hash
    only.save(tmp_path / "plan.npz")
    found = check_plan.rescore(tmp_path / "plan.npz", loads["train"].rows_MLGE, 2, 4)
    report = only.report
    assert found["mean"] == pytest.approx(report.imbalance_mean, rel=1e-12)
    assert found["p99"] == pytest.approx(report.imbalance_p99, rel=1e-12)
    assert found["max"] == pytest.approx(report.imbalance_max, rel=1e-12)
    assert found["replicas"] == report.replicas


def test_other_loads_are_refused(
    plan: StepPlan, loads: dict[str, LoadMatrix], tmp_path: Path
) -> None:
    plan.save(tmp_path / "plan.npz")
    rows = loads["train"].rows_MLGE.copy()
    rows[0, 0, [0, 1], 0] += [1, -1]
    with pytest.raises(PlanError, match=r"loads\['train'\]: need the loads that the plan was made"):
        StepPlan.load(tmp_path / "plan.npz", {"train": LoadMatrix(rows)})


def rewrite(source: Path, target: Path, change: dict[str, Any]) -> None:
    """Copies a plan file with some arrays replaced (None: left out)."""
    with np.load(source) as file:
        arrays = {name: file[name] for name in file.files} | change
    buffer = io.BytesIO()
    np.savez(buffer, **{name: array for name, array in arrays.items() if array is not None})
    target.write_bytes(buffer.getvalue())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_rows": None}, "slot_rows"),
        ({"slot_rows": np.zeros((2, 2, 8, 5))}, "slot_rows: need int64 with 4 axes, got float64"),
        ({"slot_rows": np.zeros((2, 2, 8, 4), np.int64)}, "slot_rows_MLGn: need shape"),
        ({"home_slot_expert": np.zeros((2, 8, 3), np.int32)}, "exactly once"),
        ({"home_slot_expert": np.array([[[{}]]], object)}, "need plain numbers, got pickled"),
        (
            {"static_slot_expert": np.zeros((2, 8, 1), np.int32)},
            "with 1 static and 2 replica slots",
        ),
        ({"extra": np.zeros(3)}, "need arrays .* got 'extra.npy'"),
        ({"meta": np.array("{")}, "need a plan file"),
        ({"meta": np.array("[]")}, "need a plan file"),
        ({"meta": np.array('{"format": "other"}')}, "meta.format: need 'relibra-plan-1'"),
    ],
)
def test_changed_arrays_are_refused(
    plan: StepPlan, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    plan.save(tmp_path / "plan.npz")
    rewrite(tmp_path / "plan.npz", tmp_path / "other.npz", change)
    with pytest.raises(PlanError, match=message) as caught:
        StepPlan.load(tmp_path / "other.npz")
    assert "other.npz" in str(caught.value)


def test_a_valid_but_other_plan_under_the_old_hash_is_refused(
    plan: StepPlan, tmp_path: Path
) -> None:
    plan.save(tmp_path / "plan.npz")
    with np.load(tmp_path / "plan.npz") as file:
        rows = file["slot_rows"].copy()
        replicas = file["replica_slot_expert"]
    place = tuple(np.argwhere((replicas >= 0) & (rows[..., 3:] > 0))[0])
    rows[(*place[:3], 3 + place[3])] -= 1
    rewrite(tmp_path / "plan.npz", tmp_path / "other.npz", {"slot_rows": rows})
    with pytest.raises(PlanError, match="need the hash .*: the file changed"):
        StepPlan.load(tmp_path / "other.npz")


def test_a_quota_that_is_not_the_documented_split_is_refused(
    plan: StepPlan, loads: dict[str, LoadMatrix], tmp_path: Path
) -> None:
    plan.save(tmp_path / "plan.npz", with_quota=True)
    with np.load(tmp_path / "plan.npz") as file:
        quota = file["quota"][::-1].copy()
    rewrite(tmp_path / "plan.npz", tmp_path / "other.npz", {"quota": quota})
    with pytest.raises(PlanError, match="quota of pass 'train' differs from the documented split"):
        StepPlan.load(tmp_path / "other.npz", loads)


def test_a_header_that_asks_for_too_much_is_refused_before_it_is_allocated(
    plan: StepPlan, tmp_path: Path
) -> None:
    plan.save(tmp_path / "plan.npz")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<i8", "fortran_order": False, "shape": (1 << 20, 1 << 20, 8, 5)}
    )
    with (
        zipfile.ZipFile(tmp_path / "plan.npz") as old,
        zipfile.ZipFile(tmp_path / "other.npz", "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, header.getvalue() if name == "slot_rows.npy" else old.read(name))
    with pytest.raises(PlanError, match="slot_rows.npy: need 351843720888320 bytes for int64"):
        StepPlan.load(tmp_path / "other.npz")


def test_damaged_bytes_give_one_plan_error_or_the_same_plan(plan: StepPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.npz")
    data = (tmp_path / "plan.npz").read_bytes()
    rng = np.random.default_rng(0)
    other, refused = tmp_path / "other.npz", 0
    for i in range(150):
        damaged = bytearray(data)
        if i % 3 == 0:
            damaged = damaged[: int(rng.integers(0, len(data)))]
        else:
            for place in rng.integers(0, len(data), 1 + i % 4):
                damaged[place] = rng.integers(0, 256)
        other.write_bytes(damaged)
        try:
            assert StepPlan.load(other).hash == plan.hash
        except PlanError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x93NUMPY", b"not a plan"])
def test_no_plan_file_at_all(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "plan.npz").write_bytes(data)
    with pytest.raises(PlanError, match="need a plan file"):
        StepPlan.load(tmp_path / "plan.npz")
    with pytest.raises(PlanError, match="need a plan file, got no such file"):
        StepPlan.load(tmp_path / "missing.npz")


def test_settings_that_are_numpy_integers_are_saved_and_read(tmp_path):
    config = PlannerConfig(
        seed=np.uint64(3), static_copies=np.int64(1), pass_weight={"a": np.int8(2)}
    )
    shape = ModelShape(np.int64(4), np.int32(1), (0,), hidden_size=np.int64(8), expert_size=8)
    loads = {"a": LoadMatrix(np.ones((1, 1, 2, 4), np.int32))}
    plan = plan_step(loads, Topology(2, 1), model=shape, config=config)
    plan.save(tmp_path / "plan.npz")
    assert StepPlan.load(tmp_path / "plan.npz").hash == plan.hash
    assert {type(config.seed), type(config.pass_weight["a"]), type(shape.top_k)} == {int}
