// What the pager records is what the reader finds, and what is damaged is refused in words.

#include "check.h"
#include "routing-trace.h"
#include "simulated.h"
#include "trace-writer.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <unistd.h>

using namespace moe_pager;

namespace {

// a name that no file has; removed at the end
struct temporary_name {
    temporary_name() {
        char      text[] = "/tmp/moe-pager-trace-XXXXXX";
        const int file   = mkstemp(text);
        if (file >= 0) {
            close(file);
        }
        path = text;
        std::remove(text);
    }

    ~temporary_name() { std::remove(path.c_str()); }

    std::string read() const {
        std::ifstream in(path, std::ios::binary);
        return { std::istreambuf_iterator<char>(in), {} };
    }

    std::string path;
};

std::unique_ptr<pager> record(const std::vector<tensor_record> & tensors, const std::string & path) {
    settings set;
    set.ram_bytes = 2 * 3000;
    set.trace     = path;
    return std::make_unique<pager>(make_layout(tensors), set, [](const layout &, page_table & table) {
        return std::make_unique<simulated_device>(table);
    });
}

std::string refusal_of(const std::string & text) {
    std::istringstream in(text);
    try {
        read_trace(in);
    } catch (const std::exception & e) {
        return e.what();
    }
    return "";
}

} // namespace

TEST(trace, what_is_recorded_is_read_again) {
    const temporary_name name;
    {
        rig r(make_tensors(2, 4), 2 * 3000);
        r.paging = record(r.tensors, name.path);
        r.favour("a", { 0, 5 });
        CHECK(r.settle());
        // a prompt whose second layer sees only the output, a warm-up, and a token with an id out of range
        int32_t                            sequence = 0;
        const std::vector<const int32_t *> seq_id(3, &sequence);
        const std::vector<int8_t>          output = { 0, 0, 1 };
        ubatch                             prompt;
        prompt.n_tokens                = 3;
        prompt.n_outputs               = 1;
        prompt.seq_id                  = seq_id.data();
        prompt.output                  = output.data();
        const std::vector<int32_t> one = { 0, 1, 0, 2, 3, 0 }, two = { 1, 2 };
        r.paging->ubatch_begin(prompt);
        r.paging->count(prompt, r.make_ids(0, one, 2));
        r.paging->count(prompt, r.make_ids(1, two, 2));
        r.paging->ubatch_end(prompt);
        r.compute(0, 0, { 1, 2 }, 2, true);
        r.compute(1, 0, { 3, 9 }, 2);
    }
    std::ifstream       in(name.path, std::ios::binary);
    const routing_trace trace = read_trace(in);
    CHECK(trace.layers.size() == 2);
    CHECK(trace.layers[1].block == 1 && trace.layers[1].n_expert == 4 && trace.layers[1].expert_bytes == 3000);
    CHECK(!trace.layers[0].pinned);
    CHECK(trace.ubatches.size() == 2);
    const auto & prompt = trace.ubatches[0];
    CHECK(prompt.n_tokens == 3 && prompt.hits == 3 + 1);
    CHECK(prompt.layers[0].n_rows == 3 && prompt.layers[0].n_used == 2);
    CHECK((prompt.layers[0].ids == std::vector<uint16_t>{ 0, 1, 0, 2, 3, 0 }));
    CHECK((prompt.layers[1].ids == std::vector<uint16_t>{ 1, 2 }));
    const auto & token = trace.ubatches[1];
    CHECK(token.n_tokens == 1 && token.layers[0].n_rows == 0);
    CHECK((token.layers[1].ids == std::vector<uint16_t>{ 3, routing_trace::no_expert }));

    const layout lay = trace.make_layout();
    CHECK(lay.n_experts() == 8 && lay.total_bytes() == 8 * 3000 && lay.fixed_bytes() == 0);
}

TEST(trace, a_file_that_is_there_is_not_overwritten_and_the_pager_says_so) {
    const temporary_name name;
    std::ofstream(name.path) << "mine";
    const auto paging = record(make_tensors(1, 4), name.path);
    CHECK(name.read() == "mine");
    bool said = false;
    for (const auto & reason : paging->reasons()) {
        said = said ||
               reason == "the routing is not recorded: cannot write MOE_PAGER_TRACE='" + name.path + "': File exists";
    }
    CHECK(said);
}

TEST(trace, without_the_variable_nothing_is_recorded) {
    CHECK(read_settings([](const char *) -> const char * { return nullptr; }).trace.empty());
    const auto set =
        read_settings([](const char * name) { return std::string(name) == "MOE_PAGER_TRACE" ? "/tmp/t" : nullptr; });
    CHECK(set.trace == "/tmp/t");
}

TEST(trace, damage_is_named) {
    const std::string head =
        R"({"format":"moe-routing-trace","version":1,"layers":[{"block":7,"experts":4,"expert_bytes":9,"pinned":false}]})"
        "\n";
    const auto words = [](std::initializer_list<uint32_t> values) {
        return std::string((const char *) values.begin(), values.size() * sizeof(uint32_t));
    };
    const std::string start = "not a routing trace of version 1: ";
    CHECK(refusal_of(head).empty());
    CHECK(refusal_of(head + words({ 1, 0, 1, 2, 0x00010003 })).empty());
    CHECK(refusal_of("") == start + "its first line does not say so");
    CHECK(refusal_of("{}\n") == start + "its first line does not say so");
    CHECK(refusal_of(head + "x") == start + "the last ubatch is cut off");
    CHECK(refusal_of(head + words({ 1, 0, 1 })) == start + "ubatch 0 is cut off");
    CHECK(refusal_of(head + words({ 1, 0, 1, 2 })) == start + "ubatch 0 is cut off");
    CHECK(refusal_of(head + words({ 1, 0, 1, 2, 0x00010003, 1, 0, 1, 2, 4 })) ==
          start + "ubatch 1 picks expert 4 of 4 in block 7");
    CHECK(refusal_of(head + words({ 1, 0, 2, 2, 0, 0 })) ==
          start + "ubatch 0 has 1 tokens, but 2 rows of 2 experts in block 7");
    CHECK(refusal_of(head + words({ 1, 0, 1, 5, 0, 0, 0 })) ==
          start + "ubatch 0 has 1 tokens, but 1 rows of 5 experts in block 7");
    std::string twice = head;
    twice.insert(twice.find(']'), R"(,{"block":7,"experts":4,"expert_bytes":9,"pinned":false})");
    CHECK(refusal_of(twice) == start + "the layers in its first line are not in order");
}
