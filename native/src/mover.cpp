#include "mover.h"

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

namespace moe_pager {

namespace {

// Linux's default for how much one page fault may map
constexpr uint64_t fault_around_bytes = 64 << 10;

} // namespace

mover::mover(const layout & lay,
             page_table &   table,
             score &        scores,
             stats &        counters,
             device &       dev,
             const policy & pol,
             uint64_t       budget_bytes,
             double         horizon_tokens)
    : lay_(lay),
      table_(table),
      scores_(scores),
      stats_(counters),
      device_(dev),
      policy_(pol),
      horizon_tokens_(horizon_tokens),
      budget_(budget_bytes),
      resident_(lay.n_experts()),
      locked_(lay.n_experts()) {
    for (uint32_t e = 0; e < lay.n_experts(); ++e) {
        resident_[e] = table.resident(e) ? 1 : 0;
        if (resident_[e]) { // for good
            stats::add(stats_.resident_bytes, lay.bytes_of(e));
            stats::add(stats_.resident_experts, 1);
        }
    }
}

mover::~mover() {
    stop();
}

void mover::start() {
    thread_ = std::thread([this] { run(); });
}

void mover::stop() noexcept {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    device_.stop();
    changed_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
    }
}

void mover::wake(bool urgent) noexcept {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ++requested_;
        urgent_ += urgent ? 1 : 0;
    }
    changed_.notify_one();
}

void mover::set_budget(uint64_t bytes) noexcept {
    budget_.store(bytes, std::memory_order_relaxed);
    wake(true);
}

uint64_t mover::pending() const noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    return left_ + (busy_ || requested_ != planned_ ? 1 : 0);
}

void mover::run() noexcept {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return stopping_ || requested_ != planned_; });
        if (stopping_) {
            return;
        }
        lock.unlock();
        step();
        lock.lock();
        // a pass per token would cost more than it brings
        changed_.wait_for(lock, pass_interval, [this] { return stopping_ || urgent_ != planned_urgent_; });
    }
}

void mover::step() noexcept {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        busy_           = true;
        planned_        = requested_;
        planned_urgent_ = urgent_;
    }
    try {
        pass();
    } catch (const std::bad_alloc &) {
        stats_.refusals.add("memory", ENOMEM);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    left_ = 0;
    busy_ = false;
}

void mover::pass() {
    scores_.evaluate(seen_.score, &seen_.picks);
    seen_.last_pick.resize(lay_.n_experts());
    for (uint32_t e = 0; e < lay_.n_experts(); ++e) {
        seen_.last_pick[e] = table_.last_pick(e);
    }
    const uint64_t budget  = budget_bytes();
    const uint64_t fixed   = lay_.fixed_bytes();
    const uint64_t movable = budget > fixed ? budget - fixed : 0;

    if (first_pass_ && device_.gives_back() && movable < lay_.total_bytes() - fixed) {
        // the loader has read the whole file in
        std::vector<uint32_t> all;
        for (uint32_t e = 0; e < lay_.n_experts(); ++e) {
            if (!resident_[e]) {
                all.push_back(e);
            }
        }
        give_back(std::move(all));
    }
    first_pass_ = false;

    for (uint32_t c = 0; c < lay_.n_size_classes(); ++c) {
        const policy_view view = { lay_, seen_, resident_, c, device_.room(c, movable), horizon_tokens_ };
        carry_out(policy_.plan(view));
    }
    if (device_.gives_back()) {
        give_cold_back();
    }
}

bool mover::outdated(size_t n_done) const {
    return stopping_ || urgent_ != planned_urgent_ ||
           (n_done % moves_per_look == 0 && n_done > 0 && requested_ != planned_);
}

// Demotions of a window come first: a device whose frames become free between two ubatches then waits once per window.
void mover::carry_out(std::vector<move> moves) {
    for (size_t begin = 0; begin < moves.size(); begin += moves_per_look) {
        const auto first = moves.begin() + (std::ptrdiff_t) begin;
        const auto last  = moves.begin() + (std::ptrdiff_t) std::min(begin + moves_per_look, moves.size());
        std::stable_partition(first, last, [](const move & m) { return !m.promote; });
    }
    for (size_t i = 0; i < moves.size(); ++i) {
        if (i % moves_per_look == 0) {
            device_.settle();
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (outdated(i)) {
                break;
            }
            left_ = moves.size() - i;
        }
        if (moves[i].promote) {
            promote(moves[i].expert);
        } else {
            demote(moves[i].expert);
        }
    }
    device_.settle();
}

