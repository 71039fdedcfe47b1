#pragma once

// Replays a routing on a simulated device: the pager's own policies, score, page table and mover, and a clock that is the
// trace. After each ubatch the mover makes a pass, whose moves are there for the next one.

#include "routing-trace.h"
#include "score.h"

#include <cstdint>
#include <optional>
#include <string>

namespace moe_pager {

struct replay_options {
    // one that an engine can run; "best-set": static, filled at the start with the experts that the trace's own decoded
    // tokens pick most; "belady" (policy-belady.h)
    std::string          policy           = "posterior";
    double               share            = 0.2; // of the experts' bytes, that may be resident
    double               half_life_tokens = 0;   // 0: the pager's default, as for the next
    double               horizon_tokens   = 0;
    std::optional<prior> belief;         // from the start on
    uint32_t             pass_every = 1; // ubatches from one pass of the mover to the next
    uint32_t moves_max     = 0; // promotions between two ubatches, rounded up to the mover's window; 0: any number
    size_t   skip_ubatches = 0; // that are replayed but not counted in the result
};

struct replay_result {
    uint64_t tokens       = 0;
    uint64_t picks        = 0;
    uint64_t hits         = 0;
    uint64_t promotions   = 0;
    uint64_t decoded      = 0; // the part of the ubatches of one token
    uint64_t decode_picks = 0;
    uint64_t decode_hits  = 0;
    uint64_t decode_moves = 0;
    uint64_t recorded     = 0; // hits of the same ubatches when they were recorded
};

// names that replay_options::policy may have
std::vector<std::string> replay_policies();

// Throws std::runtime_error for a policy that is not among them.
replay_result replay(const routing_trace & trace, const replay_options & options);

} // namespace moe_pager
