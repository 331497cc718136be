"""The short table at the end of `gpu_check.sh`: steps, failed first checks, best rates.

python perf/gpu_table.py FOLDER
"""

import json
import sys
from pathlib import Path


def lines_of(path: Path) -> list[dict[str, object]]:
    """JSON lines; none without the file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(folder: Path) -> list[str]:
    """The lines to print."""
    out = (folder / "gpu_steps.txt").read_text().splitlines()
    checks = lines_of(folder / "gpu_first.json")
    out.append(f"first on a GPU: {sum(bool(c['passed']) for c in checks)} of {len(checks)} pass")
    out += [f"  FAIL {c['check']}: {c['reason']}" for c in checks if not c["passed"]]
    for path in sorted(folder.glob("bench_*.json")):
        for row in lines_of(path):
            name = str(row.get("name", ""))
            ours = name.startswith("relibra")
            if row.get("bench") == "replica_sync":  # of many patterns one
                ours = name != "copy" and str(row["case"]).endswith(" ring")
            if "median_us" not in row or not ours:
                continue
            rates = [
                f"{row[key]:.0f} {unit}"
                for key, unit in (
                    ("tflops", "TFLOP/s"),
                    ("gb_per_s", "GB/s"),
                    ("percent_of_copy", "% of a copy"),
                    ("percent_of_bound", "% of the bound"),
                )
                if key in row
            ]
            if "must_tflops" in row:
                reached = "reached" if row["tflops"] >= row["must_tflops"] else "NOT REACHED"
                rates.append(f"(must {row['must_tflops']:.0f}: {reached})")
            title = " ".join(
                str(row[key]) for key in ("bench", "case", "dtype", "group", "name") if key in row
            )
            out.append(f"{title:76} {row['median_us']:10.1f} us {' '.join(rates)}")
    return out


if __name__ == "__main__":
    print("\n".join(table(Path(sys.argv[1]))))
