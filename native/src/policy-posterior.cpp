// The best experts per byte over all layers, with hysteresis.
//
// Ranked by score per byte, ties by expert index. Free room goes to any expert with a score above zero. An expert x
// takes the place of residents v only if
//
//   (s(x) - sum of s(v)) * horizon_tokens > 1
//
// because a promotion costs about what one miss costs, so it must save more than one within the horizon. If all experts
// fit in the budget all are promoted, whatever their score.
//
// A plan is made after most tokens and mostly comes out empty, so what cannot lead to a move is not sorted.

#include "policy.h"

#include <algorithm>
#include <limits>

namespace moe_pager {

namespace {

struct better {
    const policy_view & view;

    bool operator()(uint32_t a, uint32_t b) const {
        const double density_a = view.score[a] / (double) view.lay.bytes_of(a);
        const double density_b = view.score[b] / (double) view.lay.bytes_of(b);
        return density_a != density_b ? density_a > density_b : a < b;
    }
};

class posterior_plan {
  public:
    explicit posterior_plan(const policy_view & view) : view_(view) {}

    std::vector<move> make() {
        collect();
        demote_to_budget();

        const auto weak = std::partition(candidates_.begin(), candidates_.end(), [this](uint32_t x) {
            return fits(x) || pays(x, least_resident_score_);
        });
        std::sort(candidates_.begin(), weak, better{ view_ });
        for (auto x = candidates_.begin(); x != weak; ++x) {
            take_in(*x);
        }
        // a large victim may have left room for what was not worth a swap
        if (weak != candidates_.end() && used_ + least_bytes_ <= view_.budget_bytes) {
            std::sort(weak, candidates_.end(), better{ view_ });
            for (auto x = weak; x != candidates_.end(); ++x) {
                if (fits(*x)) {
                    promote(*x);
                }
            }
        }
        return std::move(moves_);
    }

  private:
    bool planned(const layout_layer & layer) const { return layer.movable && layer.size_class == view_.size_class; }

    double score(uint32_t expert) const { return view_.score[expert]; }

    uint64_t bytes(uint32_t expert) const { return view_.lay.bytes_of(expert); }

    bool fits(uint32_t expert) const { return used_ + bytes(expert) <= view_.budget_bytes; }

    bool pays(uint32_t expert, double lost_score) const {
        return (score(expert) - lost_score) * view_.horizon_tokens > 1;
    }

    void collect() {
        uint64_t total = 0;
        for (const auto & layer : view_.lay.layers()) {
            total += planned(layer) ? layer.expert_bytes * layer.n_expert : 0;
        }
        const bool all_fit = total <= view_.budget_bytes;
        for (const auto & layer : view_.lay.layers()) {
            if (!planned(layer)) {
                continue;
            }
            least_bytes_ = std::min(least_bytes_, layer.expert_bytes);
            for (uint32_t e = layer.first; e < layer.first + layer.n_expert; ++e) {
                if (view_.resident[e]) {
                    used_ += layer.expert_bytes;
                    residents_.push_back(e);
                    least_resident_score_ = std::min(least_resident_score_, score(e));
                } else if (layer.expert_bytes <= view_.budget_bytes && (all_fit || score(e) > 0)) {
                    candidates_.push_back(e);
                }
            }
        }
        std::make_heap(residents_.begin(), residents_.end(), better{ view_ });
    }

    // moves the worst of the first n residents to place n - 1
    void pop_worst(size_t n) {
        std::pop_heap(residents_.begin(), residents_.begin() + (std::ptrdiff_t) n, better{ view_ });
    }

    void put_back(size_t n) {
        std::push_heap(residents_.begin(), residents_.begin() + (std::ptrdiff_t) n, better{ view_ });
    }

    void demote_last() {
        used_ -= bytes(residents_.back());
        moves_.push_back({ residents_.back(), false });
        residents_.pop_back();
    }

    void promote(uint32_t expert) {
        used_ += bytes(expert);
        moves_.push_back({ expert, true });
    }

    void demote_to_budget() {
        while (used_ > view_.budget_bytes && !residents_.empty()) {
            pop_worst(residents_.size());
            demote_last();
        }
    }

    // promotes x if there is room, or if it is worth more than the residents that would have to go
    void take_in(uint32_t x) {
        size_t   n_kept = residents_.size();
        double   lost   = 0;
        uint64_t freed  = 0;
        while (used_ - freed + bytes(x) > view_.budget_bytes && n_kept > 0) {
            pop_worst(n_kept--);
            lost += score(residents_[n_kept]);
            freed += bytes(residents_[n_kept]);
        }
        const bool has_room = used_ - freed + bytes(x) <= view_.budget_bytes;
        if (!has_room || (freed > 0 && !pays(x, lost))) {
            while (n_kept < residents_.size()) {
                put_back(++n_kept);
            }
            return;
        }
        while (residents_.size() > n_kept) {
            demote_last();
        }
        promote(x);
    }

    const policy_view &   view_;
    uint64_t              used_                 = 0;
    uint64_t              least_bytes_          = std::numeric_limits<uint64_t>::max() / 2;
    double                least_resident_score_ = std::numeric_limits<double>::infinity();
    std::vector<uint32_t> candidates_;
    std::vector<uint32_t> residents_; // a heap, the worst on top
    std::vector<move>     moves_;
};

class policy_posterior : public policy {
  public:
    const char * name() const override { return "posterior"; }

    std::vector<move> plan(const policy_view & view) const override { return posterior_plan(view).make(); }
};

} // namespace

std::unique_ptr<policy> make_policy_posterior() {
    return std::make_unique<policy_posterior>();
}

} // namespace moe_pager
