#include "gpu-cuda.h"

#include "parallel.h"

#include <cuda_runtime.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include <sys/mman.h>

namespace moe_pager {

namespace {

constexpr int drain_threads = 256;

// one block a row
__global__ void drain_kernel(int32_t * from, int32_t * to, uint64_t stride, uint32_t n_used) {
    from += blockIdx.x * stride;
    to += blockIdx.x * stride;
    const int32_t  n_tokens = from[0];
    const uint64_t n        = min(1 + (uint64_t) n_tokens * n_used, stride); // a row does not hold more
    for (uint64_t i = threadIdx.x; i < n; i += blockDim.x) {
        to[i] = from[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        from[0] = 0;
    }
}

class gpu_cuda : public gpu {
  public:
    ~gpu_cuda() override {
        for (void * memory : device_memory_) {
            (void) cudaFree(memory);
        }
        for (void * memory : host_memory_) {
            (void) cudaFreeHost(memory);
        }
        (void) cudaGetLastError();
    }

    uint64_t used_bytes() noexcept override {
        size_t free = 0, total = 0;
        return ok(cudaMemGetInfo(&free, &total)) ? total - free : 0;
    }

    char * allocate(uint64_t bytes) noexcept override {
        void * memory = nullptr;
        if (!ok(cudaMalloc(&memory, bytes))) {
            return nullptr;
        }
        keep(device_memory_, memory);
        // tiled kernels read a little beyond a tensor's end: what they find there must not be a NaN
        return ok(cudaMemset(memory, 0, bytes)) ? (char *) memory : nullptr;
    }

    char * allocate_host(uint64_t bytes, char *& device) noexcept override {
        void * memory = nullptr;
        if (!ok(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable))) {
            return nullptr;
        }
        keep(host_memory_, memory);
        std::memset(memory, 0, bytes);
        void * mapped = nullptr;
        if (!ok(cudaHostGetDevicePointer(&mapped, memory, 0))) {
            return nullptr;
        }
        device = (char *) mapped;
        return (char *) memory;
    }

    bool start_copy(char * to, const void * from, uint64_t bytes) noexcept override {
        return ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, cudaStreamPerThread));
    }

    bool finish_copies() noexcept override { return ok(cudaStreamSynchronize(cudaStreamPerThread)); }

    bool drain_log(int32_t * from,
                   int32_t * to,
                   uint32_t  n_rows,
                   uint64_t  stride,
                   uint32_t  n_used,
                   void *    stream) noexcept override {
        drain_kernel<<<n_rows, drain_threads, 0, (cudaStream_t) stream>>>(from, to, stride, n_used);
        return ok(cudaGetLastError());
    }

    void wait(void * stream) noexcept override { ok(cudaStreamSynchronize((cudaStream_t) stream)); }

    std::string last_error() const override {
        std::lock_guard<std::mutex> lock(mutex_);
        return last_error_;
    }

  private:
    bool ok(cudaError_t error) noexcept {
        if (error == cudaSuccess) {
            return true;
        }
        (void) cudaGetLastError(); // a refusal must not look like a failure of the next kernel
        std::lock_guard<std::mutex> lock(mutex_);
        last_error_ = cudaGetErrorString(error);
        return false;
    }

    void keep(std::vector<void *> & list, void * memory) {
        std::lock_guard<std::mutex> lock(mutex_);
        list.push_back(memory);
    }

    mutable std::mutex  mutex_;
    std::vector<void *> device_memory_;
    std::vector<void *> host_memory_;
    std::string         last_error_;
};

} // namespace

std::unique_ptr<gpu> make_gpu_cuda() {
    return std::make_unique<gpu_cuda>();
}

// Registering pages that are there already takes a fraction of the time that cudaHostAlloc takes to make them.
void * allocate_home(uint64_t bytes, std::string & reason) {
    int device = 0, same_address = 0;
    (void) cudaGetDevice(&device);
    (void) cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, device);
    if (!same_address) {
        reason = "this GPU cannot read host memory at the host's own addresses";
        return nullptr;
    }
    void * memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        reason = std::strerror(errno);
        return nullptr;
    }
    (void) madvise(memory, bytes, MADV_HUGEPAGE);
    for_each_part(bytes, [&](uint64_t begin, uint64_t end) { std::memset((char *) memory + begin, 0, end - begin); });
    const cudaError_t error = cudaHostRegister(memory, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
    if (error != cudaSuccess) {
        (void) cudaGetLastError();
        munmap(memory, bytes);
        reason = cudaGetErrorString(error);
        return nullptr;
    }
    return memory;
}

void free_home(void * memory, uint64_t bytes) {
    (void) cudaHostUnregister(memory);
    (void) cudaGetLastError();
    munmap(memory, bytes);
}

} // namespace moe_pager
