// Forced interleavings of the mover with compute threads and control calls: the simulated device holds a promotion at a
// closed gate for as long as the test wants.

#include "check.h"
#include "simulated.h"

#include <algorithm>
#include <thread>

using namespace moe_pager;

static bool promoted(const std::vector<move> & calls, uint32_t expert) {
    return std::any_of(calls.begin(), calls.end(), [&](const move & m) { return m.promote && m.expert == expert; });
}

TEST(mover, at_load_all_are_promoted_if_they_fit_and_else_all_are_given_back) {
    rig all(make_tensors(2, 4), UINT64_MAX);
    CHECK(all.residents().size() == 8);
    CHECK(all.sim->held() == all.residents());
    CHECK(all.sim->take_given_back().empty());
    CHECK(all.read(all.counts().resident_bytes) == 8 * 3000);
    CHECK(all.read(all.counts().locked_bytes) == 8 * 100);

    rig few(make_tensors(2, 4), 2 * 3000);
    CHECK(few.residents().empty());
    CHECK(few.sim->take_given_back().size() == 8);
}

TEST(mover, counting_goes_on_while_a_promotion_takes_its_time) {
    rig r(make_tensors(1, 4), 3000);
    r.sim->close();
    r.favour("a", { 2 });
    r.sim->wait_entered();
    r.compute(0, 0, { 2, 2, 2, 0 }, 1); // of the very expert that is being promoted
    CHECK(r.read(r.counts().misses) == 4);
    CHECK(r.read(r.counts().hits) == 0);
    CHECK(r.paging->get_mover().pending() > 0);
    r.sim->open();
    CHECK(r.settle());
    r.compute(0, 0, { 2, 0 }, 1);
    CHECK(r.read(r.counts().hits) == 1);
    CHECK(r.read(r.counts().misses) == 5);
}

TEST(mover, a_newer_prior_stops_an_older_plan_at_the_move_in_hand) {
    rig r(make_tensors(2, 8), 4 * 3000);
    r.sim->close();
    r.favour("a", { 0, 1, 2, 3 });
    r.sim->wait_entered();
    r.favour("b", { 8, 9, 10, 11 });
    r.sim->open();
    CHECK(r.settle());
    CHECK((r.residents() == std::set<uint32_t>{ 8, 9, 10, 11 }));
    CHECK(promoted(r.sim->calls(), 0));
    CHECK(!promoted(r.sim->calls(), 1));
    CHECK(r.sim->held() == r.residents());
    CHECK(r.sim->held_max() <= 4);
}

TEST(mover, a_b_a_ends_on_a) {
    rig r(make_tensors(2, 8), 4 * 3000);
    r.sim->close();
    r.favour("a", { 0, 1, 2, 3 });
    r.sim->wait_entered();
    r.favour("b", { 8, 9, 10, 11 });
    r.favour("a", { 0, 1, 2, 3 });
    r.sim->open();
    CHECK(r.settle());
    CHECK((r.residents() == std::set<uint32_t>{ 0, 1, 2, 3 }));
    CHECK(r.sim->held() == r.residents());
    CHECK(r.paging->get_score().get_prior().id == "a");
    CHECK(r.read(r.counts().priors) == 3);
}

TEST(mover, pending_is_never_zero_before_the_last_wish_is_carried_out) {
    rig r(make_tensors(2, 8), 4 * 3000);
    for (int i = 0; i < 200; ++i) {
        const std::set<uint32_t> wish =
            i % 2 == 0 ? std::set<uint32_t>{ 0, 1, 2, 3 } : std::set<uint32_t>{ 4, 5, 12, 13 };
        r.favour("x", wish);
        CHECK(r.settle());
        CHECK(r.residents() == wish);
    }
}

