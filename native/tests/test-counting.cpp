#include "check.h"
#include "simulated.h"

#include <cstring>
#include <thread>

using namespace moe_pager;

namespace {

std::vector<uint64_t> of_sequence(rig & r, int32_t sequence) {
    usage_record record;
    r.paging->read_sequence(sequence, false, record);
    return record.picks;
}

uint64_t sum(const std::vector<uint64_t> & picks) {
    uint64_t total = 0;
    for (const uint64_t n : picks) {
        total += n;
    }
    return total;
}

struct tokens {
    explicit tokens(std::vector<int32_t> sequences) : sequence(std::move(sequences)) {
        for (const int32_t & s : sequence) {
            seq_id.push_back(&s);
        }
    }

    ubatch view(const std::vector<int8_t> & output = {}) const {
        ubatch ub;
        ub.n_tokens = (uint32_t) sequence.size();
        ub.seq_id   = seq_id.data();
        ub.output   = output.empty() ? nullptr : output.data();
        for (const int8_t flag : output) {
            ub.n_outputs += flag != 0 ? 1 : 0;
        }
        return ub;
    }

    std::vector<int32_t>         sequence;
    std::vector<const int32_t *> seq_id;
};

} // namespace

TEST(counting, each_pick_goes_to_the_sequence_of_its_token) {
    rig          r(make_tensors(2, 4), UINT64_MAX);
    const tokens batch({ 0, 0, 7, 0 });
    auto         ub = batch.view();
    r.paging->ubatch_begin(ub);
    r.paging->count(ub, r.make_ids(0, { 0, 1, 0, 2, 3, 1, 0, 1 }, 2));
    r.paging->count(ub, r.make_ids(1, { 3, 2, 3, 2, 3, 2, 3, 0 }, 2));
    r.paging->ubatch_end(ub);
    CHECK((of_sequence(r, 0) == std::vector<uint64_t>{ 3, 2, 1, 0, 1, 0, 2, 3 }));
    CHECK((of_sequence(r, 7) == std::vector<uint64_t>{ 0, 1, 0, 1, 0, 0, 1, 1 }));
    CHECK((r.paging->totals(false).picks == std::vector<uint64_t>{ 3, 3, 1, 1, 1, 0, 3, 4 }));
    CHECK(r.paging->totals(false).tokens == 4);
    usage_record record;
    CHECK(r.paging->read_sequence(7, false, record) && record.tokens == 1);
    CHECK(!r.paging->read_sequence(1, false, record));
    // bytes count each expert once per ubatch and layer
    CHECK(r.read(r.counts().hits) == 16);
    CHECK(r.read(r.counts().hit_bytes) == (4 + 3) * 3000);
}

TEST(counting, a_layer_that_sees_output_tokens_only_maps_its_rows_to_them) {
    rig                       r(make_tensors(2, 4), UINT64_MAX);
    const tokens              batch({ 0, 0, 5, 5, 5 });
    const std::vector<int8_t> output = { 0, 1, 0, 0, 1 };
    auto                      ub     = batch.view(output);
    r.paging->ubatch_begin(ub);
    r.paging->count(ub, r.make_ids(0, { 0, 0, 1, 1, 1 }, 1));
    r.paging->count(ub, r.make_ids(1, { 2, 3 }, 1));
    r.paging->ubatch_end(ub);
    CHECK((of_sequence(r, 0) == std::vector<uint64_t>{ 2, 0, 0, 0, 0, 0, 1, 0 }));
    CHECK((of_sequence(r, 5) == std::vector<uint64_t>{ 0, 3, 0, 0, 0, 0, 0, 1 }));
    CHECK(r.read(r.counts().lost_rows) == 0);
}

TEST(counting, rows_that_fit_no_tokens_are_counted_but_not_attributed) {
    rig          r(make_tensors(1, 4), UINT64_MAX);
    const tokens batch({ 0, 0, 0 });
    auto         ub = batch.view();
    r.paging->ubatch_begin(ub);
    r.paging->count(ub, r.make_ids(0, { 0, 1 }, 1));
    r.paging->ubatch_end(ub);
    CHECK(sum(of_sequence(r, 0)) == 0);
    CHECK(sum(r.paging->totals(false).picks) == 2);
    CHECK(r.read(r.counts().lost_rows) == 2);
    CHECK(r.paging->reasons().size() == 1);
}

TEST(counting, ids_may_be_a_view_of_a_wider_tensor) {
    rig                        r(make_tensors(1, 4), UINT64_MAX);
    const tokens               batch({ 0, 0 });
    auto                       ub   = batch.view();
    // the sorted ids of all 4 experts, of which a token uses the first 2; every other column holds something else
    const std::vector<int32_t> wide = { 3, 90, 1, 91, 0, 92, 2, 93, 1, 94, 2, 95, 3, 96, 0, 97 };
    routed_ids                 ids  = r.make_ids(0, wide, 2);
    ids.n_rows                      = 2;
    ids.nb_used                     = 2 * sizeof(int32_t);
    ids.nb_row                      = 8 * sizeof(int32_t);
    r.paging->ubatch_begin(ub);
    r.paging->count(ub, ids);
    r.paging->ubatch_end(ub);
    CHECK((of_sequence(r, 0) == std::vector<uint64_t>{ 0, 2, 1, 1 }));
}

