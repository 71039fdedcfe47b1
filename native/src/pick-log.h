#pragma once

// Where kernels write down which experts they were asked for.
//
// A CUDA graph is replayed without any call into the host, so what a layer picked is known to kernels only. They write it
// into device memory, at the same place every time. One copy behind the graph brings it to the host: a kernel that
// writes to the host itself does not end before that write has arrived, and there would be one in each layer.
//
// One row per layer: the number of tokens that went through it, then their ids, [token][n_expert_used]. A row whose number
// is 0 was not written. The device's rows belong to the stream; the host's belong to the stream from drain() until it is
// idle, then to the thread that computes.

#include "gpu.h"
#include "layout.h"

#include <cstdint>

namespace moe_pager {

class pick_log {
  public:
    // tokens beyond `n_tokens_max` of an ubatch are not written
    pick_log(const layout & lay, gpu & device, uint32_t n_tokens_max);

    bool usable() const { return host_ != nullptr && device_ != nullptr; }

    uint32_t n_tokens_max() const { return n_tokens_max_; }

    // a layer's row, for kernels
    int32_t * device_row(uint32_t row) const { return device_ == nullptr ? nullptr : device_ + row * stride_; }

    // a layer's row, for the host: the number of tokens, then their ids
    const int32_t * host_row(uint32_t row) const { return host_ + row * stride_; }

    // all rows to the host, behind what was launched on `stream`
    void drain(void * stream) noexcept;

  private:
    gpu &          gpu_;
    const uint32_t n_rows_;
    const uint32_t n_used_;
    const uint32_t n_tokens_max_;
    const uint64_t stride_; // in ids
    int32_t *      host_                 = nullptr;
    int32_t *      host_seen_by_kernels_ = nullptr;
    int32_t *      device_               = nullptr;
};

} // namespace moe_pager
