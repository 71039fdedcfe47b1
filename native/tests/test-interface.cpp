// The C interface as the patches call it, with tensors made by hand. Suite `interface` runs with MOE_PAGER=1 in the
// environment, suite `switched_off` without.

#include "check.h"
#include "moe-pager.h"
#include "pager.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <nlohmann/json.hpp>

#include <cstdio>
#include <map>
#include <memory>

using json = nlohmann::json;

// the functions of ggml that the hooks call; the library itself is not linked here, and no tensor has a buffer
const char * ggml_type_name(enum ggml_type) {
    return "f16";
}

bool ggml_is_quantized(enum ggml_type) {
    return false;
}

ggml_backend_buffer_type_t ggml_backend_buffer_get_type(ggml_backend_buffer_t) {
    return nullptr;
}

bool ggml_backend_buft_is_host(ggml_backend_buffer_type_t) {
    return true;
}

ggml_backend_dev_t ggml_backend_buft_get_device(ggml_backend_buffer_type_t) {
    return nullptr;
}

enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_CPU;
}

namespace {

json call(const char * method, const char * path, int status, const char * query = "", const char * body = "") {
    int    got  = 0;
    char * text = moe_pager_control(method, path, query, body, &got);
    CHECK(got == status);
    json result = json::parse(text);
    moe_pager_free(text);
    return result;
}

struct fake_model {
    explicit fake_model(int n_layers) : weights(1 << 16) {
        for (int i = 0; i < n_layers; ++i) {
            for (const char * kind : { "down", "gate", "up" }) {
                tensors.push_back(std::make_unique<ggml_tensor>());
                ggml_tensor & t = *tensors.back();
                t.type          = GGML_TYPE_F16;
                t.ne[2]         = 4;
                t.nb[2]         = 64;
                t.data          = weights.data();
                std::snprintf(t.name, sizeof(t.name), "blk.%d.ffn_%s_exps.weight", i, kind);
                list.push_back(&t);
            }
        }
        tensors.push_back(std::make_unique<ggml_tensor>());
        tensors.back()->data = weights.data();
        std::snprintf(tensors.back()->name, sizeof(tensors.back()->name), "token_embd.weight");
        list.push_back(tensors.back().get());
    }

    void load() const { moe_pager_model_loaded(this, 2, list.data(), list.size()); }

    void unload() const { moe_pager_model_freed(this); }

    // the three MUL_MAT_IDs of a layer, for tokens of one sequence that use one expert each
    void compute(int32_t sequence, std::vector<int32_t> ids) const {
        std::vector<const int32_t *> seq_id(ids.size(), &sequence);
        moe_pager_ubatch_begin(this, (uint32_t) ids.size(), seq_id.data(), nullptr, false);
        ggml_tensor routed{};
        routed.type  = GGML_TYPE_I32;
        routed.ne[0] = 1;
        routed.ne[1] = (int64_t) ids.size();
        routed.nb[0] = sizeof(int32_t);
        routed.nb[1] = sizeof(int32_t);
        routed.data  = ids.data();
        for (size_t i = 0; i + 1 < tensors.size() && i < 3; ++i) { // the last tensor is no expert
            ggml_tensor product{};
            product.op     = GGML_OP_MUL_MAT_ID;
            product.src[0] = tensors[i].get();
            product.src[2] = &routed;
            moe_pager_mul_mat_id(&product);
        }
        moe_pager_ubatch_end();
    }

    std::vector<char>                         weights;
    std::vector<std::unique_ptr<ggml_tensor>> tensors;
    std::vector<const ggml_tensor *>          list;
};

} // namespace

TEST(switched_off, every_hook_returns_and_every_route_says_so) {
    const fake_model model(1);
    model.load();
    moe_pager_sequence_begin(&model, 0, "r");
    model.compute(0, { 0 });
    moe_pager_sequence_end(&model, 0);
    const json error = call("GET", "/experts", 501)["error"];
    CHECK(error["type"] == "not_supported_error" && error["code"] == 501);
    CHECK(error["message"].get<std::string>().find("MOE_PAGER=1") != std::string::npos);
    call("POST", "/experts/prior", 501);
    model.unload();
}

