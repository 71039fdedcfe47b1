#pragma once

// The only file that knows ggml's structs. It reads fields of tensors and buffers; it never computes or allocates.

#include "pager.h"
#include "stager.h"

struct ggml_tensor;

namespace moe_pager {

tensor_record describe(const ggml_tensor & tensor);

// of a GGML_OP_MUL_MAT_ID node whose ids are in device memory
device_ids read_device_ids(const ggml_tensor & mul_mat_id);

const ggml_tensor & weight_of(const ggml_tensor & mul_mat_id);

uint32_t row_bytes_of(const ggml_tensor & weight);
uint64_t slab_bytes_of(const ggml_tensor & weight); // of one expert

// of a GGML_OP_MUL_MAT_ID node whose ids are in host memory; `data` is null if they are not i32
routed_ids read_ids(const ggml_tensor & mul_mat_id);

} // namespace moe_pager
