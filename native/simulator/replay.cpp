#include "replay.h"

#include "device.h"
#include "mover.h"
#include "page-table.h"
#include "pager.h"
#include "policy-belady.h"
#include "stats.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>

namespace moe_pager {

namespace {

// as tier-vram: frames are shared out to size classes in proportion to their bytes, and moves are there at once
class simulated_tier : public device {
  public:
    simulated_tier(const layout & lay, page_table & table) : lay_(lay), table_(table), total_(lay.n_size_classes()) {
        for (const auto & layer : lay.layers()) {
            total_[layer.size_class] += layer.movable ? layer.expert_bytes * layer.n_expert : 0;
        }
    }

    promotion promote(uint32_t expert) noexcept override {
        table_.set_resident(expert, true);
        if (++n_promoted_ == n_promoted_max && time_is_up) {
            time_is_up();
        }
        return {};
    }

    void demote(uint32_t expert) noexcept override { table_.set_resident(expert, false); }

    uint64_t room(uint32_t size_class, uint64_t budget_bytes) const noexcept override {
        uint64_t all = 0;
        for (const uint64_t bytes : total_) {
            all += bytes;
        }
        return all == 0 ? 0 : (uint64_t) ((double) budget_bytes * (double) total_[size_class] / (double) all);
    }

    bool gives_back() const noexcept override { return false; }

    int give_back(uint32_t, uint32_t) noexcept override { return 0; }

    void begin_pass() { n_promoted_ = 0; }

    // called when so many experts have been promoted since begin_pass
    std::function<void()> time_is_up;
    uint32_t              n_promoted_max = 0;

  private:
    const layout &        lay_;
    page_table &          table_;
    std::vector<uint64_t> total_; // bytes by size class
    uint32_t              n_promoted_ = 0;
};

// outweighs every count
constexpr double certain_kappa = 1e12;

prior best_set(const layout & lay, const routing_trace & trace, size_t skip_ubatches) {
    std::vector<uint64_t> picks(lay.n_experts());
    uint64_t              n_tokens = 0;
    for (size_t u = skip_ubatches; u < trace.ubatches.size(); ++u) {
        const routed_ubatch & ubatch = trace.ubatches[u];
        n_tokens += ubatch.n_tokens == 1 ? 1 : 0;
        for (size_t row = 0; ubatch.n_tokens == 1 && row < trace.layers.size(); ++row) {
            for (const uint16_t id : ubatch.layers[row].ids) {
                if (id != routing_trace::no_expert) {
                    ++picks[lay.layers()[row].first + id];
                }
            }
        }
    }
    prior value;
    value.id    = "best-set";
    value.kappa = certain_kappa;
    for (const uint64_t n : picks) {
        value.p.push_back((float) ((double) n / (double) std::max<uint64_t>(1, n_tokens)));
    }
    return value;
}

std::unique_ptr<policy> policy_of(const std::string & name, const future & ahead) {
    if (name == "belady") {
        return make_policy_belady(ahead);
    }
    auto made = make_policy(name == "best-set" ? "static" : name);
    if (made == nullptr) {
        throw std::runtime_error("policy '" + name + "' is none of " + listed(replay_policies()));
    }
    return made;
}

// the picks of one layer, counted as pager::count does; how many were hits
uint64_t count(const layout_layer & layer, uint32_t row, const routed_layer & routed, page_table & table, score & sc) {
    const uint64_t tick = table.begin_layer();
    uint64_t       hits = 0;
    for (const uint16_t id : routed.ids) {
        if (id != routing_trace::no_expert) {
            const uint32_t expert = layer.first + id;
            table.touch(expert, tick);
            hits += table.resident(expert) ? 1 : 0;
            sc.count_pick(expert);
        }
    }
    sc.count_tokens(row, routed.n_rows);
    return hits;
}

} // namespace

std::vector<std::string> replay_policies() {
    std::vector<std::string> names = policy_names();
    names.insert(names.end(), { "best-set", "belady" });
    return names;
}

replay_result replay(const routing_trace & trace, const replay_options & options) {
    const settings usual;
    const auto     given = [](double value, double otherwise) {
        return value > 0 ? value : otherwise;
    };
    const double horizon = given(options.horizon_tokens, usual.horizon_tokens);

    const layout   lay = trace.make_layout();
    page_table     table(lay);
    score          sc(lay, given(options.half_life_tokens, usual.half_life_tokens));
    stats          counters;
    simulated_tier tier(lay, table);
    future         ahead(trace);
    const auto     pol = policy_of(options.policy, ahead);
    mover          moving(
        lay, table, sc, counters, tier, *pol, (uint64_t) (options.share * (double) lay.total_bytes()), horizon);
    tier.n_promoted_max = options.moves_max;
    tier.time_is_up     = [&] {
        moving.ubatch_finished();
    };

    if (options.policy == "best-set") {
        sc.set_prior(best_set(lay, trace, options.skip_ubatches));
    } else if (options.belief) {
        sc.set_prior(*options.belief);
    }
    moving.step();

    replay_result result;
    for (size_t u = 0; u < trace.ubatches.size(); ++u) {
        const routed_ubatch & ubatch = trace.ubatches[u];
        uint64_t              picks = 0, hits = 0;
        for (uint32_t row = 0; row < trace.layers.size(); ++row) {
            const routed_layer & routed = ubatch.layers[row];
            picks += (uint64_t) (std::count_if(
                routed.ids.begin(), routed.ids.end(), [](uint16_t id) { return id != routing_trace::no_expert; }));
            hits += count(lay.layers()[row], row, routed, table, sc);
        }
        table.end_ubatch();
        ahead.set_now(u + 1);

        const uint64_t before = stats::get(counters.promotions);
        if ((u + 1) % options.pass_every == 0) {
            tier.begin_pass();
            moving.step();
        }
        if (u < options.skip_ubatches) {
            continue;
        }
        const uint64_t moves = stats::get(counters.promotions) - before;
        result.tokens += ubatch.n_tokens;
        result.picks += picks;
        result.hits += hits;
        result.promotions += moves;
        result.recorded += ubatch.hits;
        if (ubatch.n_tokens == 1) {
            ++result.decoded;
            result.decode_picks += picks;
            result.decode_hits += hits;
            result.decode_moves += moves;
        }
    }
    return result;
}

} // namespace moe_pager
