"""Plan files made to break the reader: each is refused with one PlanError, quickly and in place."""

import dataclasses
import io
import json
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relibra.load_matrix import LoadMatrix
from relibra.plan import StepPlan
from relibra.plan_report import FROM_LOADS
from relibra.planner import plan_step
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

LOADS = {
    name: LoadMatrix(np.random.default_rng(seed).integers(0, 30, (2, 3, 2, 8)))
    for seed, name in enumerate(("train", "logprob"))
}


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    return plan_step(LOADS, Topology(1, 2), model=ModelShape(8, 2, (0, 1, 2)))


@pytest.fixture
def saved(plan: StepPlan, tmp_path: Path) -> Path:
    plan.save(tmp_path / "plan.npz")
    return tmp_path / "plan.npz"


def arrays_of(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def rewrite(path: Path, changes: dict[str, Any]) -> None:
    """Replaces arrays of a plan file; None leaves one out."""
    arrays = arrays_of(path) | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


def set_meta(path: Path, *keys: str, value: object) -> None:
    """Replaces one value of the meta data."""
    meta = json.loads(str(arrays_of(path)["meta"]))
    place = meta
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    rewrite(path, {"meta": np.array(json.dumps(meta))})


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("topology", "rank_to_node"), [0, 10**12], r"every node 0\.\.1000000000000 .* got none"),
        (("topology", "rank_to_node"), [10**30, 0], r"every node 0\.\.10{30} .* got none"),
        (("topology", "rank_to_node"), [0, 3 * 10**7], r"every node 0\.\.30000000 .* got none"),
        (("topology",), {"num_nodes": 10**8, "ranks_per_node": 8}, "need at most 1048576 ranks"),
        (("topology",), {"num_nodes": 1, "ranks_per_node": 3}, "need 3 for G in shape"),
        (("topology", "rank_to_node"), 7, "rank_to_node: need one number a rank, got 7"),
        (("model", "num_experts"), 2**34, "num_experts: need at most 65536"),
        (("model", "moe_layers"), [0, 1, 10**12], "moe_layers: need 0 to 4095"),
        (("model", "moe_layers"), [0, 1], "need 2 for L in shape"),
        (("passes",), ["train", "train"], "meta.passes: need every name once"),
        (("passes",), ["train", "../logprob"], "meta.passes: need names of 1 to 64 letters"),
        (("passes",), ["train", 3], "meta.passes: need names of type str, got int 3"),
        (("passes",), "train", "meta.passes: need a list of names, got train"),
        (("passes",), [], "meta.passes: need a list of names"),
        (("passes",), ["train"], r"need no arrays \['logprob/replica_slot_expert', 'logprob/slot"),
        (("passes",), ["train", "x"], r"need the arrays \['x/replica_slot_expert', 'x/slot_rows'"),
        (("strategy",), "\x1b[2J", "meta.strategy: need names of 1 to 64 letters"),
        (("strategy",), ["relibra"], "meta.strategy: need names of type str"),
        (("config", "pass_weight"), {"a\0": 1}, "pass_weight: need names of 1 to 64 letters"),
        (("report", "replicas"), 1.5, "report.replicas: need int, got float 1.5"),
        (("report", "imbalance_mean"), "1.0", "report.imbalance_mean: need float, got str '1.0'"),
        (("report", "rdma_rows"), [1], "report.rdma_rows: need int | None, got list"),
        (("report", "planner_ms"), float("nan"), "report.planner_ms: need a finite number"),
        (("report", "hidden"), 1, "unexpected keyword argument 'hidden'"),
    ],
)
def test_hostile_meta_data(saved: Path, keys: tuple[str, ...], value: object, message: str) -> None:
    set_meta(saved, *keys, value=value)
    tracemalloc.start()
    with pytest.raises(PlanError, match=message.replace(" | ", r" \| ")) as caught:
        StepPlan.load(saved)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()
    assert str(saved) in str(caught.value)


