#pragma once

// One model's pager: the tables, and who may touch them. Knows neither ggml nor HTTP.
//
//   compute thread(s)   ubatch_begin, count, ubatch_end: no lock but the mover's wake-up (and the registry's, once per
//                       ubatch, in moe-pager.cpp); no allocation but a sequence's table when its number is first seen
//   server threads      sequence_begin / sequence_end, control calls (control.h)
//   mover               its own thread, from construction to destruction
//
// The parts' own headers say what is written in which order. The pager outlives its model's computations: whoever frees
// the model stops the mover first (stop), later control calls see the tables as they were.

#include "device.h"
#include "layout.h"
#include "mover.h"
#include "page-table.h"
#include "policy.h"
#include "score.h"
#include "stats.h"
#include "tier-vram.h"
#include "trace-writer.h"
#include "usage.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace moe_pager {

struct settings {
    bool        enabled   = false;
    uint64_t    ram_bytes = UINT64_MAX; // not given: all experts
    bool        vram      = false;      // a VRAM budget was given
    vram_budget vram_bytes;
    uint32_t    ubatch_tokens    = 4096; // of the longest ubatch that is counted on a GPU
    double      half_life_tokens = 64;
    double      horizon_tokens   = 64;
    std::string policy           = "posterior";
    std::string trace; // file to record the routing in; empty: none

    std::vector<std::string> remarks; // values that could not be used, and what was used in their place
};

// from the environment; `get` is getenv or a test's stand-in
settings read_settings(const std::function<const char *(const char *)> & get);

// the ids of one MUL_MAT_ID node, as they lie in memory
struct routed_ids {
    const void * key     = nullptr; // the weight tensor
    const char * data    = nullptr; // i32 [n_used, n_rows]
    int64_t      n_used  = 0;
    int64_t      n_rows  = 0;
    uint64_t     nb_used = 0; // bytes from one id to the next
    uint64_t     nb_row  = 0;
    int64_t      n_read  = INT64_MAX; // rows beyond were not written down
};

class pager;

// the ubatch that a compute thread is working on; all pointers are the caller's
struct ubatch {
    pager *                 owner     = nullptr;
    uint32_t                n_tokens  = 0;
    uint32_t                n_outputs = 0;
    const int32_t * const * seq_id    = nullptr;
    const int8_t *          output    = nullptr;
    bool                    warmup    = false;
    bool                    counted   = false; // a layer with experts was seen
};

class pager {
  public:
    using make_device_fn = std::function<std::unique_ptr<device>(const layout &, page_table &)>;

    pager(layout lay, const settings & set, const make_device_fn & make_device);
    ~pager();

    // compute thread

    void ubatch_begin(const ubatch & ub) noexcept;
    void count(ubatch & ub, const routed_ids & ids) noexcept;
    // all of its layers have been computed and counted
    void ubatch_end(const ubatch & ub) noexcept;

    // the device's room for experts has changed
    void room_changed() noexcept { mover_.room_changed(); }

    // server threads

    void sequence_begin(int32_t sequence, const std::string & request) { usage_.begin(sequence, request); }

    void sequence_end(int32_t sequence) { usage_.end(sequence); }

    // control

    void         set_prior(prior value);
    void         set_budget(uint64_t bytes);
    usage_record totals(bool reset);

    bool read_sequence(int32_t sequence, bool reset, usage_record & record) {
        return usage_.read_sequence(sequence, reset, record);
    }

    bool read_request(const std::string & request, bool reset, usage_record & record) {
        return usage_.read_request(request, reset, record);
    }

    const layout & get_layout() const { return lay_; }

    const page_table & get_table() const { return table_; }

    const score & get_score() const { return score_; }

    const stats & get_stats() const { return stats_; }

    const mover & get_mover() const { return mover_; }

    const policy & get_policy() const { return *policy_; }

    // bytes of experts that may be resident: in VRAM, where there is such a tier, as far as there are frames
    uint64_t budget_bytes() const;

    // null: experts are not moved to VRAM
    const tier_vram * vram() const { return vram_; }

    const char * home() const; // "mmap", "pinned", "device" or "anonymous"

    std::vector<std::string> reasons() const; // for anything that is off, in words

    // drops what is planned and ends the mover's thread
    void stop() noexcept { mover_.stop(); }

  private:
    layout                        lay_;
    std::vector<std::string>      remarks_;
    page_table                    table_;
    score                         score_;
    usage                         usage_;
    stats                         stats_;
    std::unique_ptr<device>       device_;
    const tier_vram *             vram_;
    std::unique_ptr<policy>       policy_;
    std::atomic<uint64_t>         unclaimed_cold_bytes_{ 0 }; // read since the mover was woken last
    std::mutex                    totals_mutex_;
    std::unique_ptr<trace_writer> trace_; // null: nothing is recorded
    uint64_t                      tokens_reset_at_ = 0;
    uint64_t                      hits_reset_at_   = 0;
    mover                         mover_; // last: its thread uses all of the above
};

} // namespace moe_pager
