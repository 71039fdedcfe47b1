#include "pager.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace moe_pager {

namespace {

// cold pages that one ubatch may read in before the mover is woken in the middle of it
constexpr uint64_t cold_slack_bytes = 64ull << 20;

bool parse_u64(const char * text, uint64_t & value) {
    if (*text < '0' || *text > '9') {
        return false;
    }
    char * end = nullptr;
    errno      = 0;
    value      = std::strtoull(text, &end, 10);
    return errno == 0 && *end == '\0';
}

} // namespace

settings read_settings(const std::function<const char *(const char *)> & get) {
    settings     result;
    const char * on = get("MOE_PAGER");
    result.enabled  = on != nullptr && std::strcmp(on, "1") == 0;

    result.vram_bytes.reserve_bytes = 256ull << 20;

    const auto number = [&](const char * name, uint64_t low, const char * otherwise, const auto & set) {
        const char * text = get(name);
        if (text == nullptr || *text == '\0') {
            return;
        }
        uint64_t value = 0;
        if (parse_u64(text, value) && value >= low) {
            set(value);
        } else {
            result.remarks.push_back(std::string(name) + "='" + text + "' is not a whole number of at least " +
                                     std::to_string(low) + "; " + otherwise);
        }
    };
    number("MOE_PAGER_RAM_BYTES", 0, "all experts are kept", [&](uint64_t v) { result.ram_bytes = v; });
    number("MOE_PAGER_VRAM_BYTES", 1, "experts are not moved to VRAM", [&](uint64_t v) {
        result.vram                     = true;
        result.vram_bytes.process_bytes = v;
    });
    number("MOE_PAGER_VRAM_OTHERS_BYTES", 0, "0 is used", [&](uint64_t v) { result.vram_bytes.others_bytes = v; });
    number("MOE_PAGER_VRAM_RESERVE_BYTES", 0, "256 MiB are left free", [&](uint64_t v) {
        result.vram_bytes.reserve_bytes = v;
    });
    number("MOE_PAGER_UBATCH_TOKENS", 1, "4096 is used", [&](uint64_t v) {
        result.ubatch_tokens = (uint32_t) std::min<uint64_t>(v, 1 << 16);
    });
    number("MOE_PAGER_HALF_LIFE", 1, "64 is used", [&](uint64_t v) { result.half_life_tokens = (double) v; });
    number("MOE_PAGER_HORIZON", 1, "64 is used", [&](uint64_t v) { result.horizon_tokens = (double) v; });

    if (const char * trace = get("MOE_PAGER_TRACE")) {
        result.trace = trace;
    }

    const char * name = get("MOE_PAGER_POLICY");
    if (name != nullptr && *name != '\0') {
        if (make_policy(name) != nullptr) {
            result.policy = name;
        } else {
            result.remarks.push_back("MOE_PAGER_POLICY='" + std::string(name) + "' is none of " +
                                     listed(policy_names()) + "; '" + result.policy + "' is used");
        }
    }
    return result;
}

pager::pager(layout lay, const settings & set, const make_device_fn & make_device)
    : lay_(std::move(lay)),
      remarks_(set.remarks),
      table_(lay_),
      score_(lay_, set.half_life_tokens),
      usage_(lay_),
      device_(make_device(lay_, table_)),
      vram_(dynamic_cast<const tier_vram *>(device_.get())),
      policy_(make_policy(set.policy)),
      mover_(lay_,
             table_,
             score_,
             stats_,
             *device_,
             *policy_,
             set.ram_bytes == UINT64_MAX || lay_.has(memory::pinned) ? lay_.total_bytes() : set.ram_bytes,
             set.horizon_tokens) {
    if (!set.trace.empty()) {
        trace_ = std::make_unique<trace_writer>(lay_, set.trace);
    }
    mover_.start();
}

pager::~pager() {
    mover_.stop();
}

void pager::ubatch_begin(const ubatch & ub) noexcept {
    if (ub.warmup) {
        return;
    }
    stats::add(stats_.ubatches, 1);
    stats::add(stats_.tokens, ub.n_tokens);
    if (ub.seq_id == nullptr) {
        return;
    }
    // neighbours mostly belong to one sequence
    for (uint32_t i = 0; i < ub.n_tokens;) {
        const int32_t sequence = ub.seq_id[i][0];
        uint32_t      n        = 0;
        for (; i < ub.n_tokens && ub.seq_id[i][0] == sequence; ++i) {
            ++n;
        }
        if (usage::table * counts = usage_.open(sequence)) {
            stats::add(counts->tokens, n);
        }
    }
}

