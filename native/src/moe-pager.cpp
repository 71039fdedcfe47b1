// The C boundary: which model has which pager, which ubatch this thread is computing, and the promise that nothing is
// thrown.
//
// Who writes what stands in loaded-models.h.

#include "moe-pager.h"

#include "ggml-hooks.h"
#include "loaded-models.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace moe_pager {

thread_local ubatch     current;
thread_local gpu_side * current_side = nullptr;

registry & the_registry() {
    static registry instance;
    return instance;
}

namespace {

const settings & the_settings() {
    static const settings instance = read_settings([](const char * name) { return std::getenv(name); });
    return instance;
}

std::shared_ptr<instance> find(const void * model) {
    registry & known = the_registry();
    if (!known.in_use.load(std::memory_order_acquire)) {
        return nullptr;
    }
    std::lock_guard<std::mutex> lock(known.mutex);
    for (const auto & entry : known.models) {
        if (entry.model == model) {
            return entry.pages;
        }
    }
    return nullptr;
}

// calls f and keeps what it throws from llama.cpp: the pager gives way, the model does not
template <typename F>
void guarded(F && f) noexcept {
    try {
        f();
    } catch (...) {
    }
}

reply answer(const std::string & method,
             const std::string & path,
             const std::string & query,
             const std::string & body) {
    if (!the_settings().enabled) {
        return error_reply(
            501, "not_supported_error", "The expert pager is off. Start with MOE_PAGER=1 in the environment.");
    }
    std::shared_ptr<instance> main;
    {
        registry &                  known = the_registry();
        std::lock_guard<std::mutex> lock(known.mutex);
        if (known.models.empty()) {
            return error_reply(503, "unavailable_error", "No model is loaded.");
        }
        main = known.models.front().pages;
    }
    if (main == nullptr) {
        return error_reply(
            501, "not_supported_error", "The loaded model has no expert tensors, so there is nothing to page.");
    }
    return main->answers.call(method, path, query, body);
}

void catch_up(instance & pages) noexcept {
    if (pages.side != nullptr) {
        pages.side->catch_up();
    }
}

char * copy(const std::string & text) noexcept {
    char * result = (char *) std::malloc(text.size() + 1);
    if (result != nullptr) {
        std::memcpy(result, text.c_str(), text.size() + 1);
    }
    return result;
}

} // namespace

} // namespace moe_pager

using namespace moe_pager;

void moe_pager_model_loaded(const void *                       model,
                            uint32_t                           n_expert_used,
                            const struct ggml_tensor * const * tensors,
                            size_t                             n_tensors) noexcept {
    guarded([&] {
        if (!the_settings().enabled) {
            return;
        }
        std::vector<tensor_record> records;
        for (size_t i = 0; i < n_tensors; ++i) {
            records.push_back(describe(*tensors[i]));
        }
        std::ifstream       maps("/proc/self/maps");
        const file_mappings mappings(maps);
        layout              lay(
            records, n_expert_used, [&](const void * data, uint64_t size) { return mappings.contains(data, size); });

        std::shared_ptr<instance> pages;
        if (!lay.empty()) {
            pages = std::make_shared<instance>(std::move(lay), the_settings());
        }
        registry &                  known = the_registry();
        std::lock_guard<std::mutex> lock(known.mutex);
        known.models.push_back({ model, std::move(pages) });
        known.in_use.store(true, std::memory_order_release);
    });
}

void moe_pager_model_freed(const void * model) noexcept {
    guarded([&] {
        std::shared_ptr<instance> pages = find(model);
        if (pages != nullptr) {
            pages->paging.stop(); // before the weights go
        }
        registry &                  known = the_registry();
        std::lock_guard<std::mutex> lock(known.mutex);
        known.models.erase(std::remove_if(known.models.begin(),
                                          known.models.end(),
                                          [&](const loaded_model & entry) { return entry.model == model; }),
                           known.models.end());
    });
}

void moe_pager_ubatch_begin(const void *            model,
                            uint32_t                n_tokens,
                            const int32_t * const * seq_id,
                            const int8_t *          output,
                            bool                    warmup) noexcept {
    current      = {};
    current_side = nullptr;
    guarded([&] {
        const std::shared_ptr<instance> pages = find(model);
        if (pages == nullptr) {
            return;
        }
        ubatch ub;
        ub.owner    = &pages->paging; // lives until moe_pager_model_freed
        ub.n_tokens = n_tokens;
        ub.seq_id   = seq_id;
        ub.output   = output;
        ub.warmup   = warmup;
        for (uint32_t i = 0; output != nullptr && i < n_tokens; ++i) {
            ub.n_outputs += output[i] != 0 ? 1 : 0;
        }
        if (pages->side != nullptr) {
            pages->side->begin(ub);
            current_side = pages->side.get();
        }
        ub.owner->ubatch_begin(ub);
        current = ub;
    });
}

void moe_pager_ubatch_end(void) noexcept {
    if (current.owner == nullptr) {
        return;
    }
    if (current_side != nullptr) {
        current_side->end();
    } else {
        current.owner->ubatch_end(current);
    }
    current      = {};
    current_side = nullptr;
}

void moe_pager_mul_mat_id(const struct ggml_tensor * dst) noexcept {
    if (current.owner == nullptr) {
        return;
    }
    const routed_ids ids = read_ids(*dst);
    if (ids.data != nullptr) {
        current.owner->count(current, ids);
    }
}

void moe_pager_sequence_begin(const void * model, int32_t sequence, const char * request) noexcept {
    guarded([&] {
        if (const auto pages = find(model)) {
            catch_up(*pages);
            const std::string name = request == nullptr ? "" : request;
            pages->paging.sequence_begin(sequence, name.substr(0, request_name_bytes_max));
        }
    });
}

void moe_pager_sequence_end(const void * model, int32_t sequence) noexcept {
    guarded([&] {
        if (const auto pages = find(model)) {
            catch_up(*pages);
            pages->paging.sequence_end(sequence);
        }
    });
}

bool moe_pager_is_request_header(const char * name) noexcept {
    static const char * const wanted = "x-moe-request";
    for (size_t i = 0;; ++i) {
        if (std::tolower((unsigned char) name[i]) != wanted[i]) {
            return false;
        }
        if (wanted[i] == '\0') {
            return true;
        }
    }
}

char * moe_pager_control(
    const char * method, const char * path, const char * query, const char * body, int * status) noexcept {
    *status = 500;
    try {
        const reply result = answer(method, path, query, body);
        *status            = result.status;
        return copy(result.body);
    } catch (...) {
        return copy(R"({"error": {"code": 500, "message": "out of memory", "type": "server_error"}})");
    }
}

void moe_pager_free(char * text) noexcept {
    std::free(text);
}
