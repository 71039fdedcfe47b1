#pragma once

// The one thread that promotes and demotes.
//
// It sleeps until something has changed (a prior, a budget, a finished ubatch), then makes a pass: score the experts,
// ask the policy for moves, carry them out one by one, give cold pages back. Nobody waits for it. A plan is dropped and
// made anew
//   - before its next move, when a prior or a budget came in: an old wish never outlives a newer one;
//   - after `moves_per_look` moves, when an ubatch was finished.
// Finished ubatches are gathered for `pass_interval`; priors and budgets are not kept waiting.
//
// Who writes what:
//   requested_, urgent_   any thread, under the mutex; the mover compares them with what its plan was made for
//   left_, planned_       the mover, under the mutex; pending() reads all four under it, so 0 means: everything that
//                         was asked for before the call has been carried out
//   budget                any thread (relaxed store, then wake under the mutex). The mover reads it when it plans, when
//                         it promotes and when it gives back: a change in between makes the plan outdated
//   entries               the device (page-table.h says in which order)
//   gauges                the mover only
// The device is called without the mutex, so a slow disk holds up neither counting nor control calls.

#include "device.h"
#include "layout.h"
#include "page-table.h"
#include "policy.h"
#include "score.h"
#include "stats.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace moe_pager {

class mover {
  public:
    static constexpr size_t                    moves_per_look = 32;
    static constexpr std::chrono::milliseconds pass_interval{ 20 };

    mover(const layout & lay,
          page_table &   table,
          score &        scores,
          stats &        counters,
          device &       dev,
          const policy & pol,
          uint64_t       budget_bytes,
          double         horizon_tokens);
    ~mover(); // stops

    mover(const mover &)             = delete;
    mover & operator=(const mover &) = delete;

    void start();

    // A pass on the caller's thread, for a mover that has not been started: simulators keep time themselves.
    void step() noexcept;

    void stop() noexcept; // returns when the move in hand is done; the rest is dropped

    void ubatch_finished() noexcept { wake(false); }

    void prior_changed() noexcept { wake(true); }

    // the device has another amount of room than when the last plan was made
    void room_changed() noexcept { wake(true); }

    void set_budget(uint64_t bytes) noexcept;

    uint64_t budget_bytes() const noexcept { return budget_.load(std::memory_order_relaxed); }

    double horizon_tokens() const noexcept { return horizon_tokens_; }

    // Moves planned and not yet carried out, plus 1 while anything has not been planned for or is being finished.
    uint64_t pending() const noexcept;

  private:
    void     wake(bool urgent) noexcept;
    void     run() noexcept;
    void     pass();
    void     carry_out(std::vector<move> moves);
    void     promote(uint32_t expert);
    void     demote(uint32_t expert);
    void     give_cold_back();
    void     give_back(std::vector<uint32_t> experts);
    void     give_back_run(uint32_t first, uint32_t n);
    uint32_t untouched_beside(uint32_t expert, int step) const;
    bool     outdated(size_t n_done) const; // needs the mutex

    const layout & lay_;
    page_table &   table_;
    score &        scores_;
    stats &        stats_;
    device &       device_;
    const policy & policy_;
    const double   horizon_tokens_;

    std::atomic<uint64_t> budget_;

    mutable std::mutex      mutex_;
    std::condition_variable changed_;
    uint64_t                requested_      = 1; // the load of the model is the first request
    uint64_t                urgent_         = 0;
    uint64_t                planned_        = 0; // requests up to this one have been planned for
    uint64_t                planned_urgent_ = 0;
    uint64_t                left_           = 0;
    bool                    busy_           = false;
    bool                    stopping_       = false;

    // of the mover's thread
    bool                  first_pass_ = true;
    evidence              seen_;
    std::vector<uint8_t>  resident_; // as the device was told; the page table follows
    std::vector<uint64_t> locked_;   // bytes, by expert

    std::thread thread_;
};

} // namespace moe_pager
