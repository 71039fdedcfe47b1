#pragma once

// What a mat-vec kernel does with paged weights.

#include "moe-pager.h"

#include <cstdint>

namespace moe_pager {

// 16-byte units that a block needs to hold `bytes` that may start anywhere
constexpr __host__ __device__ uint32_t units_of(uint32_t bytes) {
    return (bytes + 15) / 16 + 1;
}

// What a launch asks for so that fetch can work: for `n_rows` of the weight, and of the gate when there is one. 0 if the
// weight is not paged, or if its rows are too long: then they are read where they are, which is slower.
inline uint32_t shared_bytes(const moe_pager_weights & pages, uint32_t n_rows, uint32_t n_readers = 1) {
    constexpr uint32_t limit = 40 << 10; // of the 48 KiB that every kernel may have; the rest is the kernel's own
    if (pages.x == nullptr) {
        return 0;
    }
    const uint32_t bytes = n_readers * units_of(n_rows * pages.row_bytes) * 16 * (pages.gate != nullptr ? 2 : 1);
    return bytes <= limit ? bytes : 0;
}

// Where to read `n_rows` rows of the slabs of expert `id` from, starting at row `row0`. Rows in a frame are read where they
// are. Rows at home are first copied to shared memory in 16-byte lanes, each once: over the link narrow and repeated
// loads cost what wide ones do. `shared` is the reader's own; all of its threads call. True: they must synchronise before
// they use what x and gate now point at.
__device__ __forceinline__ bool fetch(const moe_pager_weights & pages,
                                      uint32_t                  id,
                                      uint32_t                  row0,
                                      uint32_t                  n_rows,
                                      bool                      with_gate,
                                      uint4 *                   shared,
                                      uint32_t                  thread,
                                      uint32_t                  n_threads,
                                      const void *&             x,
                                      const void *&             gate) {
    const uint64_t offset     = (uint64_t) row0 * pages.row_bytes;
    const uint32_t bytes      = n_rows * pages.row_bytes;
    const uint64_t entry_x    = pages.x[id];
    const uint64_t entry_gate = with_gate ? pages.gate[id] : entry_x;
    const char *   at_x       = (const char *) (entry_x & ~(uint64_t) 1) + offset;
    const char *   at_gate    = (const char *) (entry_gate & ~(uint64_t) 1) + offset;
    x                         = at_x;
    gate                      = at_gate;
    if (!(entry_x & 1) || pages.shared_bytes == 0) {
        return false;
    }
    const uint32_t lead_x    = (uint32_t) ((uintptr_t) at_x & 15);
    const uint32_t lead_gate = (uint32_t) ((uintptr_t) at_gate & 15);
    const uint4 *  from_x    = (const uint4 *) (at_x - lead_x);
    const uint4 *  from_gate = (const uint4 *) (at_gate - lead_gate);
    const uint32_t n         = units_of(bytes);
    const uint32_t n_x       = (lead_x + bytes + 15) / 16;
    const uint32_t n_gate    = (lead_gate + bytes + 15) / 16;
    for (uint32_t i = thread; i < n; i += n_threads) {
        uint4 a = make_uint4(0, 0, 0, 0), b = a;
        if (i < n_x) {
            a = from_x[i];
        }
        if (with_gate && i < n_gate) {
            b = from_gate[i];
        }
        shared[i] = a;
        if (with_gate) {
            shared[n + i] = b;
        }
    }
    x    = (const char *) shared + lead_x;
    gate = (const char *) (shared + n) + lead_gate;
    return true;
}

// notes the pick of one token's slot in the layer's row of the log; one thread of one block calls
__device__ __forceinline__ void log_pick(
    const moe_pager_weights & pages, uint32_t token, uint32_t n_tokens, uint32_t slot, uint32_t n_used, uint32_t id) {
    if (token < pages.log_tokens) {
        pages.log[1 + token * n_used + slot] = (int32_t) id;
    }
    if (token == 0 && slot == 0) {
        pages.log[0] = (int32_t) n_tokens;
    }
}

// A kernel's own arguments with the pages of its weights.
template <typename Arguments>
struct with_pages : Arguments {
    moe_pager_weights pages = {};
};

inline bool is_paged(const moe_pager_weights & pages) {
    return pages.x != nullptr || pages.log != nullptr;
}

// The arguments of a launch whose blocks hold `n_readers` readers of `n_rows` rows each.
template <typename Arguments>
Arguments with_shared_bytes(Arguments arguments, uint32_t n_rows, uint32_t n_readers) {
    arguments.pages.shared_bytes = shared_bytes(arguments.pages, n_rows, n_readers);
    return arguments;
}

// What a kernel does before it reads `n_rows` rows of expert `id` from row0 on, for one token's slot: notes the pick, and
// points x, gate and the offset from x (in blocks of the weight's type) at the rows. Reader `token` of `n_tokens` in this
// block is one warp; a block that reads for one token is one reader with all its threads.
template <typename Pointer>
__device__ __forceinline__ void turn_page(const moe_pager_weights & pages,
                                          uint32_t                  id,
                                          uint32_t                  row0,
                                          uint32_t                  n_rows,
                                          bool                      with_gate,
                                          uint32_t                  token,
                                          uint32_t                  n_tokens,
                                          Pointer &                 x,
                                          const void *&             gate,
                                          int &                     offset) {
    extern __shared__ uint4 paged_rows[];
    const bool              whole_block = n_tokens == 1;
    const uint32_t          thread      = whole_block ? threadIdx.y * blockDim.x + threadIdx.x : threadIdx.x;
    if (pages.x != nullptr) {
        const uint32_t n_threads = whole_block ? blockDim.x * blockDim.y : blockDim.x;
        uint4 *        shared    = paged_rows + token * (pages.shared_bytes / n_tokens / sizeof(uint4));
        const void *   at        = nullptr;
        if (fetch(pages, id, row0, n_rows, with_gate, shared, thread, n_threads, at, gate)) {
            if (whole_block) {
                __syncthreads();
            } else {
                __syncwarp();
            }
        }
        x      = at;
        offset = 0;
    }
    if (pages.log != nullptr && blockIdx.x == 0 && thread == 0) {
        log_pick(pages, token, n_tokens, blockIdx.y, gridDim.y, id);
    }
}

} // namespace moe_pager
