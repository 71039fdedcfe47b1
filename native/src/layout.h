#pragma once

// Which experts a model has and where their slabs lie. Built once at load, immutable afterwards: every thread reads it
// without a lock.
//
//   slab    the contiguous bytes of one expert in one tensor (nb[2] of a ffn_{gate,up,down,gate_up}_exps tensor)
//   expert  (layer, id): its two or three slabs, always moved together
//   row     index of a layer among the layers that have experts, in the order of their block numbers
//   index   flat number of an expert: layers[row].first + id. All tables of the pager are indexed by it
//
// A tensor is known by its address (`key`), never by a hash of its name.

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

namespace moe_pager {

// where a tensor's data lies
enum class memory {
    host,   // pages of the process: of a file or not
    pinned, // host memory that a GPU reads; the VRAM tier's homes
    device, // of a GPU, for good
};

// what the loader knows of one tensor
struct tensor_record {
    std::string  name;
    std::string  type;
    bool         quantized  = false;
    const void * key        = nullptr; // the ggml_tensor, only compared
    const void * data       = nullptr;
    uint64_t     slab_bytes = 0;
    uint32_t     n_expert   = 0;
    memory       place      = memory::host;
};

struct layout_layer {
    int32_t  block        = 0; // the N of blk.N
    uint32_t first        = 0;
    uint32_t n_expert     = 0;
    uint64_t expert_bytes = 0; // all slabs of one expert
    memory   place        = memory::host;
    bool     movable    = false; // all slabs are pages of a read-only file mapping, or pinned and of a type that moves
    uint32_t size_class = 0;     // pinned layers whose experts are equal in size share one

    std::vector<tensor_record> tensors;                // sorted by name
    const void *               counting_key = nullptr; // of the tensor whose picks are counted

    uint64_t least_slab_bytes() const;
};

class layout {
  public:
    // true if [data, data + size) lies in a read-only mapping of a file
    using is_mapped_fn = std::function<bool(const void * data, uint64_t size)>;

    // Takes what are expert weights out of all tensors of a model; without any, empty() is true. A tier of its own is
    // made for pinned layers, so where there are any the host's pages stay where they are.
    layout(const std::vector<tensor_record> & tensors, uint32_t n_expert_used, const is_mapped_fn & is_mapped);

    bool empty() const { return layers_.empty(); }

    const std::vector<layout_layer> & layers() const { return layers_; }

    uint32_t n_experts() const { return n_experts_; } // over all layers

    uint32_t n_expert_used() const { return n_expert_used_; }

    uint32_t n_expert_max() const; // in one layer

    uint64_t total_bytes() const { return total_bytes_; }

    uint64_t fixed_bytes() const { return fixed_bytes_; } // of layers that are not movable

    // is there a layer in this kind of memory?
    bool has(memory place) const;

    uint32_t n_size_classes() const { return n_size_classes_; }

    uint64_t largest_tensor_bytes() const; // of movable layers

    uint32_t row_of(uint32_t expert) const { return row_of_[expert]; }

    const layout_layer & layer_of(uint32_t expert) const { return layers_[row_of_[expert]]; }

    uint64_t bytes_of(uint32_t expert) const { return layer_of(expert).expert_bytes; }

    // row of a block number, -1 if that block has no experts
    int32_t find_block(int64_t block) const;

    // an expert weight, or null
    const tensor_record * find(const void * key) const;

    // row whose picks the tensor counts, -1 for any other tensor. Exactly one tensor of a layer counts, so that a pick
    // is counted once though two or three matrices are multiplied for it
    int32_t counting_row(const void * key) const;

    // tensors that look like experts but were left out, and why
    const std::vector<std::string> & remarks() const { return remarks_; }

  private:
    std::vector<layout_layer>                  layers_;
    std::vector<uint32_t>                      row_of_;
    std::unordered_map<const void *, uint32_t> counting_;
    std::vector<std::string>                   remarks_;
    uint32_t                                   n_experts_      = 0;
    uint32_t                                   n_expert_used_  = 0;
    uint64_t                                   total_bytes_    = 0;
    uint64_t                                   fixed_bytes_    = 0;
    uint32_t                                   n_size_classes_ = 1;
};

// block number of an expert weight's name ("blk.N.ffn_{gate,up,down,gate_up}_exps.weight"), -1 for any other name
int32_t parse_block(const std::string & name);

} // namespace moe_pager
