"""Writes `relibra_kernels/OPS.md`, the table of op schemas, from what is registered.

    python perf/op_table.py [--check]

Schemas, mutated arguments, bodies and gradients are read from PyTorch's dispatcher; dtypes are
checked inside the ops, so their words stand here. `--check` only compares.
"""

import argparse
import re
import sys
from pathlib import Path

import torch

import relibra_kernels  # noqa: F401  registers the ops

FILE = Path(__file__).resolve().parents[1] / "relibra_kernels/OPS.md"
ROWS = "rows and weights fp32, fp16 or bf16, all the same; tables int32"
WGRAD = "rows fp32, fp16 or bf16; gradients fp32; tables int32; `slot_rows_n` on the CPU"
IDS = "ids int32 or int64; tables int32"
DTYPES = {
    "build_route": IDS,
    "build_rows": "tables int32",
    "combine": "rows fp32, fp16 or bf16; index int32; scores fp32",
    "combine_backward": "rows fp32, fp16 or bf16; index int32; scores fp32",
    "count_sends": IDS,
    "expert_bias_grad": f"{WGRAD}; scores fp32",
    "expert_down": ROWS,
    "expert_down_backward": f"{ROWS}; scores fp32",
    "expert_up": f"{ROWS}; scores fp32",
    "expert_up_backward": ROWS,
    "expert_wgrad": WGRAD,
    "grouped_gemm": ROWS,
    "grouped_gemm_dgrad": ROWS,
    "grouped_gemm_wgrad": WGRAD,
    "home_reduce": "gradients fp32; lists int32",
    "moe_backward": "rows and weights fp32, fp16 or bf16; gradients of weights fp32",
    "moe_forward": "rows and weights fp32, fp16 or bf16; ids int32 or int64; scores floating",
    "replica_push": "weights fp32, fp16 or bf16; lists int32",
    "route_to_slots": IDS,
    "row_scores": "scores fp32, fp16 or bf16; tables int32",
    "swiglu": "fp32, fp16 or bf16",
    "swiglu_backward": "fp32, fp16 or bf16",
    "token_permute": "rows fp32, fp16 or bf16; tables int32",
    "token_unpermute": "rows fp32, fp16 or bf16; tables int32",
    "token_unpermute_backward": "rows fp32, fp16 or bf16; tables int32",
}
HEAD = """\
# Schemas of the ops

Part of the contract: a test fails when a registered schema and this file differ. Written by
`python perf/op_table.py`; what an op means stands in `relibra_kernels/reference/<op>.py`.

Results are new tensors that the op allocates on the device of its first argument; an op without
results fills the arguments that its schema marks with `!`, which the caller allocates. No op
changes or keeps any other argument; `moe_forward` and `moe_backward` also write what their runtime
owns (replica slots, `main_grad`), which they find by number. "reference" is plain PyTorch, and
takes fp64 rows as well; "Triton" are the kernels of `triton_ops/`. `backend` chooses: by default
CPU tensors take the first and CUDA tensors the second. Kernels also run on CPU tensors where
`TRITON_INTERPRET=1` is set.
"""


def ops() -> dict[str, torch._ops.OpOverload]:
    """Name -> op, of every registered op."""
    names = torch._C._dispatch_get_all_op_names()
    found = sorted(name.split("::")[1] for name in names if name.startswith("relibra::"))
    return {name: getattr(torch.ops.relibra, name).default for name in found}


def schema_text(schema: object) -> str:
    """The schema, with mutated arguments lettered in order, as versions of PyTorch differ."""
    letters: dict[str, str] = {}

    def letter(found: re.Match[str]) -> str:
        return f"({letters.setdefault(found[1], chr(ord('a') + len(letters)))}!)"

    return re.sub(r"\((\w+)!\)", letter, str(schema).replace("relibra::", ""))


def bodies(op: torch._ops.OpOverload) -> str:
    """What runs on CPU and on CUDA tensors."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = op.name()
    if any(one.name == "backend" for one in op._schema.arguments):
        return "reference, Triton" if has(name, "CUDA") else "reference"
    if not has(name, "CUDA"):
        return "reference, CPU only"
    return "calls the other ops"


def table() -> str:
    """The whole file."""
    known = ops()
    if set(known) != set(DTYPES):
        missing, gone = sorted(set(known) - set(DTYPES)), sorted(set(DTYPES) - set(known))
        raise ValueError(f"DTYPES: need an entry an op; missing {missing}, without an op {gone}")
    definitions = torch._library.custom_ops.OPDEFS
    lines = [HEAD, "| op | results | mutated | dtypes | bodies | gradients |"]
    lines.append("|---|---|---|---|---|---|")
    for name, op in known.items():
        schema = op._schema
        mutated = [
            f"`{a.name}`" for a in schema.arguments if a.alias_info and a.alias_info.is_write
        ]
        backward = definitions[f"relibra::{name}"]._backward_fn is not None
        cells = [f"`{name}`", str(len(schema.returns)), ", ".join(mutated), DTYPES[name]]
        cells += [bodies(op), "registered" if backward else ""]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "```text"]
    lines += [line for op in known.values() for line in (schema_text(op._schema), "")]
    return "\n".join([*lines[:-1], "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit status 1 where the file is old")
    if not parser.parse_args().check:
        FILE.write_text(table())
    elif FILE.read_text() != table():
        sys.exit(f"error: {FILE.name} is old. Remedy: python perf/op_table.py")


if __name__ == "__main__":
    main()
