#include "ggml-hooks.h"

#include "ggml.h"

namespace moe_pager {

tensor_record describe(const ggml_tensor & tensor) {
    tensor_record record;
    record.name       = tensor.name;
    record.type       = ggml_type_name(tensor.type);
    record.key        = &tensor;
    record.data       = tensor.data;
    record.slab_bytes = tensor.nb[2];
    record.n_expert   = (uint32_t) tensor.ne[2];
    return record;
}

routed_ids read_ids(const ggml_tensor & mul_mat_id) {
    // src: the experts' weights, the activations, the ids; the ids are often a view of the sorted router output
    const ggml_tensor & ids = *mul_mat_id.src[2];

    routed_ids result;
    result.key     = mul_mat_id.src[0];
    result.data    = ids.type == GGML_TYPE_I32 ? (const char *) ids.data : nullptr;
    result.n_used  = ids.ne[0];
    result.n_rows  = ids.ne[1];
    result.nb_used = ids.nb[0];
    result.nb_row  = ids.nb[1];
    return result;
}

} // namespace moe_pager
