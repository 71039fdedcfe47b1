#include "gpu-cuda.h"

#include <cuda_runtime.h>

#include <cstring>
#include <mutex>
#include <vector>

namespace moe_pager {

namespace {

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

void * allocate_home(uint64_t bytes, std::string & reason) {
    void *            memory = nullptr;
    const cudaError_t error  = cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
    if (error != cudaSuccess) {
        (void) cudaGetLastError();
        reason = cudaGetErrorString(error);
        return nullptr;
    }
    return memory;
}

void free_home(void * memory) {
    (void) cudaFreeHost(memory);
    (void) cudaGetLastError();
}

} // namespace moe_pager
