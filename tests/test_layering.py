"""Imports point down the list of layers, siblings stay apart, and C++ stays free of torch."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS = [  # low to high; a file may import its own layer and lower ones
    {"checks", "limits", "topology", "rank_order", "native", "errors", "_planner"}
    | {"_replica_sync"},
    {"trace", "formats", "id_arrays", "dispatch_rows", "slicing", "load_matrix", "dealing"}
    | {"layout", "placement_maps", "tables", "weights", "validate", "shape", "presets", "synthetic"}
    | {"slot_layout", "thread_state"}
    | {
        "plan",
        "pass_plan",
        "plan_check",
        "plan_config",
        "plan_file",
        "array_files",
        "plan_report",
        "source_split",
    },
    {"cost_model", "token_copies", "token_sample", "pass_cost", "transfer_cost", "planner"},
    {"reference", "triton_ops"},
    {"ops", "transport", "testing", "registry", "relibra_kernels"},
    {"hop_splits", "hop_tables", "places", "dispatcher", "stages", "started_layer"}
    | {
        "rank_settings",
        "rank_tables",
        "copy_lists",
        "static_slots",
        "balanced_moe",
        "module",
        "runtime",
        "step",
        "migrate",
        "compose",
    }
    | {
        "compiled",
        "token_exchange",
        "layer_options",
        "expert_weights",
        "expert_ops",
        "layer_passes",
        "weight_grads",
        "composition",
        "composed",
        "simulate",
        "simulate_input",
        "simulate_plots",
        "simulate_report",
        "simulate_reroute",
        "simulate_settings",
        "report",
        "logical_state",
        "local_use",
        "local_attachment",
        "local_layer",
        "local_rank",
        "local_runtime",
        "local_step",
        "live_routes",
        "use",
        "route_checks",
        "agreement",
        "sharded_planning",
        "attachment",
        "attachable",
        "movers",
        "table_ring",
        "runtime_warmup",
        "runtime_state",
        "runtime_groups",
        "runtime_replicas",
        "runtime_transport",
        "row_needs",
        "domain_sync",
        "output_marker",
        "step_tables",
        "step_calls",
        "step_facts",
        "step_next",
        "step_report",
        "layer_kinds",
        "replica_counts",
        "departures",
    },
    {"integrations", "cli", "cli_input", "cli_plan", "cli_check", "cli_simulate", "doctor"}
    | {"cli_settings"}
    | {"demo", "__main__", "relibra"},
]
# importer -> what it must not import although the layers would allow it
FORBIDDEN = {
    "reference": {"triton_ops"},
    "triton_ops": {"reference", "plan", "planner"},
    "transport": {"planner"},
    "planner": {"torch.distributed"},
}
FOLDERS = ("relibra_kernels", "triton_ops", "python/relibra")
PACKAGES = ("relibra", "relibra_kernels")


def python_sources() -> list[str]:
    """Every source by its real path: `rglob` follows no link."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def module_of(file: str) -> list[str]:
    """Dotted name of a file, such as ["relibra_kernels", "triton_ops", "permute"]."""
    parts = file.removeprefix("python/").removesuffix(".py").split("/")
    return (["relibra_kernels"] if parts[0] == "triton_ops" else []) + parts


def part_of(module: list[str]) -> str:
    """Name that has a layer: the second one, or the package for its `__init__`."""
    return module[1] if len(module) > 1 and module[1] != "__init__" else module[0]


def layer_of(part: str) -> int:
    """Index in LAYERS."""
    found = [index for index, names in enumerate(LAYERS) if part in names]
    assert found, f"{part} has no layer: add it to LAYERS in tests/test_layering.py"
    return found[0]


def is_module(package: str, name: str) -> bool:
    """Whether `package.name` is a module, and not a function or class that the package exports."""
    path = ROOT / "python" / package / name
    listed = any(name in names for names in LAYERS)
    return listed or path.is_dir() or path.with_suffix(".py").is_file()


