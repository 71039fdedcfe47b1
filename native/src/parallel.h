#pragma once

// Work on large pieces of memory by several threads: one alone does not reach the memory's bandwidth.

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace moe_pager {

// calls f(begin, end) for parts of [0, bytes) that begin at multiples of 64 KiB
template <typename F>
void for_each_part(uint64_t bytes, F && f) {
    constexpr uint64_t least = 8u << 20; // a thread costs more than that much copying
    constexpr uint64_t unit  = 64u << 10;
    const uint64_t     n     = std::max<uint64_t>(
        1, std::min<uint64_t>({ std::max(1u, std::thread::hardware_concurrency()), 16, bytes / least }));
    const uint64_t           part = (bytes / n + unit - 1) / unit * unit;
    std::vector<std::thread> threads;
    for (uint64_t begin = part; n > 1 && begin < bytes; begin += part) {
        threads.emplace_back([=, &f] { f(begin, std::min(bytes, begin + part)); });
    }
    f(0, n > 1 ? std::min(bytes, part) : bytes);
    for (auto & thread : threads) {
        thread.join();
    }
}

} // namespace moe_pager