TEST(mover, an_expert_may_be_demoted_while_its_picks_are_counted) {
    rig               r(make_tensors(1, 8), 2 * 3000);
    std::atomic<bool> stop{ false };
    std::atomic<int>  n_counted{ 0 };
    std::thread       compute([&] {
        while (!stop) {
            r.compute(0, 3, { 0, 1, 4, 5 }, 2);
            n_counted += 4;
        }
    });
    for (int i = 0; i < 100; ++i) {
        r.favour("x", i % 2 == 0 ? std::set<uint32_t>{ 0, 1 } : std::set<uint32_t>{ 4, 5 });
        const int seen = n_counted;
        check::eventually([&] { return n_counted > seen; });
    }
    stop = true;
    compute.join();
    CHECK(r.settle());
    CHECK(r.read(r.counts().picks) == (uint64_t) n_counted);
    CHECK(r.read(r.counts().hits) + r.read(r.counts().misses) == (uint64_t) n_counted);
    CHECK(r.sim->held() == r.residents());
    CHECK(r.sim->held_max() <= 2);
    CHECK(!r.sim->gave_back_held());
    CHECK(r.read(r.counts().resident_experts) == r.residents().size());
    CHECK(r.read(r.counts().resident_bytes) == r.residents().size() * 3000);
    CHECK(r.read(r.counts().locked_bytes) == r.residents().size() * 100);
    CHECK(r.read(r.counts().promotions) - r.read(r.counts().demotions) == r.residents().size());
}

TEST(mover, a_budget_of_nothing_during_moves_leaves_nothing_resident) {
    rig r(make_tensors(2, 8), 8 * 3000);
    r.sim->close();
    r.favour("a", { 0, 1, 2, 3, 4, 5 });
    r.sim->wait_entered();
    r.paging->set_budget(0);
    CHECK(r.paging->get_mover().pending() > 0);
    r.sim->open();
    CHECK(r.settle());
    CHECK(r.residents().empty());
    CHECK(r.sim->held().empty());
    CHECK(r.read(r.counts().resident_bytes) == 0);

    r.paging->set_budget(UINT64_MAX);
    CHECK(r.settle());
    CHECK(r.residents().size() == 16);
}

TEST(mover, the_model_may_be_freed_during_moves) {
    rig r(make_tensors(2, 8), 8 * 3000);
    r.sim->close();
    r.favour("a", { 0, 1, 2, 3, 4, 5, 6, 7 });
    r.sim->wait_entered();
    std::thread free([&] { r.paging->stop(); });
    r.sim->open();
    free.join();
    CHECK(r.sim->held() == r.residents());
    const auto calls = r.sim->calls().size();
    r.favour("b", { 8 }); // after the end a call changes nothing, and harms nothing
    CHECK(r.sim->calls().size() == calls);
}

TEST(mover, what_the_system_refuses_is_counted_and_not_tried_for_ever) {
    rig r(make_tensors(1, 4), 2 * 3000);
    r.sim->make_unreadable(0);
    r.favour("a", { 0, 1 });
    CHECK(r.settle());
    CHECK((r.residents() == std::set<uint32_t>{ 1 }));
    CHECK(r.counts().refusals.read().at("populate").at(5) == 1);

    r.sim->make_unlockable();
    r.favour("b", { 2 });
    CHECK(r.settle());
    CHECK(r.residents().count(2) == 1); // resident, though not locked
    CHECK(r.counts().refusals.read().at("mlock").at(12) == 1);
    CHECK(r.paging->reasons().size() == 2);
}

TEST(mover, cold_experts_are_given_back_above_the_budget) {
    // slabs larger than the reach of a page fault: one untouched neighbour on either side goes along
    const uint64_t slab_bytes = 1 << 20;
    const uint64_t bytes      = 3 * slab_bytes;
    rig            r(make_tensors(1, 16, slab_bytes), 3 * bytes);
    // three residents whose score no count will reach
    prior          value;
    value.id    = "a";
    value.kappa = 1e6;
    value.p     = std::vector<float>(16, 0.0f);
    value.p[0] = value.p[1] = value.p[2] = 0.9f;
    r.paging->set_prior(value);
    CHECK(r.settle());
    r.sim->take_given_back();

    r.paging->set_budget(3 * bytes + 2 * bytes); // room for two cold ones, or for two more residents
    CHECK(r.settle());
    r.compute(0, 0, { 5 }, 1);
    CHECK(r.settle());
    CHECK((r.residents() == std::set<uint32_t>{ 0, 1, 2, 5 })); // free room goes to what has a score
    r.compute(0, 0, { 9, 9, 9 }, 1);
    CHECK(r.settle());
    CHECK((r.residents() == std::set<uint32_t>{ 0, 1, 2, 5, 9 }));
    r.sim->take_given_back(); // what promotions mapped beside them

    r.compute(0, 0, { 12 }, 1); // no room and not worth a swap: read, then given back
    CHECK(r.settle());
    CHECK((r.residents() == std::set<uint32_t>{ 0, 1, 2, 5, 9 }));
    CHECK((r.sim->take_given_back() == std::vector<uint32_t>{ 11, 12, 13 }));
    CHECK(r.read(r.counts().resident_bytes) == 5 * bytes);
}

