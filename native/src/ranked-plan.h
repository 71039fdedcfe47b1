#pragma once

// The plan that all policies make: the best experts stay or come, as far as there is room.
//
// A policy says what an expert is worth and when taking one in pays. Free room goes to any expert worth more than 0. An
// expert x takes the place of the worst residents v only if pays(worth of x, worth of all v together). If all experts
// fit in the budget all are promoted, whatever they are worth. Ties go by expert index.
//
// A plan is made after most tokens and mostly comes out empty, so what cannot lead to a move is not sorted.

#include "policy.h"

#include <functional>
#include <vector>

namespace moe_pager {

enum class worth_kind {
    amount, // picks: ranked per byte; several experts together are worth their sum
    time,   // of a pick: ranked as it is; several experts together are worth what the best of them is
};

struct ranking {
    const std::vector<double> &                     worth; // by expert, never below 0
    worth_kind                                      kind;
    std::function<bool(double gained, double lost)> pays; // more lost never pays better
};

std::vector<move> plan_by_rank(const policy_view & view, const ranking & ranks);

} // namespace moe_pager
