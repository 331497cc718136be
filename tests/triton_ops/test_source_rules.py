"""Rules that every Triton source keeps, and for each a snippet that breaks it."""

import ast
from pathlib import Path

import pytest
from triton_rules import jit_functions, violations

HEAD = "import triton\nimport triton.language as tl\n@triton.jit\n"


def sources(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((root / "triton_ops").glob("*.py"))}


def test_kernel_02_every_triton_source_keeps_the_rules(project_root):
    assert violations(sources(project_root)) == []


def test_the_rules_see_every_kernel(project_root):
    texts = sources(project_root)
    found = jit_functions({file: ast.parse(text) for file, text in texts.items()})
    marks = sum(text.count("@triton.jit") for text in texts.values())
    assert len(found) == marks > 20, "two functions of one name, or a decorator that is not seen"


BROKEN = {
    "row times stride": (
        "def k(x_ptr, stride_x, N: tl.constexpr):\n"
        "    row = tl.program_id(0)\n"
        "    tl.store(x_ptr + row * stride_x + tl.arange(0, N), 0.0)\n",
        "k: row * stride_x is a 32-bit product",
    ),
    "rows of a block times a constant width": (
        "def k(x_ptr, D: tl.constexpr):\n"
        "    rows = tl.program_id(0) * 16 + tl.arange(0, 16)\n"
        "    tl.store(x_ptr + rows[:, None] * D + tl.arange(0, 16)[None, :], 0.0)\n",
        "k: rows[:, None] * D is a 32-bit product",
    ),
    "cast after the product": (
        "def k(x_ptr, stride_x):\n"
        "    tl.store(x_ptr + (tl.program_id(0) * stride_x).to(tl.int64), 0.0)\n",
        "k: tl.program_id(0) * stride_x is a 32-bit product",
    ),
    "one assignment of two is narrow": (
        "def k(x_ptr, index_ptr, stride_x, GATHER: tl.constexpr):\n"
        "    row = tl.program_id(0).to(tl.int64)\n"
        "    if GATHER:\n"
        "        row = tl.load(index_ptr + row)\n"
        "    tl.store(x_ptr + row * stride_x, 0.0)\n",
        "k: row * stride_x is a 32-bit product",
    ),
    "a narrow argument of a helper": (
        "def place(row, stride_x):\n"
        "    return row * stride_x\n"
        "@triton.jit\n"
        "def k(x_ptr, stride_x):\n"
        "    tl.store(x_ptr + place(tl.program_id(0), stride_x), 0.0)\n",
        "place: row * stride_x is a 32-bit product",
    ),
    "a loaded row": (
        "def k(x_ptr, index_ptr, stride_x):\n"
        "    tl.store(x_ptr + tl.load(index_ptr) * stride_x, 0.0)\n",
        "k: tl.load(index_ptr) * stride_x is a 32-bit product",
    ),
    "product in place": (
        "def k(x_ptr, stride_x):\n"
        "    row = tl.program_id(0)\n"
        "    row *= stride_x\n"
        "    tl.store(x_ptr + row, 0.0)\n",
        "k: row *= stride_x is a 32-bit product",
    ),
    "autotune": (
        "@triton.autotune(configs=[], key=[])\ndef k(x_ptr):\n    pass\n",
        "triton.autotune: needs a drive",
    ),
    "warp_specialize": (
        "def k(n):\n    for i in tl.range(0, n, warp_specialize=True):\n        pass\n",
        "warp_specialize=True: fails",
    ),
    "num_ctas": ("def k(n):\n    pass\nk[(1,)](1, num_ctas=2)\n", "num_ctas=2: fails"),
    "TF32": (
        "def k(a, b):\n    return tl.dot(a, b)\n",
        "needs input_precision='ieee'",
    ),
    "chained dots": (
        "def k(a, b, acc, n):\n"
        "    for i in range(n):\n"
        "        acc = tl.dot(a, b, acc, input_precision='ieee')\n"
        "        acc = tl.dot(b, a, acc, input_precision='ieee')\n",
        "two dots into acc in one loop",
    ),
    "chained dots, added": (
        "def k(a, b, acc, n):\n"
        "    for i in range(n):\n"
        "        acc += tl.dot(a, b, input_precision='ieee')\n"
        "        acc += tl.dot(b, a, input_precision='ieee')\n",
        "two dots into acc in one loop",
    ),
    "block pointe": (
        "def k(x_ptr):\n    p = tl.make_block_ptr(x_ptr, (1,), (1,), (0,), (16,), (0,))\n",
        "make_block_ptr: gone in Triton 3.9",
    ),
    "host sync": (
        "def k(x_ptr):\n    pass\ndef wrapper(x):\n    return x.item()\n",
        "x.item: waits",
    ),
}


@pytest.mark.parametrize(("snippet", "message"), BROKEN.values(), ids=BROKEN)
def test_a_violation_is_found(snippet, message):
    found = violations({"snippet.py": HEAD + snippet})
    assert len(found) == 1, found
    assert message in found[0]


GOOD = {
    "wide row": "def k(x_ptr, stride_x):\n"
    "    row = tl.program_id(0).to(tl.int64)\n"
    "    tl.store(x_ptr + row * stride_x, 0.0)\n",
    "wide argument": "def place(row, stride_x):\n"
    "    return row * stride_x\n"
    "@triton.jit\n"
    "def k(x_ptr, stride_x):\n"
    "    tl.store(x_ptr + place(tl.program_id(0).to(tl.int64), stride_x), 0.0)\n",
    "two accumulators": "def k(a, b, gate, up, n):\n"
    "    for i in range(n):\n"
    "        gate = tl.dot(a, b, gate, input_precision='ieee')\n"
    "        up = tl.dot(b, a, up, input_precision='ieee')\n",
    "tiles and constants": "def k(num_m, D: tl.constexpr, F: tl.constexpr):\n"
    "    NUM_N: tl.constexpr = D * F // 16\n"
    "    for tile in tl.range(tl.program_id(0), num_m * NUM_N, tl.num_programs(0)):\n"
    "        pass\n",
}


@pytest.mark.parametrize("snippet", GOOD.values(), ids=GOOD)
def test_right_code_is_accepted(snippet):
    assert violations({"snippet.py": HEAD + snippet}) == []
