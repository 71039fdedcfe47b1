#include "trace-writer.h"

#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstring>
#include <utility>

namespace moe_pager {

namespace {

constexpr uint16_t no_expert = UINT16_MAX;

std::string header_of(const layout & lay) {
    nlohmann::ordered_json layers = nlohmann::ordered_json::array();
    for (const auto & layer : lay.layers()) {
        layers.push_back({ { "block", layer.block },
                           { "experts", layer.n_expert },
                           { "expert_bytes", layer.expert_bytes },
                           { "pinned", layer.place == memory::pinned } });
    }
    const nlohmann::ordered_json header = { { "format", "moe-routing-trace" }, { "version", 1 }, { "layers", layers } };
    return header.dump() + "\n";
}

} // namespace

trace_writer::trace_writer(const layout & lay, const std::string & path) : lay_(lay), path_(path) {
    file_ = std::fopen(path.c_str(), "wbx");
    if (file_ == nullptr) {
        fail();
        return;
    }
    const std::string header = header_of(lay);
    write(header.data(), header.size());
    if (file_ != nullptr && std::fflush(file_) != 0) {
        fail();
    }
}

trace_writer::~trace_writer() {
    if (file_ != nullptr) {
        std::fclose(file_);
    }
}

void trace_writer::fail() {
    error_ = "the routing is not recorded: cannot write MOE_PAGER_TRACE='" + path_ + "': " + std::strerror(errno);
    if (file_ != nullptr) {
        std::fclose(file_);
        file_ = nullptr;
    }
    open_.clear();
}

void trace_writer::write(const void * data, size_t bytes) {
    if (file_ != nullptr && std::fwrite(data, 1, bytes, file_) != bytes) {
        fail();
    }
}

void trace_writer::add(uint32_t     row,
                       const char * ids,
                       int64_t      n_used,
                       int64_t      n_rows,
                       uint64_t     nb_used,
                       uint64_t     nb_row,
                       uint64_t     hits) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    if (file_ == nullptr) {
        return;
    }
    try {
        ubatch_record & record = open_[std::this_thread::get_id()];
        record.hits += hits;
        record.layers.resize(lay_.layers().size());
        layer_record & layer = record.layers[row];
        layer.n_rows         = (uint32_t) n_rows;
        layer.n_used         = (uint32_t) n_used;
        layer.ids.clear();
        for (int64_t r = 0; r < n_rows; ++r) {
            for (int64_t k = 0; k < n_used; ++k) {
                int32_t id = 0;
                std::memcpy(&id, ids + r * nb_row + k * nb_used, sizeof(id));
                const bool valid = id >= 0 && (uint32_t) id < lay_.layers()[row].n_expert;
                layer.ids.push_back(valid ? (uint16_t) id : no_expert);
            }
        }
    } catch (const std::bad_alloc &) {
        errno = ENOMEM;
        fail();
    }
}

void trace_writer::end_ubatch(uint32_t n_tokens) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto                  found = open_.find(std::this_thread::get_id());
    if (found == open_.end() || file_ == nullptr) {
        return;
    }
    const ubatch_record record = std::move(found->second);
    open_.erase(found);
    const uint32_t head[2] = { n_tokens, (uint32_t) record.hits };
    write(head, sizeof(head));
    for (const auto & layer : record.layers) {
        const uint32_t shape[2] = { layer.n_rows, layer.n_used };
        write(shape, sizeof(shape));
        write(layer.ids.data(), layer.ids.size() * sizeof(uint16_t));
    }
    if (file_ != nullptr && std::fflush(file_) != 0) {
        fail();
    }
}

std::string trace_writer::error() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
}

} // namespace moe_pager
