#include "pick-log.h"

namespace moe_pager {

pick_log::pick_log(const layout & lay, gpu & device, uint32_t n_tokens_max)
    : gpu_(device),
      n_rows_((uint32_t) lay.layers().size()),
      n_used_(lay.n_expert_used()),
      n_tokens_max_(n_tokens_max),
      stride_(1 + (uint64_t) n_tokens_max * n_used_) {
    const uint64_t bytes           = stride_ * n_rows_ * sizeof(int32_t);
    char *         seen_by_kernels = nullptr;
    host_                          = (int32_t *) gpu_.allocate_host(bytes, seen_by_kernels);
    host_seen_by_kernels_          = (int32_t *) seen_by_kernels;
    device_                        = (int32_t *) gpu_.allocate(bytes);
}

void pick_log::drain(void * stream) noexcept {
    if (usable()) {
        (void) gpu_.drain_log(device_, host_seen_by_kernels_, n_rows_, stride_, n_used_, stream);
    }
}

} // namespace moe_pager
