#pragma once

// What a mat-vec kernel does with paged weights.

#include "moe-pager.h"

#include <cstdint>

namespace moe_pager {

// Blocks of the fused paged variant that a multiprocessor must have registers for: as many as of the stock variant of most
// types. Left alone it takes a few registers more, which costs a block. For a type that needs many more they would spill.
constexpr __host__ __device__ int min_blocks(bool fused_and_paged, bool spills) {
    return fused_and_paged && !spills ? 10 : 1;
}

__device__ __forceinline__ bool is_home(uint64_t entry) {
    return entry & 1;
}

__device__ __forceinline__ char * in_global(uint64_t entry) {
    return (char *) __cvta_global_to_generic(entry & ~(uint64_t) 1);
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

// What a kernel does before it reads `n_rows` rows of expert `id` from row0 on, for one token's slot: notes the pick, and
// points x, gate and the offset from x (in blocks of the weight's type) at the rows. Reader `token` of `n_tokens` in this
// block is one warp; a block that reads for one token is one reader with all its threads.
//
// Rows in a frame are read where they are. Rows at home are first copied to device memory in 16-byte lanes, each once:
// over the link narrow and repeated loads cost what wide ones do. Lanes at the ends reach into what lies beside, in the
// copy as at home, so whoever else writes a byte writes the same. x and gate are in global memory in either case, and
// said to be: loads that might also be from shared memory are slower.
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
    const bool     whole_block = n_tokens == 1;
    const uint32_t thread      = whole_block ? threadIdx.y * blockDim.x + threadIdx.x : threadIdx.x;
    if (pages.x != nullptr) {
        const uint64_t entry_x    = pages.x[id];
        const uint64_t entry_gate = with_gate ? pages.gate[id] : entry_x;
        const uint64_t begin      = (uint64_t) row0 * pages.row_bytes;
        const char *   at_x       = in_global(entry_x) + begin;
        const char *   at_gate    = in_global(entry_gate) + begin;
        if (is_home(entry_x) && pages.x_copies != nullptr) {
            const uint64_t at     = id * pages.slab_bytes + begin;
            char *         x_copy = in_global((uint64_t) pages.x_copies) + at;
            char *         g_copy = in_global((uint64_t) pages.gate_copies) + at;
            // of all four addresses: weights and copies are aligned to more than a lane
            const uint32_t lead   = (uint32_t) ((uintptr_t) at_x & 15);
            // a block may ask for rows beyond the last one
            const uint32_t bytes  = (uint32_t) min((uint64_t) n_rows * pages.row_bytes, pages.slab_bytes - begin);
            const uint32_t lanes  = (lead + bytes + 15) / 16;
            const uint32_t step   = whole_block ? blockDim.x * blockDim.y : blockDim.x;
            for (uint32_t i = thread; i < lanes; i += step) {
                const uint4 lane = ((const uint4 *) (at_x - lead))[i];
                if (with_gate) {
                    ((uint4 *) (g_copy - lead))[i] = ((const uint4 *) (at_gate - lead))[i];
                }
                ((uint4 *) (x_copy - lead))[i] = lane;
            }
            at_x    = x_copy;
            at_gate = g_copy;
            if (whole_block) {
                __syncthreads();
            } else {
                __syncwarp();
            }
        }
        x      = at_x;
        gate   = at_gate;
        offset = 0;
    }
    if (pages.log != nullptr && blockIdx.x == 0 && thread == 0) {
        log_pick(pages, token, n_tokens, blockIdx.y, gridDim.y, id);
    }
}

} // namespace moe_pager
