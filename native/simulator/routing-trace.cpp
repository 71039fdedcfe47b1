#include "routing-trace.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <stdexcept>

namespace moe_pager {

namespace {

constexpr uint32_t n_tokens_max = 1u << 20;
constexpr uint32_t n_used_max   = 1024;
constexpr size_t   n_layers_max = 4096;

[[noreturn]] void refuse(const std::string & what) {
    throw std::runtime_error("not a routing trace of version 1: " + what);
}

routing_trace::layer read_layer(const nlohmann::json & record) {
    routing_trace::layer layer;
    try {
        layer.block        = record.at("block").get<int32_t>();
        layer.n_expert     = record.at("experts").get<uint32_t>();
        layer.expert_bytes = record.at("expert_bytes").get<uint64_t>();
        layer.pinned       = record.at("pinned").get<bool>();
    } catch (const nlohmann::json::exception & e) {
        refuse(std::string("a layer in its first line: ") + e.what());
    }
    if (layer.block < 0 || layer.n_expert == 0 || layer.n_expert >= routing_trace::no_expert ||
        layer.expert_bytes == 0) {
        refuse("layer " + record.dump() + " in its first line has a value out of range");
    }
    return layer;
}

// false at the end of the file
template <typename T>
bool read_values(std::istream & in, T * values, size_t n, const std::string & place) {
    in.read((char *) values, (std::streamsize)(n * sizeof(T)));
    const auto n_read = (size_t) in.gcount();
    if (n_read != 0 && n_read != n * sizeof(T)) {
        refuse(place + " is cut off");
    }
    return n_read != 0 || n == 0;
}

} // namespace

routing_trace read_trace(std::istream & in) {
    std::string line;
    std::getline(in, line);
    const auto header = nlohmann::json::parse(line, nullptr, false);
    if (!header.is_object() || header.value("format", "") != "moe-routing-trace" || header.value("version", 0) != 1 ||
        !header.contains("layers") || !header["layers"].is_array() || header["layers"].empty() ||
        header["layers"].size() > n_layers_max) {
        refuse("its first line does not say so");
    }
    routing_trace trace;
    for (const auto & record : header["layers"]) {
        trace.layers.push_back(read_layer(record));
        const size_t n = trace.layers.size();
        if (n > 1 && trace.layers[n - 2].block >= trace.layers[n - 1].block) {
            refuse("the layers in its first line are not in order");
        }
    }
    for (uint32_t head[2]; read_values(in, head, 2, "the last ubatch");) {
        const std::string place = "ubatch " + std::to_string(trace.ubatches.size());
        routed_ubatch     ubatch;
        ubatch.n_tokens = head[0];
        ubatch.hits     = head[1];
        for (const auto & layer : trace.layers) {
            uint32_t shape[2];
            if (!read_values(in, shape, 2, place)) {
                refuse(place + " is cut off");
            }
            if (head[0] > n_tokens_max || shape[0] > head[0] || shape[1] > std::min(n_used_max, layer.n_expert)) {
                refuse(place + " has " + std::to_string(head[0]) + " tokens, but " + std::to_string(shape[0]) +
                       " rows of " + std::to_string(shape[1]) + " experts in block " + std::to_string(layer.block));
            }
            routed_layer routed;
            routed.n_rows = shape[0];
            routed.n_used = shape[1];
            routed.ids.resize((size_t) shape[0] * shape[1]);
            if (!read_values(in, routed.ids.data(), routed.ids.size(), place)) {
                refuse(place + " is cut off");
            }
            for (const uint16_t id : routed.ids) {
                if (id >= layer.n_expert && id != routing_trace::no_expert) {
                    refuse(place + " picks expert " + std::to_string(id) + " of " + std::to_string(layer.n_expert) +
                           " in block " + std::to_string(layer.block));
                }
            }
            ubatch.layers.push_back(std::move(routed));
        }
        trace.ubatches.push_back(std::move(ubatch));
    }
    return trace;
}

layout routing_trace::make_layout() const {
    std::vector<tensor_record> tensors;
    for (const auto & layer : layers) {
        tensor_record tensor;
        tensor.name       = "blk." + std::to_string(layer.block) + ".ffn_gate_up_exps.weight";
        tensor.quantized  = true;
        tensor.key        = &layer;
        tensor.data       = &layer;
        tensor.slab_bytes = layer.expert_bytes;
        tensor.n_expert   = layer.n_expert;
        tensor.place      = layer.pinned ? memory::pinned : memory::host;
        tensors.push_back(tensor);
    }
    return layout(tensors, n_used_max, [](const void *, uint64_t) { return true; });
}

} // namespace moe_pager
