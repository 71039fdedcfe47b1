#pragma once

// For the one function of ggml-cuda that computes a GGML_OP_MUL_MAT_ID: its weight as kernels without pages can read it.

#include "moe-pager.h"

#include "ggml.h"

namespace moe_pager {

// Valid for kernels that are launched while this object lives.
class staged_weight {
  public:
    staged_weight(const ggml_tensor * mul_mat_id, void * stream) : node_(mul_mat_id), stream_(stream) {}

    ~staged_weight() { moe_pager_gpu_unstage(stream_); }

    staged_weight(const staged_weight &)             = delete;
    staged_weight & operator=(const staged_weight &) = delete;

    const ggml_tensor * get() {
        const void * data = moe_pager_gpu_stage(node_, stream_);
        if (data == nullptr) {
            return node_->src[0];
        }
        copy_      = *node_->src[0];
        copy_.data = const_cast<void *>(data);
        return &copy_;
    }

  private:
    const ggml_tensor * node_;
    void *              stream_;
    ggml_tensor         copy_;
};

} // namespace moe_pager
