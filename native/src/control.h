#pragma once

// The control API: JSON in, JSON out. No HTTP, no thread, no state but the snapshots of the counters.
//
// Every call is checked against the layout before anything is changed; a refused call changes nothing.

#include "control-requests.h"
#include "pager.h"

#include <array>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace moe_pager {

struct reply {
    int         status = 200;
    std::string body;
};

// {"error": {"code", "message", "type"}} in the form llama-server uses
reply error_reply(int status, const std::string & type, const std::string & message);

class control {
  public:
    static constexpr size_t n_snapshot_max = 64;

    explicit control(pager & owner);

    reply
    call(const std::string & method, const std::string & path, const std::string & query, const std::string & body);

  private:
    static constexpr size_t n_counters = 13;

    struct snapshot {
        uint64_t                         number = 0;
        std::array<uint64_t, n_counters> values{};
    };

    reply get_experts() const;
    reply get_stats(const std::string & query);
    reply get_residency() const;
    reply get_usage(const std::string & query);
    reply post_prior(const std::string & body);
    reply post_budget(const std::string & body);
    reply post_domain(const std::string & body);
    reply accept(prior_request request);

    snapshot take_snapshot();

    pager &                                     pager_;
    const std::string                           start_id_;
    const std::chrono::steady_clock::time_point started_at_;

    std::mutex           mutex_; // guards the two below
    uint64_t             n_snapshots_ = 0;
    std::deque<snapshot> snapshots_;
};

} // namespace moe_pager
