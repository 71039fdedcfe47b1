#pragma once

// A GPU in memory: allocations come out of a budget, copies are done at once or held back at a gate. And weights for it.

#include "gpu.h"
#include "simulated.h"

#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace moe_pager {

class simulated_gpu : public gpu {
  public:
    explicit simulated_gpu(uint64_t bytes) : bytes_(bytes) {}

    uint64_t used_bytes() noexcept override { return used_; }

    char * allocate(uint64_t bytes) noexcept override {
        if (used_ + bytes > bytes_) {
            return nullptr;
        }
        used_ += bytes;
        return take(bytes);
    }

    char * allocate_host(uint64_t bytes, char *& device) noexcept override {
        device = take(bytes);
        return device;
    }

    bool start_copy(char * to, const void * from, uint64_t bytes) noexcept override {
        std::unique_lock<std::mutex> lock(mutex_);
        if (bytes == held_bytes_) {
            ++n_held_;
            changed_.notify_all();
            changed_.wait(lock, [this] { return held_bytes_ == 0; });
        }
        if (broken_) {
            return false;
        }
        std::memcpy(to, from, bytes);
        return true;
    }

    bool finish_copies() noexcept override { return true; }

    bool drain_log(int32_t * from, int32_t * to, uint32_t n_rows, uint64_t stride, uint32_t, void *) noexcept override {
        for (uint32_t row = 0; row < n_rows; ++row) {
            std::memcpy(to + row * stride, from + row * stride, stride * sizeof(int32_t));
            from[row * stride] = 0;
        }
        return true;
    }

    void wait(void *) noexcept override { ++n_waits; }

    int n_waits = 0;

    std::string last_error() const override { return "out of memory"; }

    // copies of so many bytes wait until release()
    void hold(uint64_t bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        held_bytes_ = bytes;
        n_held_     = 0;
    }

    void wait_held() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return n_held_ > 0; });
    }

    void release() {
        std::lock_guard<std::mutex> lock(mutex_);
        held_bytes_ = 0;
        changed_.notify_all();
    }

    void break_copies(bool broken) {
        std::lock_guard<std::mutex> lock(mutex_);
        broken_ = broken;
    }

    void occupy(uint64_t bytes) { used_ += bytes; }

  private:
    char * take(uint64_t bytes) {
        memory_.push_back(std::make_unique<char[]>(bytes + 256));
        std::memset(memory_.back().get(), 0, bytes + 256);
        return (char *) (((uintptr_t) memory_.back().get() + 255) / 256 * 256);
    }

    const uint64_t                       bytes_;
    uint64_t                             used_ = 0;
    std::vector<std::unique_ptr<char[]>> memory_;

    std::mutex              mutex_;
    std::condition_variable changed_;
    uint64_t                held_bytes_ = 0;
    int                     n_held_     = 0;
    bool                    broken_     = false;
};

inline constexpr uint64_t slab = 1024;

// layers of gate, up and down with weights that name their expert: every byte of a slab is its number
struct weights {
    explicit weights(uint32_t n_layers, uint32_t n_expert, uint32_t big_from = UINT32_MAX)
        : records(make_tensors(n_layers, n_expert, slab)) {
        for (size_t t = 0; t < records.size(); ++t) {
            tensor_record & record = records[t];
            record.place           = memory::pinned;
            record.quantized       = true;
            record.type            = "q4_K";
            record.slab_bytes      = t / 3 >= big_from ? 2 * slab : slab;
            data.emplace_back(record.slab_bytes * n_expert);
            for (uint32_t id = 0; id < n_expert; ++id) {
                std::memset(data.back().data() + id * record.slab_bytes, value(t, id), record.slab_bytes);
            }
            record.data = data.back().data();
        }
    }

    static int value(size_t tensor, uint32_t id) { return (int) ((tensor * 31 + id * 7 + 1) & 0xff); }

    std::vector<std::vector<char>> data;
    std::vector<tensor_record>     records;
};

} // namespace moe_pager
