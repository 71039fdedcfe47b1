#include "gpu-ubatch.h"

#include <algorithm>

namespace moe_pager {

void gpu_ubatch::begin(const ubatch & ub) {
    state_ = state::none; // should memory run out
    now_   = ub;
    sequence_.clear();
    seq_id_.clear();
    output_.clear();
    if (ub.seq_id != nullptr) {
        for (uint32_t i = 0; i < ub.n_tokens; ++i) {
            sequence_.push_back(ub.seq_id[i][0]);
        }
        for (const int32_t & sequence : sequence_) {
            seq_id_.push_back(&sequence);
        }
        now_.seq_id = seq_id_.data();
    }
    if (ub.output != nullptr) {
        output_.assign(ub.output, ub.output + ub.n_tokens);
        now_.output = output_.data();
    }
    state_ = state::open;
}

void gpu_ubatch::count(pager & owner) noexcept {
    for (uint32_t row = 0; log_.usable() && row < lay_.layers().size(); ++row) {
        const int32_t * written = log_.host_row(row);
        const int32_t   n_rows  = *written;
        if (n_rows <= 0) {
            continue; // computed elsewhere, or not at all
        }
        routed_ids ids;
        ids.key     = lay_.layers()[row].counting_key;
        ids.data    = (const char *) (written + 1);
        ids.n_used  = lay_.n_expert_used();
        ids.n_rows  = n_rows;
        ids.n_read  = std::min<int64_t>(n_rows, log_.n_tokens_max());
        ids.nb_used = sizeof(int32_t);
        ids.nb_row  = sizeof(int32_t) * lay_.n_expert_used();
        owner.count(now_, ids);
    }
    owner.ubatch_end(now_);
    state_ = state::none;
}

} // namespace moe_pager
