#pragma once

// Records what was routed, so that moe-pager-simulate can replay it. Off unless MOE_PAGER_TRACE names a file.
//
// The file, all numbers little-endian:
//   one line of JSON   {"format": "moe-routing-trace", "version": 1, "layers": [{"block", "experts", "expert_bytes",
//                      "pinned"}, ...]}, in the order of the rows below
//   then, per ubatch   u32 tokens; u32 picks that were hits when it was computed; and for each layer
//                      u32 rows; u32 experts used; u16 ids, [row][used]. 65535 stands for an id out of range
// An ubatch is what is computed at once: a piece of a prompt, or one token of each sequence that is being generated.
// Residency changes between ubatches, so their limits are part of the trace. Rows may be fewer than tokens: after the
// last attention many models go on with the output tokens only. Warm-up runs are left out.
//
// Threads: each thread's ubatch is gathered apart and written as a whole when it ends, under a mutex. After an error
// nothing more is written; what is there is whole ubatches but for a tail that readers refuse.

#include "layout.h"

#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace moe_pager {

class trace_writer {
  public:
    // The file must not be there: neither a second model nor the next start overwrites what was recorded.
    trace_writer(const layout & lay, const std::string & path);
    ~trace_writer();

    trace_writer(const trace_writer &)             = delete;
    trace_writer & operator=(const trace_writer &) = delete;

    // compute threads: the ids of a layer of this thread's ubatch, i32 with nb_used bytes from one to the next and
    // nb_row from one token to the next
    void add(uint32_t     row,
             const char * ids,
             int64_t      n_used,
             int64_t      n_rows,
             uint64_t     nb_used,
             uint64_t     nb_row,
             uint64_t     hits) noexcept;
    void end_ubatch(uint32_t n_tokens) noexcept;

    // why nothing is recorded, in words; empty if all is well
    std::string error() const;

  private:
    struct layer_record {
        uint32_t              n_rows = 0;
        uint32_t              n_used = 0;
        std::vector<uint16_t> ids;
    };

    struct ubatch_record {
        uint64_t                  hits = 0;
        std::vector<layer_record> layers;
    };

    void write(const void * data, size_t bytes); // needs the mutex
    void fail();                                 // needs the mutex

    const layout &    lay_;
    const std::string path_;

    mutable std::mutex                       mutex_;
    std::FILE *                              file_ = nullptr;
    std::string                              error_;
    std::map<std::thread::id, ubatch_record> open_;
};

} // namespace moe_pager
