// moe-pager-simulate TRACE [options]: the hit rates of policies on a recorded routing, as a table or as JSON.
//
// The trace comes from an engine that ran with MOE_PAGER_TRACE=FILE.

#include "control-requests.h"
#include "replay.h"

#include <nlohmann/json.hpp>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>

using namespace moe_pager;

namespace {

constexpr const char * usage =
    "usage: moe-pager-simulate TRACE [options]\n"
    "  --policy NAME,...     posterior, lru, lfu, static, best-set, belady (default: all)\n"
    "  --share PERCENT,...   of the experts' bytes that may be resident (default: 5,10,20,40,60)\n"
    "  --half-life TOKENS    after which a count weighs half (default: the engine's)\n"
    "  --horizon TOKENS      over which a move must pay for itself (default: the engine's)\n"
    "  --prior FILE          a prior from the start on, as POST /experts/prior takes it\n"
    "  --pass-every N        ubatches from one pass of the mover to the next (default: 1)\n"
    "  --moves N             promotions between two ubatches, rounded up to 32 (default: any number)\n"
    "  --skip N              ubatches that are replayed first and not counted (default: 0)\n"
    "  --json                print JSON\n"
    "Decoded tokens are the ubatches of one token.\n";

struct arguments {
    std::string              trace;
    std::vector<std::string> policies = replay_policies();
    std::vector<double>      shares   = { 5, 10, 20, 40, 60 };
    std::string              prior_file;
    replay_options           options;
    bool                     as_json = false;
};

struct bad_usage : std::runtime_error {
    using std::runtime_error::runtime_error;
};

double number(const std::string & option, const std::string & text, double low, double high, bool whole) {
    char *       end   = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    const bool   fine  = !text.empty() && *end == '\0' && value >= low && value <= high;
    if (!fine || (whole && value != std::floor(value))) {
        std::ostringstream message;
        message << option << " '" << text << "' is not a " << (whole ? "whole " : "") << "number from " << low << " to "
                << high;
        throw bad_usage(message.str());
    }
    return value;
}

std::vector<std::string> split(const std::string & text) {
    std::vector<std::string> parts;
    std::istringstream       in(text);
    for (std::string part; std::getline(in, part, ',');) {
        parts.push_back(part);
    }
    return parts;
}

arguments parse(int argc, char ** argv) {
    arguments result;
    for (int i = 1; i < argc; ++i) {
        const std::string option = argv[i];
        if (option.rfind("--", 0) != 0) {
            if (!result.trace.empty()) {
                throw bad_usage("there is one trace, not '" + result.trace + "' and '" + option + "'");
            }
            result.trace = option;
            continue;
        }
        if (option == "--json") {
            result.as_json = true;
            continue;
        }
        if (i + 1 == argc) {
            throw bad_usage(option + " needs a value, or is not known");
        }
        const std::string value = argv[++i];
        if (option == "--policy") {
            result.policies = split(value);
        } else if (option == "--share") {
            result.shares.clear();
            for (const auto & part : split(value)) {
                result.shares.push_back(number(option, part, 0, 100, false));
            }
        } else if (option == "--half-life") {
            result.options.half_life_tokens = number(option, value, 1, 1e12, false);
        } else if (option == "--horizon") {
            result.options.horizon_tokens = number(option, value, 1, 1e12, false);
        } else if (option == "--prior") {
            result.prior_file = value;
        } else if (option == "--pass-every") {
            result.options.pass_every = (uint32_t) number(option, value, 1, 1e6, true);
        } else if (option == "--moves") {
            result.options.moves_max = (uint32_t) number(option, value, 1, 1e9, true);
        } else if (option == "--skip") {
            result.options.skip_ubatches = (size_t) number(option, value, 0, 1e12, true);
        } else {
            throw bad_usage(option + " is not known");
        }
    }
    if (result.trace.empty()) {
        throw bad_usage("no trace is given");
    }
    return result;
}

std::ifstream open(const std::string & path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) {
        throw std::runtime_error("cannot open: " + std::string(std::strerror(errno)));
    }
    return in;
}

prior read_prior_file(const layout & lay, const std::string & path) {
    try {
        std::ifstream     in = open(path);
        const std::string body{ std::istreambuf_iterator<char>(in), {} };
        return read_prior(lay, body).value;
    } catch (const std::exception & e) {
        throw std::runtime_error(path + ": " + e.what());
    }
}

routing_trace read_trace_file(const std::string & path) {
    try {
        std::ifstream in    = open(path);
        routing_trace trace = read_trace(in);
        if (trace.ubatches.empty()) {
            throw std::runtime_error("no ubatch has been recorded");
        }
        return trace;
    } catch (const std::exception & e) {
        throw std::runtime_error(path + ": " + e.what());
    }
}

double percent(uint64_t part, uint64_t whole) {
    return whole == 0 ? 0 : 100.0 * (double) part / (double) whole;
}

void print_row(const std::string & policy, double share, const replay_result & r) {
    const double per_token = r.decoded == 0 ? 0 : (double) r.decode_moves / (double) r.decoded;
    std::printf("%-10s %6.4g %8.2f %8.2f %8.2f\n",
                policy.c_str(),
                share,
                percent(r.hits, r.picks),
                percent(r.decode_hits, r.decode_picks),
                per_token);
}

nlohmann::ordered_json row_of(const std::string & policy, double share, const replay_result & r) {
    return { { "policy", policy },
             { "share_percent", share },
             { "tokens", r.tokens },
             { "picks", r.picks },
             { "hits", r.hits },
             { "promotions", r.promotions },
             { "decoded_tokens", r.decoded },
             { "decode_picks", r.decode_picks },
             { "decode_hits", r.decode_hits },
             { "decode_promotions", r.decode_moves },
             { "recorded_hits", r.recorded } };
}

void run(const arguments & args) {
    const routing_trace trace   = read_trace_file(args.trace);
    replay_options      options = args.options;
    if (options.skip_ubatches >= trace.ubatches.size()) {
        throw bad_usage("--skip leaves nothing of " + std::to_string(trace.ubatches.size()) + " ubatches");
    }
    if (!args.prior_file.empty()) {
        options.belief = read_prior_file(trace.make_layout(), args.prior_file);
    }
    if (!args.as_json) {
        std::printf("%-10s %6s %8s %8s %8s\n", "policy", "room %", "hits %", "decode %", "moves/t");
    }
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    replay_result          last;
    for (const auto & policy : args.policies) {
        for (const double share : args.shares) {
            options.policy = policy;
            options.share  = share / 100;
            last           = replay(trace, options);
            if (args.as_json) {
                rows.push_back(row_of(policy, share, last));
            } else {
                print_row(policy, share, last);
            }
        }
    }
    if (args.as_json) {
        std::printf("%s\n", rows.dump(1).c_str());
    } else if (last.recorded > 0) {
        std::printf("recorded: %.2f %% of all picks were hits\n", percent(last.recorded, last.picks));
    }
}

} // namespace

int main(int argc, char ** argv) {
    try {
        run(parse(argc, argv));
        return 0;
    } catch (const bad_usage & e) {
        std::fprintf(stderr, "moe-pager-simulate: %s\n%s", e.what(), usage);
        return 2;
    } catch (const std::exception & e) {
        std::fprintf(stderr, "moe-pager-simulate: %s\n", e.what());
        return 1;
    }
}