void pager::count(ubatch & ub, const routed_ids & ids) noexcept {
    const int32_t row = lay_.counting_row(ids.key);
    if (row < 0) {
        return;
    }
    ub.counted                 = true;
    const layout_layer & layer = lay_.layers()[row];
    const uint64_t       tick  = table_.begin_layer();

    // After the last attention many models go on with the output tokens only.
    const bool all_tokens   = ids.n_rows == (int64_t) ub.n_tokens;
    const bool only_outputs = !all_tokens && ids.n_rows == (int64_t) ub.n_outputs && ub.output != nullptr;
    const bool attributed   = ub.seq_id != nullptr && (all_tokens || only_outputs);

    const int64_t n_rows = std::min(ids.n_rows, ids.n_read);
    uint64_t      picks = 0, hits = 0, hit_bytes = 0, miss_bytes = 0, lost = 0;

    const auto add = [&](uint32_t expert, uint32_t n, usage::table * counts) {
        const bool first    = table_.touch(expert, tick);
        const bool resident = table_.resident(expert);
        picks += n;
        hits += resident ? n : 0;
        if (first) {
            (resident ? hit_bytes : miss_bytes) += layer.expert_bytes;
        }
        if (!ub.warmup) {
            score_.count_pick(expert, n);
        }
        if (counts != nullptr) {
            counts->picks[expert].fetch_add(n, std::memory_order_relaxed);
        }
    };

    // Runs of rows of one sequence are summed up first: an atomic per pick is too dear for a long prompt.
    static thread_local std::array<uint32_t, 1024> sums{};
    const bool                                     summed = layer.n_expert <= sums.size();
    uint32_t                                       token  = 0;
    for (int64_t r = 0; r < n_rows;) {
        usage::table * counts      = nullptr;
        const uint64_t hits_before = hits;
        int64_t        n           = 0;
        for (; r + n < n_rows; ++n, ++token) {
            while (only_outputs && token < ub.n_tokens && ub.output[token] == 0) {
                ++token;
            }
            usage::table * const mine =
                attributed && token < ub.n_tokens && !ub.warmup ? usage_.find(ub.seq_id[token][0]) : nullptr;
            if (n > 0 && mine != counts) {
                break;
            }
            counts = mine;
        }
        const bool sum = summed && n * ids.n_used > (int64_t) layer.n_expert;
        for (const int64_t end = r + n; r < end; ++r) {
            for (int64_t k = 0; k < ids.n_used; ++k) {
                int32_t id = 0;
                std::memcpy(&id, ids.data + r * ids.nb_row + k * ids.nb_used, sizeof(id));
                if (id < 0 || (uint32_t) id >= layer.n_expert) {
                    ++lost;
                } else if (sum) {
                    ++sums[id];
                } else {
                    add(layer.first + (uint32_t) id, 1, counts);
                }
            }
        }
        for (uint32_t id = 0; sum && id < layer.n_expert; ++id) {
            if (sums[id] > 0) {
                add(layer.first + id, sums[id], counts);
                sums[id] = 0;
            }
        }
        if (counts != nullptr) {
            stats::add(counts->hits, hits - hits_before);
        }
    }
    if (!ub.warmup) {
        if (trace_ != nullptr) {
            trace_->add((uint32_t) row, ids.data, ids.n_used, n_rows, ids.nb_used, ids.nb_row, hits);
        }
        score_.count_tokens((uint32_t) row, (uint32_t) n_rows);
        stats::add(stats_.picks, picks);
        stats::add(stats_.hits, hits);
        stats::add(stats_.misses, picks - hits);
        stats::add(stats_.hit_bytes, hit_bytes);
        stats::add(stats_.miss_bytes, miss_bytes);
        stats::add(stats_.lost_picks, lost);
        stats::add(stats_.lost_rows,
                   (uint64_t) (attributed || ub.seq_id == nullptr ? ids.n_rows - n_rows : ids.n_rows));
    }
    // A large ubatch may read in more than there is room for, long before it ends.
    if (unclaimed_cold_bytes_.fetch_add(miss_bytes, std::memory_order_relaxed) + miss_bytes >= cold_slack_bytes) {
        unclaimed_cold_bytes_.store(0, std::memory_order_relaxed);
        mover_.ubatch_finished();
    }
}

void pager::ubatch_end(const ubatch & ub) noexcept {
    if (!ub.counted && !ub.warmup) {
        stats::add(stats_.unseen_ubatches, 1);
    }
    if (trace_ != nullptr && !ub.warmup) {
        trace_->end_ubatch(ub.n_tokens);
    }
    table_.end_ubatch();
    unclaimed_cold_bytes_.store(0, std::memory_order_relaxed);
    mover_.ubatch_finished();
}

