#pragma once

// How likely the next token is to pick an expert.
//
//   s(l,e) = (kappa * prior(l,e) + n(l,e)) / (kappa + N(l))          0 where the denominator is 0
//
// the posterior mean of "a token picks e", for a Beta prior with the weight of kappa tokens. n counts picks and N
// tokens of layer l, both decayed: when T tokens of a layer are drained,
//
//   n <- n * 2^(-T/half_life) + picks      N <- N * 2^(-T/half_life) + T
//
// A new prior replaces the old at once; counts carry on.
//
// Who writes what: compute threads add to the window (relaxed; one atomic add per pick). Everything else is guarded by
// the mutex: the mover drains the window into n and N, control calls set the prior and read totals. A drain that runs
// while a layer is being counted may take some of its picks now and the rest next time; none is lost or counted twice.

#include "layout.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace moe_pager {

struct prior {
    std::string        id;
    bool               set   = false; // false: none has been given yet
    double             kappa = 0;     // weight, in tokens
    std::vector<float> p;             // by expert index: probability that a token picks it; empty is all zero
};

class score {
  public:
    score(const layout & lay, double half_life_tokens);

    // compute thread

    void count_pick(uint32_t expert, uint32_t n = 1) noexcept {
        window_picks_[expert].fetch_add(n, std::memory_order_relaxed);
    }

    void count_tokens(uint32_t row, uint32_t n) noexcept {
        window_tokens_[row].fetch_add(n, std::memory_order_relaxed);
    }

    // mover: drains the window and returns each expert's score, and its picks since the start if they are wanted
    void evaluate(std::vector<double> & scores, std::vector<uint64_t> * picks = nullptr);

    // control

    void  set_prior(prior value);
    prior get_prior() const;

    // picks by expert index since the start, or since the last reset
    std::vector<uint64_t> totals(bool reset);

    double half_life_tokens() const { return half_life_tokens_; }

  private:
    void drain(); // needs the mutex

    const layout & lay_;
    const double   half_life_tokens_;

    std::unique_ptr<std::atomic<uint32_t>[]> window_picks_;
    std::unique_ptr<std::atomic<uint32_t>[]> window_tokens_;

    mutable std::mutex    mutex_;
    prior                 prior_;
    std::vector<double>   n_;       // by expert index
    std::vector<double>   n_layer_; // N, by row
    std::vector<uint64_t> drained_; // by expert index, never decayed
    std::vector<uint64_t> reset_at_;
};

} // namespace moe_pager
