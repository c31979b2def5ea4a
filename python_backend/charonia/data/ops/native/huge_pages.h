// Huge pages: one translation of an address for 2 MiB. Must not know what lies in them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace charonia {

constexpr int64_t kHugePage = 2 << 20;  // bytes

// Ask for huge pages for memory that begins at a multiple of kHugePage. Where the system has none,
// pages are small.
inline void advise_huge_pages(void* memory, size_t bytes) {
  madvise(memory, bytes, MADV_HUGEPAGE);
}

}  // namespace charonia
