"""What nobody has run on a GPU yet, first: each feature that so far only compiled, pass or fail.

    python perf/gpu_first.py [--device cuda] [--json FILE]

Small problems against plain torch in fp64; a line each, exit status 1 if one fails. A check that
crashes or hangs fails, and the others go on in a new process. With
`--device cpu` and TRITON_INTERPRET=1 the same checks run in Triton's interpreter.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from relibra_kernels.tables import m_tiles, slot_bases, w_tiles
from relibra_kernels.testing.compare import calc_diff
from relibra_kernels.triton_ops import configs
from relibra_kernels.triton_ops.expert_down_backward import expert_down_backward
from relibra_kernels.triton_ops.expert_up import expert_up
from relibra_kernels.triton_ops.grouped_gemm import grouped_gemm
from relibra_kernels.triton_ops.grouped_gemm_wgrad import count_output_tiles, expert_wgrad
from relibra_kernels.weights import WeightSet

NUM_REPLICA = 1
MAX_DIFF = {torch.bfloat16: 1e-5, torch.float32: 1e-10}


class Problem:
    """A rank's tables, weights and inputs. By default D and F are no multiples of the blocks.

    Slots: home ones, and one replica; by default home 1 is empty.

    Args:
        device: where kernels run.
        dtype: of rows and weights.
        sizes: D and F.
        slot_rows: rows of each slot.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        sizes: tuple[int, int] | None = None,
        slot_rows: list[int] | None = None,
    ) -> None:
        self.device, self.dtype, self.arch = device, dtype, configs.arch_of(device)
        self.D, self.F = sizes or ((80, 64) if self.arch == "interpreter" else (576, 448))
        self.block_rows = configs.block_rows(self.arch)
        self.slot_rows = slot_rows or [2 * self.block_rows + 5, 0, 7, self.block_rows]
        self.overrides: dict[str, configs.GemmConfig] = {}
        base = slot_bases(self.slot_rows, self.block_rows).tolist()
        self.num_rows, generator = base[-1], torch.Generator().manual_seed(0)
        self.slot = torch.full((self.num_rows,), -1)
        for slot, (first, rows) in enumerate(zip(base, self.slot_rows, strict=False)):
            self.slot[first : first + rows] = slot
        real = self.slot >= 0
        self.row_to_token = torch.full((self.num_rows,), -1, dtype=torch.int32)
        self.row_to_token[real] = torch.randperm(int(real.sum()), generator=generator).int()
        num_slots = len(self.slot_rows)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(dtype)

        self.x, self.dy = normal(int(real.sum()), self.D), normal(int(real.sum()), self.D)
        self.w13 = normal(num_slots, 2 * self.F, self.D, scale=self.D**-0.5)
        self.w2 = normal(num_slots, self.D, self.F, scale=self.F**-0.5)
        self.scores = torch.rand(int(real.sum()), 1, generator=generator)
        tiles = m_tiles(self.slot_rows, self.num_home, self.block_rows)
        self.tiles, self.num_tiles = tiles, torch.tensor([len(tiles)], dtype=torch.int32)

    @property
    def num_home(self) -> int:
        return len(self.slot_rows) - NUM_REPLICA

    def config(self, kernel: str) -> configs.GemmConfig:
        if kernel in self.overrides:
            return self.overrides[kernel]
        return configs.lookup(kernel, self.arch, self.dtype, self.D, self.F)

    def put(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device)

    def weights(self, w: torch.Tensor, halves: int = 1, separate: bool = False) -> WeightSet:
        w = self.put(w)
        home = tuple(w[: self.num_home].clone()) if separate else w[: self.num_home].clone()
        return WeightSet(home, replica=w[self.num_home :].clone(), halves=halves)

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """fp64 rows, zeros on padding."""
        rows = x.double()[self.row_to_token.clamp(min=0).long()]
        return rows * (self.row_to_token >= 0)[:, None]

    def by_slot(self, rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """rows @ w[slot].T in fp64."""
        out = torch.zeros(self.num_rows, w.shape[1], dtype=torch.float64)
        for slot in range(len(self.slot_rows)):
            here = self.slot == slot
            out[here] = rows.double()[here] @ w[slot].double().T
        return out

    def up(self, separate: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return expert_up(
            self.put(self.x),
            self.put(self.row_to_token),
            self.weights(self.w13, 2, separate),
            self.put(self.tiles),
            self.put(self.num_tiles),
            config=self.config("expert_up"),
        )


def equal(name: str, found: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    diff = calc_diff(found.cpu(), expected)
    if not diff < limit:
        raise AssertionError(f"{name}: calc_diff {diff:.1e}, need below {limit:.0e}")


def check_up(p: Problem, separate: bool = False) -> None:
    h, a = p.up(separate)
    expected = p.by_slot(p.rows_of(p.x), p.w13)
    equal("h", h, expected, MAX_DIFF[p.dtype])
    gate, up = h.cpu().double().chunk(2, 1)
    equal("a", a, F.silu(gate) * up, MAX_DIFF[p.dtype])


def check_down(p: Problem, separate: bool = False) -> None:
    rows = p.rows_of(p.x[:, : p.F].contiguous()).to(p.dtype)
    rows[p.slot < 0] = float("nan")
    tables = p.put(p.tiles), p.put(p.num_tiles)
    w2 = p.weights(p.w2[:, :, : rows.shape[1]].contiguous(), separate=separate)
    out = grouped_gemm(p.put(rows), w2, *tables, config=p.config("grouped_gemm"))
    expected = p.by_slot(rows.nan_to_num(0.0), p.w2[:, :, : rows.shape[1]])
    equal("y", out, expected, MAX_DIFF[p.dtype])


def check_down_backward(p: Problem) -> None:
    h, _ = p.up()
    row_to_choice = p.put(p.row_to_token)  # one choice a token
    dh, scored_a, dscore = expert_down_backward(
        p.put(p.dy),
        p.put(p.row_to_token),
        p.weights(p.w2),
        h,
        p.put(p.scores),
        row_to_choice,
        p.put(p.tiles),
        p.put(p.num_tiles),
        config=p.config("expert_down_backward"),
    )
    leaf = h.cpu().double().requires_grad_()
    gate, up = leaf.chunk(2, 1)
    a = F.silu(gate) * up
    score = p.rows_of(p.scores)
    g = p.by_slot(p.rows_of(p.dy), p.w2.transpose(1, 2))
    (expected,) = torch.autograd.grad((a * g * score).sum(), leaf)
    limit = MAX_DIFF[p.dtype]
    equal("dh", dh, expected, limit)
    equal("scored_a", scored_a, a.detach() * score, limit)
    equal("dscore", dscore, (g * a.detach()).sum(1), limit)


def wgrad(p: Problem, num_programs: int | None, start: float) -> list[torch.Tensor]:
    """Both gradients: home adds to `start`, the replica overwrites; then the ready flag."""
    config = p.config("grouped_gemm_wgrad")
    num = count_output_tiles(p.D, p.F, config)
    tiles = w_tiles(p.slot_rows, p.num_home, 0, p.block_rows, 2 * num, num, True)
    grads = [torch.full(w.shape, start) for w in (p.w13, p.w2)]
    sets = [p.weights(grad, halves) for grad, halves in zip(grads, (2, 1), strict=True)]
    dh = p.rows_of(torch.cat([p.x, p.x], 1)[:, : 2 * p.F].contiguous()).to(p.dtype)
    scored_a = p.rows_of(p.dy[:, : p.F].contiguous()).to(p.dtype)
    arrived = torch.zeros(NUM_REPLICA, dtype=torch.int32, device=p.device)
    ready = torch.zeros(NUM_REPLICA, dtype=torch.int64, device=p.device)
    expert_wgrad(
        *map(p.put, (p.x, p.dy, dh, scored_a, p.row_to_token, tiles)),
        p.put(torch.tensor([len(tiles)], dtype=torch.int32)),
        *sets,
        config=config,
        arrived_S=arrived,
        ready_S=ready,
        ready_value=41,
        num_programs=num_programs,
    )
    if ready.tolist() != [41] or arrived.tolist() != [0]:
        raise AssertionError(f"ready {ready.tolist()}, arrived {arrived.tolist()}; need 41 and 0")
    found = [torch.cat([one.home, one.replica]).cpu() for one in sets]
    for name, got, left, right in (
        ("dW13", found[0], dh, p.x),
        ("dW2", found[1], p.rows_of(p.dy), None),
    ):
        for slot, rows in enumerate(p.slot_rows):
            here = p.slot == slot
            other = p.rows_of(right) if right is not None else scored_a.double()
            expected = left.double()[here].T @ other[here]
            expected += start if slot < p.num_home else 0
            if not rows and not torch.equal(got[slot], torch.full_like(got[slot], start)):
                raise AssertionError(f"{name}: the empty home slot {slot} changed")
            equal(f"{name}[{slot}]", got[slot], expected, MAX_DIFF[p.dtype])
    return found


def check_wgrad(p: Problem) -> None:
    wgrad(p, None, 0.5)


def check_counter(p: Problem) -> None:
    first = wgrad(p, 1, 0.5)
    for num_programs in (3, 7, 200):
        for a, b in zip(first, wgrad(p, num_programs, 0.5), strict=True):
            if not torch.equal(a, b):
                raise AssertionError(f"{num_programs} programs: other bits than one program")


BF16, FP32 = torch.bfloat16, torch.float32
CHECKS: dict[str, tuple[torch.dtype, Callable[[Problem], None]]] = {
    "descriptor selected by value (F1, home and replica)": (BF16, check_up),
    "descriptor selected by value (F2)": (BF16, check_down),
    "descriptors from a table of addresses (F1)": (BF16, lambda p: check_up(p, True)),
    "descriptors from a table of addresses (F2)": (BF16, lambda p: check_down(p, True)),
    "fused backward (B1)": (BF16, check_down_backward),
    "STORE, ADD, SIGNAL, ragged, one launch (B2)": (BF16, check_wgrad),
    "work counter: bits for 1, 3, 7, 200 programs (B2)": (BF16, check_counter),
    "fp32 IEEE products (F1)": (FP32, check_up),
    "fp32 IEEE products (F2)": (FP32, check_down),
    "fp32 IEEE products (B1)": (FP32, check_down_backward),
    "fp32 IEEE products (B2)": (FP32, check_wgrad),
}


def run(name: str, device: torch.device) -> dict[str, object]:
    """One check: pass or fail, with the reason."""
    dtype, check = CHECKS[name]
    start, reason = time.perf_counter(), ""
    try:
        check(Problem(device, dtype))
        if device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # the next check runs whatever this one did
        reason = f"{type(error).__name__}: {str(error).strip()[-400:]}"
        traceback.print_exc(limit=-3)
    return {"check": name, "passed": not reason, "reason": reason} | {
        "seconds": round(time.perf_counter() - start, 2)
    }


def run_here(names: list[str], device: torch.device, out: Path) -> None:
    """Checks in this process, a JSON line each; ends early once CUDA itself has failed."""
    if device.type == "cpu":
        from relibra_kernels.testing import bf16_interpreter

        bf16_interpreter.install()
    for name in names:
        result = run(name, device)
        add(out, result)
        if device.type == "cuda" and not result["passed"]:
            try:
                torch.cuda.synchronize()
            except RuntimeError:  # an illegal access: this process can run nothing more
                return


def run_all(device: str, out: Path, limit_s: float) -> None:
    """Every check, printed as it ends; after a crash or a hang the rest go on in a new process."""
    out.write_text("")
    command = [sys.executable, __file__, "--device", device, "--json", str(out), "--here"]
    known, begun = 0, 0.0
    process: subprocess.Popen[bytes] | None = None
    while known < len(CHECKS):
        if process is None:
            process = subprocess.Popen([*command, *list(CHECKS)[known:]])
            begun = time.monotonic()
        ended = process.poll() is not None
        hangs = not ended and time.monotonic() - begun > limit_s
        if new := read(out)[known:]:
            for one in new:
                verdict = "pass" if one["passed"] else f"FAIL {one['reason']}"
                print(f"{one['check']:52} {verdict}", flush=True)
            known, begun = known + len(new), time.monotonic()
        elif ended or hangs:
            process.kill()
            status = process.wait()
            reason = f"no end within {limit_s:.0f} s" if hangs else f"exit status {status}"
            add(out, {"check": list(CHECKS)[known], "passed": False, "reason": reason})
            process = None
        if ended:
            process = None
        time.sleep(0.1)


def add(path: Path, result: dict[str, object]) -> None:
    """One more line."""
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")


def read(path: Path) -> list[dict[str, object]]:
    """Results so far; a line may still be in the making."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="write one JSON line a check")
    parser.add_argument("--limit", type=float, default=45, help="seconds a check")
    parser.add_argument("--here", nargs="+", metavar="CHECK", help=argparse.SUPPRESS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = args.json or Path(folder) / "first.json"
        if args.here:
            run_here(args.here, torch.device(args.device), out)
            return
        run_all(args.device, out, args.limit)
        results = read(out)
    sys.exit(not all(one["passed"] for one in results))


if __name__ == "__main__":
    main()
