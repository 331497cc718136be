"""The op registry: importing this module registers ``torch.ops.relibra.*``.

| op | what it does | gradients |
|---|---|---|
| ``route_to_slots`` | expert ids -> slot ids, for dispatchers that know only experts | |
| ``count_sends`` | distinct tokens to each rank | |
| ``build_route`` | the source's tables | |
| ``build_rows`` | the destination's tables | |
| ``token_permute`` | received tokens -> rows | x |
| ``token_unpermute``, ``token_unpermute_backward`` | rows -> (token, choice) | rows |
| ``row_scores`` | scores of choices -> scores of rows, or back | scores |
| ``grouped_gemm`` | rows times the weight of their slot | rows, weights |
| ``grouped_gemm_dgrad``, ``grouped_gemm_wgrad`` | its two gradients | |
| ``expert_up`` | gather, first GEMM and activation in one | |
| ``expert_down`` | second GEMM | |
| ``expert_down_backward`` | gather, backward of the second GEMM and of the activation | |
| ``expert_up_backward`` | gradient of the rows that went into the first GEMM | |
| ``expert_wgrad`` | both weight gradients in one | |
| ``expert_bias_grad`` | both bias gradients in one | |
| ``swiglu``, ``swiglu_backward`` | the gated activation | h |
| ``combine``, ``combine_backward`` | weighted sums of rows in a fixed order | rows, scores |
| ``moe_forward``, ``moe_backward`` | the whole layer, opaque to the compiler | all |
| ``replica_push`` | home weights -> replica slots | |
| ``home_reduce`` | replica gradients -> home gradients | |

Each op has a schema, checks, a CPU body (`relibra_kernels.reference`, which also states its
contract with an example), a fake for tracing, and autograd where the table says so. Ops with a
Triton body take a last argument ``backend`` ("auto", "triton", "reference"; see
`relibra_kernels.ops.backend`). Ops that have no body for a device fail there with the dispatcher's
own message; nothing falls back silently.
"""

from relibra_kernels.ops import bias_grad as bias_grad
from relibra_kernels.ops import combine as combine
from relibra_kernels.ops import expert_rows as expert_rows
from relibra_kernels.ops import expert_wgrad as expert_wgrad
from relibra_kernels.ops import experts as experts
from relibra_kernels.ops import grouped_gemm as grouped_gemm
from relibra_kernels.ops import moe_layer as moe_layer
from relibra_kernels.ops import permute as permute
from relibra_kernels.ops import replica as replica
from relibra_kernels.ops import routing as routing
from relibra_kernels.ops import swiglu as swiglu
from relibra_kernels.ops.device_guard import guard_ops
from relibra_kernels.ops.direct import DirectOps

# Not the whole layer, whose parts are ops of their own.
GUARDED = guard_ops(
    [bias_grad, combine, expert_rows, expert_wgrad, experts, grouped_gemm, permute, routing]
)
direct_ops = DirectOps(GUARDED)
