#pragma once

// What the VRAM tier needs of a GPU. gpu-cuda.cu does it with CUDA; the tests do it in memory.
//
// Any thread may call. Nothing throws; what the driver refuses comes back as null or false, with the reason kept for
// last_error().

#include <cstdint>
#include <string>

namespace moe_pager {

class gpu {
  public:
    virtual ~gpu() = default;

    // memory of the device that is in use, by this process and by others
    virtual uint64_t used_bytes() noexcept = 0;

    // device memory, zeroed, aligned to 256 bytes; freed with this object
    virtual char * allocate(uint64_t bytes) noexcept = 0;

    // host memory that kernels can write to, zeroed; `device` is its address for kernels; freed with this object
    virtual char * allocate_host(uint64_t bytes, char *& device) noexcept = 0;

    // starts a copy from pinned memory to the device; `from` must stay as it is until finish_copies returned
    virtual bool start_copy(char * to, const void * from, uint64_t bytes) noexcept = 0;

    // returns when all copies that were started have arrived, for every kernel launched from then on
    virtual bool finish_copies() noexcept = 0;

    // In the order of `stream`, moves what kernels wrote into the rows of a log (pick-log.h) to the host's copy of it, and
    // sets the numbers of tokens back to 0. `stride` in ids.
    virtual bool drain_log(
        int32_t * from, int32_t * to, uint32_t n_rows, uint64_t stride, uint32_t n_used, void * stream) noexcept = 0;

    // returns when all work of a stream is done
    virtual void wait(void * stream) noexcept = 0;

    virtual std::string last_error() const = 0;
};

} // namespace moe_pager
