#pragma once

// What a model's pager needs when a GPU computes its experts: the card, the log of picks, the ubatch in flight, and the
// tier and its staging where there is a VRAM budget.
//
// All calls come from the thread that computes, which in llama.cpp is also the one that waits for a stream. One ubatch
// is in flight at a time: llama.cpp waits for a context's stream before it writes the next one's inputs.
//
// Counting an ubatch takes the host as long as some of its kernels take, and between two ubatches nothing else runs. So it
// is put off until the next one has been launched, or until a request ends. While it is put off the tier still holds
// its stream to be in flight: nothing is published, and hits are told from misses as the kernels saw them. What waits
// to be published is not kept waiting: then it is counted at once.

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
          ubatches_{ { owner.get_layout(), log_ }, { owner.get_layout(), log_ } } {}

    void begin(const ubatch & ub) {
        if (now().launched()) { // nobody has waited for it
            card_.wait(stream_);
            idle(stream_);
        }
        if (tier_ != nullptr && tier_->open()) {
            owner_.room_changed();
        }
        count(before());
        which_ ^= 1; // the other one may wait to be counted
        now().begin(ub);
    }

    void end() noexcept {
        count(before());
        log_.drain(stream_);
        now().end();
    }

    void launch(void * stream) noexcept {
        if (held_ == stream) {
            held_ = nullptr;
        } else if (held_ != nullptr) {
            catch_up();
        }
        stream_ = stream;
        if (tier_ != nullptr) {
            tier_->launch(stream);
        }
        if (stager_ != nullptr) {
            stager_->graph_begins();
        }
    }

    void idle(void * stream) noexcept {
        if (stream == stream_) {
            now().finish();
            if (now().finished() && (tier_ == nullptr || !tier_->has_changed())) {
                held_ = stream;
                return;
            }
        }
        catch_up();
        if (tier_ != nullptr) {
            tier_->idle(stream);
        }
    }

    // Counts what is finished. A request begins or ends: what it used must have been counted.
    void catch_up() noexcept {
        count(before());
        count(now());
        if (held_ != nullptr && tier_ != nullptr) {
            tier_->idle(held_);
        }
        held_ = nullptr;
    }

    int32_t * log_row(const void * key) const {
        const int32_t row = owner_.get_layout().counting_row(key);
        return row < 0 ? nullptr : log_.device_row((uint32_t) row);
    }

    uint32_t log_tokens() const { return log_.n_tokens_max(); }

    tier_vram * tier() const { return tier_; }

    stager * copier() const { return stager_.get(); }

  private:
    gpu_ubatch & now() { return ubatches_[which_]; }

    gpu_ubatch & before() { return ubatches_[which_ ^ 1]; }

    void count(gpu_ubatch & ubatch) noexcept {
        if (ubatch.finished()) {
            ubatch.count(owner_);
        }
    }

    pager &                 owner_;
    gpu &                   card_;
    tier_vram * const       tier_;
    std::unique_ptr<stager> stager_;
    pick_log                log_;
    gpu_ubatch              ubatches_[2];
    int                     which_  = 0;
    void *                  stream_ = nullptr; // of the last launch
    void *                  held_   = nullptr; // idle since, and kept in flight until its ubatch has been counted
};

} // namespace moe_pager