void mover::promote(uint32_t expert) {
    const promotion result = device_.promote(expert);
    if (result.populate_error != 0) {
        stats_.refusals.add("populate", result.populate_error);
        device_.demote(expert);
        if (device_.gives_back()) {
            give_back({ expert });
        }
        return;
    }
    if (result.lock_error != 0) {
        stats_.refusals.add("mlock", result.lock_error);
    }
    locked_[expert]   = result.locked_bytes;
    resident_[expert] = 1;
    stats::add(stats_.promotions, 1);
    stats::add(stats_.promoted_bytes, lay_.bytes_of(expert));
    stats::add(stats_.resident_experts, 1);
    stats::add(stats_.resident_bytes, lay_.bytes_of(expert));
    stats::add(stats_.locked_bytes, result.locked_bytes);

    if (device_.gives_back() && budget_bytes() < lay_.total_bytes()) {
        if (const uint32_t n = untouched_beside(expert, -1)) {
            give_back_run(expert - n, n);
        }
        if (const uint32_t n = untouched_beside(expert, 1)) {
            give_back_run(expert + 1, n);
        }
    }
}

void mover::demote(uint32_t expert) {
    resident_[expert] = 0;
    stats_.resident_experts.fetch_sub(1, std::memory_order_relaxed);
    stats_.resident_bytes.fetch_sub(lay_.bytes_of(expert), std::memory_order_relaxed);
    stats_.locked_bytes.fetch_sub(locked_[expert], std::memory_order_relaxed);
    locked_[expert] = 0;
    stats::add(stats_.demotions, 1);
    device_.demote(expert);
    if (device_.gives_back()) {
        table_.forget_finished(expert);
        give_back({ expert });
    }
}

void mover::give_cold_back() {
    uint64_t       cold_bytes = 0;
    const auto     cold       = table_.cold(lay_, cold_bytes);
    const uint64_t budget     = budget_bytes();
    const uint64_t held       = stats::get(stats_.resident_bytes);

    std::vector<uint32_t> gone;
    for (const auto & entry : cold) {
        if (held + cold_bytes <= budget) {
            break;
        }
        // a false answer means it has been picked again: a later pass finds it
        if (table_.forget(entry)) {
            gone.push_back(entry.expert);
            cold_bytes -= lay_.bytes_of(entry.expert);
        }
    }
    give_back(std::move(gone));
}

// Untouched neighbours go along: they are not counted.
void mover::give_back(std::vector<uint32_t> experts) {
    std::sort(experts.begin(), experts.end());
    for (size_t i = 0; i < experts.size();) {
        const layout_layer & layer = lay_.layer_of(experts[i]);
        const uint32_t       first = experts[i];
        uint32_t             last  = first;
        for (; i < experts.size() && experts[i] <= last + 1 && experts[i] < layer.first + layer.n_expert; ++i) {
            last = experts[i];
            stats::add(stats_.given_back_bytes, layer.expert_bytes);
        }
        const uint32_t before = untouched_beside(first, -1);
        give_back_run(first - before, before + (last - first + 1) + untouched_beside(last, 1));
    }
}

void mover::give_back_run(uint32_t first, uint32_t n) {
    const int error = device_.give_back(first, n);
    if (error != 0) {
        stats_.refusals.add("give_back", error);
    }
}

// A page fault maps what lies around it as well: how many neighbours within its reach nobody has asked for, on one
// side.
uint32_t mover::untouched_beside(uint32_t expert, int step) const {
    const layout_layer & layer = lay_.layer_of(expert);
    const uint64_t       reach = (fault_around_bytes + layer.least_slab_bytes() - 1) / layer.least_slab_bytes();
    int64_t              next  = (int64_t) expert + step;
    uint32_t             n     = 0;
    for (; n < reach && next >= layer.first && next < (int64_t) layer.first + layer.n_expert; next += step, ++n) {
        if (!table_.untouched((uint32_t) next)) {
            break;
        }
    }
    return n;
}

} // namespace moe_pager
