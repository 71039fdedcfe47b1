#pragma once

// An ubatch that a GPU computes: kept from its beginning until its picks have been read from the log.
//
//   begin      the tokens' sequences are copied: llama.cpp reuses its arrays before the GPU has finished
//   end        all of its kernels have been launched
//   finish     the stream was waited for after that: the log has its picks
//   count      the rows of the log were handed to the pager
//
// All calls come from the thread that computes.

#include "pager.h"
#include "pick-log.h"

#include <cstdint>
#include <vector>

namespace moe_pager {

class gpu_ubatch {
  public:
    gpu_ubatch(const layout & lay, const pick_log & log) : lay_(lay), log_(log) {}

    void begin(const ubatch & ub);

    void end() noexcept { state_ = state_ == state::open ? state::launched : state_; }

    void finish() noexcept { state_ = state_ == state::launched ? state::finished : state_; }

    void count(pager & owner) noexcept;

    bool launched() const noexcept { return state_ == state::launched; }

    bool finished() const noexcept { return state_ == state::finished; }

  private:
    enum class state { none, open, launched, finished };

    const layout &   lay_;
    const pick_log & log_;

    state                        state_ = state::none;
    ubatch                       now_;
    std::vector<int32_t>         sequence_; // of each token: its first
    std::vector<const int32_t *> seq_id_;
    std::vector<int8_t>          output_;
};

} // namespace moe_pager
