#include "layout.h"

#include <algorithm>
#include <map>

namespace moe_pager {

int32_t parse_block(const std::string & name) {
    static const std::string prefix = "blk.";
    if (name.compare(0, prefix.size(), prefix) != 0) {
        return -1;
    }
    size_t  pos   = prefix.size();
    int32_t block = 0;
    for (; pos < name.size() && name[pos] >= '0' && name[pos] <= '9'; ++pos) {
        block = block * 10 + (name[pos] - '0');
        if (block > 1000000) {
            return -1;
        }
    }
    if (pos == prefix.size()) {
        return -1;
    }
    for (const char * kind : { "gate", "up", "down", "gate_up" }) {
        if (name.compare(pos, std::string::npos, std::string(".ffn_") + kind + "_exps.weight") == 0) {
            return block;
        }
    }
    return -1;
}

uint64_t layout_layer::least_slab_bytes() const {
    uint64_t least = expert_bytes;
    for (const auto & tensor : tensors) {
        least = std::min(least, tensor.slab_bytes);
    }
    return least;
}

layout::layout(const std::vector<tensor_record> & tensors, uint32_t n_expert_used, const is_mapped_fn & is_mapped)
    : n_expert_used_(n_expert_used) {
    std::map<int32_t, std::vector<tensor_record>> blocks;
    for (const auto & tensor : tensors) {
        const int32_t block = parse_block(tensor.name);
        if (block < 0) {
            continue;
        }
        // a model that is only measured, not loaded, has tensors without data
        if (tensor.data == nullptr || tensor.slab_bytes == 0 || tensor.n_expert == 0) {
            remarks_.push_back(tensor.name + " has no data and is left out");
            continue;
        }
        blocks[block].push_back(tensor);
    }

    for (auto & [block, found] : blocks) {
        const uint32_t n_expert = found.front().n_expert;
        if (std::any_of(found.begin(), found.end(), [&](const auto & t) { return t.n_expert != n_expert; })) {
            remarks_.push_back("block " + std::to_string(block) +
                               " is left out: its expert tensors disagree about the number of experts");
            continue;
        }
        std::sort(found.begin(), found.end(), [](const auto & a, const auto & b) { return a.name < b.name; });

        layout_layer layer;
        layer.block    = block;
        layer.first    = n_experts_;
        layer.n_expert = n_expert;
        layer.movable  = true;
        for (const auto & tensor : found) {
            layer.expert_bytes += tensor.slab_bytes;
            layer.movable = layer.movable && is_mapped(tensor.data, tensor.slab_bytes * n_expert);
        }
        layer.tensors = std::move(found);

        const uint32_t row                  = (uint32_t) layers_.size();
        // the last name in order is up or gate_up, which a layer multiplies by first
        counting_[layer.tensors.back().key] = row;

        n_experts_ += n_expert;
        row_of_.insert(row_of_.end(), n_expert, row);
        total_bytes_ += layer.expert_bytes * n_expert;
        fixed_bytes_ += layer.movable ? 0 : layer.expert_bytes * n_expert;
        layers_.push_back(std::move(layer));
    }
}

uint32_t layout::n_expert_max() const {
    uint32_t n = 0;
    for (const auto & layer : layers_) {
        n = std::max(n, layer.n_expert);
    }
    return n;
}

int32_t layout::find_block(int64_t block) const {
    const auto it = std::lower_bound(
        layers_.begin(), layers_.end(), block, [](const layout_layer & layer, int64_t b) { return layer.block < b; });
    return it != layers_.end() && it->block == block ? (int32_t) (it - layers_.begin()) : -1;
}

int32_t layout::counting_row(const void * key) const {
    const auto it = counting_.find(key);
    return it == counting_.end() ? -1 : (int32_t) it->second;
}

} // namespace moe_pager
