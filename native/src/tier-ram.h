#pragma once

// The RAM tier: experts whose home is the model file's mapping.
//
//   promote    read the slabs' pages in (MADV_POPULATE_READ, else MADV_WILLNEED) and lock them
//   demote     unlock
//   give back  MADV_DONTNEED: RSS falls, the page cache is the kernel's affair
//
// Only whole pages inside a slab, or inside a run of neighbouring slabs, are touched: the page that two neighbours
// share belongs to neither alone. Never applied to anonymous memory, where MADV_DONTNEED would zero the weights: the
// layout tells which layers lie in a file mapping.

#include "device.h"
#include "layout.h"
#include "page-table.h"

#include <cstdint>
#include <istream>
#include <memory>
#include <vector>

namespace moe_pager {

struct byte_range {
    uintptr_t begin = 0;
    uintptr_t end   = 0;

    uint64_t size() const { return end - begin; }
};

// the whole pages inside [begin, begin + size); empty (begin == end) if there is none
byte_range inner_pages(uintptr_t begin, uint64_t size, uint64_t page_bytes);

// the process's mappings that are backed by a file and cannot be written to
class file_mappings {
  public:
    explicit file_mappings(std::istream & maps); // the text of /proc/self/maps

    bool contains(const void * data, uint64_t size) const;

  private:
    std::vector<byte_range> ranges_; // sorted; neighbours are joined
};

std::unique_ptr<device> make_tier_ram(const layout & lay, page_table & table);

} // namespace moe_pager
