#include "policy-belady.h"

#include "ranked-plan.h"

#include <algorithm>

namespace moe_pager {

future::future(const routing_trace & trace) {
    uint32_t n_experts = 0;
    for (const auto & layer : trace.layers) {
        n_experts += layer.n_expert;
    }
    picked_in_.resize(n_experts);
    for (uint32_t u = 0; u < trace.ubatches.size(); ++u) {
        uint32_t first = 0;
        for (size_t row = 0; row < trace.layers.size(); ++row) {
            for (const uint16_t id : trace.ubatches[u].layers[row].ids) {
                if (id == routing_trace::no_expert) {
                    continue;
                }
                auto & picked = picked_in_[first + id];
                if (picked.empty() || picked.back() != u) {
                    picked.push_back(u);
                }
            }
            first += trace.layers[row].n_expert;
        }
    }
}

size_t future::distance(uint32_t expert) const {
    const auto & picked = picked_in_[expert];
    const auto   next   = std::lower_bound(picked.begin(), picked.end(), now_);
    return next == picked.end() ? 0 : *next - now_ + 1;
}

bool future::just_picked(uint32_t expert) const {
    const auto & picked = picked_in_[expert];
    return now_ == 0 || std::binary_search(picked.begin(), picked.end(), now_ - 1);
}

namespace {

class policy_belady : public policy {
  public:
    explicit policy_belady(const future & ahead) : ahead_(ahead) {}

    const char * name() const override { return "belady"; }

    std::vector<move> plan(const policy_view & view) const override {
        std::vector<double> worth(view.lay.n_experts());
        for (uint32_t e = 0; e < view.lay.n_experts(); ++e) {
            if (view.resident[e] || ahead_.just_picked(e)) {
                const size_t distance = ahead_.distance(e);
                worth[e]              = distance == 0 ? 0 : 1.0 / (double) distance;
            }
        }
        const auto pays = [](double gained, double lost) {
            return gained > lost;
        };
        return plan_by_rank(view, { worth, worth_kind::time, pays });
    }

  private:
    const future & ahead_;
};

} // namespace

std::unique_ptr<policy> make_policy_belady(const future & ahead) {
    return std::make_unique<policy_belady>(ahead);
}

} // namespace moe_pager
