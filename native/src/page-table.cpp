#include "page-table.h"

#include <algorithm>

namespace moe_pager {

page_table::page_table(const layout & lay)
    : resident_(new std::atomic<uint8_t>[lay.n_experts()]), stamp_(new std::atomic<uint64_t>[lay.n_experts()]) {
    for (uint32_t e = 0; e < lay.n_experts(); ++e) {
        const layout_layer & layer = lay.layer_of(e);
        const bool           there = !layer.movable && layer.place != memory::pinned; // for good
        resident_[e].store(there ? 1 : 0, std::memory_order_relaxed);
        stamp_[e].store(0, std::memory_order_relaxed);
    }
}

std::vector<page_table::cold_expert> page_table::cold(const layout & lay, uint64_t & cold_bytes) const {
    const uint64_t           finished = finished_.load(std::memory_order_acquire);
    std::vector<cold_expert> found;
    cold_bytes = 0;
    for (const auto & layer : lay.layers()) {
        for (uint32_t e = layer.first; layer.movable && e < layer.first + layer.n_expert; ++e) {
            const uint64_t stamp = stamp_[e].load(std::memory_order_relaxed);
            if (stamp == 0 || resident(e)) {
                continue;
            }
            cold_bytes += layer.expert_bytes;
            if (stamp <= finished) {
                found.push_back({ stamp, e });
            }
        }
    }
    std::sort(found.begin(), found.end(), [](const cold_expert & a, const cold_expert & b) {
        return a.stamp != b.stamp ? a.stamp < b.stamp : a.expert < b.expert;
    });
    return found;
}

} // namespace moe_pager
