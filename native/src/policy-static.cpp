// Fills its room with the best experts by score as long as there is some, and then keeps them: what was resident stays,
// whatever is picked. With a prior at the start that is the prior's hot set, else that of the first tokens.

#include "ranked-plan.h"

namespace moe_pager {

namespace {

class policy_static : public policy {
  public:
    const char * name() const override { return "static"; }

    std::vector<move> plan(const policy_view & view) const override {
        const auto never = [](double, double) {
            return false;
        };
        return plan_by_rank(view, { view.seen.score, worth_kind::amount, never });
    }
};

} // namespace

std::unique_ptr<policy> make_policy_static() {
    return std::make_unique<policy_static>();
}

} // namespace moe_pager
