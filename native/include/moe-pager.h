#pragma once

// The expert pager's C interface: all that the patches in patches/ and the tests of the whole may see.
//
// One pager per loaded model that has expert tensors. It is switched on by the environment (MOE_PAGER=1); switched off,
// every call below returns on a null check and llama.cpp behaves as if it had not been patched.
//
// Nothing here throws, aborts or keeps a pointer that was handed in beyond what is said beside the function.
//
// Environment, read once when the first model is loaded:
//   MOE_PAGER            1: on; anything else: off
//   MOE_PAGER_RAM_BYTES  experts kept in RAM, in bytes (default: all of them)
//   MOE_PAGER_VRAM_BYTES, MOE_PAGER_VRAM_OTHERS_BYTES, MOE_PAGER_VRAM_RESERVE_BYTES
//                        VRAM of the whole process (not given: experts are not moved to VRAM); what others used of it
//                        before (default 0); what is left free for the backend (default 256 MiB)
//   MOE_PAGER_UBATCH_TOKENS  of the longest ubatch that is counted on a GPU (default 4096)
//   MOE_PAGER_HALF_LIFE  tokens after which a count weighs half (default 64)
//   MOE_PAGER_HORIZON    tokens over which a move must pay for itself (default 64)
//   MOE_PAGER_TRACE      file to record the routing in, for moe-pager-simulate (default: none)
//   MOE_PAGER_POLICY     posterior (default), lru, lfu or static

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(MOE_PAGER_SHARED) && defined(__GNUC__)
#define MOE_PAGER_API __attribute__((visibility("default")))
#else
#define MOE_PAGER_API
#endif

#ifdef __cplusplus
#define MOE_PAGER_NOEXCEPT noexcept
extern "C" {
#else
#define MOE_PAGER_NOEXCEPT
#endif

struct ggml_tensor;
struct ggml_backend_buffer_type;

// Where a CUDA mat-vec kernel reads the experts of a weight, and where it notes the picks. Passed to kernels by value;
// what it points at is valid, at the same addresses, until moe_pager_model_freed.
struct moe_pager_weights {
    const uint64_t * x;           // by expert: address of its slab; bit 0: it lies in host memory. Null: not paged
    const uint64_t * gate;        // of the gate that is computed with it, or null
    char *           x_copies;    // device memory for all slabs of x, in order, that this launch may write; or null
    char *           gate_copies; // likewise
    uint64_t         slab_bytes;  // of x and of gate
    uint32_t         row_bytes;
    uint32_t         log_tokens; // that fit
    int32_t *        log;        // null: this weight does not count
};

// The weights are in place: `tensors` are all of the model's, `n_expert_used` is the most experts a token picks in a
// layer. `model` is only a key. The tensors (not the array) must live until moe_pager_model_freed.
MOE_PAGER_API void moe_pager_model_loaded(const void *                       model,
                                          uint32_t                           n_expert_used,
                                          const struct ggml_tensor * const * tensors,
                                          size_t                             n_tensors) MOE_PAGER_NOEXCEPT;

// Before the weights go away. No graph of this model may be running. Returns when the mover has stopped.
MOE_PAGER_API void moe_pager_model_freed(const void * model) MOE_PAGER_NOEXCEPT;

// Around the computation of one ubatch, on the thread that computes (thread 0 of ggml-cpu is the calling thread).
// seq_id[i][0] is the sequence of token i, output[i] tells whether its logits are wanted; both may be null and must
// live until moe_pager_ubatch_end. A warm-up run is not counted.
MOE_PAGER_API void moe_pager_ubatch_begin(const void *            model,
                                          uint32_t                n_tokens,
                                          const int32_t * const * seq_id,
                                          const int8_t *          output,
                                          bool                    warmup) MOE_PAGER_NOEXCEPT;
MOE_PAGER_API void moe_pager_ubatch_end(void) MOE_PAGER_NOEXCEPT;

// Thread 0 of ggml-cpu is about to compute this GGML_OP_MUL_MAT_ID node; its ids are ready.
MOE_PAGER_API void moe_pager_mul_mat_id(const struct ggml_tensor * dst) MOE_PAGER_NOEXCEPT;

// The buffer type that the loader is to put this tensor in: paged if it holds experts, a VRAM budget was given and
// `otherwise` belongs to a GPU that can read host memory; null for any other.
MOE_PAGER_API struct ggml_backend_buffer_type *
moe_pager_buffer_type(const char * tensor_name, struct ggml_backend_buffer_type * otherwise) MOE_PAGER_NOEXCEPT;
MOE_PAGER_API bool moe_pager_is_paged(const struct ggml_backend_buffer_type * type) MOE_PAGER_NOEXCEPT;

// The rest of this part is for the CUDA backend and present only in a build for CUDA. All calls come from the thread that
// computes, between moe_pager_ubatch_begin and _end, except gpu_idle. `stream` is a cudaStream_t.

// A graph is about to be launched on this stream; and: all that was launched on it is done.
MOE_PAGER_API void moe_pager_gpu_launch(void * stream) MOE_PAGER_NOEXCEPT;
MOE_PAGER_API void moe_pager_gpu_idle(void * stream) MOE_PAGER_NOEXCEPT;

// For the kernels that take pages. `gate` may be null.
MOE_PAGER_API struct moe_pager_weights moe_pager_gpu_weights(const struct ggml_tensor * x,
                                                             const struct ggml_tensor * gate) MOE_PAGER_NOEXCEPT;

// For all others: notes the picks of a GGML_OP_MUL_MAT_ID node and returns where its weight is whole in device memory
// for kernels launched on `stream` until gpu_unstage; null: where it is.
MOE_PAGER_API const void * moe_pager_gpu_stage(const struct ggml_tensor * mul_mat_id, void * stream) MOE_PAGER_NOEXCEPT;
MOE_PAGER_API void         moe_pager_gpu_unstage(void * stream) MOE_PAGER_NOEXCEPT;

// Does staging this node decide on the host what is copied? Then it must not become part of a CUDA graph.
MOE_PAGER_API bool moe_pager_gpu_copies(const struct ggml_tensor * mul_mat_id) MOE_PAGER_NOEXCEPT;

// A server slot takes up a request, and lets it go. The slot's number is the sequence id of its tokens. `request` is
// what the client named it (may be empty or null); several sequences may serve one request.
MOE_PAGER_API void
moe_pager_sequence_begin(const void * model, int32_t sequence, const char * request) MOE_PAGER_NOEXCEPT;
MOE_PAGER_API void moe_pager_sequence_end(const void * model, int32_t sequence) MOE_PAGER_NOEXCEPT;

// Is this the name of the HTTP header that names a request? (X-Moe-Request, in any case)
MOE_PAGER_API bool moe_pager_is_request_header(const char * name) MOE_PAGER_NOEXCEPT;

// The control API: method, path, query string and body in; HTTP status and a JSON text out. Any thread, any time.
// Speaks about the model that was loaded first. The text is freed with moe_pager_free; null only when there is no
// memory.
MOE_PAGER_API char * moe_pager_control(
    const char * method, const char * path, const char * query, const char * body, int * status) MOE_PAGER_NOEXCEPT;
MOE_PAGER_API void moe_pager_free(char * text) MOE_PAGER_NOEXCEPT;

#ifdef __cplusplus
}
#endif
