#pragma once

// Where each expert is, and when it was last picked.
//
// Who writes what, in which order:
//
//   resident[e]  written by the device, on the mover's thread or where its header says. Promotion: the device has the
//                expert, then store(1, release). Demotion: store(0, release), then the device gives it up. Compute threads load(acquire) to count a hit or a
//                miss. An entry may be stale, never dangling: in either state the weights are read at their home, so a
//                compute thread that saw "resident" while the pages are given back only pays a page fault.
//   tick         one per (ubatch, layer), taken by the compute thread before the layer reads its weights.
//   stamp[e]     the tick at which e was picked last; 0 = not picked since its pages were given back. Compute threads
//                exchange(tick); the mover compare_exchange(old, 0) right before it gives cold pages back. All accesses
//                are relaxed: the modification order of the one atomic decides who came first.
//   finished     the highest tick whose layer has been computed. Written by the compute thread when the next layer
//                starts or the ubatch ends (release); the mover (acquire) gives back only what was stamped no later, so pages
//                that are faulted in after the give-back belong to a later stamp and are found again.
//
// Two contexts of one model that compute at the same time share the ticks. `finished` is then early for one of them;
// the cost is a page fault, or cold pages that stay until they are picked once more.

#include "layout.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace moe_pager {

class page_table {
  public:
    explicit page_table(const layout & lay);

    // compute thread

    uint64_t begin_layer() noexcept {
        const uint64_t tick = tick_.fetch_add(1, std::memory_order_relaxed) + 1;
        finished_.store(tick - 1, std::memory_order_release);
        return tick;
    }

    void end_ubatch() noexcept { finished_.store(tick_.load(std::memory_order_relaxed), std::memory_order_release); }

    // true for the first pick of an expert at this tick
    bool touch(uint32_t expert, uint64_t tick) noexcept {
        return stamp_[expert].exchange(tick, std::memory_order_relaxed) != tick;
    }

    bool resident(uint32_t expert) const noexcept { return resident_[expert].load(std::memory_order_acquire) != 0; }

    // device

    void set_resident(uint32_t expert, bool value) noexcept {
        resident_[expert].store(value ? 1 : 0, std::memory_order_release);
    }

    // mover

    struct cold_expert {
        uint64_t stamp;
        uint32_t expert;
    };

    // Movable experts that are not resident and whose pages have been read, oldest pick first (then by index). Those
    // whose layer is being computed are counted in `cold_bytes` and left out of the list.
    std::vector<cold_expert> cold(const layout & lay, uint64_t & cold_bytes) const;

    // the stamp
    uint64_t last_pick(uint32_t expert) const noexcept { return stamp_[expert].load(std::memory_order_relaxed); }

    // the mover may give back the pages of a cold expert if this is still its last pick
    bool forget(const cold_expert & cold) noexcept {
        uint64_t expected = cold.stamp;
        return stamp_[cold.expert].compare_exchange_strong(expected, 0, std::memory_order_relaxed);
    }

    // neither resident nor picked since its pages were given back
    bool untouched(uint32_t expert) const noexcept {
        return !resident(expert) && stamp_[expert].load(std::memory_order_relaxed) == 0;
    }

    // on demotion: the pages that picks so far have read are given back with it
    void forget_finished(uint32_t expert) noexcept {
        const uint64_t stamp = stamp_[expert].load(std::memory_order_relaxed);
        if (stamp <= finished_.load(std::memory_order_acquire)) {
            forget({ stamp, expert });
        }
    }

  private:
    std::unique_ptr<std::atomic<uint8_t>[]>  resident_;
    std::unique_ptr<std::atomic<uint64_t>[]> stamp_;
    std::atomic<uint64_t>                    tick_{ 0 };
    std::atomic<uint64_t>                    finished_{ 0 };
};

} // namespace moe_pager
