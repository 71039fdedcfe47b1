// The best experts per byte over all layers by their score, with hysteresis: an expert x takes the place of residents v
// only if
//
//   (s(x) - sum of s(v)) * horizon_tokens > 1
//
// because a promotion costs about what one miss costs, so it must save more than one within the horizon.

#include "ranked-plan.h"

namespace moe_pager {

namespace {

class policy_posterior : public policy {
  public:
    const char * name() const override { return "posterior"; }

    std::vector<move> plan(const policy_view & view) const override {
        const auto pays = [&](double gained, double lost) {
            return (gained - lost) * view.horizon_tokens > 1;
        };
        return plan_by_rank(view, { view.seen.score, worth_kind::amount, pays });
    }
};

} // namespace

std::unique_ptr<policy> make_policy_posterior() {
    return std::make_unique<policy_posterior>();
}

} // namespace moe_pager
