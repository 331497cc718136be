"""The launches that the ahead-of-time gate compiles: sizes of five models, and each option once.

Tensors are on the "meta" device: they have shapes and strides, but no memory. The wrappers are the
real ones, so a case compiles exactly what a GPU would be given.

Letters: T tokens, U tokens received, R rows, K choices, D model dim, F expert dim.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from aot_cubin import Needs

from relibra_kernels.triton_ops import configs
from relibra_kernels.triton_ops.combine import combine
from relibra_kernels.triton_ops.expert_down_backward import expert_down_backward
from relibra_kernels.triton_ops.expert_up import expert_up
from relibra_kernels.triton_ops.grouped_gemm import grouped_gemm
from relibra_kernels.triton_ops.grouped_gemm_wgrad import expert_wgrad
from relibra_kernels.weights import WeightSet

MODELS = {  # D, F
    "Qwen3-30B-A3B": (2048, 768),
    "Qwen3-235B-A22B": (4096, 1536),
    "GLM-4.5-Air": (4096, 1408),
    "DeepSeek-V3": (7168, 2048),
    "gpt-oss": (2880, 2880),
}
ARCHS = ("sm_80", "sm_90", "sm_100")
NUM_TOKENS, NUM_CHOICES, NUM_HOME, NUM_REPLICA = 8192, 8, 16, 1
ACTIVATIONS = {"swiglu": 0, "clamped swiglu": 1, "gelu": 2, "squared relu": 3}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a case is about.

    Attributes:
        arch: such as "sm_90".
        hidden_size: D.
        expert_size: F.
        gathers: rows are read through a table.
        dtype: of rows and weights.
        option: the one thing that differs from a plain case; "" in a plain one.
        num_tokens: T = U.
        device: "meta", or "cpu" where addresses count.
        shift: entries by which tables are moved off their alignment.
    """

    arch: str
    hidden_size: int
    expert_size: int
    gathers: bool = True
    dtype: torch.dtype = torch.bfloat16
    option: str = ""
    num_tokens: int = NUM_TOKENS
    device: str = "meta"
    shift: int = 0

    @property
    def num_rows(self) -> int:
        """R, padding included."""
        return self.num_tokens * NUM_CHOICES + (NUM_HOME + NUM_REPLICA) * self.block_rows

    @property
    def block_rows(self) -> int:
        """Rows of a tile."""
        return configs.block_rows(self.arch)

    @property
    def num_tiles(self) -> int:
        """B, as large as it can be."""
        return self.num_rows // self.block_rows

    @property
    def activation(self) -> int:
        """Number of the activation."""
        return ACTIVATIONS.get(self.option, 0)

    @property
    def halves(self) -> int:
        """2 with a gate."""
        return 1 if self.activation >= 2 else 2

    def config(self, kernel: str) -> configs.GemmConfig:
        """Row of the table."""
        sizes = self.hidden_size, self.expert_size
        return configs.lookup(kernel, self.arch, self.dtype, *sizes)

    def values(self, *shape: int) -> torch.Tensor:
        """Rows or weights."""
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def table(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Integers, or scores, which a plan decides."""
        flat = torch.empty(math.prod(shape) + self.shift, dtype=dtype, device=self.device)
        return flat[self.shift :].view(shape)

    def scores(self, *shape: int) -> torch.Tensor:
        """fp32 scores."""
        return self.table(*shape, dtype=torch.float32)

    def weights(
        self,
        num_rows: int,
        num_columns: int,
        halves: int = 1,
        dtype: torch.dtype | None = None,
    ) -> WeightSet:
        """A weight field ``[slots, halves * num_rows, num_columns]`` with this case's storage."""

        def values(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)

        shape = halves * num_rows, num_columns
        transposed = self.option == "transposed"
        stored = shape[::-1] if transposed else shape
        home: torch.Tensor | tuple[torch.Tensor, ...] = values(NUM_HOME, *stored)
        if self.option == "address table":
            home = tuple(values(*stored) for _ in range(NUM_HOME))
        apart = self.option == "halves apart" and halves == 2
        if apart:  # parts of one tensor, so that the distance of their addresses is known
            home = tuple(values(2, NUM_HOME, num_rows, num_columns))
        static = values(2, *stored) if self.option == "static slots" else None
        return WeightSet(
            home,
            static=static,
            replica=values(NUM_REPLICA, *stored),
            halves=halves,
            interleaved=self.option == "interleaved" and halves == 2,
            transposed=transposed,
            halves_apart=apart,
        )

    def bias(self, num_rows: int, halves: int = 1) -> WeightSet | None:
        """Bias of a field, where this case has one."""
        if self.option != "bias":
            return None
        shape = halves * num_rows, 1
        return WeightSet(
            self.values(NUM_HOME, *shape), replica=self.values(NUM_REPLICA, *shape), halves=halves
        )


def launch_expert_up(s: Setting) -> None:
    """F1."""
    expert_up(
        s.values(s.num_tokens if s.gathers else s.num_rows, s.hidden_size),
        s.table(s.num_rows) if s.gathers else None,
        s.weights(s.expert_size, s.hidden_size, s.halves),
        s.table(s.num_tiles, 4),
        s.table(1),
        config=s.config("expert_up"),
        bias=s.bias(s.expert_size, s.halves),
        score_R=s.scores(s.num_rows) if s.option == "score at activation" else None,
        activation=s.activation,
        num_programs=132,
    )


def launch_down(s: Setting) -> None:
    """F2."""
    grouped_gemm(
        s.values(s.num_rows, s.expert_size),
        s.weights(s.hidden_size, s.expert_size),
        s.table(s.num_tiles, 4),
        s.table(1),
        config=s.config("grouped_gemm"),
        bias=s.bias(s.hidden_size),
        num_programs=132,
    )


def launch_up_backward(s: Setting) -> None:
    """B3: one k loop over gate and up."""
    grouped_gemm(
        s.values(s.num_rows, s.halves * s.expert_size),
        s.weights(s.expert_size, s.hidden_size, s.halves),
        s.table(s.num_tiles, 4),
        s.table(1),
        config=s.config("grouped_gemm"),
        backward=True,
        num_programs=132,
    )


def launch_down_backward(s: Setting) -> None:
    """B1."""
    by_row = s.option == "score by row"
    expert_down_backward(
        s.values(s.num_tokens if s.gathers else s.num_rows, s.hidden_size),
        s.table(s.num_rows) if s.gathers else None,
        s.weights(s.hidden_size, s.expert_size),
        s.values(s.num_rows, s.halves * s.expert_size),
        s.scores(s.num_rows) if by_row else s.scores(s.num_tokens, NUM_CHOICES),
        None if by_row else s.table(s.num_rows),
        s.table(s.num_tiles, 4),
        s.table(1),
        config=s.config("expert_down_backward"),
        bias=s.bias(s.hidden_size),
        score_at="activation" if s.option == "score at activation" else "output",
        activation=s.activation,
        num_programs=132,
    )


def launch_wgrad(s: Setting) -> None:
    """B2: both gradients in one launch."""
    flags = s.option == "ready flags"
    expert_wgrad(
        s.values(s.num_tokens, s.hidden_size),
        s.values(s.num_tokens, s.hidden_size),
        s.values(s.num_rows, s.halves * s.expert_size),
        s.values(s.num_rows, s.expert_size),
        s.table(s.num_rows),
        s.table(s.num_tiles, 4),
        s.table(1),
        s.weights(s.expert_size, s.hidden_size, s.halves, torch.float32),
        s.weights(s.hidden_size, s.expert_size, dtype=torch.float32),
        config=s.config("grouped_gemm_wgrad"),
        arrived_S=s.table(NUM_REPLICA) if flags else None,
        ready_S=s.table(NUM_REPLICA, dtype=torch.int64) if flags else None,
        num_programs=132,
    )


def launch_combine(s: Setting) -> None:
    """F3: scored rows -> tokens."""
    rows = s.values(s.num_rows, s.hidden_size)
    combine(rows, s.table(s.num_tokens, NUM_CHOICES), s.scores(s.num_tokens, NUM_CHOICES))


def launch_sum(s: Setting) -> None:
    """F4 and B4: rows -> tokens, without scores."""
    combine(s.values(s.num_rows, s.hidden_size), s.table(s.num_tokens, NUM_CHOICES), None)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One line of the gate.

    Attributes:
        launch: calls the wrapper.
        function: name of the Triton function that is judged.
        config: key of its block sizes; "" for kernels that copy.
        gathers: see `Setting`.
        tile: columns of one wgmma on sm_90.
        stack: most bytes of stack.
        options: each is compiled once an architecture.
    """

    launch: Callable[[Setting], None]
    function: str
    config: str = ""
    gathers: bool = True
    tile: int = 0
    stack: int = 0
    options: tuple[str, ...] = ()

    def needs(self, setting: Setting) -> Needs:
        """What the binary must look like."""
        fp32 = setting.dtype == torch.float32
        tma = bool(self.config) and setting.config(self.config).tma
        return Needs(
            setting.arch,
            fp32=fp32,
            matrix=bool(self.config),
            tile=self.tile,
            tma_loads=tma,
            gathers=bool(self.config) and self.gathers and not fp32,
            stack=self.stack,
        )


STORAGE = ("transposed", "address table", "static slots")
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
KERNELS = {
    "F1 gathered": Kernel(
        launch_expert_up,
        "_expert_up_kernel",
        "expert_up",
        tile=128,
        options=(
            *("bias", *list(ACTIVATIONS)[1:], "score at activation", "interleaved"),
            *("halves apart", *STORAGE, *DTYPES),
        ),
    ),
    "F1": Kernel(launch_expert_up, "_expert_up_kernel", "expert_up", gathers=False, tile=128),
    "F2": Kernel(
        launch_down,
        "_grouped_gemm_kernel",
        "grouped_gemm",
        gathers=False,
        tile=256,
        options=("bias", *STORAGE, *DTYPES),
    ),
    "F3": Kernel(launch_combine, "_combine_kernel", options=tuple(DTYPES)),
    "F4": Kernel(launch_sum, "_combine_kernel"),
    "B1 gathered": Kernel(
        launch_down_backward,
        "_expert_down_backward_kernel",
        "expert_down_backward",
        tile=128,
        stack=8,
        options=(
            *("bias", *list(ACTIVATIONS)[1:], "score at activation", "score by row"),
            *STORAGE,
            *DTYPES,
        ),
    ),
    "B1": Kernel(
        launch_down_backward,
        "_expert_down_backward_kernel",
        "expert_down_backward",
        gathers=False,
        tile=128,
        stack=8,
    ),
    "B2": Kernel(
        launch_wgrad,
        "_expert_wgrad_kernel",
        "grouped_gemm_wgrad",
        tile=256,
        options=("ready flags", "gelu", "interleaved", "halves apart", *STORAGE, *DTYPES),
    ),
    "B3": Kernel(
        launch_up_backward,
        "_grouped_gemm_kernel",
        "grouped_gemm",
        gathers=False,
        tile=256,
        options=("gelu", "interleaved", "halves apart", *STORAGE, *DTYPES),
    ),
    "B4": Kernel(launch_sum, "_combine_kernel"),
}
FUSED = ("F1 gathered", "B1 gathered")
NUM_ROWS = 294  # ten kernels, five models and 48 options, on three architectures
OPTION_MODEL = "Qwen3-30B-A3B"


def cases(arch: str, fast: bool = False, only: str = "") -> list[tuple[str, str, Setting]]:
    """(kernel, model, setting) of an architecture.

    Args:
        arch: such as "sm_90".
        fast: one model and no option; all kernels on sm_90, a fused one each elsewhere.
        only: how the kernels' names begin.
    """
    found = []
    for name, kernel in KERNELS.items():
        if not name.startswith(only) or (fast and arch != "sm_90" and name not in FUSED):
            continue
        for model, sizes in MODELS.items():
            if not fast or model == OPTION_MODEL:
                found.append((name, model, Setting(arch, *sizes, gathers=kernel.gathers)))
        for option in () if fast else kernel.options:
            dtype = DTYPES.get(option, torch.bfloat16)
            sizes = MODELS[OPTION_MODEL]
            setting = Setting(arch, *sizes, kernel.gathers, dtype, option)
            found.append((name, OPTION_MODEL, setting))
    return found


def expected_keys(fast: bool = False, only: str = "") -> list[tuple[str, str, str, str]]:
    """(architecture, kernel, model, option) of every row that the gate must print."""
    return [
        (arch, name, model, setting.option)
        for arch in ARCHS
        for name, model, setting in cases(arch, fast, only)
    ]
