// The part of the C interface that a GPU backend calls, and what stands in for it in a build without one.

#include "ggml-hooks.h"
#include "gpu-cuda.h"
#include "loaded-models.h"
#include "moe-pager.h"

#if defined(MOE_PAGER_CUDA)

namespace moe_pager {

std::unique_ptr<gpu> make_gpu() {
    return make_gpu_cuda();
}

std::unique_ptr<stager> make_stager(const tier_vram * tier) {
    return tier == nullptr ? nullptr : make_stager_cuda(*tier);
}

} // namespace moe_pager

using namespace moe_pager;

void moe_pager_gpu_launch(void * stream) noexcept {
    if (current_side != nullptr) {
        current_side->launch(stream);
    }
}

void moe_pager_gpu_idle(void * stream) noexcept {
    registry & known = the_registry();
    if (!known.in_use.load(std::memory_order_acquire)) {
        return;
    }
    std::lock_guard<std::mutex> lock(known.mutex);
    for (const auto & entry : known.models) {
        if (entry.pages != nullptr && entry.pages->side != nullptr) {
            entry.pages->side->idle(stream);
        }
    }
}

struct moe_pager_weights moe_pager_gpu_weights(const struct ggml_tensor * x, const struct ggml_tensor * gate) noexcept {
    moe_pager_weights pages = {};
    if (current_side == nullptr) {
        return pages;
    }
    pages.log        = current_side->log_row(x);
    pages.log_tokens = current_side->log_tokens();
    pages.row_bytes  = row_bytes_of(*x);
    if (gate != nullptr && pages.log == nullptr) {
        pages.log = current_side->log_row(gate);
    }
    if (const tier_vram * tier = current_side->tier()) {
        pages.x           = tier->entries(x);
        pages.gate        = gate == nullptr ? nullptr : tier->entries(gate);
        pages.slab_bytes  = slab_bytes_of(*x);
        pages.x_copies    = tier->staging(0);
        pages.gate_copies = tier->staging(1);
    }
    return pages;
}

const void * moe_pager_gpu_stage(const struct ggml_tensor * mul_mat_id, void * stream) noexcept {
    if (current_side == nullptr) {
        return nullptr;
    }
    const ggml_tensor & weight = weight_of(*mul_mat_id);
    const device_ids    ids    = read_device_ids(*mul_mat_id);
    if (int32_t * row = current_side->log_row(&weight)) {
        log_picks(ids, row, current_side->log_tokens(), stream);
    }
    const tensor_record * record = current.owner->get_layout().find(&weight);
    return record == nullptr || current_side->copier() == nullptr ? nullptr
                                                                  : current_side->copier()->start(*record, ids, stream);
}

void moe_pager_gpu_unstage(void * stream) noexcept {
    if (current_side != nullptr && current_side->copier() != nullptr) {
        current_side->copier()->finish(stream);
    }
}

bool moe_pager_gpu_copies(const struct ggml_tensor * mul_mat_id) noexcept {
    if (current_side == nullptr || current_side->tier() == nullptr) {
        return false;
    }
    const ggml_tensor &   weight = weight_of(*mul_mat_id);
    const tensor_record * record = current.owner->get_layout().find(&weight);
    return record != nullptr && current_side->tier()->entries(&weight) != nullptr &&
           stager::copies(record->n_expert, read_device_ids(*mul_mat_id));
}

#else

namespace moe_pager {

std::unique_ptr<gpu> make_gpu() {
    return nullptr;
}

std::unique_ptr<stager> make_stager(const tier_vram *) {
    return nullptr;
}

} // namespace moe_pager

struct ggml_backend_buffer_type * moe_pager_buffer_type(const char *, struct ggml_backend_buffer_type *) noexcept {
    return nullptr;
}

bool moe_pager_is_paged(const struct ggml_backend_buffer_type *) noexcept {
    return false;
}

#endif
