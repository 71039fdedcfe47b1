#include "gpu-cuda.h"

#include "moe-pager.cuh"

#include <cuda_runtime.h>

#include <algorithm>

namespace moe_pager {

namespace {

constexpr int log_threads     = 256;
constexpr int gather_threads  = 256;
constexpr int gather_chunks   = 16; // blocks per expert: enough requests in flight for the link
constexpr int gather_unrolled = 4;

__global__ void
log_kernel(const int32_t * ids, int n_used, int n_tokens, int64_t row_stride, int n_tokens_max, int32_t * row) {
    const int n = min(n_tokens, n_tokens_max) * n_used;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        row[1 + i] = ids[(int64_t) (i / n_used) * row_stride + i % n_used];
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        row[0] = n_tokens;
    }
}

// ids == nullptr: gathers the experts that have a frame. Else: those that were picked, wherever they are.
// slab_units: 16-byte units of one slab
__global__ void gather_kernel(const uint64_t * entries,
                              const int32_t *  ids,
                              int              n_used,
                              int              n_tokens,
                              int64_t          row_stride,
                              uint4 *          to,
                              int64_t          slab_units) {
    const int      expert = blockIdx.y;
    const uint64_t entry  = entries[expert];
    if (ids == nullptr) {
        if (entry & 1) {
            return;
        }
    } else {
        bool picked = false;
        for (int i = threadIdx.x; i < n_used * n_tokens; i += blockDim.x) {
            picked = picked || ids[(int64_t) (i / n_used) * row_stride + i % n_used] == expert;
        }
        if (!__syncthreads_or(picked)) {
            return;
        }
    }
    const uint4 * from = (const uint4 *) (entry & ~(uint64_t) 1);
    to += expert * slab_units;

    const int64_t step = (int64_t) gridDim.x * blockDim.x;
    int64_t       i    = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + (gather_unrolled - 1) * step < slab_units; i += gather_unrolled * step) {
        uint4 taken[gather_unrolled];
#pragma unroll
        for (int k = 0; k < gather_unrolled; ++k) {
            taken[k] = from[i + k * step];
        }
#pragma unroll
        for (int k = 0; k < gather_unrolled; ++k) {
            to[i + k * step] = taken[k];
        }
    }
    for (; i < slab_units; i += step) {
        to[i] = from[i];
    }
}

// Events order the two streams: full_ is recorded on the copying stream when a buffer has been filled, free_ on the
// compute stream when the kernels that read it have been launched.
class stager_cuda : public stager {
  public:
    explicit stager_cuda(const tier_vram & tier) : tier_(tier) {}

    ~stager_cuda() override;

    const void * start(const tensor_record & weight, const device_ids & ids, void * stream) noexcept override;
    void         finish(void * stream) noexcept override;

    void graph_begins() noexcept override { fresh_ = true; }

  private:
    bool open();
    void copy(const tensor_record & weight, char * to, cudaStream_t stream);

    const tier_vram & tier_;
    cudaStream_t      stream_  = nullptr; // of the copies
    cudaEvent_t       full_[2] = { nullptr, nullptr };
    cudaEvent_t       free_[2] = { nullptr, nullptr };
    int               which_   = 0;
    bool              in_use_  = false;
    bool              fresh_   = true;
};

stager_cuda::~stager_cuda() {
    for (int i = 0; i < 2; ++i) {
        if (full_[i] != nullptr) {
            (void) cudaEventDestroy(full_[i]);
            (void) cudaEventDestroy(free_[i]);
        }
    }
    if (stream_ != nullptr) {
        (void) cudaStreamDestroy(stream_);
    }
    (void) cudaGetLastError();
}

bool stager_cuda::open() {
    if (stream_ != nullptr) {
        return true;
    }
    bool made = true;
    for (int i = 0; i < 2; ++i) {
        made = made && cudaEventCreateWithFlags(&full_[i], cudaEventDisableTiming) == cudaSuccess &&
               cudaEventCreateWithFlags(&free_[i], cudaEventDisableTiming) == cudaSuccess;
    }
    if (!made || cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) != cudaSuccess) {
        (void) cudaGetLastError();
        stream_ = nullptr;
        return false;
    }
    return true;
}

const void * stager_cuda::start(const tensor_record & weight, const device_ids & ids, void * stream) noexcept {
    char * const     to      = tier_.staging(which_);
    const uint64_t * entries = tier_.entries(weight.key);
    if (to == nullptr || entries == nullptr) {
        return nullptr;
    }
    if (copies(weight.n_expert, ids)) {
        if (!open()) {
            return nullptr;
        }
        copy(weight, to, (cudaStream_t) stream);
        in_use_ = true;
    } else {
        const dim3 blocks(gather_chunks, weight.n_expert);
        gather_kernel<<<blocks, gather_threads, 0, (cudaStream_t) stream>>>(entries,
                                                                            ids.data,
                                                                            ids.n_used,
                                                                            ids.n_tokens,
                                                                            ids.row_stride,
                                                                            (uint4 *) to,
                                                                            (int64_t) (weight.slab_bytes / 16));
        which_ ^= 1;
    }
    return to;
}

void stager_cuda::copy(const tensor_record & weight, char * to, cudaStream_t stream) {
    if (fresh_) { // whatever read the buffers before was launched on `stream` before this point
        (void) cudaEventRecord(free_[0], stream);
        (void) cudaEventRecord(free_[1], stream);
        fresh_ = false;
    }
    (void) cudaStreamWaitEvent(stream_, free_[which_], 0);

    bool any_resident = false;
    for (uint32_t id = 0; id < weight.n_expert;) {
        if (!tier_.at_home(weight.key, id)) {
            any_resident = true;
            ++id;
            continue;
        }
        const uint32_t first = id;
        while (id < weight.n_expert && tier_.at_home(weight.key, id)) {
            ++id;
        }
        const uint64_t bytes = (id - first) * weight.slab_bytes;
        (void) cudaMemcpyAsync(to + first * weight.slab_bytes,
                               (const char *) weight.data + first * weight.slab_bytes,
                               bytes,
                               cudaMemcpyHostToDevice,
                               stream_);
    }
    if (any_resident) {
        const dim3 blocks(gather_chunks, weight.n_expert);
        gather_kernel<<<blocks, gather_threads, 0, stream_>>>(
            tier_.entries(weight.key), nullptr, 0, 0, 0, (uint4 *) to, (int64_t) (weight.slab_bytes / 16));
    }
    (void) cudaEventRecord(full_[which_], stream_);
    (void) cudaStreamWaitEvent(stream, full_[which_], 0);
}

void stager_cuda::finish(void * stream) noexcept {
    if (in_use_) {
        (void) cudaEventRecord(free_[which_], (cudaStream_t) stream);
        which_ ^= 1;
        in_use_ = false;
    }
}

} // namespace

void log_picks(const device_ids & ids, int32_t * row, uint32_t n_tokens_max, void * stream) {
    const int64_t n      = std::max<int64_t>(1, ids.n_picks());
    const int     blocks = (int) std::min<int64_t>(64, (n + log_threads - 1) / log_threads);
    log_kernel<<<blocks, log_threads, 0, (cudaStream_t) stream>>>(
        ids.data, ids.n_used, ids.n_tokens, ids.row_stride, (int) n_tokens_max, row);
}

std::unique_ptr<stager> make_stager_cuda(const tier_vram & tier) {
    return std::make_unique<stager_cuda>(tier);
}

} // namespace moe_pager
