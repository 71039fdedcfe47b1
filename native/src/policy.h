#pragma once

// Which experts should be resident. A policy is a pure function of what it is shown: no clock, no state, no I/O; the
// same view gives the same moves. One policy per file.

#include "layout.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moe_pager {

struct move {
    uint32_t expert;
    bool     promote; // false: demote
};

// What is known of the experts. All vectors are indexed by expert.
struct evidence {
    std::vector<double>   score; // expected picks per token (score.h)
    std::vector<uint64_t> picks; // since the start, never decayed
    std::vector<uint64_t>
        last_pick; // a tick that grows (page-table.h); 0: not yet, or so long ago that it was forgotten
};

// Only movable layers of one size class are to be planned for; bytes of others are not part of the budget shown here.
struct policy_view {
    const layout &               lay;
    const evidence &             seen;
    const std::vector<uint8_t> & resident; // by expert
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

std::unique_ptr<policy> make_policy_lfu();
std::unique_ptr<policy> make_policy_lru();
std::unique_ptr<policy> make_policy_posterior();
std::unique_ptr<policy> make_policy_static();

// those that an engine can run, the default first
const std::vector<std::string> & policy_names();

// names, separated by commas
std::string listed(const std::vector<std::string> & names);

// null for a name that is not among them
std::unique_ptr<policy> make_policy(const std::string & name);

} // namespace moe_pager
