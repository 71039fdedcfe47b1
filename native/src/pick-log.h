#pragma once

// Where kernels write down which experts they were asked for.
//
// A CUDA graph is replayed without any call into the host, so what a layer picked is known to kernels only. They write it
// into pinned host memory, at the same place every time; the host reads it when the stream has become idle. That is one
// posted write per pick and no kernel of its own.
//
// One row per layer: the number of tokens that went through it, then their ids, [token][n_expert_used]. The host sets
// the number back to 0 when it has read the row. Rows are written by kernels between launch and idle, and by the host
// between idle and the next launch.

#include "gpu.h"
#include "layout.h"

#include <cstdint>

namespace moe_pager {

class pick_log {
  public:
    // tokens beyond `n_tokens_max` of an ubatch are not written
    pick_log(const layout & lay, gpu & device, uint32_t n_tokens_max);

    bool usable() const { return host_ != nullptr; }

    uint32_t n_tokens_max() const { return n_tokens_max_; }

    // a layer's row, for kernels
    int32_t * device_row(uint32_t row) const { return device_ == nullptr ? nullptr : device_ + row * stride_; }

    // a layer's row, for the host: the number of tokens, then their ids
    int32_t * host_row(uint32_t row) const { return host_ + row * stride_; }

  private:
    const uint32_t n_tokens_max_;
    const uint64_t stride_; // in ids
    int32_t *      host_   = nullptr;
    int32_t *      device_ = nullptr;
};

} // namespace moe_pager
