#include "check.h"
#include "score.h"
#include "simulated.h"

#include <cmath>

using namespace moe_pager;

static bool near(double a, double b) {
    return std::fabs(a - b) < 1e-9;
}

static prior make_prior(double kappa, std::vector<float> p) {
    prior value;
    value.id    = "test";
    value.kappa = kappa;
    value.p     = std::move(p);
    return value;
}

TEST(score, without_prior_and_counts_it_is_zero) {
    const layout        lay = make_layout(make_tensors(1, 4));
    score               sc(lay, 4);
    std::vector<double> s;
    sc.evaluate(s);
    CHECK(s == std::vector<double>(4, 0.0));
    CHECK(!sc.get_prior().set);
}

TEST(score, is_the_posterior_mean_with_decayed_counts) {
    const layout        lay = make_layout(make_tensors(1, 4));
    score               sc(lay, 2);
    std::vector<double> s;
    sc.set_prior(make_prior(4, { 0.5f, 0.25f, 0, 0 }));
    sc.evaluate(s);
    CHECK(near(s[0], 0.5) && near(s[1], 0.25) && near(s[2], 0));

    // two tokens: both pick 0, one picks 2
    sc.count_pick(0);
    sc.count_pick(0);
    sc.count_pick(2);
    sc.count_tokens(0, 2);
    sc.evaluate(s);
    CHECK(near(s[0], (4 * 0.5 + 2) / (4 + 2)));
    CHECK(near(s[1], (4 * 0.25) / (4 + 2)));
    CHECK(near(s[2], 1.0 / 6));

    // two more, a half-life: n = (2, 0, 1) / 2 + (0, 2, 0), N = 2 / 2 + 2
    sc.count_pick(1);
    sc.count_pick(1);
    sc.count_tokens(0, 2);
    sc.evaluate(s);
    CHECK(near(s[0], (4 * 0.5 + 1) / 7));
    CHECK(near(s[1], (4 * 0.25 + 2) / 7));
    CHECK(near(s[2], 0.5 / 7));

    // time is tokens: nothing new, nothing decays
    const auto before = s;
    sc.evaluate(s);
    CHECK(s == before);
}

TEST(score, layers_decay_by_their_own_tokens) {
    const layout        lay = make_layout(make_tensors(2, 2));
    score               sc(lay, 1);
    std::vector<double> s;
    sc.count_pick(0);
    sc.count_tokens(0, 1);
    sc.count_pick(2);
    sc.count_tokens(1, 1);
    sc.evaluate(s);
    sc.count_tokens(0, 1); // one more token, but only in layer 0
    sc.evaluate(s);
    CHECK(near(s[0], 0.5 / 1.5));
    CHECK(near(s[2], 1.0));
}

TEST(score, a_new_prior_replaces_the_old_and_counts_carry_on) {
    const layout        lay = make_layout(make_tensors(1, 2));
    score               sc(lay, 100);
    std::vector<double> s;
    sc.set_prior(make_prior(2, { 1, 0 }));
    sc.count_pick(0);
    sc.count_tokens(0, 2);
    sc.set_prior(make_prior(2, { 0, 1 }));
    sc.evaluate(s);
    CHECK(near(s[0], 1.0 / 4));
    CHECK(near(s[1], 2.0 / 4));
    CHECK(sc.get_prior().set && sc.get_prior().id == "test");
}

TEST(score, totals_are_never_decayed_and_reset_on_request) {
    const layout        lay = make_layout(make_tensors(1, 2));
    score               sc(lay, 1);
    std::vector<double> s;
    for (int i = 0; i < 5; ++i) {
        sc.count_pick(1);
        sc.count_tokens(0, 1);
        sc.evaluate(s);
    }
    sc.count_pick(0); // not drained yet
    CHECK((sc.totals(false) == std::vector<uint64_t>{ 1, 5 }));
    CHECK((sc.totals(true) == std::vector<uint64_t>{ 1, 5 }));
    sc.count_pick(1);
    CHECK((sc.totals(false) == std::vector<uint64_t>{ 0, 1 }));
}
