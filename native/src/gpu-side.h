#pragma once

// What a model's pager needs when a GPU computes its experts: the card, the log of picks, the ubatch in flight, and the
// tier and its staging where there is a VRAM budget.
//
// All calls but idle come from the thread that computes; idle comes from the thread that waits for the stream, which
// in llama.cpp is the same one.

#include "gpu-ubatch.h"
#include "pager.h"
#include "pick-log.h"
#include "stager.h"
#include "tier-vram.h"

#include <cstdint>
#include <memory>

namespace moe_pager {

class gpu_side {
  public:
    // `tier` may be null: then experts are counted, not moved. `copier` may be null.
    gpu_side(pager & owner, gpu & card, tier_vram * tier, std::unique_ptr<stager> copier, uint32_t ubatch_tokens)
        : owner_(owner),
          card_(card),
          tier_(tier),
          stager_(std::move(copier)),
          log_(owner.get_layout(), card, ubatch_tokens),
          ubatch_(owner.get_layout(), log_) {}

    void begin(const ubatch & ub) {
        if (ubatch_.launched()) {
            card_.wait(stream_);
            idle(stream_);
        }
        if (tier_ != nullptr && tier_->open()) {
            owner_.room_changed();
        }
        ubatch_.begin(ub);
    }

    void end() noexcept { ubatch_.end(); }

    void launch(void * stream) noexcept {
        stream_ = stream;
        if (tier_ != nullptr) {
            tier_->launch(stream);
        }
        if (stager_ != nullptr) {
            stager_->graph_begins();
        }
    }

    // Counts first: until the tier hears of it, nothing is published, so hits are told from misses as the kernels saw
    // them.
    void idle(void * stream) noexcept {
        if (ubatch_.launched() && stream == stream_) {
            ubatch_.count(owner_);
        }
        if (tier_ != nullptr) {
            tier_->idle(stream);
        }
    }

    int32_t * log_row(const void * key) const {
        const int32_t row = owner_.get_layout().counting_row(key);
        return row < 0 ? nullptr : log_.device_row((uint32_t) row);
    }

    uint32_t log_tokens() const { return log_.n_tokens_max(); }

    tier_vram * tier() const { return tier_; }

    stager * copier() const { return stager_.get(); }

  private:
    pager &                 owner_;
    gpu &                   card_;
    tier_vram * const       tier_;
    std::unique_ptr<stager> stager_;
    pick_log                log_;
    gpu_ubatch              ubatch_;
    void *                  stream_ = nullptr; // of the last launch
};

} // namespace moe_pager
