"""Kernels, tables and references of balanced MoE training.

Importing the package registers ``torch.ops.relibra.*``; Triton and the native planner are loaded
only when something needs them.
"""

from relibra_kernels import ops as ops
from relibra_kernels.ops.warmup import LayerSpec as LayerSpec
from relibra_kernels.ops.warmup import warmup as warmup
