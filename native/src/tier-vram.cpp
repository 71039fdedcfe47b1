#include "tier-vram.h"

#include <algorithm>
#include <cerrno>

namespace moe_pager {

namespace {

constexpr uint64_t frame_alignment = 256;
constexpr uint64_t home_bit        = 1;

uint64_t aligned(uint64_t bytes) {
    return (bytes + frame_alignment - 1) / frame_alignment * frame_alignment;
}

uint64_t frame_bytes_of(const layout_layer & layer) {
    uint64_t bytes = 0;
    for (const auto & tensor : layer.tensors) {
        bytes += aligned(tensor.slab_bytes);
    }
    return bytes;
}

} // namespace

tier_vram::tier_vram(const layout & lay, page_table & table, gpu & dev, const vram_budget & budget)
    : lay_(lay), table_(table), gpu_(dev), budget_(budget), frame_of_(lay.n_experts(), no_frame) {
    report_.budget_bytes = budget.process_bytes;
    classes_.resize(lay.n_size_classes());
    for (uint32_t row = 0; row < lay.layers().size(); ++row) {
        const layout_layer & layer = lay.layers()[row];
        if (!layer.movable) {
            continue;
        }
        uint64_t offset = 0;
        for (const auto & tensor : layer.tensors) {
            weights_[tensor.key] = { row, n_entries_, offset };
            n_entries_ += layer.n_expert;
            offset += aligned(tensor.slab_bytes);
        }
        size_class & sizes = classes_[layer.size_class];
        sizes.frame_bytes  = frame_bytes_of(layer);
        sizes.total_bytes += sizes.frame_bytes * layer.n_expert;
    }
    if (n_entries_ == 0) {
        return;
    }
    char * seen_by_kernels = nullptr;
    image_                 = (uint64_t *) gpu_.allocate_host(n_entries_ * sizeof(uint64_t), seen_by_kernels);
    device_entries_        = (uint64_t *) gpu_.allocate(n_entries_ * sizeof(uint64_t));
    if (image_ == nullptr || device_entries_ == nullptr) {
        report_.reason  = "the page table could not be allocated (" + gpu_.last_error() + "): all experts stay at home";
        device_entries_ = nullptr;
        return;
    }
    for (uint32_t e = 0; e < lay.n_experts(); ++e) {
        point(e, nullptr);
    }
    publish();
}

void tier_vram::point(uint32_t expert, const char * frame) {
    const layout_layer & layer = lay_.layer_of(expert);
    if (!layer.movable) {
        return;
    }
    const uint32_t id = expert - layer.first;
    for (const auto & tensor : layer.tensors) {
        const weight & where = weights_.at(tensor.key);
        const char * at = frame == nullptr ? (const char *) tensor.data + id * tensor.slab_bytes : frame + where.offset;
        image_[where.first_entry + id] = (uint64_t) (uintptr_t) at | (frame == nullptr ? home_bit : 0);
    }
    dirty_ = true;
}

bool tier_vram::open() noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    if (opened_) {
        return false;
    }
    opened_ = true;
    if (device_entries_ == nullptr) {
        return true;
    }
    try {
        const uint64_t used  = gpu_.used_bytes();
        const uint64_t spent = (used > budget_.others_bytes ? used - budget_.others_bytes : 0) + budget_.reserve_bytes;
        uint64_t       left  = budget_.process_bytes > spent ? budget_.process_bytes - spent : 0;

        const uint64_t staging = aligned(budget_.staging_bytes);
        if (staging > 0 && 2 * staging <= left) {
            char * both = gpu_.allocate(2 * staging);
            if (both != nullptr) {
                staging_[0] = both;
                staging_[1] = both + staging;
                left -= 2 * staging;
                report_.staging_bytes = 2 * staging;
            }
        }
        if (staging > 0 && staging_[0] == nullptr) {
            report_.reason = "no room for staging, so large batches read experts over the link one row at a time: the "
                             "VRAM budget leaves " +
                             std::to_string(left >> 20) + " MiB of the " + std::to_string((2 * staging) >> 20) +
                             " MiB that it takes. Raise --vram-budget or lower --ctx-size.";
        }

        uint64_t total = 0, least = UINT64_MAX;
        for (const auto & sizes : classes_) {
            total += sizes.total_bytes;
            least = sizes.total_bytes > 0 ? std::min(least, sizes.frame_bytes) : least;
        }
        uint64_t bytes = std::min(left, total) / frame_alignment * frame_alignment;
        char *   arena = nullptr;
        // others may take memory at the same time: a smaller arena is better than none
        for (; bytes >= least && arena == nullptr; bytes = bytes / 8 * 7 / frame_alignment * frame_alignment) {
            arena = gpu_.allocate(bytes);
            if (arena != nullptr) {
                share_out(arena, bytes);
                break;
            }
        }
        if (arena == nullptr && report_.reason.empty()) {
            report_.reason = "no expert fits in VRAM: the model without its experts takes " +
                             std::to_string(spent >> 20) + " MiB of the budget of " +
                             std::to_string(budget_.process_bytes >> 20) +
                             " MiB. Raise --vram-budget or lower --ctx-size.";
        }
    } catch (...) {
        report_.reason = "out of memory while the frames were made";
    }
    return true;
}

