#include "control-requests.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <utility>

namespace moe_pager {

namespace {

using json = nlohmann::ordered_json;

// weight, in tokens, of the prior that POST /moe-set-domain makes: that call does not carry one
constexpr double domain_kappa = 64;

// a prior is three deep; printing or freeing what is nested without bound would take the stack
constexpr int body_depth_max = 8;

[[noreturn]] void refuse(const std::string & message) {
    throw refusal(400, message);
}

std::string quoted(const json & value) {
    std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
    return text.size() <= 80 ? text : text.substr(0, 77) + "...";
}

int hex_digit(char c) {
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    const char lower = (char) (c | 0x20);
    return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

std::string decode(const std::string & text) {
    std::string result;
    for (size_t i = 0; i < text.size(); ++i) {
        if (text[i] == '%' && i + 2 < text.size() && hex_digit(text[i + 1]) >= 0 && hex_digit(text[i + 2]) >= 0) {
            result += (char) (hex_digit(text[i + 1]) * 16 + hex_digit(text[i + 2]));
            i += 2;
        } else {
            result += text[i] == '+' ? ' ' : text[i];
        }
    }
    return result;
}

json parse_object(const std::string & body) {
    if (body.size() > request_bytes_max) {
        refuse("the body has more than " + std::to_string(request_bytes_max) + " bytes");
    }
    const json::parser_callback_t shallow = [](int depth, json::parse_event_t, json &) {
        if (depth > body_depth_max) {
            refuse("the body is nested too deeply");
        }
        return true;
    };
    json value = json::parse(body, shallow, false);
    if (!value.is_object()) {
        refuse("the body is not a JSON object");
    }
    return value;
}

const json & member(const json & object, const char * name) {
    const auto it = object.find(name);
    if (it == object.end()) {
        refuse(std::string("\"") + name + "\" is missing");
    }
    return *it;
}

std::string name_of(const json & object, const char * key) {
    const json & value = member(object, key);
    if (!value.is_string() || value.get_ref<const std::string &>().empty() ||
        value.get_ref<const std::string &>().size() > request_name_bytes_max) {
        refuse(std::string("\"") + key + "\" is " + quoted(value) + ", not a text of 1 to " +
               std::to_string(request_name_bytes_max) + " bytes");
    }
    return value.get<std::string>();
}

// each layer of {"N": [...]} with the entries of its list
template <typename F>
void for_each_entry(const layout & lay, const json & layers, const char * what, F && f) {
    if (!layers.is_object()) {
        refuse(std::string("\"") + what + "\" is not an object of layers");
    }
    for (const auto & [key, entries] : layers.items()) {
        const std::string place = std::string(what) + "[\"" + key + "\"]";
        const auto        block = parse_u64(key);
        const int32_t     row   = block && std::to_string(*block) == key ? lay.find_block((int64_t) *block) : -1;
        if (row < 0) {
            refuse(place + ": the model has no experts in layer \"" + key + "\"");
        }
        if (!entries.is_array()) {
            refuse(place + " is " + quoted(entries) + ", not a list");
        }
        for (size_t i = 0; i < entries.size(); ++i) {
            f(lay.layers()[row], entries[i], place + "[" + std::to_string(i) + "]");
        }
    }
}

uint32_t expert_of(const layout_layer & layer, const json & value, const std::string & place) {
    if (!value.is_number_integer() || value < 0 || value >= layer.n_expert) {
        refuse(place + ": expert " + quoted(value) + " is not a whole number from 0 to " +
               std::to_string(layer.n_expert - 1));
    }
    return layer.first + value.get<uint32_t>();
}

} // namespace

std::map<std::string, std::string> parse_query(const std::string & query) {
    std::map<std::string, std::string> result;
    for (size_t begin = 0; begin < query.size();) {
        const size_t      end              = std::min(query.find('&', begin), query.size());
        const std::string pair             = query.substr(begin, end - begin);
        const size_t      eq               = std::min(pair.find('='), pair.size());
        result[decode(pair.substr(0, eq))] = eq < pair.size() ? decode(pair.substr(eq + 1)) : "";
        begin                              = end + 1;
    }
    return result;
}

std::optional<uint64_t> parse_u64(const std::string & text) {
    const bool digits = std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (text.empty() || text.size() > 19 || !digits) {
        return std::nullopt;
    }
    return std::stoull(text);
}

prior_request read_prior(const layout & lay, const std::string & body) {
    const json request = parse_object(body);

    prior value;
    value.id           = name_of(request, "id");
    const json & kappa = member(request, "kappa");
    if (!kappa.is_number() || !(kappa.get<double>() >= 0 && kappa.get<double>() <= 1e9)) {
        refuse("\"kappa\" is " + quoted(kappa) + ", not a number of tokens from 0 to 1e9");
    }
    value.kappa = kappa.get<double>();

    uint64_t             n_entries = 0;
    std::vector<uint8_t> seen(lay.n_experts());
    value.p.resize(lay.n_experts());
    for_each_entry(lay,
                   member(request, "layers"),
                   "layers",
                   [&](const layout_layer & layer, const json & entry, const std::string & place) {
                       if (!entry.is_array() || entry.size() != 2) {
                           refuse(place + " is " + quoted(entry) + ", not a pair [expert, p]");
                       }
                       const uint32_t expert = expert_of(layer, entry[0], place);
                       if (!entry[1].is_number() || !(entry[1].get<double>() >= 0 && entry[1].get<double>() <= 1)) {
                           refuse(place + ": p is " + quoted(entry[1]) + ", not a number from 0 to 1");
                       }
                       if (seen[expert]++) {
                           refuse(place + ": expert " + quoted(entry[0]) + " is given twice");
                       }
                       value.p[expert] = entry[1].get<float>();
                       ++n_entries;
                   });

    return { std::move(value), n_entries };
}

uint64_t read_budget(const std::string & body, const char * name) {
    const json   request = parse_object(body);
    const json & bytes   = member(request, name);
    if (!bytes.is_number_unsigned()) {
        refuse("\"" + std::string(name) + "\" is " + quoted(bytes) + ", not a whole number of bytes");
    }
    return bytes.get<uint64_t>();
}

prior_request read_domain(const layout & lay, const prior & now, const std::string & body) {
    const json request = parse_object(body);

    prior value;
    value.id    = name_of(request, "domain");
    value.kappa = domain_kappa;
    value.p.resize(lay.n_experts());
    const json retain = request.value("retain", json(false));
    if (!retain.is_boolean()) {
        refuse("\"retain\" is " + quoted(retain) + ", neither true nor false");
    }

    std::vector<uint32_t> listed;
    std::vector<uint32_t> n_listed(lay.layers().size());
    std::vector<uint8_t>  seen(lay.n_experts());
    for_each_entry(lay,
                   member(request, "experts"),
                   "experts",
                   [&](const layout_layer & layer, const json & entry, const std::string & place) {
                       const uint32_t expert = expert_of(layer, entry, place);
                       if (seen[expert]++) {
                           refuse(place + ": expert " + quoted(entry) + " is given twice");
                       }
                       listed.push_back(expert);
                       ++n_listed[lay.row_of(expert)];
                   });
    for (const uint32_t expert : listed) {
        value.p[expert] = std::min(1.0f, (float) lay.n_expert_used() / (float) n_listed[lay.row_of(expert)]);
    }
    if (retain.get<bool>()) {
        for (uint32_t e = 0; e < now.p.size(); ++e) {
            value.p[e] = std::max(value.p[e], now.p[e]);
        }
    }

    return { std::move(value), listed.size() };
}

} // namespace moe_pager
