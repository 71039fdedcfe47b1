// Each policy's rule on traces short enough to follow by hand, and the offline bound on random ones.

#include "check.h"
#include "replay.h"

#include <random>
#include <stdexcept>

using namespace moe_pager;

namespace {

using picks_of_token = std::vector<std::vector<uint16_t>>; // by layer

// ubatches of one token each, through layers of n_expert experts of 1,000 bytes
routing_trace make_trace(uint32_t n_layers, uint32_t n_expert, const std::vector<picks_of_token> & tokens) {
    routing_trace trace;
    for (uint32_t row = 0; row < n_layers; ++row) {
        trace.layers.push_back({ (int32_t) row, n_expert, 1000, false });
    }
    for (const auto & token : tokens) {
        routed_ubatch ubatch;
        ubatch.n_tokens = 1;
        for (const auto & ids : token) {
            ubatch.layers.push_back({ 1, (uint32_t) ids.size(), ids });
        }
        trace.ubatches.push_back(ubatch);
    }
    return trace;
}

// one layer, one pick a token
routing_trace make_trace(uint32_t n_expert, const std::vector<uint16_t> & ids) {
    std::vector<picks_of_token> tokens;
    for (const uint16_t id : ids) {
        tokens.push_back({ { id } });
    }
    return make_trace(1, n_expert, tokens);
}

replay_options options_of(const std::string & policy, double share) {
    replay_options options;
    options.policy = policy;
    options.share  = share;
    return options;
}

uint64_t hits(const routing_trace & trace, const std::string & policy, double share) {
    return replay(trace, options_of(policy, share)).hits;
}

} // namespace

TEST(replay, lru_keeps_what_was_picked_last) {
    // room for 2 of 4:               -  -  h  -  h  -  (2 took the place of 0, then 0 that of 1)
    const auto trace = make_trace(4, { 0, 1, 1, 2, 1, 0 });
    CHECK(hits(trace, "lru", .5) == 2);
    CHECK(hits(make_trace(4, { 0, 1, 0, 2, 0, 1, 2 }), "lru", .5) == 2); // 0 and 0; 2 left for 1
    // one that goes round in a larger circle than there is room never hits
    CHECK(hits(make_trace(4, { 0, 1, 2, 0, 1, 2, 0, 1, 2 }), "lru", .5) == 0);
}

TEST(replay, lfu_keeps_what_was_picked_most_and_never_forgets) {
    // room for 1: 0 stays, though 1 comes as often, until 1 has come more often
    CHECK(hits(make_trace(2, { 0, 0, 0, 1, 1, 1, 1, 1 }), "lfu", .5) == 2 + 1);
}

TEST(replay, static_keeps_what_it_took_first) {
    CHECK(hits(make_trace(2, { 0, 1, 1, 1, 1, 0 }), "static", .5) == 1);
    replay_options options = options_of("static", .5);
    options.belief         = prior{ "one", true, 8, { 0, 1 } };
    CHECK(replay(make_trace(2, { 0, 1, 1, 1, 1, 0 }), options).hits == 4);
}

TEST(replay, best_set_knows_the_trace_but_does_not_move) {
    const auto result = replay(make_trace(2, { 0, 1, 1, 1, 1, 0 }), options_of("best-set", .5));
    CHECK(result.hits == 4);
    CHECK(result.promotions == 0); // after the first token
}

TEST(replay, posterior_follows_the_text_by_its_half_life) {
    // room for 1: with a short memory 1 displaces 0 once (s(1) - s(0)) * horizon > 1, with a long one it takes as many
    std::vector<uint16_t> ids(40, 0);
    ids.insert(ids.end(), 40, 1);
    replay_options options   = options_of("posterior", .5);
    options.half_life_tokens = 4;
    options.horizon_tokens   = 1000;
    // after 40 zeros n(0) = N; each 1 keeps n(0) at 2^(-t/4) of that: 1 leads from the 4th or 5th on
    const auto quick         = replay(make_trace(2, ids), options);
    CHECK(quick.hits == 39 + 40 - 4 || quick.hits == 39 + 40 - 5);
    options.half_life_tokens = 1e9;
    CHECK(replay(make_trace(2, ids), options).hits == 39);
}

