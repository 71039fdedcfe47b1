// The buffer type that expert tensors are loaded into when they are paged: pinned host memory that belongs to the GPU.
//
// It is not the CUDA type (whose async copies assert their own) and not host memory (the scheduler would give its
// tensors to the CPU). Kernels that know nothing of pages read it over the link, which is slow and right.

#include "moe-pager.h"

#include "gpu-cuda.h"
#include "layout.h"
#include "pager.h"
#include "parallel.h"

#include "ggml-backend-impl.h"
#include "ggml.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

namespace moe_pager {

namespace {

constexpr int64_t row_padding = 512;      // elements; as ggml-cuda pads rows of quantised tensors
constexpr size_t  tail_bytes  = 64 << 10; // a block of kernels reads whole rows beyond the last one

const char * name_of(ggml_backend_buffer_type_t) {
    return "CUDA_Paged";
}

void free_buffer(ggml_backend_buffer_t buffer) {
    if (buffer->context != nullptr) {
        free_home(buffer->context, buffer->size + tail_bytes);
    }
}

void * base_of(ggml_backend_buffer_t buffer) {
    return buffer->context;
}

void memset_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    std::memset((char *) tensor->data + offset, value, size);
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    for_each_part(size, [&](uint64_t begin, uint64_t end) {
        std::memcpy((char *) tensor->data + offset + begin, (const char *) data + begin, end - begin);
    });
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    std::memcpy(data, (const char *) tensor->data + offset, size);
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(buffer->context, value, buffer->size);
}

const ggml_backend_buffer_i buffer_interface = {
    /* .free_buffer   = */ free_buffer,
    /* .get_base      = */ base_of,
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ memset_tensor,
    /* .set_tensor    = */ set_tensor,
    /* .get_tensor    = */ get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ clear,
    /* .reset         = */ nullptr,
};

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t size) {
    if (size == 0) { // the loader asks whether an operation is supported
        return ggml_backend_buffer_init(type, buffer_interface, nullptr, 0);
    }
    std::string reason;
    void *      memory = allocate_home(size + tail_bytes, reason);
    if (memory == nullptr) {
        std::fprintf(
            stderr,
            "moe-pager: %zu MiB of host memory for the experts could not be pinned (%s). Close other programs, use a "
            "smaller model, or under WSL2 raise its memory limit; --no-pager loads the model without it.\n",
            size >> 20,
            reason.c_str());
        return nullptr;
    }
    return ggml_backend_buffer_init(type, buffer_interface, memory, size);
}

size_t alignment_of(ggml_backend_buffer_type_t) {
    return 128;
}

size_t size_of(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    size_t        size = ggml_nbytes(tensor);
    const int64_t rest = tensor->ne[0] % row_padding;
    if (ggml_is_quantized(tensor->type) && rest != 0) {
        size += ggml_row_size(tensor->type, row_padding - rest);
    }
    return size;
}

const ggml_backend_buffer_type_i type_interface = {
    /* .get_name       = */ name_of,
    /* .alloc_buffer   = */ allocate,
    /* .get_alignment  = */ alignment_of,
    /* .get_max_size   = */ nullptr,
    /* .get_alloc_size = */ size_of,
    /* .is_host        = */ nullptr,
};

// one per device, for good: buffers keep a pointer to theirs
ggml_backend_buffer_type_t type_for(ggml_backend_dev_t device) {
    static std::mutex                                                              mutex;
    static std::map<ggml_backend_dev_t, std::unique_ptr<ggml_backend_buffer_type>> types;

    std::lock_guard<std::mutex> lock(mutex);
    auto &                      type = types[device];
    if (type == nullptr) {
        type.reset(new ggml_backend_buffer_type{ type_interface, device, nullptr });
    }
    return type.get();
}

} // namespace

} // namespace moe_pager

using namespace moe_pager;

struct ggml_backend_buffer_type * moe_pager_buffer_type(const char *                      tensor_name,
                                                        struct ggml_backend_buffer_type * otherwise) noexcept {
    try {
        static const settings set    = read_settings([](const char * name) { return std::getenv(name); });
        ggml_backend_dev_t    device = ggml_backend_buft_get_device(otherwise);
        if (!set.enabled || !set.vram || parse_block(tensor_name) < 0 || device == nullptr ||
            ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_GPU ||
            std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)), "CUDA") != 0) {
            return nullptr;
        }
        return type_for(device);
    } catch (...) {
        return nullptr;
    }
}

bool moe_pager_is_paged(const struct ggml_backend_buffer_type * type) noexcept {
    return type->iface.get_name == name_of;
}
