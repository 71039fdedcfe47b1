// The VRAM tier on a simulated GPU: what kernels would read at any moment, with moves forced in between.

#include "check.h"
#include "simulated-gpu.h"
#include "simulated.h"

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

using namespace moe_pager;

namespace {

struct card {
    card(const weights & w, uint64_t frames, uint64_t vram = 1 << 20, uint64_t staging = 0)
        : lay(make_layout(w.records, false)), table(lay), device(vram) {
        vram_budget budget;
        // the page table itself is part of the process
        budget.process_bytes = (uint64_t) w.records.size() * lay.n_expert_max() * 8 + frames * 3 * slab + 2 * staging;
        budget.staging_bytes = staging;
        tier                 = std::make_unique<tier_vram>(lay, table, device, budget);
    }

    uint64_t entry(const weights & w, size_t tensor, uint32_t id) const { return tier->entries(&w_key(w, tensor))[id]; }

    static const char & w_key(const weights & w, size_t tensor) { return *(const char *) w.records[tensor].key; }

    // what a kernel would do: follow the entry and look at the first and last byte
    bool reads_right(const weights & w, size_t tensor, uint32_t id) const {
        const char * at    = (const char *) (uintptr_t) (entry(w, tensor, id) & ~uint64_t{ 1 });
        const char   wants = (char) weights::value(tensor, id);
        return at[0] == wants && at[w.records[tensor].slab_bytes - 1] == wants;
    }

    bool in_frame(const weights & w, uint32_t expert) const {
        const uint32_t row = lay.row_of(expert), id = expert - lay.layers()[row].first;
        bool           all = true, none = true;
        for (size_t t = 0; t < w.records.size(); ++t) {
            if (lay.layers()[row].block == parse_block(w.records[t].name)) {
                const bool home = entry(w, t, id) & 1;
                all             = all && !home;
                none            = none && home;
            }
        }
        CHECK(all || none); // an expert moves as a whole
        return all;
    }

    bool all_right(const weights & w) const {
        bool right = true;
        for (size_t t = 0; t < w.records.size(); ++t) {
            for (uint32_t id = 0; id < w.records[t].n_expert; ++id) {
                right = right && reads_right(w, t, id);
            }
        }
        return right;
    }

    layout                     lay;
    page_table                 table;
    simulated_gpu              device;
    std::unique_ptr<tier_vram> tier;
};

int streams[2];

} // namespace

TEST(tier_vram, all_start_at_home_and_a_promotion_is_published_when_nothing_is_in_flight) {
    const weights w(2, 4);
    card          c(w, 3);
    CHECK(c.all_right(w));
    CHECK(c.tier->promote(5).populate_error != 0); // there are no frames before open
    CHECK(c.tier->open());
    CHECK(!c.tier->open());
    CHECK(c.tier->get_report().frames == 3 && c.tier->get_report().reason.empty());
    CHECK(c.tier->room(0, UINT64_MAX) == 3 * 3 * slab);

    CHECK(c.tier->promote(5).populate_error == 0);
    CHECK(!c.in_frame(w, 5) && !c.table.resident(5));
    c.tier->settle();
    CHECK(c.in_frame(w, 5) && c.table.resident(5));
    CHECK(c.all_right(w));
    c.tier->demote(5);
    c.tier->settle();
    CHECK(!c.in_frame(w, 5) && !c.table.resident(5));
    CHECK(c.all_right(w));
}

TEST(tier_vram, entries_stay_as_they_are_while_kernels_are_in_flight) {
    const weights w(1, 4);
    card          c(w, 2);
    c.tier->open();
    c.tier->promote(0);
    c.tier->settle();

    c.tier->launch(&streams[0]);
    c.tier->launch(&streams[1]);
    c.tier->promote(1);
    c.tier->demote(0);
    c.tier->settle();
    CHECK(c.in_frame(w, 0) && !c.in_frame(w, 1));
    CHECK(c.table.resident(0) && !c.table.resident(1));
    c.tier->idle(&streams[0]);
    CHECK(c.in_frame(w, 0) && !c.in_frame(w, 1)); // the other stream still reads
    c.tier->idle(&streams[1]);
    CHECK(!c.in_frame(w, 0) && c.in_frame(w, 1));
    CHECK(!c.table.resident(0) && c.table.resident(1));
    CHECK(c.all_right(w));
}