TEST(replay, belady_keeps_what_is_picked_again_soonest) {
    // before the first token it holds 0 and 1; 2 comes back after both, so it is let by:  h  h  -  h  h  -
    CHECK(hits(make_trace(4, { 0, 1, 2, 0, 1, 2 }), "belady", .5) == 4);
    // 3 is never picked again; 2 takes the place of 1, which comes later
    CHECK(hits(make_trace(4, { 0, 1, 3, 2, 2, 0, 1 }), "belady", .5) == 4);
}

// As random as text is not: each token's experts are drawn with a skew that drifts.
TEST(replay, no_policy_hits_more_than_belady) {
    std::mt19937 random(7);
    for (int round = 0; round < 40; ++round) {
        const uint32_t n_layers = 1 + random() % 3, n_expert = 4 + random() % 12, n_used = 1 + random() % 3;
        std::vector<picks_of_token> tokens;
        for (uint32_t t = 0; t < 120; ++t) {
            picks_of_token token;
            for (uint32_t row = 0; row < n_layers; ++row) {
                std::vector<uint16_t> ids;
                while (ids.size() < n_used) {
                    const uint32_t reach = 1 + random() % n_expert;
                    const uint16_t id    = (uint16_t) ((random() % reach + t / 40) % n_expert);
                    if (std::find(ids.begin(), ids.end(), id) == ids.end()) {
                        ids.push_back(id);
                    }
                }
                token.push_back(ids);
            }
            tokens.push_back(token);
        }
        const auto   trace = make_trace(n_layers, n_expert, tokens);
        const double share = (1 + random() % 9) / 10.0;
        const auto   bound = hits(trace, "belady", share);
        for (const auto & policy : replay_policies()) {
            CHECK(hits(trace, policy, share) <= bound);
        }
        CHECK(hits(trace, "posterior", 1) == (uint64_t) 120 * n_layers * n_used); // all fit
    }
}

TEST(replay, prompts_decoded_tokens_and_skipped_ubatches_are_told_apart) {
    routing_trace trace    = make_trace(4, { 0, 0, 0, 1 });
    trace.ubatches[0]      = { 3, 2, { { 3, 1, { 0, 0, 1 } } } };
    replay_options options = options_of("lru", .25);
    auto           result  = replay(trace, options);
    CHECK(result.tokens == 6 && result.picks == 6 && result.decoded == 3 && result.decode_picks == 3);
    CHECK(result.recorded == 2);
    options.skip_ubatches = 1;
    result                = replay(trace, options);
    CHECK(result.tokens == 3 && result.picks == 3 && result.recorded == 0);
    // an id that was out of range is not a pick
    trace.ubatches[1].layers[0].ids[0] = routing_trace::no_expert;
    CHECK(replay(trace, options).picks == 2);
}

TEST(replay, a_pass_comes_as_often_and_moves_as_much_as_is_said) {
    // 64 experts are picked once, then all again
    picks_of_token all(1);
    for (uint16_t id = 0; id < 64; ++id) {
        all[0].push_back(id);
    }
    const auto     trace   = make_trace(1, 128, { all, all, all });
    replay_options options = options_of("lru", .5);
    CHECK(replay(trace, options).hits == 128);
    options.moves_max = 1; // of the mover's window of 32
    CHECK(replay(trace, options).hits == 32 + 64);
    options.moves_max  = 0;
    options.pass_every = 2;
    CHECK(replay(trace, options).hits == 64);
}

TEST(replay, an_unknown_policy_is_refused_by_name) {
    try {
        hits(make_trace(2, { 0 }), "lottery", .5);
        CHECK(false);
    } catch (const std::runtime_error & e) {
        CHECK(std::string(e.what()) == "policy 'lottery' is none of posterior, lru, lfu, static, best-set, belady");
    }
}
