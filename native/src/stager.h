#pragma once

#include "layout.h"

#include <cstdint>

namespace moe_pager {

// The routed ids of one layer, on the device.
struct device_ids {
    const int32_t * data       = nullptr;
    int32_t         n_used     = 0;
    int32_t         n_tokens   = 0;
    int64_t         row_stride = 0; // in ids

    int64_t n_picks() const { return (int64_t) n_used * n_tokens; }
};

// Makes a weight whole in device memory for kernels that know nothing of pages: tiled and others.
//
//   few picks     a kernel gathers the experts that were picked, from their frames or, over the link, from their homes.
//                 It reads the ids itself, so it can be part of a CUDA graph
//   many picks    nearly every expert is used: all that are not resident are copied by the copy engine on a stream of
//                 its own, one tensor ahead of the compute; resident ones are gathered from their frames. Which experts
//                 those are is known when it is enqueued, so it cannot be part of a CUDA graph
//
// Two buffers in turn. A copy into one waits until the kernels that read it last are done; they
// wait for the copy. Called by the thread that computes.
class stager {
  public:
    virtual ~stager() = default;

    // is this the case of many picks? Never of so few tokens that mat-vec kernels may compute them: those put what they
    // read at home in the same buffers
    static bool copies(uint32_t n_expert, const device_ids & ids) {
        return ids.n_picks() >= 4 * (int64_t) n_expert && ids.n_tokens > 16;
    }

    // The weight's data in a staging buffer, valid for kernels launched on `stream` until finish. Null: read it at home.
    virtual const void * start(const tensor_record & weight, const device_ids & ids, void * stream) noexcept = 0;
    virtual void         finish(void * stream) noexcept                                                      = 0;

    // a new graph is about to be launched
    virtual void graph_begins() noexcept = 0;
};

} // namespace moe_pager
