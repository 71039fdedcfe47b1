#include "ggml-hooks.h"

#include "ggml-backend.h"
#include "ggml.h"
#include "moe-pager.h"

namespace moe_pager {

namespace {

memory place_of(const ggml_tensor & tensor) {
    if (tensor.buffer == nullptr) {
        return memory::host;
    }
    ggml_backend_buffer_type * type = ggml_backend_buffer_get_type(tensor.buffer);
    if (moe_pager_is_paged(type)) {
        return memory::pinned;
    }
    return ggml_backend_buft_is_host(type) || ggml_backend_buft_get_device(type) == nullptr ||
                   ggml_backend_dev_type(ggml_backend_buft_get_device(type)) == GGML_BACKEND_DEVICE_TYPE_CPU
               ? memory::host
               : memory::device;
}

} // namespace

tensor_record describe(const ggml_tensor & tensor) {
    tensor_record record;
    record.name       = tensor.name;
    record.type       = ggml_type_name(tensor.type);
    record.key        = &tensor;
    record.data       = tensor.data;
    record.slab_bytes = tensor.nb[2];
    record.n_expert   = (uint32_t) tensor.ne[2];
    record.quantized  = ggml_is_quantized(tensor.type);
    record.place      = place_of(tensor);
    return record;
}

device_ids read_device_ids(const ggml_tensor & mul_mat_id) {
    const ggml_tensor & ids = *mul_mat_id.src[2];

    device_ids result;
    result.data       = (const int32_t *) ids.data;
    result.n_used     = (int32_t) ids.ne[0];
    result.n_tokens   = (int32_t) ids.ne[1];
    result.row_stride = (int64_t) (ids.nb[1] / sizeof(int32_t));
    return result;
}

const ggml_tensor & weight_of(const ggml_tensor & mul_mat_id) {
    return *mul_mat_id.src[0];
}

uint32_t row_bytes_of(const ggml_tensor & weight) {
    return (uint32_t) weight.nb[1];
}

uint64_t slab_bytes_of(const ggml_tensor & weight) {
    return weight.nb[2];
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
