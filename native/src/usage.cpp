#include "usage.h"

#include <algorithm>
#include <new>

namespace moe_pager {

usage::table::table(uint32_t n_experts) : picks(new std::atomic<uint32_t>[n_experts]) {
    for (uint32_t e = 0; e < n_experts; ++e) {
        picks[e].store(0, std::memory_order_relaxed);
    }
}

usage::usage(const layout & lay) : n_experts_(lay.n_experts()) {}

usage::~usage() {
    for (auto & slot : tables_) {
        delete slot.load(std::memory_order_relaxed);
    }
}

usage::table * usage::find(int32_t sequence) const noexcept {
    return sequence >= 0 && sequence < n_sequence_max ? tables_[sequence].load(std::memory_order_acquire) : nullptr;
}

usage::table * usage::open(int32_t sequence) noexcept {
    table * found = find(sequence);
    if (found != nullptr || sequence < 0 || sequence >= n_sequence_max) {
        return found;
    }
    std::unique_ptr<table> made;
    try {
        made = std::make_unique<table>(n_experts_);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
    if (tables_[sequence].compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) {
        return made.release();
    }
    return found; // another thread was first
}

usage_record & usage_record::operator+=(const usage_record & other) {
    tokens += other.tokens;
    hits += other.hits;
    picks.resize(std::max(picks.size(), other.picks.size()));
    for (size_t e = 0; e < other.picks.size(); ++e) {
        picks[e] += other.picks[e];
    }
    return *this;
}

usage_record usage::read(table & from, bool reset) const {
    const auto taken = [reset](auto & counter) -> uint64_t {
        return reset ? counter.exchange(0, std::memory_order_relaxed) : counter.load(std::memory_order_relaxed);
    };
    usage_record result;
    result.tokens = taken(from.tokens);
    result.hits   = taken(from.hits);
    result.picks.resize(n_experts_);
    for (uint32_t e = 0; e < n_experts_; ++e) {
        result.picks[e] = taken(from.picks[e]);
    }
    return result;
}

void usage::begin(int32_t sequence, const std::string & request) {
    table * counts = open(sequence);
    if (counts == nullptr) {
        return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    finish(sequence);
    read(*counts, true);
    sequences_[sequence] = { true, request };
}

void usage::end(int32_t sequence) {
    if (find(sequence) == nullptr) {
        return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    finish(sequence);
}

void usage::finish(int32_t sequence) {
    live_sequence & entry = sequences_[sequence];
    if (!entry.live) {
        return;
    }
    entry.live = false;
    if (entry.request.empty()) {
        return;
    }
    auto it = std::find_if(
        finished_.begin(), finished_.end(), [&](const finished_request & f) { return f.request == entry.request; });
    if (it == finished_.end()) {
        if (finished_.size() == n_finished_max) {
            finished_.pop_front();
        }
        finished_.push_back({ entry.request, {} });
        it = finished_.end() - 1;
    }
    it->record += read(*find(sequence), false);
}

bool usage::read_sequence(int32_t sequence, bool reset, usage_record & record) {
    table * counts = find(sequence);
    if (counts == nullptr) {
        return false;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    record = read(*counts, reset);
    return true;
}

bool usage::read_request(const std::string & request, bool reset, usage_record & record) {
    std::lock_guard<std::mutex> lock(mutex_);
    bool                        found = false;
    for (int32_t s = 0; s < n_sequence_max; ++s) {
        if (sequences_[s].live && sequences_[s].request == request) {
            record += read(*find(s), reset);
            found = true;
        }
    }
    for (auto & entry : finished_) {
        if (entry.request != request) {
            continue;
        }
        found = true;
        record += entry.record;
        if (reset) {
            entry.record = { 0, 0, std::vector<uint64_t>(n_experts_) };
        }
    }
    return found && !request.empty();
}

} // namespace moe_pager
