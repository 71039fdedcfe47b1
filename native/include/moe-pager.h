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
//   MOE_PAGER_HALF_LIFE  tokens after which a count weighs half (default 256)
//   MOE_PAGER_HORIZON    tokens over which a move must pay for itself (default 64)
//   MOE_PAGER_POLICY     posterior

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
