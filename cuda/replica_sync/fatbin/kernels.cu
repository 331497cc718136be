// All kernels in one file without launchers, for replica_sync.fatbin: loaded by name through CuPy's
// RawModule or cuda.bindings where the shared library cannot be used.
#define RS_KERNELS_ONLY

#include "replica_sync/push.cu"
#include "replica_sync/push_tma.cu"
#include "replica_sync/reduce.cu"
#include "replica_sync/wait.cu"
