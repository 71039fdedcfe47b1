#include "score.h"

#include <cmath>
#include <utility>

namespace moe_pager {

score::score(const layout & lay, double half_life_tokens)
    : lay_(lay),
      half_life_tokens_(half_life_tokens),
      window_picks_(new std::atomic<uint32_t>[lay.n_experts()]),
      window_tokens_(new std::atomic<uint32_t>[lay.layers().size()]),
      n_(lay.n_experts()),
      n_layer_(lay.layers().size()),
      drained_(lay.n_experts()),
      reset_at_(lay.n_experts()) {
    for (uint32_t e = 0; e < lay.n_experts(); ++e) {
        window_picks_[e].store(0, std::memory_order_relaxed);
    }
    for (size_t row = 0; row < lay.layers().size(); ++row) {
        window_tokens_[row].store(0, std::memory_order_relaxed);
    }
}

void score::drain() {
    for (size_t row = 0; row < lay_.layers().size(); ++row) {
        const auto &   layer  = lay_.layers()[row];
        const uint32_t tokens = window_tokens_[row].exchange(0, std::memory_order_relaxed);
        const double   decay  = std::exp2(-(double) tokens / half_life_tokens_);
        n_layer_[row]         = n_layer_[row] * decay + tokens;
        for (uint32_t e = layer.first; e < layer.first + layer.n_expert; ++e) {
            // most are zero, and a load is cheaper than an exchange
            const uint32_t picks = window_picks_[e].load(std::memory_order_relaxed) == 0
                                       ? 0
                                       : window_picks_[e].exchange(0, std::memory_order_relaxed);
            n_[e]                = n_[e] * decay + picks;
            drained_[e] += picks;
        }
    }
}

void score::evaluate(std::vector<double> & scores, std::vector<uint64_t> * picks) {
    std::lock_guard<std::mutex> lock(mutex_);
    drain();
    scores.resize(lay_.n_experts());
    for (uint32_t e = 0; e < lay_.n_experts(); ++e) {
        const double p      = prior_.p.empty() ? 0 : prior_.p[e];
        const double weight = prior_.kappa + n_layer_[lay_.row_of(e)];
        scores[e]           = weight > 0 ? (prior_.kappa * p + n_[e]) / weight : 0;
    }
    if (picks != nullptr) {
        *picks = drained_;
    }
}

void score::set_prior(prior value) {
    value.set = true;
    std::lock_guard<std::mutex> lock(mutex_);
    std::swap(prior_, value); // the old one is freed after the lock
}

prior score::get_prior() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return prior_;
}

std::vector<uint64_t> score::totals(bool reset) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<uint64_t>       picks(lay_.n_experts());
    for (uint32_t e = 0; e < lay_.n_experts(); ++e) {
        const uint64_t total = drained_[e] + window_picks_[e].load(std::memory_order_relaxed);
        picks[e]             = total - reset_at_[e];
        if (reset) {
            reset_at_[e] = total;
        }
    }
    return picks;
}

} // namespace moe_pager
