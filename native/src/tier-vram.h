#pragma once

// The VRAM tier: experts whose home is pinned host memory, and the frames that hold some of them on the device.
//
//   entry     8 bytes per (tensor, expert), in a device array: the address to read the slab from; bit 0 is set while
//             that is the home
//   frame     room for one expert. Frames come from one arena, taken when the first ubatch begins: by then the context
//             with its KV cache and compute buffers is there, and what is left of the budget is known, not estimated.
//             Experts of one size form a class; the arena is shared out in proportion to the classes' bytes
//   in flight a stream on which kernels were launched that have not been waited for
//
// Three rules make reads safe without a lock on the device:
//   1. the device's entries change only while nothing is in flight ("published"). So all kernels of an ubatch, and the
//      host that counts for it, see one state of the table;
//   2. a frame is written only while no published entry points at it: a demoted expert's frame is free once its entry
//      has been published;
//   3. an entry points at a frame only after the copy into it has arrived.
//
// Who does what, all under one mutex but for the copies themselves:
//   mover     promote (copies first, then changes the image of the entries), demote, settle
//   compute   launch, idle; the thread that finds nothing in flight publishes what the mover has changed
//   mover     publishes in settle() when nothing is in flight; else it waits there for the compute thread to do it

#include "device.h"
#include "gpu.h"
#include "layout.h"
#include "page-table.h"

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace moe_pager {

struct vram_budget {
    uint64_t process_bytes = 0; // of the whole process, as nvidia-smi shows it
    uint64_t others_bytes  = 0; // in use by other processes when this one started
    uint64_t reserve_bytes = 0; // left free for what the backend takes while it computes
    uint64_t staging_bytes = 0; // two buffers that large tensors pass through
};

class tier_vram : public device {
  public:
    tier_vram(const layout & lay, page_table & table, gpu & dev, const vram_budget & budget);

    // mover

    promotion promote(uint32_t expert) noexcept override;
    void      demote(uint32_t expert) noexcept override;
    void      settle() noexcept override;
    void      stop() noexcept override;

    int give_back(uint32_t, uint32_t) noexcept override { return 0; }

    bool gives_back() const noexcept override { return false; }

    uint64_t room(uint32_t size_class, uint64_t budget_bytes) const noexcept override;

    // compute thread

    // takes the arena if that has not been done; true when it was taken by this call
    bool open() noexcept;

    bool has_changed() const noexcept; // something waits to be published

    void launch(void * stream) noexcept;
    void idle(void * stream) noexcept;

    // of a weight; null for one whose experts do not move
    const uint64_t * entries(const void * key) const noexcept;

    // what a published entry says, for the thread that has launched: true if the expert is at its home
    bool at_home(const void * key, uint32_t id) const noexcept;

    // Two buffers of that many bytes each; null if there was no room. Set by open().
    char * staging(int which) const noexcept { return staging_[which]; }

    // control

    struct report {
        uint64_t    budget_bytes  = 0;
        uint64_t    arena_bytes   = 0;
        uint64_t    staging_bytes = 0; // both
        uint64_t    frames        = 0;
        uint64_t    publications  = 0;
        std::string reason; // why there are fewer frames than asked for; empty if all is well
    };

    report get_report() const;

  private:
    static constexpr uint32_t no_frame = UINT32_MAX;

    struct size_class {
        uint64_t              frame_bytes = 0;
        uint64_t              total_bytes = 0; // of all its experts
        uint32_t              n_frames    = 0;
        char *                base        = nullptr;
        std::vector<uint32_t> free;
    };

    struct weight {
        uint32_t row;
        uint64_t first_entry;
        uint64_t offset; // in a frame
    };

    void point(uint32_t expert, const char * frame); // needs the mutex; null: to its home
    void publish() noexcept;                         // needs the mutex, nothing in flight
    void share_out(char * arena, uint64_t bytes);

    const layout &    lay_;
    page_table &      table_;
    gpu &             gpu_;
    const vram_budget budget_;

    std::unordered_map<const void *, weight> weights_;
    uint64_t *                               device_entries_ = nullptr;
    uint64_t *                               image_          = nullptr; // pinned
    uint64_t                                 n_entries_      = 0;
    char *                                   staging_[2]     = { nullptr, nullptr };

    mutable std::mutex      mutex_;
    std::condition_variable published_;
    std::set<void *>        in_flight_;
    bool                    opened_   = false;
    bool                    dirty_    = false;
    bool                    stopping_ = false;
    std::vector<size_class> classes_;
    std::vector<uint32_t>   frame_of_; // by expert
    std::vector<uint32_t>   arriving_; // experts whose new entry has not been published
    std::vector<uint32_t>   leaving_;  // likewise, frames of demoted experts: expert, frame in turn
    report                  report_;
};

} // namespace moe_pager
