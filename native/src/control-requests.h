#pragma once

// What a control call asks for: query strings and JSON bodies in, records that fit the layout out. Pure functions;
// whatever is wrong is thrown as a refusal that names the first bad entry and its value.

#include "layout.h"
#include "score.h"

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

namespace moe_pager {

constexpr size_t request_bytes_max      = 32u << 20;
constexpr size_t request_name_bytes_max = 128;

// becomes the call's answer
struct refusal : std::runtime_error {
    refusal(int code, const std::string & message) : std::runtime_error(message), status(code) {}

    int status;
};

struct prior_request {
    prior    value;
    uint64_t n_entries;
};

std::map<std::string, std::string> parse_query(const std::string & query);

// decimal digits only
std::optional<uint64_t> parse_u64(const std::string & text);

// {"id", "kappa", "layers": {"0": [[expert, p], ...]}}
prior_request read_prior(const layout & lay, const std::string & body);

// {"domain", "experts": {"0": [ids]}, "retain"?}: the listed experts of a layer share its picks evenly; with "retain"
// what the present prior favours stays favoured
prior_request read_domain(const layout & lay, const prior & now, const std::string & body);

// {"ram_bytes"} or {"vram_bytes"}, whichever `name` says: bytes of experts that may be held there
uint64_t read_budget(const std::string & body, const char * name);

} // namespace moe_pager
