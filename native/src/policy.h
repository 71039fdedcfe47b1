#pragma once

// Which experts should be resident. A policy is a pure function of what it is shown: no clock, no state, no I/O; the
// same view gives the same moves. One policy per file.

#include "layout.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace moe_pager {

struct move {
    uint32_t expert;
    bool     promote; // false: demote
};

// All vectors are indexed by expert. Only movable layers of one size class are to be planned for; bytes of others are not
// part of the budget shown here.
struct policy_view {
    const layout &               lay;
    const std::vector<double> &  score; // expected picks per token
    const std::vector<uint8_t> & resident;
    uint32_t                     size_class;
    uint64_t                     budget_bytes;
    double                       horizon_tokens;
};

class policy {
  public:
    virtual ~policy()                 = default;
    virtual const char * name() const = 0;

    // Moves in the order in which they are to be carried out. Carried out one by one, they never hold more than the
    // budget (unless more is held at the start: then demotions come first).
    virtual std::vector<move> plan(const policy_view & view) const = 0;
};

std::unique_ptr<policy> make_policy_posterior();

} // namespace moe_pager
