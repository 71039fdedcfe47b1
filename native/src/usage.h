#pragma once

// Which experts each sequence picked, and to which request that sequence belonged.
//
// Who writes what:
//   table of a sequence   made before the sequence's first ubatch is computed, never freed before the pager is;
//   published
//                         with compare_exchange(acq_rel). Compute threads add to it (relaxed), nobody else while the
//                         sequence is being computed: a server slot begins and ends between ubatches.
//   live / finished       guarded by the mutex: server threads begin and end sequences, control calls read.
//
// A request's usage is the sum over its live sequences and what its finished ones left in the ring of the last
// `n_finished_max` requests.

#include "layout.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace moe_pager {

struct usage_record {
    uint64_t              tokens = 0;
    uint64_t              hits   = 0; // picks whose expert was resident
    std::vector<uint64_t> picks;      // by expert index

    usage_record & operator+=(const usage_record & other);
};

class usage {
  public:
    static constexpr int32_t n_sequence_max = 256; // as llama.cpp's LLAMA_MAX_SEQ
    static constexpr size_t  n_finished_max = 256;

    struct table {
        explicit table(uint32_t n_experts);

        std::atomic<uint64_t>                    tokens{ 0 };
        std::atomic<uint64_t>                    hits{ 0 };
        std::unique_ptr<std::atomic<uint32_t>[]> picks;
    };

    explicit usage(const layout & lay);
    ~usage();

    usage(const usage &)             = delete;
    usage & operator=(const usage &) = delete;

    // The table of a sequence, made if need be; null for a number out of range or when there is no memory. Its counts
    // go into the totals all the same.
    table * open(int32_t sequence) noexcept;

    // the table if there is one; for compute threads
    table * find(int32_t sequence) const noexcept;

    void begin(int32_t sequence, const std::string & request);
    void end(int32_t sequence);

    // false: no such sequence or request. reset zeroes what was read
    bool read_sequence(int32_t sequence, bool reset, usage_record & record);
    bool read_request(const std::string & request, bool reset, usage_record & record);

  private:
    struct live_sequence {
        bool        live = false;
        std::string request;
    };

    struct finished_request {
        std::string  request;
        usage_record record;
    };

    usage_record read(table & from, bool reset) const;
    void         finish(int32_t sequence); // needs the mutex

    const uint32_t                                   n_experts_;
    std::array<std::atomic<table *>, n_sequence_max> tables_{};

    std::mutex                                mutex_;
    std::array<live_sequence, n_sequence_max> sequences_;
    std::deque<finished_request>              finished_; // oldest first
};

} // namespace moe_pager
