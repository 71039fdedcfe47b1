// The RAM tier on a real mapping of a real file.

#include "check.h"
#include "simulated.h"
#include "tier-ram.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

using namespace moe_pager;

namespace {

const uint64_t page = (uint64_t) sysconf(_SC_PAGESIZE);

// a read-only mapping of a file whose byte i is i % 251
struct mapped_file {
    explicit mapped_file(uint64_t n_bytes, int protection = PROT_READ) : size(n_bytes) {
        std::vector<char> content(size);
        for (uint64_t i = 0; i < size; ++i) {
            content[i] = (char) (i % 251);
        }
        FILE * file = std::tmpfile();
        CHECK(file != nullptr && std::fwrite(content.data(), 1, size, file) == size && std::fflush(file) == 0);
        data = (char *) mmap(nullptr, size, protection, MAP_SHARED, fileno(file), 0);
        CHECK(data != MAP_FAILED);
        std::fclose(file);
    }

    ~mapped_file() { munmap(data, size); }

    bool intact() const {
        for (uint64_t i = 0; i < size; ++i) {
            if (data[i] != (char) (i % 251)) {
                return false;
            }
        }
        return true;
    }

    char *   data;
    uint64_t size;
};

// pages of the range that are mapped into this process, by /proc/self/pagemap
uint64_t present_pages(const char * data, uint64_t size) {
    std::vector<uint64_t> entries(size / page);
    const int             pagemap = open("/proc/self/pagemap", O_RDONLY);
    const ssize_t         n_bytes = (ssize_t) (entries.size() * sizeof(entries[0]));
    CHECK(pread(pagemap, entries.data(), (size_t) n_bytes, (off_t) ((uintptr_t) data / page * sizeof(entries[0]))) ==
          n_bytes);
    close(pagemap);
    uint64_t n = 0;
    for (const uint64_t entry : entries) {
        n += entry >> 63;
    }
    return n;
}

file_mappings read_own_mappings() {
    std::ifstream maps("/proc/self/maps");
    return file_mappings(maps);
}

} // namespace

TEST(tier_ram, only_whole_pages_inside_a_slab_are_touched) {
    CHECK(inner_pages(4096, 8192, 4096).begin == 4096 && inner_pages(4096, 8192, 4096).size() == 8192);
    CHECK(inner_pages(4097, 8192, 4096).begin == 8192 && inner_pages(4097, 8192, 4096).size() == 4096);
    CHECK(inner_pages(4095, 8194, 4096).begin == 4096 && inner_pages(4095, 8194, 4096).size() == 8192);
    CHECK(inner_pages(4097, 4096, 4096).size() == 0);
    CHECK(inner_pages(4097, 10, 4096).size() == 0);
}

TEST(tier_ram, the_kernels_list_of_mappings_is_understood) {
    std::istringstream  maps("00001000-00002000 r--s 00000000 08:01 42  /models/a b.gguf\n"
                             "00002000-00004000 r--s 00001000 08:01 42  /models/a b.gguf\n"
                             "00005000-00006000 rw-p 00000000 08:01 42  /models/a.gguf\n"
                             "00006000-00007000 r--p 00000000 00:00 0\n"
                             "00007000-00008000 r-xp 00000000 08:01 43  /lib/x.so\n"
                             "nonsense\n");
    const file_mappings mappings(maps);
    CHECK(mappings.contains((void *) 0x1000, 0x3000));
    CHECK(mappings.contains((void *) 0x1fff, 2));
    CHECK(!mappings.contains((void *) 0x1000, 0x3001));
    CHECK(!mappings.contains((void *) 0x5000, 1));
    CHECK(!mappings.contains((void *) 0x6000, 1));
    CHECK(!mappings.contains((void *) 0x0fff, 2));
}

TEST(tier_ram, a_file_mapping_is_told_from_other_memory) {
    const mapped_file   file(16 * page);
    const mapped_file   writable(16 * page, PROT_READ | PROT_WRITE);
    std::vector<char>   heap(16 * page);
    const file_mappings mappings = read_own_mappings();
    CHECK(mappings.contains(file.data, file.size));
    CHECK(!mappings.contains(writable.data, writable.size));
    CHECK(!mappings.contains(heap.data(), heap.size()));
}

TEST(tier_ram, promotion_reads_pages_in_and_demotion_gives_them_back) {
    // two experts whose slabs share a page: 3.5 pages each
    const uint64_t    slab = 3 * page + page / 2;
    const mapped_file file(8 * page);
    auto              tensors = make_tensors(1, 2, slab);
    tensors.resize(1);
    tensors[0].data = file.data;
    const layout lay(
        tensors, 1, [&](const void * data, uint64_t size) { return read_own_mappings().contains(data, size); });
    CHECK(lay.fixed_bytes() == 0);
    page_table table(lay);
    const auto tier = make_tier_ram(lay, table);

    madvise(file.data, file.size, MADV_DONTNEED);
    CHECK(present_pages(file.data, file.size) == 0);

    const promotion promoted = tier->promote(0);
    CHECK(promoted.populate_error == 0);
    CHECK(promoted.locked_bytes == (promoted.lock_error == 0 ? 3 * page : 0));
    CHECK(present_pages(file.data, 3 * page) == 3);

    const promotion second = tier->promote(1); // its slab begins in the middle of page 3 and ends with page 6
    CHECK(second.populate_error == 0);
    CHECK(present_pages(file.data + 4 * page, 3 * page) == 3);
    CHECK(file.intact());

    tier->demote(0);
    CHECK(tier->give_back(0, 1) == 0);
    CHECK(present_pages(file.data, 3 * page) == 0);
    CHECK(present_pages(file.data + 4 * page, 3 * page) == 3); // the neighbour keeps its pages

    tier->demote(1);
    CHECK(tier->give_back(1, 1) == 0);
    CHECK(present_pages(file.data + 4 * page, 3 * page) == 0);

    CHECK(file.intact()); // reads all pages in again
    CHECK(tier->give_back(0, 2) == 0);
    CHECK(present_pages(file.data, 7 * page) == 0); // with the page that the two share
    CHECK(file.intact());
}

TEST(tier_ram, memory_that_is_no_file_is_never_given_back) {
    const uint64_t    slab = 4 * page;
    std::vector<char> heap(3 * slab, 'x');
    auto              tensors = make_tensors(1, 2, slab);
    tensors.resize(1);
    tensors[0].data = heap.data();
    const layout lay(
        tensors, 1, [&](const void * data, uint64_t size) { return read_own_mappings().contains(data, size); });
    page_table table(lay);
    const auto tier = make_tier_ram(lay, table);
    tier->promote(0);
    tier->demote(0);
    CHECK(tier->give_back(0, 2) == 0);
    CHECK(heap == std::vector<char>(3 * slab, 'x'));
}
