#pragma once

// CUDA behind the interfaces that the pager knows. Present only in a build for CUDA; streams are cudaStream_t.

#include "gpu.h"
#include "stager.h"
#include "tier-vram.h"

#include <cstdint>
#include <memory>
#include <string>

namespace moe_pager {

std::unique_ptr<gpu> make_gpu_cuda();

// pinned host memory that kernels read in place; null if the system does not pin that much, with the reason
void * allocate_home(uint64_t bytes, std::string & reason);
void   free_home(void * memory, uint64_t bytes);

// writes ids into a layer's row of the log
void log_picks(const device_ids & ids, int32_t * row, uint32_t n_tokens_max, void * stream);

// the stager (stager.h) for the experts of this tier, which outlives it
std::unique_ptr<stager> make_stager_cuda(const tier_vram & tier);

} // namespace moe_pager
