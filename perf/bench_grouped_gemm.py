"""The CPU bodies of `grouped_gemm` beside torch's grouped GEMM on the same padded rows.

`torch.nn.functional.grouped_mm` takes one weight tensor, so it is called once a family of slots;
all candidates write zeros into the padding. Outputs must agree before any time is printed.

    python perf/bench_grouped_gemm.py [--smoke] [--json FILE]
"""

import argparse
import sys

import numpy as np
import torch
import torch.nn.functional as F
from harness import measure, write_lines

from relibra_kernels.tables import m_tiles, slot_bases
from relibra_kernels.testing.compare import calc_diff

# home slots, replica slots, D, N, mean rows of a slot, rows of a tile
CASES = {
    "demo": (4, 1, 64, 128, 60, 16),
    "many small slots": (64, 1, 64, 128, 8, 16),
    "middle": (16, 1, 512, 512, 128, 16),
    "wide": (8, 1, 1024, 1536, 200, 16),
}
SMOKE = {"smoke": (4, 1, 32, 32, 8, 4)}


def torch_grouped(rows, weights, slot_rows, base, num_home):
    """One `grouped_mm` a family, then zeros in the padding."""
    parts = []
    for weight, slots in zip(weights, (slice(0, num_home), slice(num_home, None)), strict=True):
        first, ends = int(base[:-1][slots][0]), base[1:][slots]
        here = rows[first : int(ends[-1])]
        parts.append(F.grouped_mm(here, weight.transpose(1, 2), offs=ends - first))
    out = torch.cat(parts)
    for begin, count, end in zip(base[:-1].tolist(), slot_rows, base[1:].tolist(), strict=True):
        out[begin + count : end].zero_()
    return out


def candidates(num_home, num_replica, width, num_out, mean, block_rows, dtype):
    """Name -> function that returns the product."""
    torch.manual_seed(0)
    slot_rows = np.random.default_rng(0).poisson(mean, num_home + num_replica).tolist()
    base, tiles = slot_bases(slot_rows, block_rows), m_tiles(slot_rows, num_home, block_rows)
    rows = torch.randn(int(base[-1]), width).to(dtype)
    all_weights = (torch.randn(len(slot_rows), num_out, width) / width**0.5).to(dtype)
    home, replica = all_weights[:num_home].clone(), all_weights[num_home:].clone()
    op = torch.ops.relibra.grouped_gemm
    return {
        "torch grouped_mm": lambda: torch_grouped(rows, (home, replica), slot_rows, base, num_home),
        "relibra": lambda: op(rows, home, replica, tiles, block_rows, False),
        "relibra exact": lambda: op(rows, home, replica, tiles, block_rows, True),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one tiny case, two rounds")
    parser.add_argument("--json", metavar="FILE", help="append one JSON line a result")
    args = parser.parse_args()
    rows = []
    for case, sizes in (SMOKE if args.smoke else CASES).items():
        for dtype in (torch.float32, torch.bfloat16):
            functions = candidates(*sizes, dtype)
            expected = functions["torch grouped_mm"]()
            for name, run in functions.items():
                if not (diff := calc_diff(run(), expected)) < 1e-5:
                    sys.exit(f"error: {name}: differs from torch, calc_diff {diff:.1e}")
            times = measure(functions, rounds=2 if args.smoke else 15)
            print(f"{case}: H, S, D, N, rows a slot, BM = {sizes}; {dtype}, measured on CPU")
            base = times["torch grouped_mm"]["median_us"]
            for name, value in times.items():
                print(
                    f"  {name:18} {value['median_us'] / 1e3:8.3f} ms "
                    f"(p10 {value['p10_us'] / 1e3:.3f}, p90 {value['p90_us'] / 1e3:.3f}), "
                    f"{value['median_us'] / base:.2f} x torch grouped_mm"
                )
                about = {"bench": "grouped_gemm", "case": case, "dtype": str(dtype), "name": name}
                rows.append({**about, **value})
    write_lines(args.json, rows)


if __name__ == "__main__":
    main()