TEST(interface, a_model_is_paged_from_load_to_free) {
    CHECK(call("GET", "/experts", 503)["error"]["type"] == "unavailable_error");
    const fake_model model(2);
    moe_pager_mul_mat_id(nullptr); // outside an ubatch: returns at once
    model.load();
    CHECK(call("GET", "/experts", 200)["model"]["layers"] == json({ 0, 1 }));
    CHECK(call("GET", "/experts", 200)["tiers"]["ram"]["home"] == "anonymous");

    moe_pager_sequence_begin(&model, 3, "abc");
    model.compute(3, { 0, 2, 2 });
    moe_pager_sequence_end(&model, 3);
    const json expected =
        json::parse(R"({"tokens": 3, "picks": 3, "hits": 3, "layers": {"0": [1, 0, 2, 0], "1": [0, 0, 0, 0]}})");
    CHECK(call("GET", "/experts/usage", 200, "request=abc") == expected); // three tensors, one count
    moe_pager_sequence_begin(&model, 3, nullptr);
    CHECK(call("GET", "/experts/usage", 200, "sequence=3")["tokens"] == 0);

    model.unload();
    call("GET", "/experts", 503);
    model.unload(); // again: nothing
    model.compute(3, { 0 });
}

TEST(interface, a_draft_model_has_its_own_tables_and_control_speaks_of_the_first) {
    const fake_model main(1), draft(3), dense(0);
    main.load();
    draft.load();
    dense.load();
    draft.compute(0, { 1, 1 });
    dense.compute(0, { 1, 1 });
    CHECK(call("GET", "/experts/stats", 200)["picks"] == 0);
    main.compute(0, { 1 });
    CHECK(call("GET", "/experts/stats", 200)["picks"] == 1);
    main.unload();
    CHECK(call("GET", "/experts/stats", 200)["picks"] == 2);
    draft.unload();
    const std::string reason = call("GET", "/experts", 501)["error"]["message"];
    CHECK(reason.find("no expert tensors") != std::string::npos);
    dense.unload();
}

TEST(interface, a_model_that_is_only_measured_is_not_paged) {
    fake_model model(1);
    for (auto & tensor : model.tensors) {
        tensor->data = nullptr;
    }
    model.load();
    call("GET", "/experts", 501);
    model.unload();
}

TEST(interface, the_request_header_is_known_in_any_case) {
    CHECK(moe_pager_is_request_header("X-Moe-Request"));
    CHECK(moe_pager_is_request_header("x-moe-request"));
    CHECK(!moe_pager_is_request_header("X-Moe-Reques"));
    CHECK(!moe_pager_is_request_header("X-Moe-Requests"));
    CHECK(!moe_pager_is_request_header(""));
}

TEST(interface, settings_that_make_no_sense_are_named_and_not_used) {
    const std::map<std::string, const char *> environment = {
        { "MOE_PAGER", "1" },          { "MOE_PAGER_RAM_BYTES", "8G" },   { "MOE_PAGER_HALF_LIFE", "0" },
        { "MOE_PAGER_HORIZON", "32" }, { "MOE_PAGER_POLICY", "lottery" },
    };
    const auto set = moe_pager::read_settings([&](const char * name) {
        const auto it = environment.find(name);
        return it == environment.end() ? nullptr : it->second;
    });
    CHECK(set.enabled && set.ram_bytes == UINT64_MAX && set.half_life_tokens == 64 && set.horizon_tokens == 32);
    CHECK(set.remarks.size() == 3);
    CHECK(set.remarks[0].find("'8G'") != std::string::npos);
    CHECK(set.policy == "posterior");
    CHECK(set.remarks[2] == "MOE_PAGER_POLICY='lottery' is none of posterior, lru, lfu, static; 'posterior' is used");
    for (const auto & name : moe_pager::policy_names()) {
        CHECK(moe_pager::make_policy(name)->name() == name);
        const auto chosen = moe_pager::read_settings([&](const char * variable) {
            return std::string(variable) == "MOE_PAGER_POLICY" ? name.c_str() : nullptr;
        });
        CHECK(chosen.policy == name && chosen.remarks.empty());
    }
    CHECK(!moe_pager::read_settings([](const char *) { return "0"; }).enabled);
}