TEST(tier_vram, a_frame_is_not_written_before_the_kernels_that_may_read_it_are_done) {
    const weights w(1, 4);
    card          c(w, 1);
    c.tier->open();
    c.tier->promote(0);
    c.tier->settle();

    c.tier->launch(&streams[0]);
    c.tier->demote(0);
    std::atomic<bool> done{ false };
    std::thread       mover([&] {
        c.tier->promote(1);
        done = true;
    });
    CHECK(c.reads_right(w, 0, 0) && c.in_frame(w, 0)); // kernels read expert 0 from the only frame
    CHECK(!done);
    c.tier->idle(&streams[0]);
    mover.join();
    CHECK(done);
    c.tier->settle();
    CHECK(c.in_frame(w, 1) && !c.in_frame(w, 0));
    CHECK(c.all_right(w));
}

TEST(tier_vram, an_ubatch_is_not_held_up_by_a_copy_that_takes_its_time) {
    const weights w(1, 4);
    card          c(w, 2);
    c.tier->open();
    c.device.hold(slab);
    std::thread mover([&] { c.tier->promote(2); });
    c.device.wait_held();
    c.tier->launch(&streams[0]); // neither call waits for the copy
    c.tier->idle(&streams[0]);
    CHECK(!c.in_frame(w, 2) && c.all_right(w));
    c.device.release();
    mover.join();
    c.tier->settle();
    CHECK(c.in_frame(w, 2) && c.all_right(w));
}

TEST(tier_vram, demoted_before_it_was_published_it_never_becomes_resident) {
    const weights w(1, 4);
    card          c(w, 2);
    c.tier->open();
    c.tier->launch(&streams[0]);
    c.tier->promote(3);
    c.tier->demote(3);
    c.tier->idle(&streams[0]);
    CHECK(!c.in_frame(w, 3) && !c.table.resident(3));
    for (const uint32_t e : { 0u, 1u }) { // both frames are free again
        CHECK(c.tier->promote(e).populate_error == 0);
    }
    c.tier->settle();
    CHECK(c.all_right(w));
}

TEST(tier_vram, stopping_ends_a_promotion_that_waits_for_a_frame) {
    const weights w(1, 4);
    card          c(w, 1);
    c.tier->open();
    c.tier->promote(0);
    c.tier->settle();
    c.tier->launch(&streams[0]);
    c.tier->demote(0);
    std::thread mover([&] { CHECK(c.tier->promote(1).populate_error != 0); });
    c.tier->stop();
    mover.join();
    CHECK(c.all_right(w));
}

TEST(tier_vram, a_copy_that_fails_changes_nothing_and_loses_no_frame) {
    const weights w(1, 4);
    card          c(w, 1);
    c.tier->open();
    c.device.break_copies(true);
    CHECK(c.tier->promote(0).populate_error != 0);
    c.tier->demote(0); // as the mover does
    c.device.break_copies(false);
    c.tier->settle();
    CHECK(!c.in_frame(w, 0) && c.all_right(w));
    CHECK(c.tier->promote(1).populate_error == 0);
    c.device.break_copies(true);
    c.tier->settle(); // the table itself could not be written
    CHECK(!c.in_frame(w, 1) && !c.table.resident(1) && c.all_right(w));
    c.device.break_copies(false);
    c.tier->settle();
    CHECK(c.in_frame(w, 1) && c.table.resident(1) && c.all_right(w));
}

