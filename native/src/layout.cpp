#include "layout.h"

#include <algorithm>
#include <map>

namespace moe_pager {

namespace {

// can mat-vec kernels read one of its experts from a frame?
bool moves(const tensor_record & tensor) {
    return tensor.quantized && tensor.slab_bytes % 16 == 0;
}

} // namespace

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

    const bool                   any_pinned = std::any_of(blocks.begin(), blocks.end(), [](const auto & entry) {
        return std::any_of(entry.second.begin(), entry.second.end(), [](const auto & tensor) {
            return tensor.place == memory::pinned;
        });
    });
    std::map<uint64_t, uint32_t> classes; // by bytes of an expert
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
        layer.place    = found.front().place;
        for (const auto & tensor : found) {
            layer.expert_bytes += tensor.slab_bytes;
            switch (layer.place) {
            case memory::host:
                layer.movable = layer.movable && !any_pinned && is_mapped(tensor.data, tensor.slab_bytes * n_expert);
                break;
            case memory::pinned:
                layer.movable = layer.movable && moves(tensor);
                break;
            case memory::device:
                layer.movable = false;
                break;
            }
            layer.movable = layer.movable && tensor.place == layer.place;
        }
        if (layer.place == memory::pinned && !layer.movable) {
            remarks_.push_back(
                "the experts of block " + std::to_string(block) + " (" + found.front().type +
                ") are read at their home in host memory: only quantised types of whole 16-byte units are "
                "moved to VRAM");
        }
        if (layer.place == memory::pinned && layer.movable) {
            layer.size_class = classes.emplace(layer.expert_bytes, (uint32_t) classes.size()).first->second;
        }
        layer.tensors = std::move(found);

        // The last name in order is up or gate_up, which a layer multiplies by first. On a GPU kernels that know no pages
        // may compute it together with the gate; nothing is ever computed together with down, the first name.
        layer.counting_key = layer.place == memory::host ? layer.tensors.back().key : layer.tensors.front().key;

        const uint32_t row            = (uint32_t) layers_.size();
        counting_[layer.counting_key] = row;

        n_experts_ += n_expert;
        row_of_.insert(row_of_.end(), n_expert, row);
        total_bytes_ += layer.expert_bytes * n_expert;
        fixed_bytes_ += layer.movable ? 0 : layer.expert_bytes * n_expert;
        layers_.push_back(std::move(layer));
    }
    n_size_classes_ = std::max<uint32_t>(1, (uint32_t) classes.size());
}

bool layout::has(memory place) const {
    return std::any_of(layers_.begin(), layers_.end(), [&](const auto & layer) { return layer.place == place; });
}

uint64_t layout::largest_tensor_bytes() const {
    uint64_t bytes = 0;
    for (const auto & layer : layers_) {
        for (const auto & tensor : layer.tensors) {
            bytes = layer.movable ? std::max(bytes, tensor.slab_bytes * layer.n_expert) : bytes;
        }
    }
    return bytes;
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

const tensor_record * layout::find(const void * key) const {
    for (const auto & layer : layers_) {
        for (const auto & tensor : layer.tensors) {
            if (tensor.key == key) {
                return &tensor;
            }
        }
    }
    return nullptr;
}

int32_t layout::counting_row(const void * key) const {
    const auto it = counting_.find(key);
    return it == counting_.end() ? -1 : (int32_t) it->second;
}

} // namespace moe_pager
