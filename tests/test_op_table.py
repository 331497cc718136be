"""The table of op schemas says what is registered."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "perf"))  # scripts, not a package

import op_table

ROOT = Path(__file__).resolve().parents[1]


def test_the_file_is_what_the_registered_schemas_give():
    """Remedy: python perf/op_table.py, and a look at who calls the changed op."""
    assert op_table.FILE.read_text() == op_table.table()


def test_the_file_is_linked():
    assert "(relibra_kernels/OPS.md)" in (ROOT / "README.md").read_text()


def test_a_changed_schema_shows():
    schema = torch._C.parse_schema("relibra::swiglu(Tensor h_R2F, bool gated=True) -> Tensor")
    assert op_table.schema_text(schema) not in op_table.table()
    assert op_table.schema_text(torch.ops.relibra.swiglu.default._schema) in op_table.table()


def test_mutated_arguments_are_named_and_lettered_in_order():
    text = op_table.table()
    row = next(line for line in text.splitlines() if line.startswith("| `grouped_gemm_wgrad`"))
    assert "| 0 | `home_grad_HND`, `replica_grad_SND` |" in row
    assert "Tensor(a!) home_grad_HND, Tensor(b!) replica_grad_SND" in text


def test_comm_05_every_op_stands_in_a_test_that_calls_opcheck():
    checked = ""
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if "library.opcheck" in text:
            for node in ast.parse(text).body:
                part = ast.get_source_segment(text, node) or ""
                checked += part if isinstance(node, ast.FunctionDef) and "opcheck" in part else ""
    names = {name.partition("::")[2].partition(".")[0] for name in op_table_names()}
    assert len(names) >= 25
    assert sorted(n for n in names if not re.search(rf"\b{n}\b", checked)) == []


def op_table_names():
    """Registered operations."""
    return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("relibra::")]


def test_an_op_without_an_entry_is_an_error(monkeypatch):
    monkeypatch.delitem(op_table.DTYPES, "combine")
    with pytest.raises(ValueError, match=r"missing \['combine'\]"):
        op_table.table()
