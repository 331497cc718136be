"""Compares a run's times with stored ones, and fails where one is slower by more than a factor.

    python perf/compare_results.py NEW_FOLDER STORED_FOLDER [--slower 1.05]

Both folders hold the JSON lines of the benchmarks. Exit status: 0 compared, nothing slower; 1
something slower, or no new results; 3 NOT COMPARED, since nothing is stored. Results that only one
of the folders has are named; they cannot fail, since benchmarks stop at a time budget.
"""

import argparse
import json
import sys
from pathlib import Path

NOT_COMPARED = 3
KEY = ("bench", "case", "dtype", "group", "name")


def read(folder: Path) -> dict[tuple[str, ...], float]:
    """Key -> median microseconds, of every line that has a time."""
    found = {}
    for path in sorted(folder.glob("bench_*.json")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "median_us" in row:
                found[tuple(str(row.get(name, "")) for name in KEY)] = float(row["median_us"])
    return found


def compare(
    new: dict[tuple[str, ...], float], stored: dict[tuple[str, ...], float], slower: float
) -> tuple[list[str], list[str]]:
    """What is too slow, and what has nothing to be compared with."""
    failed = [
        f"{' '.join(key)}: {time:.1f} us, stored {stored[key]:.1f} us"
        for key, time in new.items()
        if key in stored and time > slower * stored[key]
    ]
    return failed, [" ".join(key) for key in new if key not in stored]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("new", type=Path)
    parser.add_argument("stored", type=Path)
    parser.add_argument("--slower", type=float, default=1.05, help="factor that still passes")
    args = parser.parse_args()
    new = read(args.new)
    if not new:
        sys.exit(f"error: {args.new}: need bench_*.json with times, got none")
    stored = read(args.stored)
    failed, unknown = compare(new, stored, args.slower)
    gone = [" ".join(key) for key in stored if key not in new]
    compared = len(new) - len(unknown)
    if not compared:
        print(f"NOT COMPARED: {args.stored} has no time of any of the {len(new)} new results")
        sys.exit(NOT_COMPARED)
    print("\n".join(["too slow:", *failed] if failed else ["nothing is slower than stored"]))
    for title, names in (("stored, but not in this run", gone), ("without a stored one", unknown)):
        print("\n".join([f"{title}: {len(names)}", *(f"  {name}" for name in names)]))
    print(f"{compared} of {len(new)} results compared")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
