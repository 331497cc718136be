"""Reads a compiled kernel with the tools in Triton's wheel, and judges it; no GPU, no driver."""

import collections
import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
MATRIX_OPS = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}
SHARED_BYTES = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448}
COUNTED = (
    *("HGMMA", "HMMA", "UTCHMMA", "FFMA", "UTMALDG", "UTMASTG", "LDGSTS", "LDG", "STG"),
    *("REDG", "ATOMG", "LDL", "STL"),
)


@dataclasses.dataclass(frozen=True)
class Binary:
    """What the gate looks at.

    Attributes:
        registers: a thread.
        stack: bytes a thread; above 0 the compiler spilled.
        shared: bytes a program.
        sass: disassembly, one instruction a line.
    """

    registers: int
    stack: int
    shared: int
    sass: str

    @property
    def opcodes(self) -> dict[str, int]:
        """Instructions of the counted kinds."""
        kinds = r"\b(" + "|".join(COUNTED) + r")2?\b"  # FFMA2: two at once, on sm_100
        found = collections.Counter(re.findall(kinds, self.sass))
        return dict(sorted(found.items()))


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a kernel must look like.

    Attributes:
        arch: such as "sm_90".
        fp32: IEEE products, so no matrix unit.
        matrix: whether it multiplies matrices.
        tile: columns of one wgmma on sm_90, 0 where any will do.
        tma_loads: operands come through tensor descriptors.
        gathers: rows are gathered through asynchronous copies.
        stack: most bytes of stack.
    """

    arch: str
    fp32: bool = False
    matrix: bool = True
    tile: int = 0
    tma_loads: bool = False
    gathers: bool = False
    stack: int = 0


def read(cubin: bytes, shared: int) -> Binary:
    """Registers, stack and disassembly of a binary.

    Args:
        cubin: the binary.
        shared: bytes of shared memory that its launch asks for.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        sass = _run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump: need REG and STACK, got {usage[:200]!r}")
    return Binary(int(found[1]), int(found[2]), shared, sass)


def judge(binary: Binary, needs: Needs) -> list[str]:
    """What is wrong with a binary; nothing if it passes.

    Args:
        binary: what was compiled.
        needs: what it must look like.
    """
    ops = binary.opcodes
    found = []
    if binary.stack > needs.stack:
        found.append(f"stack {binary.stack} B, need at most {needs.stack}")
    spills = ops.get("LDL", 0) + ops.get("STL", 0)
    if spills and needs.stack == 0:
        found.append(f"{spills} spill instructions")
    if binary.registers > 255:
        found.append(f"{binary.registers} registers")
    if binary.shared > (limit := SHARED_BYTES[needs.arch]):
        found.append(f"shared {binary.shared} B, need at most {limit}")
    if needs.matrix:
        found += _wrong_products(binary, ops, needs)
    found += _wrong_copies(binary, ops, needs)
    return found


def _wrong_products(binary: Binary, ops: Mapping[str, int], needs: Needs) -> list[str]:
    if needs.fp32:
        found = [] if ops.get("FFMA") else ["no FFMA"]
        return found + (["TF32 in an fp32 kernel"] if re.search("tf32", binary.sass, re.I) else [])
    unit = MATRIX_OPS[needs.arch]
    if not ops.get(unit):
        return [f"no {unit}"]
    found = []
    if needs.arch == "sm_90":
        shapes = set(re.findall(r"HGMMA\.(64x\d+x\d+)", binary.sass))
        if needs.tile and shapes != {f"64x{needs.tile}x16"}:
            found.append(f"HGMMA of {sorted(shapes)}, need 64x{needs.tile}x16")
        waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", binary.sass)
        if not any(int(wait, 16) > 0 for wait in waits):
            found.append("no wgmma in flight over a wait (serialised)")
    return found


def _wrong_copies(binary: Binary, ops: Mapping[str, int], needs: Needs) -> list[str]:
    found = []
    copies = re.findall(r"\bLDGSTS\.[A-Z0-9.]+", binary.sass)
    narrow = [copy for copy in copies if ".128" not in copy]
    if narrow and not needs.fp32:
        found.append(f"{len(narrow)} LDGSTS narrower than 128 bit")
    if needs.gathers and not copies:
        found.append("no LDGSTS: gathered rows are not copied asynchronously")
    if needs.tma_loads and not ops.get("UTMALDG"):
        found.append("no UTMALDG")
    if needs.tma_loads and not needs.gathers and copies:
        found.append(f"{len(copies)} LDGSTS beside tensor descriptors")
    return found


def _run(tool: str, *args: str) -> str:
    done = subprocess.run([TOOLS / tool, *args], capture_output=True, text=True, check=True)
    return done.stdout
