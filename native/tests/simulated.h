#pragma once

// What the tests run the pager on: layouts without weights, and a device that does as it is told.

#include "device.h"
#include "layout.h"
#include "pager.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace moe_pager {

// layers 0..n_layers-1 with gate, up and down; keys are addresses into a static array, slabs of `slab_bytes`
inline std::vector<tensor_record> make_tensors(uint32_t n_layers, uint32_t n_expert, uint64_t slab_bytes = 1000) {
    static char                keys[4096];
    std::vector<tensor_record> tensors;
    for (uint32_t layer = 0; layer < n_layers; ++layer) {
        int kind = 0;
        for (const char * name : { "gate", "up", "down" }) {
            tensor_record record;
            record.name       = "blk." + std::to_string(layer) + ".ffn_" + name + "_exps.weight";
            record.type       = "f16";
            record.key        = &keys[layer * 3 + kind++];
            record.data       = record.key;
            record.slab_bytes = slab_bytes;
            record.n_expert   = n_expert;
            tensors.push_back(record);
        }
    }
    return tensors;
}

inline layout make_layout(const std::vector<tensor_record> & tensors, bool mapped = true) {
    return layout(tensors, 2, [mapped](const void *, uint64_t) { return mapped; });
}

class simulated_device : public device {
  public:
    explicit simulated_device(page_table & table) : table_(table) {}

    promotion promote(uint32_t expert) noexcept override {
        std::unique_lock<std::mutex> lock(mutex_);
        ++n_entered_;
        changed_.notify_all();
        changed_.wait(lock, [this] { return open_; });
        if (unreadable_.count(expert) > 0) {
            return { 0, 5 /* EIO */, 0 };
        }
        calls_.push_back({ expert, true });
        held_.insert(expert);
        table_.set_resident(expert, true);
        n_held_max_ = std::max(n_held_max_, held_.size());
        return { unlockable_ ? 0u : 100u, 0, unlockable_ ? 12 /* ENOMEM */ : 0 };
    }

    void demote(uint32_t expert) noexcept override {
        std::lock_guard<std::mutex> lock(mutex_);
        calls_.push_back({ expert, false });
        held_.erase(expert);
        table_.set_resident(expert, false);
    }

    int give_back(uint32_t first, uint32_t n) noexcept override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (uint32_t e = first; e < first + n; ++e) {
            given_back_held_ = given_back_held_ || held_.count(e) > 0;
            given_back_.push_back(e);
        }
        return 0;
    }

    // promotions wait at a closed gate
    void close() {
        std::lock_guard<std::mutex> lock(mutex_);
        open_      = false;
        n_entered_ = 0;
    }

    void open() {
        std::lock_guard<std::mutex> lock(mutex_);
        open_ = true;
        changed_.notify_all();
    }

    void wait_entered() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return n_entered_ > 0; });
    }

    void make_unreadable(uint32_t expert) {
        std::lock_guard<std::mutex> lock(mutex_);
        unreadable_.insert(expert);
    }

    void make_unlockable() {
        std::lock_guard<std::mutex> lock(mutex_);
        unlockable_ = true;
    }

    std::set<uint32_t> held() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return held_;
    }

    size_t held_max() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return n_held_max_;
    }

    std::vector<move> calls() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return calls_;
    }

    // was memory of a resident expert ever given back?
    bool gave_back_held() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return given_back_held_;
    }

    std::vector<uint32_t> take_given_back() {
        std::lock_guard<std::mutex> lock(mutex_);
        std::vector<uint32_t>       result;
        result.swap(given_back_);
        return result;
    }

  private:
    page_table &            table_;
    mutable std::mutex      mutex_;
    std::condition_variable changed_;
    bool                    open_            = true;
    bool                    unlockable_      = false;
    bool                    given_back_held_ = false;
    size_t                  n_entered_       = 0;
    size_t                  n_held_max_      = 0;
    std::set<uint32_t>      unreadable_;
    std::set<uint32_t>      held_;
    std::vector<move>       calls_;
    std::vector<uint32_t>   given_back_;
};

// a pager on a simulated device, settled
struct rig {
    rig(const std::vector<tensor_record> & tensor_records, uint64_t budget_bytes, bool mapped = true)
        : tensors(tensor_records) {
        settings set;
        set.enabled   = true;
        set.ram_bytes = budget_bytes;
        paging = std::make_unique<pager>(make_layout(tensors, mapped), set, [this](const layout &, page_table & table) {
            auto made = std::make_unique<simulated_device>(table);
            sim       = made.get();
            return made;
        });
        settle();
    }

    bool settle() {
        return check::eventually([this] { return paging->get_mover().pending() == 0; });
    }

    std::set<uint32_t> residents() const {
        std::set<uint32_t> result;
        for (uint32_t e = 0; e < paging->get_layout().n_experts(); ++e) {
            if (paging->get_table().resident(e)) {
                result.insert(e);
            }
        }
        return result;
    }

    void favour(const std::string & id, const std::set<uint32_t> & experts) {
        prior value;
        value.id    = id;
        value.kappa = 1000;
        value.p.resize(paging->get_layout().n_experts());
        for (const uint32_t e : experts) {
            value.p[e] = 0.5f;
        }
        paging->set_prior(std::move(value));
    }

    // one ubatch of tokens of one sequence that goes through one layer; ids: n_used per token
    void
    compute(uint32_t layer, int32_t sequence, const std::vector<int32_t> & ids, int64_t n_used, bool warmup = false) {
        const uint32_t               n_tokens = (uint32_t) (ids.size() / n_used);
        std::vector<const int32_t *> seq_id(n_tokens, &sequence);
        ubatch                       ub;
        ub.n_tokens = n_tokens;
        ub.seq_id   = seq_id.data();
        ub.warmup   = warmup;
        paging->ubatch_begin(ub);
        paging->count(ub, make_ids(layer, ids, n_used));
        paging->ubatch_end(ub);
    }

    routed_ids make_ids(uint32_t layer, const std::vector<int32_t> & ids, int64_t n_used) const {
        routed_ids routed;
        routed.key     = paging->get_layout().layers()[layer].tensors.back().key;
        routed.data    = (const char *) ids.data();
        routed.n_used  = n_used;
        routed.n_rows  = (int64_t) ids.size() / n_used;
        routed.nb_used = sizeof(int32_t);
        routed.nb_row  = sizeof(int32_t) * n_used;
        return routed;
    }

    uint64_t read(const stats::counter & counter) const { return stats::get(counter); }

    const stats & counts() const { return paging->get_stats(); }

    std::vector<tensor_record> tensors;
    simulated_device *         sim = nullptr; // owned by the pager
    std::unique_ptr<pager>     paging;
};

} // namespace moe_pager