TEST(tier_vram, experts_of_different_size_share_the_arena_by_their_bytes) {
    const weights w(4, 4, 2); // layers 2 and 3 are twice as large
    const layout  lay = make_layout(w.records, false);
    CHECK(lay.n_size_classes() == 2);
    card c(w, 12);
    c.tier->open();
    CHECK(c.tier->room(0, UINT64_MAX) == 4 * 3 * slab);     // a third of the bytes
    CHECK(c.tier->room(1, UINT64_MAX) == 4 * 3 * 2 * slab); // two thirds
    for (const uint32_t e : { 0u, 7u, 8u, 15u }) {
        CHECK(c.tier->promote(e).populate_error == 0);
    }
    c.tier->settle();
    CHECK(c.in_frame(w, 0) && c.in_frame(w, 7) && c.in_frame(w, 8) && c.in_frame(w, 15));
    CHECK(c.all_right(w));
}

TEST(tier_vram, what_does_not_fit_is_said_with_its_cure) {
    const weights w(1, 4);
    card          none(w, 0);
    none.tier->open();
    CHECK(none.tier->get_report().frames == 0);
    CHECK(none.tier->get_report().reason.find("--vram-budget") != std::string::npos);
    CHECK(none.tier->promote(0).populate_error != 0 && none.all_right(w));

    card small(w, 2, 1 << 20, 3 * slab);
    small.device.occupy(7 * slab); // the context took it
    small.tier->open();
    CHECK(small.tier->staging(0) == nullptr);
    CHECK(small.tier->get_report().frames == 1);
    CHECK(small.tier->get_report().reason.find("staging") != std::string::npos);

    // the budget is there, the card is not: others were quicker
    card occupied(w, 4, 4 * 3 * 8 + 2 * 3 * slab + 1024);
    occupied.tier->open();
    CHECK(occupied.tier->get_report().frames >= 1 && occupied.tier->get_report().frames < 4);
    CHECK(occupied.tier->promote(1).populate_error == 0);
    occupied.tier->settle();
    CHECK(occupied.all_right(w));
}

TEST(tier_vram, types_that_no_kernel_reads_from_a_frame_stay_at_home) {
    weights w(2, 4);
    for (size_t t = 0; t < 3; ++t) {
        w.records[t].quantized = false;
        w.records[t].type      = "f16";
    }
    const layout lay = make_layout(w.records, false);
    CHECK(!lay.layers()[0].movable && lay.layers()[1].movable);
    CHECK(lay.remarks().size() == 1 && lay.remarks()[0].find("f16") != std::string::npos);
    const page_table table(lay);
    CHECK(!table.resident(0)); // read over the link: a miss, not a hit
    card c(w, 8);
    CHECK(c.tier->entries(w.records[0].key) == nullptr && c.tier->entries(w.records[3].key) != nullptr);
}

// Laws 1 and 5 under load: a mover that never rests, and kernels that read every entry between launch and idle.
TEST(tier_vram, every_read_between_launch_and_idle_is_of_the_right_weights) {
    const weights     w(2, 8);
    card              c(w, 5);
    std::atomic<bool> stop{ false };
    c.tier->open();
    std::thread mover([&] {
        std::mt19937          random(1);
        std::vector<uint32_t> held;
        while (!stop) {
            if (held.size() == 5) {
                std::swap(held[random() % held.size()], held.back());
                c.tier->demote(held.back());
                held.pop_back();
            }
            const uint32_t expert = random() % 16;
            if (std::find(held.begin(), held.end(), expert) == held.end() &&
                c.tier->promote(expert).populate_error == 0) {
                held.push_back(expert);
            }
            if (random() % 4 == 0) {
                c.tier->settle();
            }
        }
    });
    bool        right = true;
    for (int i = 0; i < 2000; ++i) {
        c.tier->launch(&streams[0]);
        right = right && c.all_right(w);
        for (uint32_t e = 0; e < 16; ++e) {
            right = right && c.in_frame(w, e) == c.table.resident(e); // hits are told from misses as kernels see them
        }
        c.tier->idle(&streams[0]);
    }
    stop = true;
    c.tier->stop();
    mover.join();
    CHECK(right);
    CHECK(c.tier->get_report().publications > 0);
}
