// The experts that were picked last: one that was picked takes the place of the resident whose last pick is the longest
// ago. It knows no prior, so before the first pick nothing is resident.

#include "ranked-plan.h"

namespace moe_pager {

namespace {

class policy_lru : public policy {
  public:
    const char * name() const override { return "lru"; }

    std::vector<move> plan(const policy_view & view) const override {
        const std::vector<double> worth(view.seen.last_pick.begin(), view.seen.last_pick.end());
        const auto                pays = [](double gained, double lost) {
            return gained > lost;
        };
        return plan_by_rank(view, { worth, worth_kind::time, pays });
    }
};

} // namespace

std::unique_ptr<policy> make_policy_lru() {
    return std::make_unique<policy_lru>();
}

} // namespace moe_pager
