#pragma once

// The only file that knows ggml's structs. It reads fields of ggml_tensor; it never computes, allocates or follows a
// buffer.

#include "pager.h"

struct ggml_tensor;

namespace moe_pager {

tensor_record describe(const ggml_tensor & tensor);

// of a GGML_OP_MUL_MAT_ID node whose ids are in host memory; `data` is null if they are not i32
routed_ids read_ids(const ggml_tensor & mul_mat_id);

} // namespace moe_pager
