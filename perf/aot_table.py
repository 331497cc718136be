"""The table of kernels in the README, from the results of the ahead-of-time gate.

    python perf/aot_table.py [--write]

Prints it, or puts it into the README between its two marks.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "perf/results/aot.json"
BLOCK = re.compile(r"(<!-- aot_table: begin -->\n).*?(<!-- aot_table: end -->)", re.DOTALL)
VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")  # of Triton, whose results are stored
REQUIRED = "3.7.1"  # the version that the figures are of
ARCHS = ("sm_80", "sm_90", "sm_100")
KERNELS = {
    "F1 gathered": "`expert_up`, rows gathered",
    "F1": "`expert_up`, rows in place",
    "F2": "`grouped_gemm`: second GEMM",
    "F3": "`combine` with scores",
    "F4": "`combine` without scores, at the source",
    "B1 gathered": "`expert_down_backward`, rows gathered",
    "B1": "`expert_down_backward`, rows in place",
    "B2": "`expert_wgrad`: both weight gradients",
    "B3": "`grouped_gemm`: gradient of the rows",
    "B4": "`combine`: gradient of the tokens",
}
OTHERS = {  # op -> its Triton functions; `tests/aot/test_launches.py` compiles them, no figures
    "`build_route`, `count_sends`, `route_to_slots`": (
        *("_rank_in_block_kernel", "_scan_blocks_kernel"),
        *("_assign_kernel", "_send_tables_kernel"),
    ),
    "`build_rows`": ("_build_rows_kernel",),
    "`token_permute`, `token_unpermute`": ("_copy_rows_kernel",),
    "`row_scores`": ("_row_scores_kernel",),
    "`combine_backward`": (
        *("_claims_kernel", "_combine_rows_grad_kernel", "_combine_scores_grad_kernel"),
    ),
    "score gradient of `expert_down_backward`": ("_score_gradient_kernel",),
    "`expert_bias_grad`": ("_expert_bias_grad_kernel",),
    "copies of rows to peers": ("_copy_rows_to_peers_kernel",),
}
STATE = "compiled, not run"


def figures(rows: list[dict[str, object]]) -> str:
    """Registers / bytes of stack / KiB of shared memory, the most of plain bf16 over the models."""
    most = [max(int(str(row[key])) for row in rows) for key in ("registers", "stack", "shared")]
    return f"{most[0]} / {most[1]} / {most[2] / 1024:.0f}"


def table(results: dict[str, list[dict[str, object]]]) -> str:
    """Markdown: one row a kernel, then what passed with which Triton."""
    lines = ["| kernel | op | " + " | ".join(ARCHS) + " | on a GPU |", "|---|---|---|---|---|---|"]
    for name, op in KERNELS.items():
        cells = []
        for arch in ARCHS:
            plain = [
                row
                for row in results[REQUIRED]
                if (row["kernel"], row["arch"], row["option"]) == (name, arch, "")
            ]
            cells.append(figures(plain))
        lines.append(f"| {name} | {op} | " + " | ".join(cells) + f" | {STATE} |")
    for op in OTHERS:
        lines.append(f"| | {op} |" + " compiles |" * len(ARCHS) + f" {STATE} |")
    passed = [
        f"{version} ({sum(not row['wrong'] for row in rows)} of {len(rows)})"
        for version, rows in sorted(results.items())
    ]
    lines += ["", f"Binaries that pass, by version of Triton: {', '.join(passed)}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into the README")
    text = table(json.loads(RESULTS.read_text()))
    if not parser.parse_args().write:
        sys.stdout.write(text)
        return
    before = README.read_text()
    if not BLOCK.search(before):
        sys.exit(f"error: {README.name}: need the marks aot_table: begin and end")
    README.write_text(BLOCK.sub(lambda found: found[1] + text + found[2], before))


if __name__ == "__main__":
    main()
