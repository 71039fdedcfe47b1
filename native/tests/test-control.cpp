#include "check.h"
#include "control.h"
#include "simulated.h"

#include <nlohmann/json.hpp>

using namespace moe_pager;
using json = nlohmann::json;

namespace {

struct desk {
    explicit desk(uint64_t budget_bytes = 2 * 3000) : r(make_tensors(2, 4), budget_bytes), answers(*r.paging) {}

    json get(const std::string & path, const std::string & query = "", int status = 200) {
        const reply result = answers.call("GET", path, query, "");
        CHECK(result.status == status);
        return json::parse(result.body);
    }

    json post(const std::string & path, const std::string & body, int status = 200) {
        const reply result = answers.call("POST", path, "", body);
        CHECK(result.status == status);
        return json::parse(result.body);
    }

    // a refused call names what is wrong and changes nothing
    void refused(const std::string & path, const std::string & body, const std::string & what) {
        const auto before = r.paging->get_score().get_prior();
        const json error  = post(path, body, 400)["error"];
        CHECK(error["code"] == 400 && error["type"] == "invalid_request_error");
        const std::string message = error["message"];
        if (message.find(what) == std::string::npos) {
            std::fprintf(stderr, "%s -> %s\n", body.c_str(), message.c_str());
            CHECK(!"the message names the entry");
        }
        CHECK(r.paging->get_score().get_prior().id == before.id);
        CHECK(r.read(r.counts().priors) == 0);
    }

    rig     r;
    control answers;
};

} // namespace

TEST(control, experts_shows_layout_tiers_policy_and_prior) {
    desk d;
    json experts = d.get("/experts");
    CHECK(experts["mode"] == "on");
    CHECK(experts["model"] == json::parse(R"({"layers": [0, 1], "experts": 4, "experts_used": 2})"));
    CHECK(experts["layout"]["1"]["expert_bytes"] == 3000);
    CHECK(experts["layout"]["1"]["tensors"].size() == 3);
    CHECK(experts["layout"]["1"]["tensors"][0] ==
          json::parse(R"({"name": "blk.1.ffn_down_exps.weight", "type": "f16", "slab_bytes": 1000})"));
    CHECK(experts["tiers"]["ram"] == json::parse(R"({"home": "mmap", "budget_bytes": 6000, "total_bytes": 24000,
          "resident_bytes": 0, "resident_experts": 0, "experts": 8, "locked_bytes": 0})"));
    CHECK(experts["policy"]["name"] == "posterior" && experts["policy"]["half_life_tokens"] == 64 &&
          experts["policy"]["horizon_tokens"] == 64);
    CHECK(experts["prior"]["id"].is_null());
    CHECK(experts["mover"]["pending"] == 0);
    CHECK(experts["reasons"].empty());
}

TEST(control, a_prior_moves_experts_and_is_shown) {
    desk       d;
    const json answer =
        d.post("/experts/prior", R"({"id": "p1", "kappa": 64, "layers": {"0": [[3, 0.5]], "1": [[0, 0.25], [1, 0]]}})");
    CHECK(answer == json::parse(R"({"id": "p1", "entries": 3})"));
    CHECK(d.r.settle());
    CHECK(d.get("/experts/residency") == json::parse(R"({"layers": {"0": [3], "1": [0]}})"));
    CHECK(d.get("/experts")["prior"] == json::parse(R"({"id": "p1", "kappa": 64.0})"));
}

