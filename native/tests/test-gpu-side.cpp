// An ubatch that a GPU computes, from its beginning until its picks have been counted.

#include "gpu-side.h"

#include "check.h"
#include "simulated-gpu.h"
#include "simulated.h"

#include <algorithm>
#include <vector>

using namespace moe_pager;

namespace {

// two layers of four experts, of which each token picks two
struct computing {
    computing()
        : w(2, 4),
          paging(make_layout(w.records, false),
                 enabled(),
                 [&](const layout & lay, page_table & table) {
                     vram_budget budget;
                     budget.process_bytes = 1 << 20;
                     auto made            = std::make_unique<tier_vram>(lay, table, card, budget);
                     tier                 = made.get();
                     return made;
                 }),
          side(paging, card, tier, nullptr, 2) {
        paging.set_budget(0); // the mover moves nothing: the tests do
        CHECK(check::eventually([this] { return paging.get_mover().pending() == 0; }));
    }

    static settings enabled() {
        settings set;
        set.enabled = true;
        return set;
    }

    // the caller's arrays are gone when it returns
    void begin(const std::vector<int32_t> & sequences) {
        std::vector<const int32_t *> seq_id;
        for (const int32_t & sequence : sequences) {
            seq_id.push_back(&sequence);
        }
        ubatch ub;
        ub.n_tokens = (uint32_t) sequences.size();
        ub.seq_id   = seq_id.data();
        side.begin(ub);
        paging.ubatch_begin(ub);
    }

    // what kernels do
    void write(int32_t n_tokens, const std::vector<int32_t> & ids) {
        for (const auto & layer : paging.get_layout().layers()) {
            int32_t * row = side.log_row(layer.counting_key);
            std::copy(ids.begin(), ids.end(), row + 1);
            row[0] = n_tokens;
        }
    }

    void run(const std::vector<int32_t> & sequences, const std::vector<int32_t> & ids) {
        begin(sequences);
        side.launch(&stream);
        write((int32_t) sequences.size(), ids);
        side.end();
    }

    uint64_t picks() const { return stats::get(paging.get_stats().picks); }

    weights       w;
    simulated_gpu card{ 1 << 20 };
    tier_vram *   tier = nullptr;
    pager         paging;
    gpu_side      side;
    int           stream = 0, other = 0;
};

} // namespace

TEST(gpu_side, picks_read_from_the_log_count_as_picks_seen_by_the_cpu) {
    computing r;
    // three tokens of two sequences, of which the log holds two
    r.run({ 3, 3, 5 }, { 3, 0, 1, 2 });
    r.side.idle(&r.stream);
    r.side.catch_up();

    const stats & counts = r.paging.get_stats();
    CHECK(stats::get(counts.tokens) == 3 && stats::get(counts.ubatches) == 1);
    CHECK(stats::get(counts.picks) == 8 && stats::get(counts.misses) == 8);
    CHECK(stats::get(counts.lost_rows) == 2); // one a layer
    CHECK(stats::get(counts.unseen_ubatches) == 0);
    usage_record record;
    CHECK(r.paging.read_sequence(3, false, record));
    CHECK((record.picks == std::vector<uint64_t>{ 1, 1, 1, 1, 1, 1, 1, 1 }));

    // no layer wrote: it is said, not made up
    r.begin({ 3 });
    r.side.launch(&r.stream);
    r.side.end();
    r.side.idle(&r.stream);
    r.side.catch_up();
    CHECK(stats::get(counts.unseen_ubatches) == 1);
    CHECK(r.picks() == 8);
}

TEST(gpu_side, counting_is_put_off_until_the_next_ubatch_was_launched) {
    computing r;
    r.run({ 1 }, { 0, 1 });
    r.side.idle(&r.stream);
    CHECK(r.picks() == 0);

    r.begin({ 1 });
    r.side.launch(&r.stream);
    CHECK(r.picks() == 0);
    r.write(1, { 2, 3 });
    r.side.end();
    CHECK(r.picks() == 4);

    r.side.idle(&r.stream);
    r.side.catch_up(); // the request ends
    CHECK(r.picks() == 8);
    usage_record record;
    CHECK(r.paging.read_sequence(1, false, record));
    CHECK((record.picks == std::vector<uint64_t>{ 1, 1, 1, 1, 1, 1, 1, 1 }));
}

TEST(gpu_side, nothing_is_published_before_what_it_changes_was_counted) {
    computing r;
    r.begin({ 1 }); // takes the frames
    r.side.launch(&r.stream);
    r.write(1, { 0, 1 });
    r.side.end();
    r.side.idle(&r.stream);
    CHECK(r.picks() == 0);

    // the mover finds the stream idle, and the ubatch not yet counted
    CHECK(r.tier->promote(0).populate_error == 0);
    r.tier->settle();
    const void * first = r.paging.get_layout().layers()[0].tensors[0].key;
    CHECK(r.tier->at_home(first, 0));
    CHECK(r.tier->has_changed());
    r.side.catch_up();
    CHECK(!r.tier->at_home(first, 0));
    CHECK(stats::get(r.paging.get_stats().hits) == 0 && r.picks() == 4); // as the kernels read them

    // what waits to be published is counted and published at once
    r.run({ 1 }, { 0, 1 });
    r.tier->demote(0);
    r.side.idle(&r.stream);
    CHECK(r.tier->at_home(first, 0));
    CHECK(stats::get(r.paging.get_stats().hits) == 1 && r.picks() == 8);
}

TEST(gpu_side, another_stream_leaves_none_in_flight) {
    computing r;
    r.run({ 1 }, { 0, 1 });
    r.side.idle(&r.stream);
    CHECK(r.picks() == 0);

    // another context of the same model
    r.begin({ 2 });
    r.side.launch(&r.other);
    CHECK(r.picks() == 4);
    r.write(1, { 2, 3 });
    r.side.end();
    CHECK(r.tier->promote(2).populate_error == 0);
    r.side.idle(&r.other);
    CHECK(r.picks() == 8);
    CHECK(!r.tier->at_home(r.paging.get_layout().layers()[0].tensors[0].key, 2));
}

TEST(gpu_side, an_ubatch_that_nobody_waited_for_is_waited_for) {
    computing r;
    r.run({ 1 }, { 0, 1 });
    CHECK(r.card.n_waits == 0);
    r.run({ 1 }, { 2, 3 });
    CHECK(r.card.n_waits == 1);
    CHECK(r.picks() == 4);
}
