#include "tier-ram.h"

#include <algorithm>
#include <cerrno>
#include <sstream>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#endif

namespace moe_pager {

byte_range inner_pages(uintptr_t begin, uint64_t size, uint64_t page_bytes) {
    byte_range inner;
    inner.begin = (begin + page_bytes - 1) / page_bytes * page_bytes;
    inner.end   = (begin + size) / page_bytes * page_bytes;
    if (inner.end < inner.begin) {
        inner.end = inner.begin;
    }
    return inner;
}

file_mappings::file_mappings(std::istream & maps) {
    for (std::string line; std::getline(maps, line);) {
        // begin-end perms offset device inode path
        std::istringstream fields(line);
        std::string        range, perms, offset, device;
        uint64_t           inode = 0;
        // Shared and read-only: nothing can be in these pages that is not in the file, so giving them back loses nothing.
        if (!(fields >> range >> perms >> offset >> device >> inode) || inode == 0 || perms.size() != 4 ||
            perms[0] != 'r' || perms[1] != '-' || perms[3] != 's') {
            continue;
        }
        const size_t dash = range.find('-');
        if (dash == std::string::npos) {
            continue;
        }
        byte_range found;
        found.begin = (uintptr_t) std::stoull(range.substr(0, dash), nullptr, 16);
        found.end   = (uintptr_t) std::stoull(range.substr(dash + 1), nullptr, 16);
        // the kernel lists them in order of address; a mapping is split where its flags differ
        if (!ranges_.empty() && ranges_.back().end == found.begin) {
            ranges_.back().end = found.end;
        } else {
            ranges_.push_back(found);
        }
    }
}

bool file_mappings::contains(const void * data, uint64_t size) const {
    const uintptr_t begin = (uintptr_t) data;
    return std::any_of(ranges_.begin(), ranges_.end(), [&](const byte_range & range) {
        return range.begin <= begin && begin < range.end && size <= range.end - begin;
    });
}

#if defined(__linux__)

namespace {

class tier_ram : public device {
  public:
    tier_ram(const layout & lay, page_table & table)
        : lay_(lay), table_(table), page_bytes_((uint64_t) sysconf(_SC_PAGESIZE)) {}

    promotion promote(uint32_t expert) noexcept override {
        promotion result;
        for_each_slab(expert, 1, [&](const byte_range & pages) {
            int error = advise(pages, MADV_POPULATE_READ);
            if (error == EINVAL) { // before Linux 5.14
                error = advise(pages, MADV_WILLNEED);
            }
            if (error != 0) {
                result.populate_error = error;
            } else if (mlock((void *) pages.begin, pages.size()) == 0) {
                result.locked_bytes += pages.size();
            } else {
                result.lock_error = errno;
            }
        });
        if (result.populate_error == 0) {
            table_.set_resident(expert, true);
        }
        return result;
    }

    void demote(uint32_t expert) noexcept override {
        table_.set_resident(expert, false);
        for_each_slab(expert, 1, [](const byte_range & pages) { munlock((void *) pages.begin, pages.size()); });
    }

    int give_back(uint32_t first, uint32_t n) noexcept override {
        int result = 0;
        for_each_slab(first, n, [&](const byte_range & pages) {
            const int error = advise(pages, MADV_DONTNEED);
            result          = error != 0 ? error : result;
        });
        return result;
    }

  private:
    static int advise(const byte_range & pages, int advice) noexcept {
        return madvise((void *) pages.begin, pages.size(), advice) == 0 ? 0 : errno;
    }

    // the whole pages of n neighbouring experts, in each tensor of their layer: there they lie side by side
    template <typename F>
    void for_each_slab(uint32_t first, uint32_t n, F && f) const noexcept {
        const layout_layer & layer = lay_.layer_of(first);
        if (!layer.movable) {
            return;
        }
        for (const auto & tensor : layer.tensors) {
            const uintptr_t  begin = (uintptr_t) tensor.data + (first - layer.first) * tensor.slab_bytes;
            const byte_range pages = inner_pages(begin, n * tensor.slab_bytes, page_bytes_);
            if (pages.size() > 0) {
                f(pages);
            }
        }
    }

    const layout & lay_;
    page_table &   table_;
    const uint64_t page_bytes_;
};

} // namespace

std::unique_ptr<device> make_tier_ram(const layout & lay, page_table & table) {
    return std::make_unique<tier_ram>(lay, table);
}

#else

// Elsewhere no layer is movable: /proc/self/maps is not there to say so.
std::unique_ptr<device> make_tier_ram(const layout &, page_table &) {
    class no_device : public device {
        promotion promote(uint32_t) noexcept override { return {}; }

        void demote(uint32_t) noexcept override {}

        int give_back(uint32_t, uint32_t) noexcept override { return 0; }
    };

    return std::make_unique<no_device>();
}

#endif

} // namespace moe_pager