TEST(counting, ids_out_of_range_and_other_tensors_do_no_harm) {
    rig          r(make_tensors(1, 4), UINT64_MAX);
    const tokens batch({ 0, 300 });
    auto         ub = batch.view();
    r.paging->ubatch_begin(ub);
    r.paging->count(ub, r.make_ids(0, { -1, 4, 2, 3 }, 2));
    routed_ids other = r.make_ids(0, { 0, 0 }, 1);
    other.key        = &other;
    r.paging->count(ub, other);
    r.paging->ubatch_end(ub);
    CHECK((r.paging->totals(false).picks == std::vector<uint64_t>{ 0, 0, 1, 1 }));
    CHECK(sum(of_sequence(r, 0)) == 0);
    CHECK(r.read(r.counts().lost_picks) == 2);

    // no sequences at all: totals only
    ubatch bare;
    bare.n_tokens = 1;
    r.paging->ubatch_begin(bare);
    r.paging->count(bare, r.make_ids(0, { 1 }, 1));
    r.paging->ubatch_end(bare);
    CHECK((r.paging->totals(false).picks == std::vector<uint64_t>{ 0, 1, 1, 1 }));
}

TEST(counting, what_another_backend_computed_is_named) {
    rig          r(make_tensors(1, 4), UINT64_MAX);
    const tokens batch({ 0 });
    const auto   ub = batch.view();
    r.paging->ubatch_begin(ub);
    r.paging->ubatch_end(ub);
    CHECK(r.read(r.counts().unseen_ubatches) == 1);
    CHECK(r.paging->reasons().size() == 1);
}

TEST(counting, two_contexts_may_compute_at_once) {
    rig                      r(make_tensors(1, 8), 3 * 3000);
    constexpr int            n = 2000;
    std::vector<std::thread> threads;
    for (int32_t sequence = 0; sequence < 2; ++sequence) {
        threads.emplace_back([&r, sequence] {
            for (int i = 0; i < n; ++i) {
                r.compute(0, sequence, { sequence, 2 + i % 4 }, 2);
            }
        });
    }
    for (auto & thread : threads) {
        thread.join();
    }
    CHECK(of_sequence(r, 0)[0] == n && of_sequence(r, 0)[1] == 0 && sum(of_sequence(r, 0)) == 2 * n);
    CHECK(of_sequence(r, 1)[1] == n && of_sequence(r, 1)[0] == 0 && sum(of_sequence(r, 1)) == 2 * n);
    CHECK(sum(r.paging->totals(false).picks) == 4 * n);
    CHECK(r.read(r.counts().hits) + r.read(r.counts().misses) == 4 * n);
    CHECK(r.settle());
}

TEST(counting, a_request_owns_what_its_sequences_picked_between_begin_and_end) {
    rig r(make_tensors(1, 4), UINT64_MAX);
    r.compute(0, 0, { 3 }, 1); // before the request
    r.paging->sequence_begin(0, "first");
    r.compute(0, 0, { 0, 1 }, 1);
    usage_record live;
    CHECK(r.paging->read_request("first", false, live));
    CHECK((live.picks == std::vector<uint64_t>{ 1, 1, 0, 0 }) && live.tokens == 2);
    r.paging->sequence_end(0);
    r.paging->sequence_end(0); // a second end changes nothing

    r.paging->sequence_begin(0, "second");
    r.compute(0, 0, { 2 }, 1);
    usage_record finished;
    CHECK(r.paging->read_request("first", false, finished));
    CHECK(finished.picks == live.picks && finished.tokens == 2);
    usage_record second;
    CHECK(r.paging->read_request("second", false, second));
    CHECK((second.picks == std::vector<uint64_t>{ 0, 0, 1, 0 }));
    CHECK((of_sequence(r, 0) == std::vector<uint64_t>{ 0, 0, 1, 0 }));

    usage_record nobody;
    CHECK(!r.paging->read_request("third", false, nobody));
    CHECK(!r.paging->read_request("", false, nobody));
}

TEST(counting, sequences_of_one_request_add_up_whether_live_or_finished) {
    rig r(make_tensors(1, 4), UINT64_MAX);
    r.paging->sequence_begin(1, "n=2");
    r.paging->sequence_begin(2, "n=2");
    r.paging->sequence_begin(3, "other");
    r.compute(0, 1, { 0 }, 1);
    r.compute(0, 2, { 0, 1 }, 1);
    r.compute(0, 3, { 2 }, 1);
    for (const int32_t ended : { -1, 1, 2 }) {
        if (ended >= 0) {
            r.paging->sequence_end(ended);
        }
        usage_record record;
        CHECK(r.paging->read_request("n=2", false, record));
        CHECK((record.picks == std::vector<uint64_t>{ 2, 1, 0, 0 }) && record.tokens == 3);
    }
    usage_record taken, after;
    CHECK(r.paging->read_request("n=2", true, taken) && sum(taken.picks) == 3);
    CHECK(r.paging->read_request("n=2", false, after) && sum(after.picks) == 0 && after.tokens == 0);
}

TEST(counting, the_last_256_finished_requests_are_kept) {
    rig r(make_tensors(1, 4), UINT64_MAX);
    for (int i = 0; i < 257; ++i) {
        r.paging->sequence_begin(0, "r" + std::to_string(i));
        r.compute(0, 0, { i % 4 }, 1);
        r.paging->sequence_end(0);
    }
    usage_record record;
    CHECK(!r.paging->read_request("r0", false, record));
    CHECK(r.paging->read_request("r1", false, record) && record.picks[1] == 1);
    CHECK(r.paging->read_request("r256", false, record));
    r.paging->sequence_begin(-1, "out of range");
    r.paging->sequence_begin(usage::n_sequence_max, "out of range");
    r.paging->sequence_end(usage::n_sequence_max);
    CHECK(!r.paging->read_request("out of range", false, record));
}