TEST(control, a_bad_prior_is_refused_by_its_first_bad_entry) {
    desk       d;
    const auto prior = [](const std::string & layers) {
        return R"({"id": "p", "kappa": 1, "layers": )" + layers + "}";
    };
    for (const auto & [layers, what] : std::vector<std::pair<std::string, std::string>>{
             { R"({"0": [[0, 0.5]], "7": [[0, 0.5]]})", "layers[\"7\"]" },
             { R"({"00": [[0, 0.5]]})", "layers[\"00\"]" },
             { R"({"-1": []})", "layers[\"-1\"]" },
             { R"({"0": 5})", "layers[\"0\"] is 5" },
             { R"({"0": [[0, 0.5], [4, 0.5]]})", "layers[\"0\"][1]: expert 4" },
             { R"({"0": [[-1, 0.5]]})", "layers[\"0\"][0]: expert -1" },
             { R"({"0": [[1.0, 0.5]]})", "layers[\"0\"][0]: expert 1.0" },
             { R"({"0": [["1", 0.5]]})", "layers[\"0\"][0]: expert \"1\"" },
             { R"({"0": [[18446744073709551615, 0.5]]})", "layers[\"0\"][0]: expert" },
             { R"({"0": [[0, 0.5], [1, 1.5]]})", "layers[\"0\"][1]: p is 1.5" },
             { R"({"0": [[0, -0.1]]})", "layers[\"0\"][0]: p is -0.1" },
             { R"({"0": [[0, "0.5"]]})", "layers[\"0\"][0]: p is" },
             { R"({"0": [[0, null]]})", "layers[\"0\"][0]: p is null" },
             { R"({"0": [[0]]})", "layers[\"0\"][0] is [0]" },
             { R"({"0": [7]})", "layers[\"0\"][0] is 7" },
             { R"({"1": [[2, 0.5], [3, 0], [2, 0.1]]})", "layers[\"1\"][2]: expert 2 is given" },
             { R"([])", "\"layers\" is not an object" },
         }) {
        d.refused("/experts/prior", prior(layers), what);
    }
    d.refused("/experts/prior", "", "not a JSON object");
    d.refused("/experts/prior", "[]", "not a JSON object");
    d.refused("/experts/prior", "{\"id\": " + std::string(300000, '[') + std::string(300000, ']') + "}", "too deeply");
    d.refused("/experts/prior", "{\"id\"", "not a JSON object");
    d.refused("/experts/prior", prior(R"({"0": [[0, NaN]]})"), "not a JSON object");
    d.refused("/experts/prior", R"({"kappa": 1, "layers": {}})", "\"id\" is missing");
    d.refused("/experts/prior", R"({"id": 7, "kappa": 1, "layers": {}})", "\"id\" is 7");
    d.refused("/experts/prior", R"({"id": ")" + std::string(129, 'x') + R"(", "kappa": 1, "layers": {}})", "\"id\" is");
    d.refused("/experts/prior", R"({"id": "p", "layers": {}})", "\"kappa\" is missing");
    d.refused("/experts/prior", R"({"id": "p", "kappa": -1, "layers": {}})", "\"kappa\" is -1");
    d.refused("/experts/prior", R"({"id": "p", "kappa": 1e999, "layers": {}})", "not a JSON object");
    d.refused("/experts/prior", R"({"id": "p", "kappa": "1", "layers": {}})", "\"kappa\" is");
    d.refused("/experts/prior", R"({"id": "p", "kappa": 1})", "\"layers\" is missing");
    CHECK(d.get("/experts/residency") == json::parse(R"({"layers": {"0": [], "1": []}})"));
}

TEST(control, a_budget_is_checked_and_takes_effect) {
    desk d;
    d.refused("/experts/budget", R"({"ram_bytes": -1})", "\"ram_bytes\" is -1");
    d.refused("/experts/budget", R"({"ram_bytes": 1.5})", "\"ram_bytes\" is 1.5");
    d.refused("/experts/budget", R"({"ram_bytes": "1"})", "\"ram_bytes\" is");
    d.refused("/experts/budget", R"({})", "\"ram_bytes\" is missing");
    CHECK(d.post("/experts/budget", R"({"ram_bytes": 24000})") == json::parse(R"({"ram_bytes": 24000})"));
    CHECK(d.r.settle());
    CHECK(d.get("/experts")["tiers"]["ram"]["resident_experts"] == 8);
    CHECK(d.post("/experts/budget", R"({"ram_bytes": 0})")["ram_bytes"] == 0);
    CHECK(d.r.settle());
    CHECK(d.get("/experts")["tiers"]["ram"]["resident_experts"] == 0);
}

