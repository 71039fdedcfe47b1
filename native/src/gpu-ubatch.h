#pragma once

// The ubatch a GPU is working on: kept from its beginning until its picks have been read from the log.
//
//   begin      the tokens' sequences are copied: llama.cpp reuses its arrays before the GPU has finished
//   end        all of its kernels have been launched
//   counted    the stream was waited for after that, and the rows of the log were handed to the pager
//
// One ubatch at a time: llama.cpp waits for a context's stream before it writes the next one's inputs. begin() finishes
// an ubatch that nobody has waited for. All calls come from the thread that computes.

#include "pager.h"
#include "pick-log.h"

#include <cstdint>
#include <vector>

namespace moe_pager {

class gpu_ubatch {
  public:
    gpu_ubatch(const layout & lay, pick_log & log) : lay_(lay), log_(log) {}

    void begin(const ubatch & ub);

    void end() noexcept { launched_ = open_; }

    // launched, and not yet counted
    bool launched() const noexcept { return launched_; }

    // reads the log, once the stream is idle
    void count(pager & owner) noexcept;

  private:
    const layout & lay_;
    pick_log &     log_;

    bool                         open_     = false;
    bool                         launched_ = false;
    ubatch                       now_;
    std::vector<int32_t>         sequence_; // of each token: its first
    std::vector<const int32_t *> seq_id_;
    std::vector<int8_t>          output_;
};

} // namespace moe_pager
