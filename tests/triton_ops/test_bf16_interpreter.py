"""The patched interpreter computes in bf16 as torch does; `tests/conftest.py` installs it."""

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from relibra_kernels.testing import bf16_interpreter
from relibra_kernels.testing.bf16_interpreter import bits_to_values, values_to_bits

BF16 = torch.bfloat16


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    tl.store(out_ptr + offs, x + y)
    tl.store(out_ptr + N + offs, x * y)
    tl.store(out_ptr + 2 * N + offs, tl.where(x > y, x, y))
    tl.store(out_ptr + 3 * N + offs, -x)
    tl.store(out_ptr + 4 * N + offs, tl.minimum(x, y))
    tl.store(out_ptr + 5 * N + offs, tl.abs(x))
    tl.store(out_ptr + 6 * N + offs, x - 1.5)


@triton.jit
def _cast_kernel(x_ptr, fp32_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    wide = tl.load(fp32_ptr + offs)
    tl.store(out_ptr + offs, wide.to(tl.bfloat16))
    tl.store(out_ptr + N + offs, wide)  # the store casts
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + 2 * N + offs, x.to(tl.float32) * 3.0)
    tl.store(out_ptr + 3 * N + offs, x.to(tl.float16).to(tl.float32))
    tl.store(out_ptr + 4 * N + offs, offs.to(tl.bfloat16))
    tl.store(out_ptr + 5 * N + offs, (x > 0.0).to(tl.float32))
    tl.store(out_ptr + 6 * N + offs, tl.full((N,), 2.5, tl.bfloat16))


@triton.jit
def _dot_kernel(x_ptr, y_ptr, out_ptr, sums_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    tl.store(out_ptr + offs, tl.dot(x, y.T))
    cols = tl.arange(0, N)
    tl.store(sums_ptr + cols, tl.sum(x, axis=1))
    tl.store(sums_ptr + N + cols, tl.max(x, axis=1))
    tl.store(sums_ptr + 2 * N + cols, tl.cumsum(tl.load(y_ptr + cols), axis=0))


def random_bf16(*shape):
    torch.manual_seed(1)
    return torch.randn(*shape).to(BF16)


def test_rounding_equals_torch_for_every_upper_half_and_for_ties():
    bits = torch.arange(2**16, dtype=torch.int32)
    for low in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        fp32 = (bits << 16 | low).view(torch.float32)
        ours = torch.from_numpy(values_to_bits(fp32.numpy()).view("int16")).view(BF16)
        torch.testing.assert_close(ours, fp32.to(BF16), rtol=0, atol=0, equal_nan=True)
    values = torch.from_numpy(bits_to_values(bits.numpy().astype("uint16")))
    expected = bits.to(torch.int16).view(BF16).float()
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def test_arithmetic_equals_torch():
    x, y = random_bf16(2, 64)
    out = torch.empty(7, 64, dtype=BF16)
    _arithmetic_kernel[(1,)](x, y, out, 64)
    expected = [x + y, x * y, torch.maximum(x, y), -x, torch.minimum(x, y), x.abs(), x - 1.5]
    assert torch.equal(out, torch.stack(expected))


def test_casts_equal_torch():
    x, fp32 = random_bf16(64), torch.randn(64)
    out = torch.empty(7, 64, dtype=BF16)
    _cast_kernel[(1,)](x, fp32, out, 64)
    expected = [fp32.to(BF16), fp32.to(BF16), x * 3, x, torch.arange(64), x > 0]
    expected = torch.stack([*(e.to(BF16) for e in expected), torch.full((64,), 2.5, dtype=BF16)])
    assert torch.equal(out, expected)


def test_dot_and_reductions():
    x, y = random_bf16(2, 32, 32)
    out, sums = torch.empty(32, 32), torch.empty(3, 32, dtype=BF16)
    _dot_kernel[(1,)](x, y, out, sums, 32)
    torch.testing.assert_close(out.double(), x.double() @ y.double().T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums[0], x.float().sum(1).to(BF16), rtol=2**-8, atol=1e-2)
    assert torch.equal(sums[1], x.max(1).values)
    torch.testing.assert_close(sums[2], y[0].float().cumsum(0).to(BF16), rtol=2**-6, atol=2e-2)


def test_a_second_call_changes_nothing():
    builder = bf16_interpreter.interpreter.InterpreterBuilder
    before = builder.binary_op
    bf16_interpreter.install()
    assert builder.binary_op is before


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0", "13.7.0", "3.60.0"])
def test_an_unknown_version_is_refused(version):
    with pytest.raises(RuntimeError, match=f"need 3.6 to 3.9 .*got {version}"):
        bf16_interpreter.install(version)


def test_without_the_patch_the_interpreter_is_wrong():
    """Else the patch, and the tests above, are no longer needed."""
    code = (
        "import os; os.environ['TRITON_INTERPRET'] = '1'; import torch, runpy\n"
        f"kernel = runpy.run_path({__file__!r})['_arithmetic_kernel']\n"
        "x = torch.ones(16, dtype=torch.bfloat16); out = torch.empty(7, 16, dtype=x.dtype)\n"
        "from triton.runtime.interpreter import InterpreterBuilder\n"
        "InterpreterBuilder.get_bf16 = lambda self, value: self.get_fp16(value)\n"
        "kernel[(1,)](x, x, out, 16)\n"
        "assert out[0, 0] != 2, out[0]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