void pager::set_prior(prior value) {
    score_.set_prior(std::move(value));
    stats::add(stats_.priors, 1);
    mover_.prior_changed();
}

void pager::set_budget(uint64_t bytes) {
    mover_.set_budget(bytes);
}

usage_record pager::totals(bool reset) {
    usage_record                result;
    std::lock_guard<std::mutex> lock(totals_mutex_);
    const uint64_t              tokens = stats::get(stats_.tokens);
    const uint64_t              hits   = stats::get(stats_.hits);
    result.tokens                      = tokens - tokens_reset_at_;
    result.hits                        = hits - hits_reset_at_;
    result.picks                       = score_.totals(reset);
    if (reset) {
        tokens_reset_at_ = tokens;
        hits_reset_at_   = hits;
    }
    return result;
}

uint64_t pager::budget_bytes() const {
    uint64_t bytes = mover_.budget_bytes();
    if (vram_ != nullptr) {
        const uint64_t budget = bytes;
        bytes                 = 0;
        for (uint32_t c = 0; c < lay_.n_size_classes(); ++c) {
            bytes += vram_->room(c, budget);
        }
    }
    return bytes;
}

const char * pager::home() const {
    if (lay_.has(memory::pinned)) {
        return "pinned";
    }
    if (lay_.has(memory::device)) {
        return "device";
    }
    return lay_.fixed_bytes() < lay_.total_bytes() ? "mmap" : "anonymous";
}

std::vector<std::string> pager::reasons() const {
    std::vector<std::string> result = remarks_;
    result.insert(result.end(), lay_.remarks().begin(), lay_.remarks().end());

    if (lay_.has(memory::device) && !lay_.has(memory::pinned)) {
        result.push_back("All experts stay where the backend put them (--gpu without a budget, or one that holds them "
                         "all): they are counted, not moved.");
    } else if (lay_.has(memory::pinned)) {
        // the layout's remarks name what does not move
    } else if (lay_.fixed_bytes() == lay_.total_bytes()) {
        result.push_back(
            "The expert weights are not pages of the model file (they were copied or repacked), so all of them "
            "stay in memory and the RAM budget has no effect. Start with --cpu-moe --load-mode mmap.");
    } else if (lay_.fixed_bytes() > 0) {
        std::string blocks;
        for (const auto & layer : lay_.layers()) {
            if (!layer.movable) {
                blocks += (blocks.empty() ? "" : ", ") + std::to_string(layer.block);
            }
        }
        result.push_back(
            "The experts of blocks " + blocks +
            " are not pages of the model file and stay in memory; their bytes count against the RAM budget.");
    }

    if (vram_ != nullptr && !vram_->get_report().reason.empty()) {
        result.push_back(vram_->get_report().reason);
    }
    if (trace_ != nullptr && !trace_->error().empty()) {
        result.push_back(trace_->error());
    }

    static const std::map<std::string, const char *> consequences = {
        { "mlock", "these experts were read in but are not locked; raise the memlock limit (ulimit -l)" },
        { "populate", "these experts could not be read in and are not resident" },
        { "give_back", "their pages stay in memory; is the model locked with --load-mode mlock?" },
        { "memory", "a plan was dropped for want of memory" },
    };
    for (const auto & [kind, errors] : stats_.refusals.read()) {
        std::string text = kind + " was refused:";
        for (const auto & [error, n] : errors) {
            text += " " + std::to_string(n) + " times with \"" + std::strerror(error) + "\",";
        }
        const auto consequence = consequences.find(kind);
        text.pop_back();
        result.push_back(text + (consequence == consequences.end() ? "" : std::string("; ") + consequence->second));
    }
    if (stats::get(stats_.lost_rows) > 0) {
        result.push_back(
            std::to_string(stats::get(stats_.lost_rows)) +
            " rows of routed ids could not be mapped to tokens: they are in the totals, not in a sequence");
    }
    if (stats::get(stats_.unseen_ubatches) > 0) {
        result.push_back(std::to_string(stats::get(stats_.unseen_ubatches)) +
                         " ubatches were not counted: the pager does not see the backend that computed their experts");
    }
    if (stats::get(stats_.lost_picks) > 0) {
        result.push_back(std::to_string(stats::get(stats_.lost_picks)) +
                         " routed ids were out of range and not counted");
    }
    return result;
}

} // namespace moe_pager