def npy(shape: str, descr: str = "<i8") -> bytes:
    text = f"{{'descr':'{descr}','fortran_order':False,'shape':{shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def test_a_bomb_of_arrays_that_no_meta_data_name(saved: Path, tmp_path: Path) -> None:
    """64 MiB of zeros each, in a file of some hundred KiB: none of it is inflated."""
    with zipfile.ZipFile(saved, "a", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            data = npy(f"({1 << 23},1,1,1)") + bytes(1 << 26)
            archive.writestr(f"x{number}/slot_rows.npy", data)
    tracemalloc.start()
    with pytest.raises(PlanError, match=r"need no arrays \['x0/slot_rows', 'x1/slot_rows', 'x2/"):
        StepPlan.load(saved)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


def test_all_arrays_together_have_a_limit(
    plan: StepPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = LoadMatrix(np.ones((100, 3, 2, 8), np.int32))
    long = plan_step({"train": loads}, plan.topology, model=plan.shape, strategy="none")
    long.save(tmp_path / "plan.npz")
    monkeypatch.setattr("relibra.array_files.MAX_ARRAY_BYTES", 20_000)
    with pytest.raises(PlanError, match="need at most 20000 bytes in .*slot_rows.*, got"):
        StepPlan.load(tmp_path / "plan.npz")


def test_meta_data_have_a_limit_of_their_own(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relibra.plan_file._MAX_META_BYTES", 1000)
    with pytest.raises(PlanError, match="meta: need at most 1000 bytes, got"):
        StepPlan.load(saved)


def test_layers_without_bytes_are_not_built(saved: Path) -> None:
    """10^9 layers of no slots take no byte of the file."""
    rewrite(saved, {"home_slot_expert": np.zeros((10**9, 0, 0), np.int32)})
    with pytest.raises(PlanError, match=r"home_slot_expert: need 3 for L in shape \['L', 'G', 'H'"):
        StepPlan.load(saved)


def test_no_micro_batch(saved: Path) -> None:
    arrays = arrays_of(saved)
    names = ("slot_rows", "replica_slot_expert")
    rewrite(saved, {name: arrays[name][:0] for name in names})
    with pytest.raises(PlanError, match="slot_rows_MLGn: need at least one micro-batch, got none"):
        StepPlan.load(saved)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "data",
    [
        npy("(True,1,2,5)"),
        npy("(99999999999999999999999,1,2,5)"),
        npy("(0,2305843009213693952,2,1)"),
        npy("(1,1,1,1)", "|O"),
        b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"(" * 9000,
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 31),
        b"",
    ],
)
@pytest.mark.parametrize("name", ["slot_rows", "meta"])
def test_damaged_headers(saved: Path, tmp_path: Path, data: bytes, name: str) -> None:
    other = tmp_path / "other.npz"
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(other, "w") as new:
        for entry in old.namelist():
            new.writestr(entry, data if entry == f"{name}.npy" else old.read(entry))
    with pytest.raises(PlanError, match=f"need a plan file: {name}.npy: need"):
        StepPlan.load(other)


# --- the report, which the hash does not cover ----------------------------------------------------


def lie(path: Path) -> dict[str, Any]:
    """Better figures than the plan has."""
    meta = json.loads(str(arrays_of(path)["meta"]))
    lies = {
        "imbalance_mean": 1.0,
        "replicas": 0,
        "rdma_rows": 0,
        "local_rows": 1,
        "planner_ms": 0.5,
    }
    lies |= {"imbalance_routed_max": 1.0, "strategy": "ideal", "hash": "0"}
    assert all(meta["report"][name] != value for name, value in lies.items() if name != "rdma_rows")
    rewrite(path, {"meta": np.array(json.dumps(meta | {"report": meta["report"] | lies}))})
    return lies


def test_with_loads_no_figure_but_the_time_is_believed(plan: StepPlan, saved: Path) -> None:
    lie(saved)
    again = StepPlan.load(saved, LOADS)
    assert again.stored_figures == ("planner_ms",)
    assert again.report == dataclasses.replace(plan.report, planner_ms=0.5)


def test_without_loads_only_figures_of_loads_are_believed(plan: StepPlan, saved: Path) -> None:
    lies = lie(saved)
    for loads in ({}, {"train": LOADS["train"]}):
        again = StepPlan.load(saved, loads)
        assert again.stored_figures == ("planner_ms", *FROM_LOADS)
        believed = {name: lies[name] for name in again.stored_figures if name in lies}
        assert set(believed) == {"planner_ms", "local_rows", "rdma_rows", "imbalance_routed_max"}
        assert again.report == dataclasses.replace(plan.report, **believed)


def test_a_plan_of_the_planner_has_no_stored_figures(plan: StepPlan) -> None:
    assert plan.stored_figures == ()


# --- writing --------------------------------------------------------------------------------------


def test_a_file_appears_when_it_is_complete(
    plan: StepPlan, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk in the middle leaves the old file and nothing else."""
    before, calls = saved.read_bytes(), []

    def fail(file: io.BytesIO, array: object, **_: object) -> None:
        calls.append(array)
        if len(calls) == 3:
            raise OSError("no space left on device")
        file.write(b"part")

    monkeypatch.setattr(np.lib.format, "write_array", fail)
    with pytest.raises(OSError, match="no space"):
        plan.save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["plan.npz"]


@pytest.mark.parametrize(
    "name", ["a\0b", "", "x/y", "../x", "a b", "é", "a\n", "-a", ".a", "a" * 65]
)
def test_pass_names_that_are_no_keys_of_files(plan: StepPlan, name: str) -> None:
    with pytest.raises(PlanError, match="passes: need names of 1 to 64 letters, digits and"):
        dataclasses.replace(plan, passes={name: plan.passes["train"]}, loads={name: LOADS["train"]})
    with pytest.raises(PlanError, match="need names of 1 to 64 letters"):
        plan_step({name: LOADS["train"]}, plan.topology, model=plan.shape, strategy="none")


def test_pass_names_that_are_no_text(plan: StepPlan) -> None:
    loads: Any = {1: LOADS["train"], "a": LOADS["train"]}
    numbered: Any = {1: plan.passes["train"]}
    with pytest.raises(TypeError, match="loads: need pass names of type str, got 1"):
        plan_step(loads, plan.topology, model=plan.shape)
    with pytest.raises(TypeError, match="passes: need names of type str, got int 1"):
        dataclasses.replace(plan, passes=numbered, loads={})


def test_usual_pass_names(plan: StepPlan, tmp_path: Path) -> None:
    for name in ("train", "ref_logprob", "actor.old-logprob", "2nd", "A+B", "a" * 64):
        one = plan_step({name: LOADS["train"]}, plan.topology, model=plan.shape, strategy="none")
        one.save(tmp_path / "plan.npz")
        assert list(StepPlan.load(tmp_path / "plan.npz").passes) == [name]