void tier_vram::share_out(char * arena, uint64_t bytes) {
    uint64_t total = 0;
    for (const auto & sizes : classes_) {
        total += sizes.total_bytes;
    }
    report_.arena_bytes = bytes;
    for (auto & sizes : classes_) {
        if (sizes.total_bytes == 0) {
            continue;
        }
        const double share = (double) sizes.total_bytes / (double) total;
        sizes.n_frames =
            (uint32_t) (std::min((double) bytes * share, (double) sizes.total_bytes) / (double) sizes.frame_bytes);
        sizes.base = arena;
        arena += sizes.n_frames * sizes.frame_bytes;
        report_.frames += sizes.n_frames;
        for (uint32_t frame = sizes.n_frames; frame-- > 0;) {
            sizes.free.push_back(frame);
        }
    }
}

uint64_t tier_vram::room(uint32_t size_class, uint64_t budget_bytes) const noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto &                sizes = classes_[size_class];
    if (sizes.total_bytes == 0) {
        return 0;
    }
    uint64_t total = 0;
    for (const auto & other : classes_) {
        total += other.total_bytes;
    }
    // the policy counts in bytes of experts, which are a little smaller than their frames
    const double   share  = std::min(1.0, (double) budget_bytes / (double) total);
    const uint64_t wanted = (uint64_t) (share * (double) sizes.total_bytes / (double) sizes.frame_bytes);
    uint64_t       expert = 0;
    for (const auto & layer : lay_.layers()) {
        expert = layer.movable && layer.size_class == size_class ? layer.expert_bytes : expert;
    }
    return std::min<uint64_t>(sizes.n_frames, wanted) * expert;
}

promotion tier_vram::promote(uint32_t expert) noexcept {
    promotion            result;
    const layout_layer & layer = lay_.layer_of(expert);
    uint32_t             frame = no_frame;
    char *               base  = nullptr;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        size_class &                 sizes = classes_[layer.size_class];
        if (sizes.free.empty() && in_flight_.empty()) {
            publish();
        }
        published_.wait(lock, [&] { return stopping_ || !sizes.free.empty() || leaving_.empty(); });
        if (stopping_ || sizes.free.empty()) {
            result.populate_error = stopping_ ? ECANCELED : ENOSPC;
            return result;
        }
        frame = sizes.free.back();
        sizes.free.pop_back();
        base = sizes.base + frame * sizes.frame_bytes;
    }

    bool           copied = true;
    const uint32_t id     = expert - layer.first;
    for (const auto & tensor : layer.tensors) {
        copied = copied && gpu_.start_copy(base + weights_.at(tensor.key).offset,
                                           (const char *) tensor.data + id * tensor.slab_bytes,
                                           tensor.slab_bytes);
    }
    copied = gpu_.finish_copies() && copied;

    std::lock_guard<std::mutex> lock(mutex_);
    if (!copied) {
        classes_[layer.size_class].free.push_back(frame);
        result.populate_error = EIO;
        return result;
    }
    frame_of_[expert] = frame;
    point(expert, base);
    arriving_.push_back(expert);
    return result;
}

void tier_vram::demote(uint32_t expert) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    if (frame_of_[expert] == no_frame) {
        return;
    }
    point(expert, nullptr);
    // one that had not been published yet never becomes resident
    arriving_.erase(std::remove(arriving_.begin(), arriving_.end(), expert), arriving_.end());
    leaving_.push_back(expert);
    leaving_.push_back(frame_of_[expert]);
    frame_of_[expert] = no_frame;
}

void tier_vram::settle() noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    if (in_flight_.empty()) {
        publish();
    }
}

void tier_vram::stop() noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    published_.notify_all();
}

void tier_vram::publish() noexcept {
    if (!dirty_) {
        return;
    }
    if (!gpu_.start_copy((char *) device_entries_, image_, n_entries_ * sizeof(uint64_t)) || !gpu_.finish_copies()) {
        return; // the old entries stay right: their frames are not reused before a publication succeeds
    }
    dirty_ = false;
    for (const uint32_t expert : arriving_) {
        table_.set_resident(expert, true);
    }
    for (size_t i = 0; i < leaving_.size(); i += 2) {
        const uint32_t expert = leaving_[i];
        table_.set_resident(expert, frame_of_[expert] != no_frame);
        classes_[lay_.layer_of(expert).size_class].free.push_back(leaving_[i + 1]);
    }
    arriving_.clear();
    leaving_.clear();
    ++report_.publications;
    published_.notify_all();
}

bool tier_vram::has_changed() const noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    return dirty_;
}

void tier_vram::launch(void * stream) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    in_flight_.insert(stream);
}

void tier_vram::idle(void * stream) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    in_flight_.erase(stream);
    if (in_flight_.empty()) {
        publish();
    }
}

const uint64_t * tier_vram::entries(const void * key) const noexcept {
    const auto found = weights_.find(key);
    return found == weights_.end() || device_entries_ == nullptr ? nullptr
                                                                 : device_entries_ + found->second.first_entry;
}

bool tier_vram::at_home(const void * key, uint32_t id) const noexcept {
    const auto found = weights_.find(key);
    return found == weights_.end() || !table_.resident(lay_.layers()[found->second.row].first + id);
}

tier_vram::report tier_vram::get_report() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return report_;
}

} // namespace moe_pager
