#include "ranked-plan.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace moe_pager {

namespace {

struct better {
    const policy_view & view;
    const ranking &     ranks;

    double rank(uint32_t expert) const {
        const double worth = ranks.worth[expert];
        return ranks.kind == worth_kind::amount ? worth / (double) view.lay.bytes_of(expert) : worth;
    }

    bool operator()(uint32_t a, uint32_t b) const {
        const double rank_a = rank(a);
        const double rank_b = rank(b);
        return rank_a != rank_b ? rank_a > rank_b : a < b;
    }
};

class ranked_plan {
  public:
    ranked_plan(const policy_view & view, const ranking & ranks) : view_(view), ranks_(ranks), better_{ view, ranks } {}

    std::vector<move> make() {
        collect();
        demote_to_budget();

        const auto weak = std::partition(candidates_.begin(), candidates_.end(), [this](uint32_t x) {
            return fits(x) || ranks_.pays(worth(x), least_resident_worth_);
        });
        std::sort(candidates_.begin(), weak, better_);
        for (auto x = candidates_.begin(); x != weak; ++x) {
            take_in(*x);
        }
        // a large victim may have left room for what was not worth a swap
        if (weak != candidates_.end() && used_ + least_bytes_ <= view_.budget_bytes) {
            std::sort(weak, candidates_.end(), better_);
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

    double worth(uint32_t expert) const { return ranks_.worth[expert]; }

    uint64_t bytes(uint32_t expert) const { return view_.lay.bytes_of(expert); }

    bool fits(uint32_t expert) const { return used_ + bytes(expert) <= view_.budget_bytes; }

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
                    least_resident_worth_ = std::min(least_resident_worth_, worth(e));
                } else if (layer.expert_bytes <= view_.budget_bytes && (all_fit || worth(e) > 0)) {
                    candidates_.push_back(e);
                }
            }
        }
        std::make_heap(residents_.begin(), residents_.end(), better_);
    }

    // moves the worst of the first n residents to place n - 1
    void pop_worst(size_t n) { std::pop_heap(residents_.begin(), residents_.begin() + (std::ptrdiff_t) n, better_); }

    void put_back(size_t n) { std::push_heap(residents_.begin(), residents_.begin() + (std::ptrdiff_t) n, better_); }

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

    // promotes x if there is room, or if it pays for the residents that would have to go
    void take_in(uint32_t x) {
        size_t   n_kept = residents_.size();
        double   lost   = 0;
        uint64_t freed  = 0;
        while (used_ - freed + bytes(x) > view_.budget_bytes && n_kept > 0) {
            pop_worst(n_kept--);
            const double one = worth(residents_[n_kept]);
            lost             = ranks_.kind == worth_kind::amount ? lost + one : std::max(lost, one);
            freed += bytes(residents_[n_kept]);
        }
        const bool has_room = used_ - freed + bytes(x) <= view_.budget_bytes;
        if (!has_room || (freed > 0 && !ranks_.pays(worth(x), lost))) {
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
    const ranking &       ranks_;
    const better          better_;
    uint64_t              used_                 = 0;
    uint64_t              least_bytes_          = std::numeric_limits<uint64_t>::max() / 2;
    double                least_resident_worth_ = std::numeric_limits<double>::infinity();
    std::vector<uint32_t> candidates_;
    std::vector<uint32_t> residents_; // a heap, the worst on top
    std::vector<move>     moves_;
};

} // namespace

std::vector<move> plan_by_rank(const policy_view & view, const ranking & ranks) {
    return ranked_plan(view, ranks).make();
}

} // namespace moe_pager
