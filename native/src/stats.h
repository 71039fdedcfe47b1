#pragma once

// Counters of one pager. Each is monotonic from the load of the model on, except those that say they are gauges.
//
// Who writes: compute threads add to the first group, the mover to the second, control calls to the third; all with
// relaxed atomics, and each reader sees every counter at some moment, not all at the same one. The mover alone stores
// the gauges.

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace moe_pager {

// What the operating system refused, by kind and errno. Rare, so a mutex will do.
class refusal_log {
  public:
    void add(const std::string & kind, int error) {
        std::lock_guard<std::mutex> lock(mutex_);
        ++counts_[kind][error];
    }

    std::map<std::string, std::map<int, uint64_t>> read() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return counts_;
    }

  private:
    mutable std::mutex                             mutex_;
    std::map<std::string, std::map<int, uint64_t>> counts_;
};

struct stats {
    using counter = std::atomic<uint64_t>;

    counter tokens{ 0 }; // of all ubatches
    counter ubatches{ 0 };
    counter picks{ 0 }; // (token, layer, expert) choices of the router
    counter hits{ 0 };  // picks of resident experts
    counter misses{ 0 };
    counter hit_bytes{ 0 }; // slabs read, each once per ubatch and layer
    counter miss_bytes{ 0 };
    counter lost_picks{ 0 };      // ids out of range
    counter lost_rows{ 0 };       // rows that could not be mapped to a token: counted, not attributed
    counter unseen_ubatches{ 0 }; // none of their layers with experts came by

    counter promotions{ 0 };
    counter promoted_bytes{ 0 };
    counter demotions{ 0 };
    counter given_back_bytes{ 0 }; // of demoted and of cold experts, each expert in full

    counter priors{ 0 };

    counter resident_bytes{ 0 }; // gauges
    counter resident_experts{ 0 };
    counter locked_bytes{ 0 };

    refusal_log refusals;

    static void add(counter & c, uint64_t n) noexcept { c.fetch_add(n, std::memory_order_relaxed); }

    static uint64_t get(const counter & c) noexcept { return c.load(std::memory_order_relaxed); }
};

} // namespace moe_pager
