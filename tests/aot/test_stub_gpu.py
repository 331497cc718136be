"""The stand-in GPU: what it notes, and what it refuses."""

import subprocess
import sys

import pytest

from relibra_kernels.testing.stub_gpu import use_stub_gpu

PROGRAM = """
import torch, triton, triton.language as tl
from relibra_kernels.testing.stub_gpu import use_stub_gpu
from relibra_kernels.triton_ops.configs import arch_of

@triton.jit(do_not_specialize=["n"])
def _double_kernel(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) * 2, mask=offs < n)

launches = use_stub_gpu("sm_90")
x = torch.ones(1000)
for n in (1, 16, 1000):
    _double_kernel[(triton.cdiv(n, 128), 2)](x, n, 128, num_warps=2)
_double_kernel[(1,)](x, 1000, 256)
assert [one.grid for one in launches] == [(1, 2, 1), (1, 2, 1), (8, 2, 1), (1, 1, 1)]
assert [one.variant for one in launches] == [0, 0, 0, 1]
assert [one.num_warps for one in launches] == [2, 2, 2, 4]
assert launches[0].kernel == "_double_kernel" and launches[0].shared_bytes == 0
assert launches[0].cubin[:4] == b"\\x7fELF" and launches[0].cubin != launches[3].cubin
assert torch.equal(x, torch.ones(1000)), "nothing ran"
assert arch_of(x.device) == "sm_90"
gpu = triton.runtime.driver.active
assert gpu.utils.get_device_properties(gpu.get_current_device())["multiprocessor_count"] == 132
"""


def test_it_notes_launches_and_runs_nothing(compiling_env, tmp_path):
    program = tmp_path / "program.py"  # Triton reads the kernel's source from its file
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)], env=compiling_env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_process_that_interprets_is_refused():
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET: need it unset"):
        use_stub_gpu("sm_90")


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="arch: .*sm_80.*sm_75"):
        use_stub_gpu("sm_75")
