#pragma once

// What a tier of memory can do with an expert. Called by the mover's thread only (but for stop), one call at a time,
// never with a lock held. A call may take as long as the disk does. It reports what the system refused and goes on; it never throws.

#include <cstdint>

namespace moe_pager {

struct promotion {
    uint64_t locked_bytes   = 0;
    int      populate_error = 0; // errno; not 0: the expert did not become resident
    int      lock_error     = 0; // errno; the expert is resident, but the kernel may drop its pages
};

class device {
  public:
    virtual ~device() = default;

    // When the expert can be read from its new place, the device says so in the page table: that may be later.
    virtual promotion promote(uint32_t expert) noexcept = 0;

    // of an expert that was promoted, or whose promotion failed: it need not be kept any more. Says so in the page table
    // before the expert's place is used for anything else.
    virtual void demote(uint32_t expert) noexcept = 0;

    // no more moves for now: make what was moved visible
    virtual void settle() noexcept {}

    // ends a promotion that waits for something
    virtual void stop() noexcept {}

    // bytes of experts of one size class that a budget for all of them leaves room for
    virtual uint64_t room(uint32_t /* size_class */, uint64_t budget_bytes) const noexcept { return budget_bytes; }

    // does memory that experts were read from have to be given back?
    virtual bool gives_back() const noexcept { return true; }

    // gives back the memory of n neighbouring experts of one layer, none of which is resident; errno, or 0
    virtual int give_back(uint32_t first, uint32_t n) noexcept = 0;
};

} // namespace moe_pager
