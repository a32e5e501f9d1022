// Memory that grows. Not std::vector: the linker keeps one copy of its functions for all instruction sets, and that copy could
// hold instructions which this processor does not have. For the same reason, nothing here calls functions of <cmath>.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace MDI_NS {

template <class T>
class Buffer {  // of numbers; their values are lost when it grows
 public:
  Buffer() = default;
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* of(size_t n) {
    if (n > size_) {
      std::free(data_);
      data_ = nullptr, size_ = 0;
      size_t n_bytes = (n * sizeof(T) + 63) / 64 * 64;
      data_ = (T*)std::aligned_alloc(64, n_bytes);
      if (!data_) throw std::bad_alloc();
      size_ = n;
    }
    return data_;
  }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace MDI_NS
