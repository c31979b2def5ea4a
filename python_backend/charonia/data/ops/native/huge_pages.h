// Huge pages: one translation of an address for 2 MiB. Must not know what lies in them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace charonia {

constexpr int64_t kHugePage = 2 << 20;  // bytes

// Wish for huge pages where memory, from a multiple of kHugePage on, has none yet.
inline void wish_for_huge_pages(void* memory, size_t bytes) {
  madvise(memory, bytes, MADV_HUGEPAGE);  // where this fails pages are small
}

}  // namespace charonia