def imported(source: str, module: list[str]) -> set[tuple[str, ...]]:
    """Dotted names that a source imports; `from a import b` gives `a.b`."""
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module[: -node.level] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            found |= {(*base, alias.name) for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            found.add(("torch", "distributed"))
    return found


def violations(file: str, source: str) -> list[str]:
    """What a source file imports against the rules."""
    module = module_of(file)
    own, found = part_of(module), []
    for dotted in sorted(imported(source, module)):
        if dotted[:2] == ("torch", "distributed") and "torch.distributed" in FORBIDDEN.get(own, ()):
            found.append(f"{own} must not import torch.distributed")
        if dotted[0] not in PACKAGES:
            continue
        if dotted[0] == "relibra" and module[0] == "relibra_kernels":
            found.append(f"{own} is below the package relibra")
        target = part_of(list(dotted[:2]))
        if len(dotted) > 1 and not is_module(*dotted[:2]):
            target = dotted[0]  # a name that the package exports: as high as the package itself
        if target == own or own == module[0]:
            continue  # a package's own parts; a package's __init__ gathers all of them
        if layer_of(target) > layer_of(own):
            found.append(f"{own} imports {target}, which is above it")
        if target in FORBIDDEN.get(own, ()):
            found.append(f"{own} must not import {target}")
        if target == "triton_ops" and module[0] == "relibra_kernels" and own != "ops":
            found.append(f"{own} imports triton_ops; inside relibra_kernels only ops may")
        if own == "triton_ops" and target not in ("checks", "tables", "weights"):
            found.append(f"triton_ops imports {target}; it may import checks, tables, weights")
    return found


@pytest.mark.parametrize("file", python_sources())
def test_imports_point_down(file: str) -> None:
    layer_of(part_of(module_of(file)))
    assert violations(file, (ROOT / file).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("python/relibra/plan.py", "from relibra.cli import main", "above it"),
        ("python/relibra/planner/reorder.py", "from ..step import x", "above it"),
        ("python/relibra/trace.py", "import relibra", "above it"),
        ("python/relibra/trace.py", "from relibra import some_function", "above it"),
        ("relibra_kernels/checks.py", "if x:\n    import relibra.topology", "below the package"),
        ("relibra_kernels/__init__.py", "import relibra", "below the package"),
        ("relibra_kernels/reference/a.py", "from relibra_kernels import triton_ops", "must not"),
        ("triton_ops/permute.py", "from relibra_kernels.reference import a", "must not"),
        ("triton_ops/permute.py", "import relibra_kernels.native", "checks, tables, weights"),
        ("relibra_kernels/transport/dist.py", "from relibra.planner import a", "below the package"),
        ("relibra_kernels/testing/a.py", "from ..triton_ops import b", "only ops may"),
        ("python/relibra/planner/a.py", "import torch.distributed as dist", "torch.distributed"),
        ("python/relibra/planner/a.py", "from torch import distributed", "torch.distributed"),
        ("python/relibra/planner/a.py", "x = torch.distributed.get_rank()", "torch.distributed"),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str, expected: str) -> None:
    assert any(expected in text for text in violations(file, source))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("python/relibra/step.py", "from relibra.plan import a\nimport torch.distributed"),
        ("python/relibra/planner/a.py", "from relibra_kernels import _planner\nfrom . import b"),
        ("triton_ops/permute.py", "from relibra_kernels.checks import a\nfrom .configs import b"),
        ("relibra_kernels/ops.py", "from relibra_kernels.triton_ops import permute"),
    ],
)
def test_a_right_import_is_accepted(file: str, source: str) -> None:
    assert violations(file, source) == []


def test_a_file_without_a_layer_is_found() -> None:
    with pytest.raises(AssertionError, match="add it to LAYERS"):
        layer_of(part_of(module_of("python/relibra/unheard_of.py")))


def test_no_init_file_below_cuda() -> None:
    """It would hide NVIDIA's `cuda` package whenever the checkout is on the path."""
    assert list((ROOT / "cuda").rglob("__init__.py")) == []


def test_native_code_includes_no_torch_and_pybind_only_in_bindings() -> None:
    for path in sorted((ROOT / "cuda").rglob("*")):
        if path.suffix not in {".cpp", ".hpp", ".h", ".cu", ".cuh"}:
            continue
        file = path.relative_to(ROOT).as_posix()
        includes = re.findall(r'#\s*include\s*[<"]([^>"]+)', path.read_text(encoding="utf-8"))
        roots = {name.split("/")[0] for name in includes}
        assert not roots & {"torch", "ATen", "c10"}, f"{file} includes torch"
        assert "pybind11" not in roots or file.startswith("cuda/bindings/"), f"{file}: pybind11"
