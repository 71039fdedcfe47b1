#pragma once

// The offline bound: keeps the experts that will be picked again soonest. It must be told the future, so it is for
// simulations only.
//
// Like every policy that reacts to picks it may only take in what has just been picked, but for the first plan: before
// the first ubatch it fills its room with what is picked first. If no ubatch picks an expert twice no such policy hits
// more; where one does, as in a long prompt, it goes by the ubatch all the same and others may be a little better.

#include "policy.h"
#include "routing-trace.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace moe_pager {

class future {
  public:
    explicit future(const routing_trace & trace);

    // so many ubatches have been computed
    void set_now(size_t n_ubatches) { now_ = n_ubatches; }

    // ubatches until the expert is picked, 1 for the next one; 0: never again
    size_t distance(uint32_t expert) const;

    // was it picked in the ubatch that was computed last, or has none been computed yet?
    bool just_picked(uint32_t expert) const;

  private:
    size_t                             now_ = 0;
    std::vector<std::vector<uint32_t>> picked_in_; // by expert: the ubatches, in order
};

// `ahead` must live as long as the policy
std::unique_ptr<policy> make_policy_belady(const future & ahead);

} // namespace moe_pager
