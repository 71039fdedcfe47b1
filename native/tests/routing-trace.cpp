// Which experts a model's router picks, counted without the pager: llama.cpp's own graph callback reads the ids that
// the graph names ffn_moe_topk-<layer>. The pager's counts are held against it.
//
//   routing-trace MODEL TOKEN_ID... [--decode ID,ID,...]
//
// The prompt is computed in one batch with only its last token as output; each token after --decode is computed in a
// batch of its own, as in generation. Prints {"tokens": n, "layers": {"0": [count per expert], ...}}.

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

struct trace {
    std::map<int, std::vector<uint64_t>> layers;
    int                                  n_expert = 0;
};

bool on_node(struct ggml_tensor * node, bool ask, void * user_data) {
    static const char prefix[] = "ffn_moe_topk-";
    const bool        wanted   = std::strncmp(node->name, prefix, sizeof(prefix) - 1) == 0;
    if (ask || !wanted) {
        return wanted || !ask;
    }
    trace & result = *(trace *) user_data;
    auto &  counts = result.layers[std::atoi(node->name + sizeof(prefix) - 1)];
    counts.resize(result.n_expert);

    // a view of the sorted router output: copy up to its last element
    std::vector<char> data((node->ne[1] - 1) * node->nb[1] + node->ne[0] * node->nb[0]);
    ggml_backend_tensor_get(node, data.data(), 0, data.size());
    for (int64_t row = 0; row < node->ne[1]; ++row) {
        for (int64_t k = 0; k < node->ne[0]; ++k) {
            int32_t id;
            std::memcpy(&id, data.data() + row * node->nb[1] + k * node->nb[0], sizeof(id));
            ++counts.at(id);
        }
    }
    return true;
}

int expert_count(const llama_model * model) {
    char architecture[64] = "";
    char value[32]        = "";
    llama_model_meta_val_str(model, "general.architecture", architecture, sizeof(architecture));
    llama_model_meta_val_str(model, (std::string(architecture) + ".expert_count").c_str(), value, sizeof(value));
    return std::atoi(value);
}

} // namespace

int main(int argc, char ** argv) {
    std::vector<llama_token> prompt;
    std::vector<llama_token> decoded;
    for (int i = 2; i < argc; ++i) {
        if (std::strcmp(argv[i], "--decode") == 0 && i + 1 < argc) {
            for (char * text = std::strtok(argv[++i], ","); text != nullptr; text = std::strtok(nullptr, ",")) {
                decoded.push_back(std::atoi(text));
            }
        } else {
            prompt.push_back(std::atoi(argv[i]));
        }
    }
    if (prompt.empty()) {
        std::fprintf(stderr, "usage: routing-trace MODEL TOKEN_ID... [--decode ID,ID,...]\n");
        return 2;
    }

    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers       = 0;
    llama_model * model             = llama_model_load_from_file(argv[1], model_params);
    if (model == nullptr) {
        std::fprintf(stderr, "routing-trace: cannot load %s\n", argv[1]);
        return 1;
    }

    trace result;
    result.n_expert = expert_count(model);

    llama_context_params params = llama_context_default_params();
    params.n_ctx                = (uint32_t) (prompt.size() + decoded.size() + 16);
    params.n_batch              = (uint32_t) prompt.size();
    params.n_ubatch             = params.n_batch;
    params.cb_eval              = on_node;
    params.cb_eval_user_data    = &result;
    llama_context * context     = llama_init_from_model(model, params);
    if (context == nullptr) {
        std::fprintf(stderr, "routing-trace: cannot make a context\n");
        return 1;
    }

    bool failed = llama_decode(context, llama_batch_get_one(prompt.data(), (int32_t) prompt.size())) != 0;
    for (size_t i = 0; i < decoded.size() && !failed; ++i) {
        failed = llama_decode(context, llama_batch_get_one(&decoded[i], 1)) != 0;
    }
    if (failed) {
        std::fprintf(stderr, "routing-trace: decoding failed\n");
        return 1;
    }

    std::printf("{\"tokens\":%zu,\"layers\":{", prompt.size() + decoded.size());
    const char * before_layer = "";
    for (const auto & [layer, counts] : result.layers) {
        std::printf("%s\"%d\":[", before_layer, layer);
        for (size_t e = 0; e < counts.size(); ++e) {
            std::printf("%s%llu", e == 0 ? "" : ",", (unsigned long long) counts[e]);
        }
        std::printf("]");
        before_layer = ",";
    }
    std::printf("}}\n");

    llama_free(context);
    llama_model_free(model);
    llama_backend_free();
    return 0;
}
