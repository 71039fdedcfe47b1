#include "check.h"
#include "simulated.h"

using namespace moe_pager;

TEST(layout, names_are_parsed_once_and_exactly) {
    CHECK(parse_block("blk.0.ffn_gate_exps.weight") == 0);
    CHECK(parse_block("blk.47.ffn_gate_up_exps.weight") == 47);
    CHECK(parse_block("blk.7.ffn_down_exps.weight") == 7);
    CHECK(parse_block("blk.7.ffn_up_exps.bias") == -1);
    CHECK(parse_block("blk.7.ffn_up_exps.scale") == -1);
    CHECK(parse_block("blk.7.ffn_up_exps.weight_scale") == -1);
    CHECK(parse_block("blk.7.ffn_up_shexp.weight") == -1);
    CHECK(parse_block("blk.7.ffn_gate_chexps.weight") == -1);
    CHECK(parse_block("blk..ffn_up_exps.weight") == -1);
    CHECK(parse_block("blk.99999999999999999999.ffn_up_exps.weight") == -1);
    CHECK(parse_block("xblk.7.ffn_up_exps.weight") == -1);
    CHECK(parse_block("token_embd.weight") == -1);
}

TEST(layout, leading_dense_layers_have_no_row) {
    auto tensors = make_tensors(4, 8);
    tensors.erase(tensors.begin(), tensors.begin() + 3); // block 0 is dense
    const layout lay = make_layout(tensors);
    CHECK(lay.layers().size() == 3);
    CHECK(lay.find_block(0) == -1);
    CHECK(lay.find_block(1) == 0);
    CHECK(lay.find_block(3) == 2);
    CHECK(lay.find_block(4) == -1);
    CHECK(lay.n_experts() == 24);
    CHECK(lay.row_of(8) == 1);
}

TEST(layout, merged_gate_up_and_types_per_layer_give_their_own_sizes) {
    auto tensors          = make_tensors(2, 4, 100);
    tensors[0].name       = "blk.0.ffn_gate_up_exps.weight";
    tensors[0].slab_bytes = 250;
    tensors.erase(tensors.begin() + 1);
    tensors[3].slab_bytes = 70; // up of block 1
    const layout lay      = make_layout(tensors);
    CHECK(lay.layers()[0].tensors.size() == 2);
    CHECK(lay.layers()[0].expert_bytes == 350);
    CHECK(lay.layers()[1].expert_bytes == 270);
    CHECK(lay.total_bytes() == 4 * 350 + 4 * 270);
    CHECK(lay.bytes_of(3) == 350);
    CHECK(lay.bytes_of(4) == 270);
}

TEST(layout, one_tensor_of_a_layer_counts) {
    const auto   tensors = make_tensors(3, 4);
    const layout lay     = make_layout(tensors);
    for (int layer = 0; layer < 3; ++layer) {
        int n_counting = 0;
        for (int i = 0; i < 3; ++i) {
            const int32_t row = lay.counting_row(tensors[layer * 3 + i].key);
            n_counting += row >= 0 ? 1 : 0;
            CHECK(row == -1 || row == layer);
        }
        CHECK(n_counting == 1);
    }
    CHECK(lay.counting_row(&lay) == -1);
}

TEST(layout, what_cannot_be_paged_is_left_out_with_a_remark) {
    auto tensors        = make_tensors(3, 4);
    tensors[1].data     = nullptr; // up of block 0
    tensors[4].n_expert = 3;       // up of block 1
    const layout lay    = make_layout(tensors);
    CHECK(lay.layers().size() == 2);
    CHECK(lay.layers()[0].tensors.size() == 2);
    CHECK(lay.find_block(1) == -1);
    CHECK(lay.remarks().size() == 2);

    CHECK(make_layout({}).empty());
}

TEST(layout, layers_outside_a_file_mapping_are_fixed) {
    const auto   tensors = make_tensors(2, 4);
    const void * inside  = tensors[4].data;
    const layout lay(tensors, 2, [&](const void * data, uint64_t size) { return size == 4000 && data != inside; });
    CHECK(lay.layers()[0].movable);
    CHECK(!lay.layers()[1].movable);
    CHECK(lay.fixed_bytes() == 4 * 3000);
}
