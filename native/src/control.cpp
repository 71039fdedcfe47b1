#include "control.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <utility>

namespace moe_pager {

namespace {

using json = nlohmann::ordered_json;

constexpr const char * version = "1";

reply ok(const json & body) {
    return { 200, body.dump(-1, ' ', false, json::error_handler_t::replace) };
}

json per_layer(const layout & lay, const std::vector<uint64_t> & picks) {
    json layers = json::object();
    for (const auto & layer : lay.layers()) {
        layers[std::to_string(layer.block)] =
            std::vector<uint64_t>(picks.begin() + layer.first, picks.begin() + layer.first + layer.n_expert);
    }
    return layers;
}

std::string random_id() {
    std::random_device source;
    std::string        text;
    for (int i = 0; i < 16; ++i) {
        text += "0123456789abcdef"[source() & 15];
    }
    return text;
}

constexpr const char * counter_names[] = { "tokens",     "ubatches",         "picks",
                                           "hits",       "misses",           "hit_bytes",
                                           "miss_bytes", "promotions",       "promoted_bytes",
                                           "demotions",  "given_back_bytes", "priors",
                                           "uptime_us" };

} // namespace

reply error_reply(int status, const std::string & type, const std::string & message) {
    const json error = { { "code", status }, { "message", message }, { "type", type } };
    return { status, ok({ { "error", error } }).body };
}

control::control(pager & owner)
    : pager_(owner), start_id_(random_id()), started_at_(std::chrono::steady_clock::now()) {}

reply control::call(const std::string & method,
                    const std::string & path,
                    const std::string & query,
                    const std::string & body) {
    try {
        const bool get = method == "GET";
        if (get && path == "/experts") {
            return get_experts();
        }
        if (get && path == "/experts/stats") {
            return get_stats(query);
        }
        if (get && path == "/experts/residency") {
            return get_residency();
        }
        if (get && path == "/experts/usage") {
            return get_usage(query);
        }
        if (!get && path == "/experts/prior") {
            return post_prior(body);
        }
        if (!get && path == "/experts/budget") {
            return post_budget(body);
        }
        if (!get && path == "/moe-set-domain") {
            return post_domain(body);
        }
        throw refusal(404, "there is no " + method + " " + path);
    } catch (const refusal & e) {
        return error_reply(e.status, e.status == 404 ? "not_found_error" : "invalid_request_error", e.what());
    } catch (const std::exception & e) {
        return error_reply(500, "server_error", e.what());
    }
}

reply control::get_experts() const {
    const layout & lay    = pager_.get_layout();
    const stats &  counts = pager_.get_stats();
    const prior    now    = pager_.get_score().get_prior();

    std::vector<int32_t> blocks;
    json                 layers = json::object();
    for (const auto & layer : lay.layers()) {
        blocks.push_back(layer.block);
        json tensors = json::array();
        for (const auto & tensor : layer.tensors) {
            tensors.push_back(
                { { "name", tensor.name }, { "type", tensor.type }, { "slab_bytes", tensor.slab_bytes } });
        }
        layers[std::to_string(layer.block)] = { { "expert_bytes", layer.expert_bytes },
                                                { "experts", layer.n_expert },
                                                { "tensors", tensors } };
    }

    json tiers = { { "ram",
                     { { "home", pager_.home() },
                       { "budget_bytes", pager_.budget_bytes() },
                       { "total_bytes", lay.total_bytes() },
                       { "resident_bytes", stats::get(counts.resident_bytes) },
                       { "resident_experts", stats::get(counts.resident_experts) },
                       { "experts", lay.n_experts() },
                       { "locked_bytes", stats::get(counts.locked_bytes) } } } };
    if (pager_.vram() != nullptr) {
        const auto report = pager_.vram()->get_report();
        tiers["vram"]     = { { "budget_bytes", report.budget_bytes },
                              { "arena_bytes", report.arena_bytes },
                              { "staging_bytes", report.staging_bytes },
                              { "frames", report.frames },
                              { "publications", report.publications } };
    }
    return ok({
        { "mode", "on" },
        { "version", version },
        { "model",
          { { "layers", blocks }, { "experts", lay.n_expert_max() }, { "experts_used", lay.n_expert_used() } } },
        { "layout", layers },
        { "tiers", tiers },
        { "policy",
          { { "name", pager_.get_policy().name() },
            { "half_life_tokens", pager_.get_score().half_life_tokens() },
            { "horizon_tokens", pager_.get_mover().horizon_tokens() } } },
        { "prior", { { "id", now.set ? json(now.id) : json(nullptr) }, { "kappa", now.kappa } } },
        { "mover", { { "pending", pager_.get_mover().pending() } } },
        { "reasons", pager_.reasons() },
    });
}

control::snapshot control::take_snapshot() {
    const stats & s      = pager_.get_stats();
    const auto    uptime = std::chrono::steady_clock::now() - started_at_;
    snapshot      taken;
    taken.values = { stats::get(s.tokens),
                     stats::get(s.ubatches),
                     stats::get(s.picks),
                     stats::get(s.hits),
                     stats::get(s.misses),
                     stats::get(s.hit_bytes),
                     stats::get(s.miss_bytes),
                     stats::get(s.promotions),
                     stats::get(s.promoted_bytes),
                     stats::get(s.demotions),
                     stats::get(s.given_back_bytes),
                     stats::get(s.priors),
                     (uint64_t) std::chrono::duration_cast<std::chrono::microseconds>(uptime).count() };
    taken.number = ++n_snapshots_;
    snapshots_.push_back(taken);
    if (snapshots_.size() > n_snapshot_max) {
        snapshots_.pop_front();
    }
    return taken;
}

reply control::get_stats(const std::string & query) {
    static_assert(std::size(counter_names) == n_counters, "one name for each counter");

    const auto parameters = parse_query(query);
    const auto since      = parameters.find("since");

    std::lock_guard<std::mutex> lock(mutex_);
    std::optional<snapshot>     before;
    if (since != parameters.end()) {
        const auto number = parse_u64(since->second);
        for (const auto & taken : snapshots_) {
            if (number && taken.number == *number) {
                before = taken;
            }
        }
        if (!before) {
            throw refusal(400,
                          "since=" + since->second + " is not one of the last " + std::to_string(n_snapshot_max) +
                              " snapshots");
        }
    }

    const snapshot now    = take_snapshot();
    json           result = { { "snapshot", now.number }, { "start_id", start_id_ } };
    for (size_t i = 0; i < n_counters; ++i) {
        result[counter_names[i]] = now.values[i];
    }
    const stats & counts   = pager_.get_stats();
    json          refusals = { { "mlock", 0 } };
    for (const auto & [kind, errors] : counts.refusals.read()) {
        uint64_t n = 0;
        for (const auto & [error, times] : errors) {
            n += times;
        }
        refusals[kind] = n;
    }
    result["refusals"]         = refusals;
    result["resident_bytes"]   = stats::get(counts.resident_bytes);
    result["resident_experts"] = stats::get(counts.resident_experts);
    result["locked_bytes"]     = stats::get(counts.locked_bytes);
    result["budget_bytes"]     = pager_.budget_bytes();
    if (before) {
        json delta = json::object();
        for (size_t i = 0; i < n_counters; ++i) {
            delta[counter_names[i]] = now.values[i] - before->values[i];
        }
        result["delta"] = delta;
    }
    return ok(result);
}

reply control::get_residency() const {
    json layers = json::object();
    for (const auto & layer : pager_.get_layout().layers()) {
        json ids = json::array();
        for (uint32_t id = 0; id < layer.n_expert; ++id) {
            if (pager_.get_table().resident(layer.first + id)) {
                ids.push_back(id);
            }
        }
        layers[std::to_string(layer.block)] = ids;
    }
    return ok({ { "layers", layers } });
}

reply control::get_usage(const std::string & query) {
    auto parameters = parse_query(query);
    for (const auto & [name, value] : parameters) {
        if (name != "sequence" && name != "request" && name != "reset") {
            throw refusal(400, "parameter \"" + name + "\" is not one of sequence, request, reset");
        }
    }
    if (parameters.count("sequence") + parameters.count("request") > 1) {
        throw refusal(400, "ask for a sequence or for a request, not for both");
    }
    const std::string flag = parameters.count("reset") ? parameters["reset"] : "0";
    if (flag != "0" && flag != "1") {
        throw refusal(400, "reset=" + flag + " is neither 0 nor 1");
    }
    const bool   reset = flag == "1";
    usage_record record;
    if (parameters.count("sequence")) {
        const auto sequence = parse_u64(parameters["sequence"]);
        if (!sequence) {
            throw refusal(400, "sequence=" + parameters["sequence"] + " is not a whole number");
        }
        if (*sequence >= (uint64_t) usage::n_sequence_max ||
            !pager_.read_sequence((int32_t) *sequence, reset, record)) {
            throw refusal(404, "sequence " + parameters["sequence"] + " has not been used");
        }
    } else if (parameters.count("request")) {
        if (!pager_.read_request(parameters["request"], reset, record)) {
            throw refusal(404,
                          "request \"" + parameters["request"] + "\" is neither running nor one of the last " +
                              std::to_string(usage::n_finished_max));
        }
    } else {
        record = pager_.totals(reset);
    }
    return ok({
        { "tokens", record.tokens },
        { "picks", std::accumulate(record.picks.begin(), record.picks.end(), uint64_t{ 0 }) },
        { "hits", record.hits },
        { "layers", per_layer(pager_.get_layout(), record.picks) },
    });
}

reply control::post_prior(const std::string & body) {
    return accept(read_prior(pager_.get_layout(), body));
}

reply control::post_domain(const std::string & body) {
    return accept(read_domain(pager_.get_layout(), pager_.get_score().get_prior(), body));
}

reply control::accept(prior_request request) {
    const json answer = { { "id", request.value.id }, { "entries", request.n_entries } };
    pager_.set_prior(std::move(request.value));
    return ok(answer);
}

reply control::post_budget(const std::string & body) {
    const char *   name  = pager_.vram() == nullptr ? "ram_bytes" : "vram_bytes";
    const uint64_t bytes = read_budget(body, name);
    pager_.set_budget(bytes);
    return ok({ { name, bytes } });
}

} // namespace moe_pager
