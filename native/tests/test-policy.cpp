#include "check.h"
#include "policy.h"
#include "simulated.h"

#include <algorithm>

using namespace moe_pager;

namespace {

struct plan_result {
    std::vector<move>    moves;
    std::vector<uint8_t> resident;
    uint64_t             bytes_max = 0; // held at any time after the first promotion
};

plan_result plan(const layout &       lay,
                 std::vector<double>  scores,
                 std::vector<uint8_t> resident,
                 uint64_t             budget_bytes,
                 double               horizon_tokens = 64) {
    const auto     pol = make_policy_posterior();
    const evidence seen{ scores, {}, {} };
    plan_result    result;
    result.moves    = pol->plan({ lay, seen, resident, 0, budget_bytes, horizon_tokens });
    result.resident = resident;
    uint64_t bytes  = 0;
    for (uint32_t e = 0; e < lay.n_experts(); ++e) {
        bytes += resident[e] ? lay.bytes_of(e) : 0;
    }
    for (const move & m : result.moves) {
        CHECK((result.resident[m.expert] != 0) != m.promote);
        result.resident[m.expert] = m.promote ? 1 : 0;
        bytes += m.promote ? lay.bytes_of(m.expert) : 0 - lay.bytes_of(m.expert);
        result.bytes_max = m.promote ? std::max(result.bytes_max, bytes) : result.bytes_max;
    }
    CHECK(bytes <= budget_bytes);
    return result;
}

using flags = std::vector<uint8_t>;

} // namespace

TEST(policy, free_room_goes_to_the_best_over_all_layers_and_none_without_a_score) {
    const layout lay = make_layout(make_tensors(2, 4));
    CHECK((plan(lay, { .1, 0, 0, .2, .9, .8, .001, 0 }, flags(8, 0), 3 * 3000).resident ==
           flags{ 0, 0, 0, 1, 1, 1, 0, 0 }));
    CHECK((plan(lay, { 0, 0, 0, .2, 0, 0, 0, 0 }, flags(8, 0), 3 * 3000).resident == flags{ 0, 0, 0, 1, 0, 0, 0, 0 }));
    CHECK(plan(lay, std::vector<double>(8, 1), flags(8, 0), 0).moves.empty());
    CHECK(plan(lay, std::vector<double>(8, 1), flags(8, 0), 2999).moves.empty());
}

TEST(policy, all_are_promoted_if_all_fit) {
    const layout lay = make_layout(make_tensors(2, 4));
    CHECK(plan(lay, std::vector<double>(8, 0), flags(8, 0), 8 * 3000).resident == flags(8, 1));
}

TEST(policy, ties_go_by_layer_and_id) {
    const layout lay = make_layout(make_tensors(2, 2));
    CHECK((plan(lay, std::vector<double>(4, .5), flags(4, 0), 2 * 3000).resident == flags{ 1, 1, 0, 0 }));
}

TEST(policy, a_swap_must_pay_for_itself_within_the_horizon) {
    const layout lay = make_layout(make_tensors(1, 4));
    // (0.30 - 0.29) * 64 < 1: flat routers do not thrash
    CHECK(plan(lay, { .29, .30, 0, 0 }, { 1, 0, 0, 0 }, 3000).moves.empty());
    // exactly 1 does not pay
    CHECK(plan(lay, { .25, .75, 0, 0 }, { 1, 0, 0, 0 }, 3000, 2).moves.empty());
    const auto swap = plan(lay, { .25, .76, 0, 0 }, { 1, 0, 0, 0 }, 3000, 2);
    CHECK(swap.moves.size() == 2 && !swap.moves[0].promote && swap.moves[1].promote);
    CHECK(swap.bytes_max == 3000);
}

TEST(policy, the_worst_residents_leave_first) {
    const layout lay = make_layout(make_tensors(1, 4));
    CHECK((plan(lay, { .5, .1, .4, .9 }, { 1, 1, 1, 0 }, 3 * 3000).resident == flags{ 1, 0, 1, 1 }));
    CHECK((plan(lay, { .5, .1, .4, 0 }, { 1, 1, 1, 0 }, 2 * 3000).resident == flags{ 1, 0, 1, 0 }));
    CHECK((plan(lay, { .5, .1, .4, 0 }, { 1, 1, 1, 0 }, 0).resident == flags(4, 0)));
}

TEST(policy, with_mixed_sizes_it_ranks_by_score_per_byte_and_pays_for_all_victims) {
    auto tensors          = make_tensors(2, 2, 1000); // 3000 bytes each
    tensors[3].slab_bytes = 4000;                     // block 1: 6000
    const layout lay      = make_layout(tensors);
    // per byte 0.5 / 3000 beats 0.9 / 6000
    CHECK((plan(lay, { .5, 0, .9, 0 }, flags(4, 0), 6000).resident == flags{ 1, 0, 0, 0 }));
    // one large for two small: only if it beats both together
    CHECK(plan(lay, { .4, .4, .7, 0 }, { 1, 1, 0, 0 }, 6000).moves.empty());
    CHECK((plan(lay, { .2, .1, .9, 0 }, { 1, 1, 0, 0 }, 6000).resident == flags{ 0, 0, 1, 0 }));
    // what does not fit leaves the room to a smaller one
    CHECK((plan(lay, { .1, 0, .9, .9 }, flags(4, 0), 9000).resident == flags{ 1, 0, 1, 0 }));
}

TEST(policy, room_that_a_large_victim_leaves_is_filled_in_the_same_plan) {
    auto tensors          = make_tensors(2, 2, 1000);
    tensors[3].slab_bytes = 4000;
    const layout lay      = make_layout(tensors);
    // 0 pays for the swap; 1 alone would not, but it fits beside 0
    CHECK((plan(lay, { .9, .105, .1, 0 }, { 0, 0, 1, 0 }, 6000).resident == flags{ 1, 1, 0, 0 }));
}

TEST(policy, many_swaps_end_with_the_best_resident) {
    const layout         lay = make_layout(make_tensors(4, 64));
    std::vector<double>  scores(256);
    std::vector<uint8_t> resident(256, 0);
    for (uint32_t e = 0; e < 256; ++e) {
        scores[e]   = (e * 97 % 256) / 256.0;
        resident[e] = e < 100;
    }
    const auto          result = plan(lay, scores, resident, 100 * 3000, 1e6);
    std::vector<double> kept, left;
    for (uint32_t e = 0; e < 256; ++e) {
        (result.resident[e] ? kept : left).push_back(scores[e]);
    }
    CHECK(kept.size() == 100);
    CHECK(*std::min_element(kept.begin(), kept.end()) > *std::max_element(left.begin(), left.end()));
    CHECK(result.bytes_max <= 100 * 3000);
}

TEST(policy, layers_that_cannot_move_are_left_alone) {
    const auto   tensors = make_tensors(2, 2);
    const layout lay(tensors, 2, [&](const void * data, uint64_t) { return data < tensors[3].data; });
    const auto   result = plan(lay, { .1, .9, .9, .9 }, { 0, 0, 1, 1 }, 100000, 64);
    CHECK((result.resident == flags{ 1, 1, 1, 1 }));
    const auto pol = make_policy_posterior();
    CHECK(pol->plan({ lay, { { 0, 0, 0, 0 }, {}, {} }, { 0, 0, 1, 1 }, 0, 0, 64 }).empty());
}
