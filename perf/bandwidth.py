"""What the benchmarks of memory-bound ops share: cases, a correctness gate, percent of a copy.

The bound is `Tensor.copy_` of as many bytes, measured in the same run.
"""

import argparse
import sys
from collections.abc import Callable, Mapping

import torch
from harness import measure, write_lines

from relibra_kernels.testing.compare import calc_diff

# tokens, D, choices
CASES = {
    "Qwen3-30B-A3B": (8192, 2048, 8),
    "Qwen3-235B-A22B": (8192, 4096, 8),
    "DeepSeek-V3": (4096, 7168, 8),
    "gpt-oss": (8192, 2880, 4),
}
SMALL_CASES = {"small": (512, 256, 8), "wide": (256, 1024, 4)}  # for a CPU
SMOKE = {"smoke": (32, 64, 4)}
MAX_DIFF = 1e-5
PADDING = 16  # every so many rows one is padding

Candidates = Mapping[str, tuple[Callable[[], torch.Tensor], int]]


def tables(num_tokens: int, num_choices: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """`token_choice_to_row`, `row_to_token` and scores: rows in random order, some are padding."""
    generator = torch.Generator().manual_seed(0)
    num_choices_all = num_tokens * num_choices
    num_rows = num_choices_all + num_choices_all // PADDING
    rows = torch.randperm(num_rows, generator=generator)[:num_choices_all].int()
    row_to_token = torch.full((num_rows,), -1, dtype=torch.int32)
    row_to_token[rows.long()] = torch.arange(num_choices_all, dtype=torch.int32) // num_choices
    scores = torch.rand(num_tokens, num_choices, generator=generator)
    return rows.view(num_tokens, -1).to(device), row_to_token.to(device), scores.to(device)


def copy_of(num_bytes: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """A copy that reads and writes as many bytes together."""
    source = torch.zeros(max(num_bytes // 8, 1), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def check(groups: Mapping[str, Candidates]) -> None:
    """Every candidate of a group equals the group's first."""
    for group, candidates in groups.items():
        first = next(iter(candidates.values()))[0]()
        for name, (run, _) in candidates.items():
            if not (diff := calc_diff(run(), first)) < MAX_DIFF:
                sys.exit(f"error: {group}, {name}: calc_diff {diff:.1e}, need below {MAX_DIFF}")


def run_cases(
    bench: str,
    make: Callable[[tuple[int, int, int], torch.device, torch.dtype], Mapping[str, Candidates]],
) -> None:
    """Checks, times and prints every case.

    Args:
        bench: name in the JSON lines.
        make: (sizes, device, dtype) -> group -> candidate -> (function, bytes that it must move).
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one tiny case, two rounds")
    parser.add_argument("--json", metavar="FILE", help="append one JSON line a result")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = CASES if device.type == "cuda" else SMALL_CASES
    for case, sizes in (SMOKE if args.smoke else known).items():
        for dtype in (torch.bfloat16, torch.float32):
            groups = make(sizes, device, dtype)
            check(groups)
            print(f"{case}: T, D, K = {sizes}; {dtype}, measured on {device.type}")
            for group, candidates in groups.items():
                about = {"bench": bench, "case": case, "dtype": str(dtype), "group": group}
                lines = [about | line for line in _time(group, candidates, device, args.smoke)]
                write_lines(args.json, lines)


def _time(
    group: str, candidates: Candidates, device: torch.device, smoke: bool
) -> list[dict[str, object]]:
    num_bytes = next(iter(candidates.values()))[1]
    functions = {name: run for name, (run, _) in candidates.items()}
    functions["copy"] = copy_of(num_bytes, device)
    lines: list[dict[str, object]] = []
    times = measure(functions, rounds=2 if smoke else 30)
    for name, value in times.items():
        percent = 100 * times["copy"]["median_us"] / value["median_us"]
        rate = num_bytes / value["median_us"] / 1e3
        print(
            f"  {group:20} {name:22} {value['median_us']:9.1f} us {rate:8.1f} GB/s "
            f"{percent:5.0f} % of a copy"
        )
        lines.append({"name": name, **value, "gb_per_s": rate, "percent_of_copy": percent})
    return lines
