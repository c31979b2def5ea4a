// Memory for packed weights. Must not know how they are packed.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>

#include "huge_pages.h"

namespace charonia {

// Memory for weights: zeros in huge pages, which are faster to read and far faster to come by. It is
// taken in chunks, as a matrix is smaller than a few huge pages; a chunk is let go with the last
// tensor in it, and the system has a tensor's memory before that.
class WeightMemory {
 public:
  static at::Tensor zeros(int64_t count, at::ScalarType type) {
    const int64_t bytes = (count * static_cast<int64_t>(at::elementSize(type)) + 63) / 64 * 64;
    static std::shared_ptr<Chunk> current;
    static std::mutex lock;
    const std::lock_guard guard(lock);
    if (!current || current->used + bytes > current->size)
      current = std::make_shared<Chunk>(std::max(kChunkBytes, bytes));
    void* const at = current->memory + current->used;
    current->used += bytes;
    return at::from_blob(
        at, {count}, [chunk = current, bytes](void* from) { give_back(from, bytes); },
        at::TensorOptions(type));
  }

 private:
  // The pages that lie within, and not those that are shared with what lies beside it.
  static void give_back(void* from, int64_t bytes) {
    constexpr uintptr_t kPage = 4096;
    const auto address = reinterpret_cast<uintptr_t>(from);
    const uintptr_t begin = (address + kPage - 1) / kPage * kPage;
    const uintptr_t end = (address + bytes) / kPage * kPage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  }

  static constexpr int64_t kChunkBytes = 32 * kHugePage;

  struct Chunk {
    explicit Chunk(int64_t bytes) : size((bytes + kHugePage - 1) / kHugePage * kHugePage) {
      // As much again as a huge page, so that one can begin where it must.
      void* const got = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (got == MAP_FAILED) throw std::bad_alloc();
      mapped = static_cast<char*>(got);
      const auto address = reinterpret_cast<uintptr_t>(mapped);
      memory = mapped + (kHugePage - address % kHugePage) % kHugePage;
      advise_huge_pages(memory, size);
    }
    ~Chunk() { munmap(mapped, size + kHugePage); }
    Chunk(const Chunk&) = delete;

    const int64_t size;
    int64_t used = 0;
    char* mapped;
    char* memory;
  };
};

}  // namespace charonia
