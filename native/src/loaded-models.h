#pragma once

// Which models are loaded, each with its pager, and what the present thread is computing.
//
// Who writes what: the registry is guarded by its mutex. A control call holds a reference to the pager it speaks about, so
// a model that is freed meanwhile takes nothing away from under it. `current` belongs to its thread: a draft model and
// the main one, computed by different threads or in turn, never see each other's ubatch.

#include "control.h"
#include "gpu-side.h"
#include "tier-ram.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace moe_pager {

// tiled kernels read up to 512 bytes beyond the end
inline constexpr uint64_t staging_tail_bytes = 4096;

// a GPU of a kind that this build computes on; null: what others pick is not seen, and reasons say so
std::unique_ptr<gpu>    make_gpu();
std::unique_ptr<stager> make_stager(const tier_vram * tier);

struct instance {
    instance(layout lay, const settings & set)
        : card(lay.has(memory::pinned) || lay.has(memory::device) ? make_gpu() : nullptr),
          paging(std::move(lay),
                 set,
                 [&](const layout & final, page_table & table) -> std::unique_ptr<device> {
                     if (!final.has(memory::pinned)) {
                         return make_tier_ram(final, table);
                     }
                     vram_budget budget   = set.vram_bytes;
                     budget.staging_bytes = final.largest_tensor_bytes() + staging_tail_bytes;
                     auto made            = std::make_unique<tier_vram>(final, table, *card, budget);
                     tier                 = made.get();
                     return made;
                 }),
          answers(paging) {
        if (card != nullptr) {
            side = std::make_unique<gpu_side>(paging, *card, tier, make_stager(tier), set.ubatch_tokens);
        }
    }

    std::unique_ptr<gpu>      card; // null: no GPU computes this model's experts
    tier_vram *               tier = nullptr;
    pager                     paging;
    control                   answers;
    std::unique_ptr<gpu_side> side;
};

struct loaded_model {
    const void *              model;
    std::shared_ptr<instance> pages; // null: it has no experts
};

struct registry {
    std::atomic<bool>         in_use{ false }; // a model was loaded while the pager was on
    std::mutex                mutex;
    std::vector<loaded_model> models; // in the order of their loading
};

registry & the_registry();

extern thread_local ubatch     current;      // no owner: none
extern thread_local gpu_side * current_side; // of the same model; null: no GPU computes its experts

} // namespace moe_pager
