// The experts that have been picked most since the start, per byte. It knows no prior and forgets nothing.

#include "ranked-plan.h"

namespace moe_pager {

namespace {

class policy_lfu : public policy {
  public:
    const char * name() const override { return "lfu"; }

    std::vector<move> plan(const policy_view & view) const override {
        const std::vector<double> worth(view.seen.picks.begin(), view.seen.picks.end());
        const auto                pays = [](double gained, double lost) {
            return gained > lost;
        };
        return plan_by_rank(view, { worth, worth_kind::amount, pays });
    }
};

} // namespace

std::unique_ptr<policy> make_policy_lfu() {
    return std::make_unique<policy_lfu>();
}

} // namespace moe_pager
