"""Launches every wrapper on a stand-in GPU; `test_launches.py` runs this and reads its output.

python tests/aot/launch_child.py ARCH     (TRITON_INTERPRET unset; prints one JSON object)
"""

import dataclasses
import functools
import json
import statistics
import sys
import time

import aot_cases as cases
import torch
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from relibra_kernels.testing.stub_gpu import use_stub_gpu
from relibra_kernels.triton_ops import combine, configs, dispatch, peer_copy, permute, row_scores
from relibra_kernels.triton_ops.bias_grad import expert_bias_grad
from relibra_kernels.weights import WeightSet

SMALL = (128, 192)  # D, F: little memory, several blocks
TOKENS = (0, 1, 15, 16, 17, 2**20)
NUM_EXPERTS, NUM_RANKS = 512, 8


def launch_permute(s):
    x = s.values(s.num_tokens, s.hidden_size)
    rows = permute.token_permute(x, s.table(s.num_rows))
    places = s.table(s.num_tokens, cases.NUM_CHOICES)
    spread = permute.token_unpermute(rows, places)
    permute.token_unpermute_backward(spread, places, s.num_rows, s.table(1))


def launch_combine_backward(s):
    shape = s.num_tokens, cases.NUM_CHOICES
    rows = s.values(s.num_rows, s.hidden_size)
    grad = s.values(s.num_tokens, s.hidden_size)
    combine.combine_backward(grad, rows, s.table(*shape), s.scores(*shape))


def launch_dispatch(s):
    ids = s.table(s.num_tokens, cases.NUM_CHOICES)
    entries = NUM_EXPERTS + s.num_tokens % 7
    lists = [s.table(NUM_EXPERTS + 1), *(s.table(entries) for _ in range(2))]
    dispatch.route_to_slots(ids, *lists, s.table(1))
    dispatch.count_sends(ids, *lists, 65, NUM_RANKS, s.table(1))
    sent = min(s.num_tokens * 2, 2**20)
    first_row = s.table(entries)
    dispatch.build_route(ids, *lists, first_row, 65, NUM_RANKS, sent, s.table(1))


def launch_bias_grad(s):
    def grad(width, halves=1):
        home, replica = (
            torch.empty(slots, halves * width, 1, device=s.device)
            for slots in (cases.NUM_HOME, cases.NUM_REPLICA)
        )
        return WeightSet(home, replica=replica, halves=halves)

    expert_bias_grad(
        s.values(s.num_rows, 2 * s.expert_size),
        s.values(s.num_tokens, s.hidden_size),
        s.table(s.num_rows),
        s.scores(s.num_tokens, cases.NUM_CHOICES),
        s.table(s.num_rows),
        s.table(s.num_tiles, 4),
        s.table(1),
        grad(s.expert_size, 2),
        grad(s.hidden_size),
        expert_size=s.expert_size,
    )


def launch_row_scores(s):
    row_scores.row_scores(s.scores(s.num_tokens, cases.NUM_CHOICES), s.table(s.num_rows))


def launch_peer_copy(s):
    sent = min(2 * s.num_tokens, 2**20)
    lists = [s.table(NUM_RANKS, dtype=torch.int64) for _ in range(4)]
    x = s.values(s.num_tokens, s.hidden_size)
    peer_copy.copy_rows_to_peers(x, s.table(sent), *lists)


WRAPPERS = {
    "expert_up": cases.launch_expert_up,
    "grouped_gemm": cases.launch_down,
    "grouped_gemm backward": cases.launch_up_backward,
    "combine": cases.launch_combine,
    "combine backward": launch_combine_backward,
    "expert_down_backward": cases.launch_down_backward,
    "expert_wgrad": cases.launch_wgrad,
    "expert_bias_grad": launch_bias_grad,
    "row_scores": launch_row_scores,
    "copy_rows_to_peers": launch_peer_copy,
    "permute": launch_permute,
    "dispatch": launch_dispatch,
}
TIMED = {
    "expert_up": "expert_up",
    "grouped_gemm": "grouped_gemm",
    "grouped_gemm backward": "grouped_gemm",
    "combine": "combine",
    "expert_down_backward": "expert_down_backward",
    "expert_wgrad": "expert_wgrad",
}
FORWARD = ("expert_up", "grouped_gemm", "combine", "combine")
BACKWARD = ("expert_down_backward", "grouped_gemm backward", "combine", "expert_wgrad", "combine")


def variants(arch, launches):
    """Wrapper -> kernel -> compiled variants over numbers that a plan decides."""
    found = {}
    for name, launch in WRAPPERS.items():
        launches.clear()
        for num_tokens in TOKENS:
            for shift in (0, 1):
                launch(
                    cases.Setting(arch, *SMALL, num_tokens=num_tokens, device="cpu", shift=shift)
                )
        by_kernel = {}
        for one in launches:
            by_kernel.setdefault(one.kernel, set()).add(one.variant)
        found[name] = {kernel: len(seen) for kernel, seen in by_kernel.items()}
    return found


def timed(function, times):
    """The function, noting the seconds of each call."""

    @functools.wraps(function)
    def run(*args, **options):
        start = time.perf_counter()
        result = function(*args, **options)
        times.append(time.perf_counter() - start)
        return result

    return run


def costs(arch):
    """Wrapper -> microseconds of Python a call, compiled before, weights known."""
    setting = cases.Setting(arch, *SMALL, num_tokens=64, device="cpu")
    cases.Setting.weights = functools.cache(cases.Setting.weights)
    found = {}
    for name, function in TIMED.items():
        original, times = getattr(cases, function), []
        setattr(cases, function, timed(original, times))
        for _ in range(200):
            WRAPPERS[name](setting)
        setattr(cases, function, original)
        found[name] = statistics.median(times) * 1e6
    return found


def grids(arch):
    """Grids of all launches for a million tokens (kernel-03); nothing is compiled."""
    found = []

    def record(self, *args, grid, warmup, **options):
        found.append((self.__name__, list(grid)))

    original, JITFunction.run = JITFunction.run, record
    try:
        for launch in WRAPPERS.values():
            launch(cases.Setting(arch, 8192, 2048, num_tokens=1_000_000))
    finally:
        JITFunction.run = original
    return found


def too_much_shared_memory(arch):
    """What a launch says that needs more than the GPU has."""
    original = configs.lookup

    @functools.wraps(original)
    def large(*key):
        return dataclasses.replace(original(*key), num_stages=12)

    configs.lookup = large
    try:
        cases.launch_expert_up(cases.Setting(arch, 2048, 768))
    except OutOfResources as error:
        return {"required": error.required, "limit": error.limit, "name": error.name}
    finally:
        configs.lookup = original
    return None


def main():
    torch.set_num_threads(1)
    arch = sys.argv[1]
    launches = use_stub_gpu(arch)
    found = {"grids": grids(arch), "variants": variants(arch, launches), "costs": costs(arch)}
    found["too much"] = too_much_shared_memory(arch)
    for direction, names in (("forward", FORWARD), ("backward", BACKWARD)):
        found[direction] = sum(found["costs"][name] for name in names)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
