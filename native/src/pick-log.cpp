#include "pick-log.h"

namespace moe_pager {

pick_log::pick_log(const layout & lay, gpu & device, uint32_t n_tokens_max)
    : n_tokens_max_(n_tokens_max), stride_(1 + (uint64_t) n_tokens_max * lay.n_expert_used()) {
    char * seen_by_kernels = nullptr;
    host_   = (int32_t *) device.allocate_host(stride_ * lay.layers().size() * sizeof(int32_t), seen_by_kernels);
    device_ = (int32_t *) seen_by_kernels;
}

} // namespace moe_pager