TEST(mover, small_neighbours_of_a_cold_expert_are_given_back_with_it) {
    rig r(make_tensors(1, 8, 40000), 0);
    r.sim->take_given_back();
    const uint64_t before = r.read(r.counts().given_back_bytes);
    r.compute(0, 0, { 4 }, 1);
    CHECK(r.settle());
    CHECK((r.sim->take_given_back() == std::vector<uint32_t>{ 2, 3, 4, 5, 6 })); // 64 KiB on either side
    CHECK(r.read(r.counts().given_back_bytes) - before == 3 * 40000);            // counted once
}

TEST(mover, what_a_promotion_maps_beside_it_is_given_back) {
    rig r(make_tensors(1, 8, 40000), 2 * 120000);
    r.favour("a", { 1 });
    CHECK(r.settle());
    r.sim->take_given_back();
    r.favour("b", { 1, 4 });
    CHECK(r.settle());
    CHECK((r.residents() == std::set<uint32_t>{ 1, 4 }));
    CHECK((r.sim->take_given_back() == std::vector<uint32_t>{ 2, 3, 5, 6 }));
    CHECK(!r.sim->gave_back_held());
}

TEST(mover, a_warm_up_run_is_not_counted_but_its_pages_are_given_back) {
    rig r(make_tensors(1, 4), 0);
    r.sim->take_given_back();
    r.compute(0, 0, { 0, 1, 2, 3 }, 4, true);
    CHECK(r.settle());
    CHECK((r.sim->take_given_back() == std::vector<uint32_t>{ 0, 1, 2, 3 }));
    CHECK(r.read(r.counts().picks) == 0);
    CHECK(r.read(r.counts().tokens) == 0);
    CHECK(r.paging->totals(false).picks == std::vector<uint64_t>(4, 0));
}

TEST(mover, pages_of_the_layer_that_is_being_computed_are_not_given_back) {
    const layout lay = make_layout(make_tensors(2, 2));
    page_table   table(lay);
    uint64_t     cold_bytes = 0;
    const auto   first      = table.begin_layer();
    CHECK(table.touch(0, first));
    CHECK(!table.touch(0, first)); // once per ubatch and layer
    CHECK(table.cold(lay, cold_bytes).empty() && cold_bytes == 3000);

    const auto second = table.begin_layer(); // layer 0 is done
    table.touch(2, second);
    auto cold = table.cold(lay, cold_bytes);
    CHECK(cold.size() == 1 && cold[0].expert == 0 && cold_bytes == 6000);

    // picked again between the mover's look and its give-back: it keeps the pages
    const auto third = table.begin_layer();
    table.touch(0, third);
    CHECK(!table.forget(cold[0]));
    table.end_ubatch();
    cold = table.cold(lay, cold_bytes);
    CHECK(cold.size() == 2 && cold[0].expert == 2 && cold[1].expert == 0);
    CHECK(table.forget(cold[0]) && table.forget(cold[1]));
    CHECK(table.cold(lay, cold_bytes).empty() && cold_bytes == 0);
}

TEST(mover, weights_outside_the_file_stay_where_they_are) {
    rig r(make_tensors(2, 4), 0, false);
    CHECK(r.residents().size() == 8);
    r.favour("a", { 0 });
    r.compute(0, 0, { 0, 1 }, 1);
    r.paging->set_budget(1);
    CHECK(r.settle());
    CHECK(r.sim->calls().empty());
    CHECK(r.read(r.counts().hits) == 2);
    CHECK(std::string(r.paging->home()) == "anonymous");
    CHECK(r.paging->reasons().size() == 1);
}
