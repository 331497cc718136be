"""Measures candidate block sizes of the GEMM kernels on this GPU, and prints rows for configs.py.

    python perf/tune_grouped_gemm.py [--kernel NAME] [--rounds N] [--json FILE]
    TRITON_INTERPRET=1 python perf/tune_grouped_gemm.py --smoke     (interpreter, two candidates)

One problem a size class, 16 home slots and a replica; candidates that do not compile, spill out of
shared memory or give other numbers than the first are left out. Rows never depend on the number of
rows: the problem only has to fill the GPU.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator

import torch
from gpu_first import Problem
from harness import machine, measure, write_lines
from triton.runtime.errors import OutOfResources

from relibra_kernels.tables import w_tiles
from relibra_kernels.testing.compare import calc_diff
from relibra_kernels.triton_ops import configs
from relibra_kernels.triton_ops.configs import GemmConfig
from relibra_kernels.triton_ops.expert_down_backward import expert_down_backward
from relibra_kernels.triton_ops.expert_up import expert_up
from relibra_kernels.triton_ops.grouped_gemm import grouped_gemm
from relibra_kernels.triton_ops.grouped_gemm_wgrad import count_output_tiles, expert_wgrad

SIZES = {"narrow": (2048, 768), "wide": (4096, 1536)}  # D, F
NUM_HOME, MEAN_ROWS = 16, 2048
MAX_DIFF = 1e-5

Run = Callable[[GemmConfig], list[torch.Tensor]]


def candidates(kernel: str, arch: str) -> Iterator[GemmConfig]:
    """The row of the table first, then every combination that may fit."""
    yield configs.lookup(kernel, arch, torch.bfloat16, *SIZES["wide"])
    rows, tma = configs.block_rows(arch), arch in ("sm_90", "sm_100")
    blocks_m = (64, 128) if kernel == "grouped_gemm_wgrad" else (rows,)
    for m, n, k, warps, stages in itertools.product(
        blocks_m, (64, 128, 256), (32, 64), (4, 8), (2, 3, 4, 5)
    ):
        if m * n >= 64 * 64 and not (warps == 4 and m * n > 128 * 128):
            yield GemmConfig(m, n, k, warps, stages, tma)


def runs(p: Problem) -> dict[str, Run]:
    """Kernel -> function of a config that launches it and returns what it wrote."""
    x, dy, scores = p.put(p.x), p.put(p.dy), p.put(p.scores)
    to_token, tables = p.put(p.row_to_token), (p.put(p.tiles), p.put(p.num_tiles))
    w13, w2 = p.weights(p.w13, 2), p.weights(p.w2)
    h, a = p.up()
    grads = [
        p.weights(torch.zeros_like(w, dtype=torch.float32), n) for w, n in ((p.w13, 2), (p.w2, 1))
    ]
    dh = torch.zeros_like(h).copy_(h)

    def down_backward(config: GemmConfig) -> list[torch.Tensor]:
        arguments = (dy, to_token, w2, h, scores, to_token, *tables)
        return list(expert_down_backward(*arguments, config=config))

    def wgrad(config: GemmConfig) -> list[torch.Tensor]:
        num = count_output_tiles(p.D, p.F, config)
        tiles = w_tiles(p.slot_rows, p.num_home, 0, p.block_rows, 2 * num, num, False)
        count = torch.tensor([len(tiles)], dtype=torch.int32)
        expert_wgrad(x, dy, dh, a, to_token, p.put(tiles), p.put(count), *grads, config=config)
        return [one.home for one in grads if isinstance(one.home, torch.Tensor)]

    return {
        "expert_up": lambda config: list(expert_up(x, to_token, w13, *tables, config=config)),
        "grouped_gemm": lambda config: [grouped_gemm(a, w2, *tables, config=config)],
        "expert_down_backward": down_backward,
        "grouped_gemm_wgrad": wgrad,
    }


def working(run: Run, configs_: list[GemmConfig]) -> dict[str, Callable[[], object]]:
    """Candidates that run and agree with the first."""
    found: dict[str, Callable[[], object]] = {}
    expected: list[torch.Tensor] = []
    for config in configs_:
        try:
            got = [one.clone() for one in run(config)]
        except (OutOfResources, RuntimeError) as error:
            print(f"  {config}: {type(error).__name__}: {str(error).strip()[:80]}")
            continue
        expected = expected or got
        worst = max(calc_diff(a, b) for a, b in zip(got, expected, strict=True))
        if worst < MAX_DIFF:
            found[str(dataclasses.astuple(config))] = lambda config=config: run(config)
        else:
            print(f"  {config}: other numbers, calc_diff {worst:.1e}")
    return found


def tune(kernel: str, size: str, p: Problem, rounds: int, limit: int | None) -> dict[str, object]:
    """The fastest candidate of a kernel; prints its row."""
    listed = list(dict.fromkeys(candidates(kernel, p.arch)))[:limit]
    if p.arch == "interpreter":
        listed = [p.config(kernel), GemmConfig(16, 32, 16)]
    times = measure(working(runs(p)[kernel], listed), rounds=rounds)
    best = min(times, key=lambda name: times[name]["median_us"])
    first = next(iter(times.values()))["median_us"]
    print(
        f'    (("{kernel}",), ("{p.arch}",), "{configs.DTYPES[p.dtype]}", ("{size}",), {best}, '
        f'"measured by perf/tune_grouped_gemm.py on {machine()["gpu"]}: '
        f'{times[best]["median_us"]:.0f} us, table {first:.0f} us"),'
    )
    row = {"bench": "tune_grouped_gemm", "case": size, "group": kernel, "name": best}
    return row | times[best] | {"table_us": first, "arch": p.arch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", choices=configs.KERNELS, help="only this one")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit", type=int, help="candidates a kernel")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU's interpreter")
    parser.add_argument("--json", metavar="FILE", help="append one JSON line a kernel")
    args = parser.parse_args()
    if not (args.smoke or torch.cuda.is_available()):
        sys.exit("error: need a CUDA GPU, or --smoke with TRITON_INTERPRET=1")
    device = torch.device("cpu" if args.smoke else "cuda")
    rows = []
    for size, dims in {"narrow": (80, 64)}.items() if args.smoke else SIZES.items():
        generator = torch.Generator().manual_seed(0)
        mean = torch.full((NUM_HOME + 1,), 20.0 if args.smoke else float(MEAN_ROWS))
        slot_rows = torch.poisson(mean, generator=generator).long().tolist()
        dtype = torch.float32 if args.smoke else torch.bfloat16
        problem = Problem(device, dtype, dims, slot_rows[-3:] if args.smoke else slot_rows)
        for kernel in [args.kernel] if args.kernel else configs.KERNELS:
            rows.append(tune(kernel, size, problem, 1 if args.smoke else args.rounds, args.limit))
    write_lines(args.json, rows)


if __name__ == "__main__":
    main()
