/* C ABI of replica synchronisation, the same for the host and the CUDA library: plain structs and
 * raw addresses, no torch, no NVSHMEM, no Python.
 *
 * Words are 64-bit, written by one rank and read by another, on 128-byte lines of their own, zero
 * at first, only ever growing:
 *
 *   word   = generation (16 bits) << 48 | (n + 1) (32 bits) << 16 | hash (16 bits)
 *   credit = generation (16 bits) << 48 | count (48 bits)
 *   abort  = generation (16 bits) << 48 | (rank + 1) (32 bits) << 16 | code (16 bits)
 *
 * A word of another generation reads as "not yet". In the CUDA library items, arrivals, addresses
 * of words and the error record are pinned host or device memory that the kernels can reach; an
 * RsFault is read by the caller's thread and may lie anywhere. The host library runs a call to its
 * end and ignores `stream`.
 */
#ifndef RELIBRA_REPLICA_SYNC_C_API_H_
#define RELIBRA_REPLICA_SYNC_C_API_H_

#if defined(__CUDACC_RTC__)
#include <cuda/std/cstdint>
#else
#include <stdint.h>
#endif

#define RS_ABI_VERSION 2

#if defined(__GNUC__)
#define RS_API __attribute__((visibility("default")))
#else
#define RS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum RsCode {
  RS_OK = 0,
  RS_TIMEOUT = 1,
  RS_MISMATCH = 2,                   /* a word of this use, but of another plan, layer or expert */
  RS_PEER_ABORTED = 3,               /* another rank found an error first */
  RS_BAD_ARGUMENT = 100,             /* returned by a call, never in a record */
  RS_BEING_WRITTEN = (int)0x80000000 /* in a record whose writer has not finished */
};

enum RsOp {
  RS_OP_WEIGHT_CREDIT = 1,
  RS_OP_WEIGHTS = 2,
  RS_OP_GRAD_CREDIT = 3,
  RS_OP_GRADS = 4,
  RS_OP_ROWS = 5,
  RS_OP_ROW_CREDIT = 6
};

enum RsReduceKind { RS_FP32_FROM_FP32 = 0, RS_FP32_FROM_BF16 = 1, RS_FP64_FROM_FP64 = 2 };

typedef struct RsWaitItem { /* 32 bytes */
  uint64_t* word;           /* polled here */
  uint64_t at_least;        /* the wait ends at a word of this generation that is not smaller */
  uint64_t exact;           /* the word must then be this; 0: any */
  int32_t peer;             /* rank that writes it, for the record */
  int32_t slot;             /* slot of that rank, -1 = none, for the record */
} RsWaitItem;

typedef struct RsPushItem { /* 48 bytes; one field of one slot */
  const void* src;          /* [bytes], any memory of this rank */
  void* dst;                /* [bytes], slot of a peer */
  uint64_t bytes;
  uint64_t* full; /* word of the peer's slot, stored after this and all earlier items; null: none */
  uint64_t word;  /* what is stored there */
  uint32_t*
      arrivals; /* of this item and this rank, zero between launches; unused if full is null */
} RsPushItem;

typedef struct RsPublishItem { /* 16 bytes */
  uint64_t* word;
  uint64_t value;
} RsPublishItem;

typedef struct RsReduceItem { /* 32 bytes; one field of one home expert */
  void* home;                 /* [count], added to in place: fp32, fp32, fp64 */
  const void* const*
      grads; /* [num_replicas] arrays [count]: fp32, bf16, fp64; added in this order */
  int32_t num_replicas;
  int32_t kind; /* RsReduceKind */
  uint64_t count;
} RsReduceItem;

typedef struct RsErrorRecord { /* 48 bytes; the first writer of `code` wins */
  uint32_t code;               /* RsCode */
  int32_t rank, op, peer, slot, reserved;
  uint64_t use, expected, observed;
} RsErrorRecord;

typedef struct RsFault {        /* 40 bytes */
  RsErrorRecord* record;        /* of this rank */
  uint64_t* abort;              /* abort word of this rank */
  uint64_t* const* peer_aborts; /* [num_peers] abort words of the other ranks */
  int32_t num_peers;
  int32_t rank;
  uint64_t generation; /* 0..65535 */
} RsFault;

#if !defined(__CUDACC_RTC__) /* device code alone has no host functions */

/* Each returns 0, RS_BAD_ARGUMENT, or the code of the CUDA runtime (driver codes from 10000 on).
 * rs_push, rs_publish and rs_reduce do nothing once *fault->abort carries this generation. */
RS_API int rs_abi_version(void);

/* Copies every item, then stores the words. blocks >= 1, threads 1..512. */
RS_API int rs_push(const RsPushItem* items, int n, const RsFault* fault, int blocks, int threads,
                   void* stream);

/* Waits for every word. A time-out or mismatch is written to the record, then to the abort word of
 * every rank; an abort of a peer ends the wait and is recorded here only. The host library returns
 * the code. */
RS_API int rs_wait(const RsWaitItem* items, int n, uint64_t use, int op, uint64_t timeout_ns,
                   const RsFault* fault, void* stream);

/* Stores every word after all earlier work of the stream. */
RS_API int rs_publish(const RsPublishItem* items, int n, const RsFault* fault, void* stream);

/* Adds the gradients of every item to its home, in the order of its list: bitwise reproducible, for
 * any blocks and threads. */
RS_API int rs_reduce(const RsReduceItem* items, int n, const RsFault* fault, int blocks,
                     int threads, void* stream);

/* rs_push by bulk copies (TMA; sm_90 and newer, else cudaErrorNotSupported), or by copy engines: no
 * SM, `items` are read on the host before the call returns, arrivals are not used, and the abort
 * word is not looked at: what is in the stream runs. That does no harm: it writes replica slots and
 * words of a generation that has failed on every rank, whose results no optimizer will use, and no
 * more than the pushes that were submitted before the caller saw the error. The host library runs
 * rs_push for both. */
RS_API int rs_push_tma(const RsPushItem* items, int n, const RsFault* fault, int blocks,
                       void* stream);
RS_API int rs_push_copy_engine(const RsPushItem* items, int n, const RsFault* fault, void* stream);

/* The stream goes on when every word is at least `at_least`, as a signed 64-bit difference: a
 * stream memory operation without SM, time-out or look at the abort word. Whoever watches it ends
 * it by storing the words. rs_wait behind it tells what has come. `items` are read on the host
 * before the call returns. The host library polls. */
RS_API int rs_wait_values(const RsWaitItem* items, int n, void* stream);

#endif

#ifdef __cplusplus
}
#endif
#endif
