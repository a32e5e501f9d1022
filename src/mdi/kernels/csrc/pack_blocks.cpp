// Rows of a GGUF file in one of its block types into panels: a shuffle of bytes, the same for every processor.
#include <cstring>

#include "block_types.h"

namespace {

constexpr int kOutputs = 16;
constexpr int kLargestPower = 252;  // LARGEST_SCALE of kernels/layout.py

struct Source {  // where a block of the file has its parts
  int halves, bytes, words, size;
};

Source source_of(const BlockType& t) {
  if (t.order == Order::kDoubleGroups) return {4 * t.words + t.bytes, 4 * t.words, 0, 4 * t.words + t.bytes + 2 * t.halves};
  return {0, 2 * t.halves, 2 * t.halves + t.bytes, 2 * t.halves + t.bytes + 4 * t.words};
}

bool is_finite(const uint8_t* half) { return (half[1] & 0x7c) != 0x7c; }

// Bits 4 i + k of a word to bits 8 k + i.
uint32_t by_byte(uint32_t x) {
  uint32_t made = 0;
  for (int k = 0; k < 4; k++) {
    uint32_t y = x >> k & 0x11111111u;
    y = (y | y >> 3) & 0x03030303u;
    y = (y | y >> 6) & 0x000f000fu;
    made |= ((y | y >> 12) & 0xffu) << 8 * k;
  }
  return made;
}

void change_words(int format, uint8_t* lines, int n_words) {
  if (format == kQ8_0)
    for (int i = 0; i < 4 * kOutputs * n_words; i++) lines[i] ^= 0x80;
  if (format == kQ5_0 || format == kQ5_1)
    for (int o = 0; o < kOutputs; o++) {
      uint32_t word;
      std::memcpy(&word, lines + 4 * o, 4);
      word = by_byte(word);
      std::memcpy(lines + 4 * o, &word, 4);
    }
}

// Rows of Q4_0 or MXFP4 into int4 or mxfp4: a scale and 32 halves of bytes, of which the file has those of inputs i and i + 16 in
// a byte, and a panel those of inputs i and i + 4.
int pack_halves(int format, const uint8_t* rows, int64_t n_rows, int64_t n_blocks, uint8_t* to) {
  const int scale_bytes = format == kInt4 ? 2 : 1, size = scale_bytes + 16;
  const int n_groups = 4 / scale_bytes, record_bytes = 64 + 256 * n_groups, zero = format == kInt4 ? 0x88 : 0;
  const int64_t n_records = (n_blocks + n_groups - 1) / n_groups, row_bytes = n_blocks * size;
  for (int64_t first = 0; first < n_rows; first += kOutputs) {
    int n = (int)(n_rows - first < kOutputs ? n_rows - first : kOutputs);
    for (int64_t r = 0; r < n_records; r++, to += record_bytes) {
      if (n < kOutputs || (r + 1) * n_groups > n_blocks) {
        std::memset(to, 0, 64);
        std::memset(to + 64, zero, (size_t)record_bytes - 64);
      }
      for (int g = 0; g < n_groups && r * n_groups + g < n_blocks; g++) {
        const uint8_t* block = rows + first * row_bytes + (r * n_groups + g) * size;
        uint8_t* lines = to + 64 + 256 * g;
        for (int o = 0; o < n; o++, block += row_bytes) {
          if (format == kInt4 ? !is_finite(block) : block[0] > kLargestPower) return -1;
          std::memcpy(to + scale_bytes * (kOutputs * g + o), block, (size_t)scale_bytes);
          uint32_t words[4], low = 0x0f0f0f0fu;
          std::memcpy(words, block + scale_bytes, 16);
          for (int i = 0; i < 2; i++) {
            uint32_t a = words[2 * i], b = words[2 * i + 1];
            uint32_t firsts = (a & low) | (b & low) << 4, seconds = (a >> 4 & low) | (b & ~low);
            std::memcpy(lines + 64 * i + 4 * o, &firsts, 4);
            std::memcpy(lines + 64 * (i + 2) + 4 * o, &seconds, 4);
          }
        }
      }
    }
  }
  return 0;
}

}  // namespace

// n_rows of n_blocks each -> whole panels of whole records, with zeros behind rows and blocks. -1 if a scale is not finite.
extern "C" __attribute__((visibility("default"))) int mdi_pack_blocks(int format, const uint8_t* rows, int64_t n_rows,
                                                                      int64_t n_blocks, uint8_t* to) {
  if (format == kInt4 || format == kMxfp4) return pack_halves(format, rows, n_rows, n_blocks, to);
  const BlockType& t = block_type(format);
  const RecordShape shape = record_shape(format);
  const Source from = source_of(t);
  const int64_t n_records = (n_blocks + shape.blocks - 1) / shape.blocks, row_bytes = n_blocks * from.size;
  int header = 2 * t.halves + t.bytes;
  for (int64_t first = 0; first < n_rows; first += kOutputs) {
    int n = (int)(n_rows - first < kOutputs ? n_rows - first : kOutputs);
    for (int64_t r = 0; r < n_records; r++, to += shape.bytes) {
      if (n < kOutputs || (r + 1) * shape.blocks > n_blocks) std::memset(to, 0, (size_t)shape.bytes);
      else std::memset(to + kOutputs * shape.blocks * header, 0, (size_t)(shape.header - kOutputs * shape.blocks * header));
      for (int b = 0; b < shape.blocks && r * shape.blocks + b < n_blocks; b++) {
        const uint8_t* block = rows + first * row_bytes + (r * shape.blocks + b) * from.size;
        uint8_t* halves = to + 2 * kOutputs * t.halves * b;
        uint8_t* bytes = to + 2 * kOutputs * t.halves * shape.blocks;
        uint8_t* words = to + shape.header + 4 * kOutputs * t.words * b;
        for (int o = 0; o < n; o++, block += row_bytes) {
          for (int h = 0; h < t.halves; h++) {
            if (!is_finite(block + from.halves + 2 * h)) return -1;
            std::memcpy(halves + 2 * (kOutputs * h + o), block + from.halves + 2 * h, 2);
          }
          for (int i = 0; i < t.bytes; i++) bytes[kOutputs * i + o] = block[from.bytes + i];
          for (int w = 0; w < t.words; w++) std::memcpy(words + 4 * (kOutputs * w + o), block + from.words + 4 * w, 4);
        }
        change_words(format, words, t.words);
      }
    }
  }
  return 0;
}