TEST(control, the_older_form_becomes_a_prior) {
    desk d;
    d.refused("/moe-set-domain", R"({"experts": {}})", "\"domain\" is missing");
    d.refused("/moe-set-domain", R"({"domain": "law", "experts": {"0": [9]}})", "experts[\"0\"][0]: expert 9");
    d.refused(
        "/moe-set-domain", R"({"domain": "law", "experts": {"0": [1, 1]}})", "experts[\"0\"][1]: expert 1 is given");
    d.refused("/moe-set-domain", R"({"domain": "law", "experts": {}, "retain": 1})", "\"retain\" is 1");

    d.post("/moe-set-domain", R"({"domain": "law", "experts": {"0": [1], "1": [0, 1, 2, 3]}})");
    prior now = d.r.paging->get_score().get_prior();
    CHECK(now.id == "law" && now.p == (std::vector<float>{ 0, 1, 0, 0, .5f, .5f, .5f, .5f }));
    d.post("/moe-set-domain", R"({"domain": "code", "experts": {"0": [2]}, "retain": true})");
    now = d.r.paging->get_score().get_prior();
    CHECK(now.id == "code" && now.p == (std::vector<float>{ 0, 1, 1, 0, .5f, .5f, .5f, .5f }));
    d.post("/moe-set-domain", R"({"domain": "code", "experts": {"0": [2]}})");
    CHECK(d.r.paging->get_score().get_prior().p == (std::vector<float>{ 0, 0, 1, 0, 0, 0, 0, 0 }));
}

TEST(control, stats_are_monotonic_and_give_the_difference_since_a_snapshot) {
    desk       d;
    const json first = d.get("/experts/stats");
    CHECK(first["snapshot"] == 1 && first["tokens"] == 0 && first["refusals"]["mlock"] == 0);
    CHECK(first["start_id"].get<std::string>().size() == 16);
    d.r.compute(0, 0, { 0, 1, 2 }, 1);
    const json second = d.get("/experts/stats", "since=1");
    CHECK(second["picks"] == 3 && second["misses"] == 3 && second["miss_bytes"] == 9000);
    CHECK(second["delta"]["picks"] == 3 && second["delta"]["ubatches"] == 1);
    CHECK(second["start_id"] == first["start_id"]);
    CHECK(d.get("/experts/stats", "since=2")["delta"]["picks"] == 0);

    d.get("/experts/stats", "since=99", 400);
    d.get("/experts/stats", "since=", 400);
    d.get("/experts/stats", "since=x", 400);
    for (size_t i = 0; i < control::n_snapshot_max; ++i) {
        d.get("/experts/stats");
    }
    d.get("/experts/stats", "since=1", 400);
}

TEST(control, usage_is_read_by_sequence_and_by_request) {
    desk d;
    d.r.paging->sequence_begin(1, "a b/c");
    d.r.compute(1, 1, { 0, 3 }, 2);
    const json one =
        json::parse(R"({"tokens": 1, "picks": 2, "hits": 0, "layers": {"0": [0, 0, 0, 0], "1": [1, 0, 0, 1]}})");
    CHECK(d.get("/experts/usage") == one);
    CHECK(d.get("/experts/usage", "sequence=1") == one);
    CHECK(d.get("/experts/usage", "request=a+b%2fc") == one);
    CHECK(d.get("/experts/usage", "reset=1&request=a%20b%2Fc") == one);
    CHECK(d.get("/experts/usage", "sequence=1")["tokens"] == 0);
    CHECK(d.get("/experts/usage", "reset=1") == one);
    CHECK(d.get("/experts/usage")["tokens"] == 0);

    CHECK(d.get("/experts/usage", "request=x", 404)["error"]["code"] == 404);
    d.get("/experts/usage", "sequence=5", 404);
    d.get("/experts/usage", "sequence=100000", 404);
    d.get("/experts/usage", "sequence=-1", 400);
    d.get("/experts/usage", "sequence=1&request=x", 400);
    d.get("/experts/usage", "reset=2", 400);
    d.get("/experts/usage", "slot=1", 400);
    d.get("/nothing", "", 404);
}
