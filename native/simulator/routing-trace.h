#pragma once

// A recorded routing in memory, read from a file as trace-writer.h describes it.

#include "layout.h"

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

namespace moe_pager {

struct routed_layer {
    uint32_t              n_rows = 0;
    uint32_t              n_used = 0;
    std::vector<uint16_t> ids; // [row][used]
};

struct routed_ubatch {
    uint32_t                  n_tokens = 0;
    uint32_t                  hits     = 0; // when it was recorded
    std::vector<routed_layer> layers;
};

struct routing_trace {
    static constexpr uint16_t no_expert = UINT16_MAX;

    struct layer {
        int32_t  block        = 0;
        uint32_t n_expert     = 0;
        uint64_t expert_bytes = 0;
        bool     pinned       = false; // its home was memory that a GPU reads
    };

    std::vector<layer>         layers;
    std::vector<routed_ubatch> ubatches;

    // The recording engine's layout without its weights; its layers can all be moved, as far as the tier allows. Keys
    // are addresses of `layers`.
    layout make_layout() const;
};

// Throws std::runtime_error that names what is wrong, and at which ubatch.
routing_trace read_trace(std::istream & in);

} // namespace moe_pager
